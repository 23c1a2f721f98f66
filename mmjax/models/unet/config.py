"""Settings of UNets. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, one_of, positive, require, setting_name
from mmjax.mesh.layout import Layout, ModuleSizes
from mmjax.models.choices import REMATS, Medium
from mmjax.models.diffusion import Diffusion
from mmjax.models.settings import ConditionTokens, OnCanvases, SquarePatches

KERNEL = 3
"""Places along the side of a kernel."""
TRANSFORMER_EPS = 1e-6
"""The epsilon of the GroupNorm of a transformer, for every value of ``UNet.norm_eps``."""
LAYER_NORM_EPS = 1e-5
"""The epsilon of the LayerNorms of a transformer's blocks."""
GATED = 4
"""Hidden units of a transformer's mlp, in widths."""
TIME = 4
"""Width of the time's features, in widths of the first level."""


_STABLE_DIFFUSION = {
    **{"queries": 77, "channels": 4, "widths": (320, 640, 1280, 1280), "blocks": 2, "groups": 32},
    **{"process": "ddpm", "sampler": "ddim", "steps_offset": 1},
}
"""Settings that its versions share."""


@configurable("UNet")
@dataclass(frozen=True, kw_only=True)
class UNetConfig(OnCanvases, Diffusion, ConditionTokens, SquarePatches):
    """A generator of pictures or latents with convolutions, attention inside a picture and attention to a condition.

    ``Diffusion`` has the settings of its noise and of drawing. A time is seen as a timestep; ``train_steps`` is that of
    pure noise. A *level* has half as many rows and columns as the level before.

    Attributes:
      preset: the preset whose values are the defaults.
      layers: networks, each of which reads the prediction of the one before; published models have one. Skips cross a
        complete network, so it is in one stage.
      width: width of the condition's features.
      queries: places of the condition: tokens of the LLM for a picture, of whatever size.
      channels: channels of a picture or of latents.
      widths: channels of the features of each level.
      heads_by_level: attention heads of each level; 0 for a level without attention.
      mid_heads: attention heads between the way down and the way up, at the last level.
      blocks: ResNet blocks of a level on the way down; the way up has one more.
      transformer_blocks: attention and mlp, so many times, behind each ResNet block of a level with attention.
      groups: groups of channels of GroupNorms.
      norm_eps: epsilon of GroupNorms, except those before attention, which have 1e-6.
      flip_sin_to_cos: whether the cosines of the time come before its sines.
      freq_shift: lowers the number of frequencies that their exponents are divided by.
      linear_projection: whether folders have the products around transformers as matrices, or as kernels of one place.
      upcast_attention: whether folders ask for attention in fp32; scores are fp32 here in any case.
      canvases: rows and columns of the canvases on which pictures lie, in the upper left corner; each holds the one
        before.
      attention: the backend of attention inside a picture: ``blockwise`` (any device), ``cudnn``, ``dense`` (all pairs
        of places at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise. Attention to
        the condition is blockwise.
      remat: the checkpoint policy of each block: ``none`` recomputes nothing, ``dots`` saves products and convolutions,
        ``full`` recomputes all; ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    medium: ClassVar[Medium] = "image"
    patch: ClassVar[int] = 1
    merge: ClassVar[int] = 1
    divided_by_tp: ClassVar[tuple[str, ...]] = ("groups",)
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "sd-1.5": {
            **_STABLE_DIFFUSION,
            **{"width": 768, "heads_by_level": (8, 8, 8, 0), "mid_heads": 8, "linear_projection": False},
            **{"canvases": ((64, 64),), "prediction": "noise"},
        },
        "sd-2.1": {
            **_STABLE_DIFFUSION,
            **{"width": 1024, "heads_by_level": (5, 10, 20, 0), "mid_heads": 20, "upcast_attention": True},
            **{"canvases": ((96, 96),), "prediction": "v"},
        },
    }

    preset: str = "tiny"
    layers: int = 1
    width: int = 48
    queries: int = 4
    channels: int = 4
    widths: tuple[int, ...] = (32, 64)
    heads_by_level: tuple[int, ...] = (2, 0)
    mid_heads: int = 4
    blocks: int = 1
    transformer_blocks: int = 1
    groups: int = 8
    norm_eps: float = 1e-5
    flip_sin_to_cos: bool = True
    freq_shift: float = 0.0
    linear_projection: bool = True
    upcast_attention: bool = False
    canvases: tuple[tuple[int, int], ...] = ((8, 8),)
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "queries", "channels", "mid_heads", "blocks", "transformer_blocks"):
            positive(f"UNet.{name}", getattr(self, name))
        positive("UNet.groups", self.groups, 32)
        positive("UNet.norm_eps", self.norm_eps, 1e-5)
        self.check_diffusion("UNet")
        one_of("UNet.remat", self.remat, REMATS)
        self._check_levels()
        fix = f"must be at most UNet.width ({self.width}), the width of rows"
        require(self.channels <= self.width, "UNet.channels", self.channels, fix)
        self.check_canvases("UNet.canvases")
        check_backend("UNet", self.attention, self.head_width)

    def _check_levels(self) -> None:
        require(bool(self.widths), "UNet.widths", self.widths, "has no level; give widths such as (320, 640)")
        fix = f"must have a number for each of the {len(self.widths)} levels of UNet.widths, such as 0"
        require(len(self.heads_by_level) == len(self.widths), "UNet.heads_by_level", self.heads_by_level, fix)
        for width in self.widths:
            fix = f"must be multiples of UNet.groups ({self.groups})"
            require(width > 0 and width % self.groups == 0, "UNet.widths", self.widths, fix)
        require(self.widths[0] % 2 == 0, "UNet.widths", self.widths, "begins with an odd width; sines need an even one")
        even = f"must be below half of the first of UNet.widths, {self.widths[0] // 2}; use 0"
        require(0 <= self.freq_shift < self.widths[0] // 2, "UNet.freq_shift", self.freq_shift, even)
        for width, heads in zip(self.widths, self.heads_by_level, strict=True):
            fix = f"must be 0 or divide the level's of UNet.widths ({width}); use 0"
            require(heads >= 0 and (not heads or width % heads == 0), "UNet.heads_by_level", self.heads_by_level, fix)
        fix = f"must divide the last of UNet.widths ({self.widths[-1]}); use 1"
        require(self.widths[-1] % self.mid_heads == 0, "UNet.mid_heads", self.mid_heads, fix)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason."""
        reasons = self.idle_diffusion("UNet")
        return {name: reason for name, reason in reasons.items() if name != "train_steps"}

    @property
    def timestep_scale(self) -> float:
        """The factor that makes timesteps of the process's times."""
        return self.train_steps / self.noising.time_scale

    @property
    def head_width(self) -> int:
        """Width of a head between the way down and the way up."""
        return self.widths[-1] // self.mid_heads

    @property
    def value_width(self) -> int:
        """Width of one head of values."""
        return self.head_width

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads between the way down and the way up: one for each query head."""
        return self.mid_heads

    @property
    def time_width(self) -> int:
        """Width of the time's features."""
        return TIME * self.widths[0]

    @property
    def down_inputs(self) -> tuple[tuple[int, ...], ...]:
        """Input channels of the ResNet blocks of each level on the way down."""
        before = (self.widths[0], *self.widths)
        return tuple((before[i], *(self.widths[i],) * (self.blocks - 1)) for i in range(len(self.widths)))

    @property
    def up_inputs(self) -> tuple[tuple[int, ...], ...]:
        """Input channels of the ResNet blocks of each level on the way up, skips included, from the last level on."""
        last, skips = len(self.widths) - 1, [self.widths[0]]
        for level, width in enumerate(self.widths):
            skips += [width] * (self.blocks + (level < last))
        width, result = self.widths[-1], []
        for level in reversed(range(len(self.widths))):
            inputs = []
            for _ in range(self.blocks + 1):
                inputs.append(width + skips.pop())
                width = self.widths[level]
            result.append(tuple(inputs))
        return tuple(result)

    def sizes(self, name: str) -> ModuleSizes:
        """See ``ModuleSettings.sizes``. Odd numbers of heads are not split, see ``is_split``."""
        heads = {f"heads_by_level[{level}]": number for level, number in enumerate(self.heads_by_level)}
        heads["mid_heads"] = self.mid_heads
        numbers = {"groups": self.groups} | {field: number for field, number in heads.items() if is_split(number)}
        return ModuleSizes(
            layers=self.layers, by_tp={setting_name(name, self, field): number for field, number in numbers.items()}
        )

    def check(self, name: str, layout: Layout) -> None:
        """See ``ModuleSettings.check``; a network is not cut into stages."""
        super().check(name, layout)
        field = setting_name(name, self, "layers")
        fix = f"a UNet's skips cross the complete network, of which there are {field}={self.layers}; use 1"
        for degree in ("pp", "chunks"):
            value = getattr(layout, degree)
            require(value == 1 or layout.pp * layout.chunks <= self.layers, f"{name}/Layout.{degree}", value, fix)


def is_split(heads: int) -> bool:
    """Whether tp splits attention of so many heads: an even number. Of others every rank computes all heads."""
    return heads > 0 and heads % 2 == 0
