"""Settings of Llama-family language models. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.models.choices import REMATS


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A language model.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      vocab: vocabulary size; 0 means the tokenizer's.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      tied: the output head is the embedding's transpose.
      z_loss: weight of a second loss, the square of the logarithm of the softmax's denominator, which keeps logits
        small (Chowdhery et al., "PaLM", §5); 0 leaves it out.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "vicuna-7b": dict(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000),
        "llama3-8b": dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, rope_theta=500000.0),
        "llama3-70b": dict(layers=80, width=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256, rope_theta=500000.0),
    }

    preset: str = "tiny"
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    mlp: int = 192
    vocab: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    z_loss: float = 0.0
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rope_theta", "norm_eps"):
            positive(f"Decoder.{name}", getattr(self, name))
        for name in ("vocab", "head_dim", "z_loss"):
            not_negative(f"Decoder.{name}", getattr(self, name))
        divides("Decoder.kv_heads", self.kv_heads, self.heads, "Decoder.heads")
        if not self.head_dim:
            divides("Decoder.heads", self.heads, self.width, "Decoder.width")
        require(self.head_width % 2 == 0, "Decoder.head_dim", self.head_width, "must be even, such as 16")
        one_of("Decoder.remat", self.remat, REMATS)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads
