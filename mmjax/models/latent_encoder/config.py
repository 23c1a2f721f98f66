"""Settings of encoders of latents. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mmjax.configurable import configurable, positive, require
from mmjax.mesh.layout import Layout
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.choices import Medium
from mmjax.models.settings import ModuleSettings, OnCanvases, SquarePatches

_NAMES = {
    **{name: name for name in ("channels", "latent_channels", "widths", "groups", "moments_convolution", "causal")},
    **{name: name for name in ("shift", "scale", "means", "deviations")},
    **{"blocks": "layers", "attends": "attention"},
}
"""Fields of `AutoencoderConfig` by their names here."""


@dataclass(frozen=True, kw_only=True)
class PictureAutoencoder(AutoencoderConfig):
    """An autoencoder of single pictures: of causal kernels it has the last frame alone."""

    @property
    def kernel_axes(self) -> int:
        """See ``AutoencoderConfig``."""
        return 2


def fields_from(c: AutoencoderConfig) -> dict[str, Any]:
    """The fields of ``LatentEncoderConfig``, by name, that an autoencoder's settings decide."""
    return {name: getattr(c, theirs) for name, theirs in _NAMES.items()}


@configurable("LatentEncoder")
@dataclass(frozen=True, kw_only=True)
class LatentEncoderConfig(OnCanvases, ModuleSettings, SquarePatches):
    """The encoder of an autoencoder, frozen: it makes latents of the pictures that a generator learns to make.

    A folder of diffusers in ``Weights.path`` decides all fields but ``canvases``.

    Attributes:
      preset: the preset whose values are the defaults.
      layers: encoders whose results are added; published models have one.
      channels: channels of a picture.
      latent_channels: channels of a latent.
      widths: channels at each size of pictures, the largest first. Each size but the first has half the sides of the
        one before.
      blocks: residual blocks at a size.
      groups: groups of channels of a GroupNorm; 0 has RMSNorms over the channels of a pixel.
      attends: whether every pixel of the smallest size attends to all.
      moments_convolution: whether a convolution of single pixels follows.
      causal: whether folders have kernels of three frames, of which a picture meets the last.
      shift, scale: a generator sees (latent - shift) · scale.
      means, deviations: with causal kernels a generator sees (latent - means) / deviations, by channel.
      canvases: rows and columns, in pixels of latents, of the canvases on which pictures lie, in the upper left corner;
        each holds the one before.
    """

    medium: ClassVar[Medium] = "drawing"
    merge: ClassVar[int] = 1
    divided_by_tp: ClassVar[tuple[str, ...]] = ()
    kv_heads: ClassVar[int] = 0
    head_width: ClassVar[int] = 0
    value_width: ClassVar[int] = 0
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        name: fields_from(AutoencoderConfig.of(name)) for name in AutoencoderConfig.presets
    }

    preset: str = "tiny"
    layers: int = 1
    channels: int = 3
    latent_channels: int = 4
    widths: tuple[int, ...] = (16, 32)
    blocks: int = 1
    groups: int = 8
    attends: bool = True
    moments_convolution: bool = True
    causal: bool = False
    shift: float = 0.0
    scale: float = 0.18215
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    canvases: tuple[tuple[int, int], ...] = ((8, 8),)

    def __post_init__(self) -> None:
        positive("LatentEncoder.layers", self.layers)
        self.check_canvases("LatentEncoder.canvases")
        _ = self.autoencoder  # raises for settings that do not fit together

    @property
    def autoencoder(self) -> PictureAutoencoder:
        """The settings of the autoencoder."""
        values = {theirs: getattr(self, name) for name, theirs in _NAMES.items()}
        over_time = (False,) * (len(self.widths) - 1) if self.causal else ()
        return PictureAutoencoder(over_time=over_time, **values)

    @property
    def width(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Numbers of a pixel of a latent: means and deviations."""
        return 2 * self.latent_channels

    @property
    def patch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Pixels of a picture along a side of a latent's pixel."""
        return self.autoencoder.factor

    @property
    def needs_whole_rows(self) -> bool:
        """See ``ModuleSettings``."""
        return True

    def check(self, name: str, layout: Layout) -> None:
        """See ``ModuleSettings.check``; ranks share pictures alone."""
        super().check(name, layout)
        for degree in ("tp", "pp", "cp", "chunks"):
            value = getattr(layout, degree)
            fix = f"a picture is encoded by one rank as a whole; set it to 1, and {name}/Layout.dp to more"
            require(value == 1, f"{name}/Layout.{degree}", value, fix)
