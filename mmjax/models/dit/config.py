"""Settings of diffusion transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.diffusion import Diffusion
from mmjax.models.settings import ConditionTokens, EqualHeads, SquarePatches


@configurable("DiT")
@dataclass(frozen=True, kw_only=True)
class DiTConfig(Diffusion, ConditionTokens, EqualHeads, SquarePatches):
    """A generator of pictures; ``Diffusion`` has the settings of its noise and of drawing.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      patch: side of a square patch in pixels.
      channels: channels of a picture.
      merge: side of the square of patches that make one LLM token.
      queries: LLM tokens that condition a picture, whatever its size, as tokens of their own before the patches; 0 = a
        token for each square of ``merge`` x ``merge`` patches, whose features are added to theirs.
      frequencies: number of sines, and of cosines, of the time.
      activation: ``gelu`` (tanh), ``gelu_exact`` or ``quick_gelu``.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    medium: ClassVar[Medium] = "image"
    splits_queries: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "dit-xl2": {"layers": 28, "width": 1152, "heads": 16, "mlp": 4608, "patch": 2, "channels": 4},
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 2
    channels: int = 1
    merge: int = 2
    queries: int = 0
    frequencies: int = 8
    activation: str = "gelu"
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "frequencies"):
            positive(f"DiT.{name}", getattr(self, name))
        self.check_diffusion("DiT")
        not_negative("DiT.queries", self.queries)
        fix = f"DiT.queries={self.queries} tokens stand for a picture of any size; set it to 1, or queries to 0"
        require(not self.queries or self.merge == 1, "DiT.merge", self.merge, fix)
        divides("DiT.heads", self.heads, self.width, "DiT.width")
        quarter = "a quarter of DiT.width (positions rotate quarters of a head), which is"
        divides("DiT.heads", self.heads, self.width // 4, quarter)
        one_of("DiT.activation", self.activation, ACTIVATIONS)
        check_backend("DiT", self.attention, self.head_width)
        one_of("DiT.remat", self.remat, REMATS)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason."""
        return self.idle_diffusion("DiT")
