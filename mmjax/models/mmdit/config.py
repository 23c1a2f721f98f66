"""Settings of double-stream diffusion transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, one_of, positive, require
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.diffusion import Diffusion
from mmjax.models.settings import ConditionTokens, EqualHeads, SquarePatches

MOST_REFERENCES = 3
"""The most pictures that a picture is made from."""


@configurable("MMDiT")
@dataclass(frozen=True, kw_only=True)
class MMDiTConfig(Diffusion, ConditionTokens, EqualHeads, SquarePatches):
    """A generator of pictures with a stream for the condition and one for the picture, such as Qwen-Image's.

    ``Diffusion`` has the settings of its noise and of drawing.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units; equal in both streams.
      patch: side of a square patch in pixels of the picture, which are numbers of latents if latents are made.
      channels: channels of a picture, or of its latents.
      queries: places of the condition, which are placeholders of each picture in the LLM's text.
      references: the most pictures before it in the text that a picture is made from, up to 3: it sees their patches,
        or latents, beside its own, without noise, as in Qwen-Image-Edit; 0 for none.
      rope: numbers of a head that rotate with a picture's index in its row, with a patch's row and with its column; ()
        is an eighth for the first, and a half of the others for each of row and column.
      activation: ``gelu`` (tanh), ``gelu_exact`` or ``quick_gelu``.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    medium: ClassVar[Medium] = "image"
    merge: ClassVar[int] = 1
    splits_queries: ClassVar[bool] = True
    shares_queries: ClassVar[bool] = True
    qk_norm = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "qwen-image": {
            **{"layers": 60, "width": 3072, "heads": 24, "mlp": 12288, "patch": 2, "channels": 16},
            **{"times": "logit_normal", "dynamic_shift": True, "max_shift": 0.9, "max_patches": 8192},
            **{"terminal_time": 0.02, "steps": 50},
        },
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 2
    channels: int = 1
    queries: int = 8
    references: int = 0
    rope: tuple[int, ...] = field(default=(), metadata={"example": (16, 56, 56)})
    activation: str = "gelu"
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "queries"):
            positive(f"MMDiT.{name}", getattr(self, name))
        fix = f"must be 0 to {MOST_REFERENCES}, such as 1"
        require(0 <= self.references <= MOST_REFERENCES, "MMDiT.references", self.references, fix)
        self.check_diffusion("MMDiT")
        divides("MMDiT.heads", self.heads, self.width, "MMDiT.width")
        least = f"must be an even number of at least 6 times MMDiT.heads={self.heads}, such as {16 * self.heads}"
        require(self.head_width % 2 == 0 and self.head_width >= 6, "MMDiT.width", self.width, least)
        fix = f"needs three even numbers above 0 whose sum is MMDiT.width / MMDiT.heads = {self.head_width}, or is ()"
        rope = self.rope_widths
        fits = len(rope) == 3 and all(n > 0 and n % 2 == 0 for n in rope) and sum(rope) == self.head_width
        require(fits, "MMDiT.rope", self.rope, fix)
        one_of("MMDiT.activation", self.activation, ACTIVATIONS)
        check_backend("MMDiT", self.attention, self.head_width)
        one_of("MMDiT.remat", self.remat, REMATS)

    @property
    def rope_widths(self) -> tuple[int, ...]:
        """The numbers of a head that rotate with each axis: ``rope``, or its default by the width of a head."""
        if self.rope:
            return self.rope
        pairs = self.head_width // 2
        first = max(1, pairs // 8)
        of_row = (pairs - first + 1) // 2
        return 2 * first, 2 * of_row, 2 * (pairs - first - of_row)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason."""
        return self.idle_diffusion("MMDiT")
