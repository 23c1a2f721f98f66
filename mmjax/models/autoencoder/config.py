"""Settings of autoencoders. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mmjax.configurable import not_negative, one_of, positive, require

RESAMPLED = 2
"""Factor by which a level's convolution makes a picture smaller, or larger."""
_QWEN_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_QWEN_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


class Level(NamedTuple):
    """Layers of an encoder or decoder at one size of pictures.

    Attributes:
      inputs: channels of its input.
      outputs: channels of its residual blocks.
      blocks: number of residual blocks.
      resampled: channels behind the convolution that halves or doubles the sides of pictures; 0 without one.
      over_time: whether that convolution has another one beside it, over frames, which single pictures do not meet.
    """

    inputs: int
    outputs: int
    blocks: int
    resampled: int = 0
    over_time: bool = False


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """A variational autoencoder of pictures.

    Attributes:
      preset: the preset whose values these are, or "".
      channels: channels of a picture, whose values lie in -1 to 1.
      latent_channels: channels of a latent.
      widths: channels at each size of pictures, the largest first. Each size but the first has half the sides of the
        one before.
      layers: residual blocks at a size in the encoder; the decoder has one more.
      groups: groups of channels of a GroupNorm; 0 has RMSNorms over the channels of a pixel.
      attention: whether every pixel of the smallest size attends to all.
      moments_convolution, latent_convolution: whether a convolution of single pixels follows the encoder, and precedes
        the decoder.
      causal: whether kernels have three frames, of which a single picture meets the last, and the decoder halves
        channels where it doubles sides, as in Wan's and Qwen-Image's autoencoder.
      over_time: whether the convolution behind each size, but the last, halves frames too; for causal kernels.
      shift, scale: a generator sees (latent - shift) · scale.
      means, deviations: with causal kernels a generator sees (latent - means) / deviations, by channel.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {"widths": (16, 32), "layers": 1, "groups": 8},
        "sd-2.1": {},
        "sdxl": {"scale": 0.13025},
        "sd3": {
            **{"latent_channels": 16, "scale": 1.5305, "shift": 0.0609},
            **{"moments_convolution": False, "latent_convolution": False},
        },
        "qwen-image": {
            **{"latent_channels": 16, "widths": (96, 192, 384, 384), "groups": 0, "scale": 1.0},
            **{"causal": True, "over_time": (False, True, True), "means": _QWEN_MEAN, "deviations": _QWEN_STD},
        },
    }

    preset: str = ""
    channels: int = 3
    latent_channels: int = 4
    widths: tuple[int, ...] = (128, 256, 512, 512)
    layers: int = 2
    groups: int = 32
    attention: bool = True
    moments_convolution: bool = True
    latent_convolution: bool = True
    causal: bool = False
    over_time: tuple[bool, ...] = ()
    shift: float = 0.0
    scale: float = 0.18215
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("channels", "latent_channels", "layers"):
            positive(f"Autoencoder.{name}", getattr(self, name))
        legal = bool(self.widths) and min(self.widths) > 0
        require(legal, "Autoencoder.widths", self.widths, "must be the channels at each size, such as (128, 256)")
        not_negative("Autoencoder.groups", self.groups)
        legal = not self.groups or all(width % self.groups == 0 for width in self.widths)
        require(legal, "Autoencoder.groups", self.groups, f"must divide each of Autoencoder.widths ({self.widths})")
        require(self.scale != 0, "Autoencoder.scale", self.scale, "must not be 0; 1 leaves latents as they are")
        legal = self.causal == (self.groups == 0)
        require(legal, "Autoencoder.groups", self.groups, f"Autoencoder.causal={self.causal} has the other norm")
        fix = "must be () without Autoencoder.causal, else have a value for each of Autoencoder.widths but the last"
        legal = len(self.over_time) == (len(self.widths) - 1 if self.causal else 0)
        require(legal, "Autoencoder.over_time", self.over_time, fix)
        fix = f"must be () without Autoencoder.causal, else have {self.latent_channels} values"
        for name in ("means", "deviations"):
            legal = len(getattr(self, name)) == (self.latent_channels if self.causal else 0)
            require(legal, f"Autoencoder.{name}", getattr(self, name), fix)

    @classmethod
    def of(cls, preset: str, **overrides: object) -> AutoencoderConfig:
        """The settings of a preset, such as "sd-2.1"; ``overrides`` win over the preset.

        Raises:
          ConfigError: no such preset, or the resulting values are illegal.
        """
        one_of("Autoencoder.preset", preset, cls.presets)
        values: Mapping[str, object] = {"preset": preset, **cls.presets[preset], **overrides}
        return cls(**values)  # pyright: ignore[reportArgumentType]

    @property
    def factor(self) -> int:
        """Pixels of a picture along one side of a latent's pixel, such as 8."""
        return RESAMPLED ** (len(self.widths) - 1)

    @property
    def kernel_axes(self) -> int:
        """Axes of kernels: rows and columns, and frames before them where kernels are causal."""
        return 3 if self.causal else 2

    @property
    def encoder_levels(self) -> tuple[Level, ...]:
        """The encoder's layers from the largest size to the smallest."""
        inputs, last = (self.widths[0], *self.widths), len(self.widths) - 1
        over_time = (*(self.over_time or (False,) * last), False)
        return tuple(
            Level(inputs[at], width, self.layers, width if at < last else 0, over_time[at])
            for at, width in enumerate(self.widths)
        )

    @property
    def decoder_levels(self) -> tuple[Level, ...]:
        """The decoder's layers from the smallest size to the largest."""
        widths, levels, inputs = self.widths[::-1], list[Level](), self.widths[-1]
        over_time = (*(self.over_time[::-1] or (False,) * (len(widths) - 1)), False)
        for at, width in enumerate(widths):
            resampled = 0 if at == len(widths) - 1 else width // 2 if self.causal else width
            levels.append(Level(inputs, width, self.layers + 1, resampled, over_time[at]))
            inputs = resampled
        return tuple(levels)
