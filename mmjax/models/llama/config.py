"""Settings of Llama-family language models. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from mmjax.attention.language import Rules
from mmjax.attention.settings import check_attention
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.models.choices import REMATS

ROPE_TURNS: Mapping[str, tuple[float, float]] = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
"""The usual ``rope_turns`` of the scalings that have some."""
ROPE_SCALINGS = ("none", "linear", *ROPE_TURNS)
_QWEN2_VL_7B: Mapping[str, object] = dict(
    **dict(layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064),
    **dict(qkv_bias=True, rope_theta=1000000.0, rope_sections=(16, 24, 24), norm_eps=1e-6),
)
"""Sizes of the language model of Qwen2-VL 7B and of Qwen2.5-VL 7B."""


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A language model.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      vocab: vocabulary size; 0 means the tokenizer's.
      qkv_bias, o_bias, mlp_bias: queries, keys and values, the attention's output, and the mlp have biases.
      qk_norm: queries and keys are normalised head by head, before they are rotated (Qwen3).
      mask: which tokens see which: "causal", another preset such as "gemma3" and "paligemma", or rules such as
        "text sees all before; vision sees vision in item" (see docs/guide/masks.md).
      window: tokens that a token sees of those before it, itself included; 0 means all (Mistral).
      chunk: tokens of a sample are cut into chunks of so many, and a token sees those of its own; what it sees in its
        item it sees anyway. 0 means one chunk (Llama 4).
      full_layers: the first layers, which have no window and no chunks where the others have (Qwen2).
      full_every: every so many layers the last has none, such as 6 for five local layers and a global one (Gemma 3).
      rope_theta: base of the rotary frequencies.
      rope_scaling: how frequencies are changed for longer contexts: ``none``, ``linear`` (all are divided), ``llama3``
        (Llama 3.1) or ``yarn`` (Peng et al., "YaRN"), which divide the slow ones and keep the fast ones.
      rope_factor: what frequencies are divided by.
      rope_context: tokens of the context that the model had before, for ``llama3`` and ``yarn``.
      rope_turns: ``llama3`` and ``yarn`` divide frequencies of fewer turns in that context than the first number, keep
        those of more than the second, and blend those between; () means (1, 4) for ``llama3``, (1, 32) for ``yarn``.
      rope_sections: how many of a head's pairs of components turn with a token's time, its row and its column: M-RoPE
        (Wang et al., "Qwen2-VL", §2.1), such as (16, 24, 24). A text token has one number for all three, an image's
        token its place in the image. () turns all with the token's place in its sample.
      norm_eps: added to the mean square in RMSNorm.
      tied: the output head is the embedding's transpose.
      z_loss: weight of a second loss, the square of the logarithm of the softmax's denominator, which keeps logits
        small (Chowdhery et al., "PaLM", §5); 0 leaves it out.
      attention: how attention is computed: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of
        tokens at once), or ``auto``: cuDNN where it takes device, mask and shape, else blockwise.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "vicuna-7b": dict(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000),
        "llama3-8b": dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, rope_theta=500000.0),
        "llama3-70b": dict(layers=80, width=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256, rope_theta=500000.0),
        "llama3.1-8b": dict(
            **dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, rope_theta=500000.0),
            **dict(rope_scaling="llama3", rope_factor=8.0, rope_context=8192),
        ),
        "mistral-7b": dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=32000, window=4096),
        "qwen2.5-7b": dict(
            **dict(layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064),
            **dict(qkv_bias=True, rope_theta=1000000.0, norm_eps=1e-6),
        ),
        "qwen2-vl-7b": _QWEN2_VL_7B,
        "qwen2.5-vl-7b": _QWEN2_VL_7B,
        "qwen3-8b": dict(
            **dict(layers=36, width=4096, heads=32, kv_heads=8, mlp=12288, vocab=151936),
            **dict(qk_norm=True, rope_theta=1000000.0, norm_eps=1e-6),
        ),
    }

    replicable: ClassVar[tuple[str, ...]] = ("kv_heads",)
    """Sizes that may be smaller than tp: each rank holds one key/value head, and tp / kv_heads ranks the same one."""

    preset: str = "tiny"
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    mlp: int = 192
    vocab: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mask: str = field(default="causal", metadata={"example": "text sees all before; vision sees vision in item"})
    window: int = 0
    chunk: int = 0
    full_layers: int = 0
    full_every: int = 0
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_context: int = 0
    rope_turns: tuple[float, ...] = field(default=(), metadata={"example": (1.0, 4.0)})
    rope_sections: tuple[int, ...] = field(default=(), metadata={"example": (16, 24, 24)})
    norm_eps: float = 1e-5
    tied: bool = False
    z_loss: float = 0.0
    attention: str = "auto"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rope_theta", "norm_eps"):
            positive(f"Decoder.{name}", getattr(self, name))
        for name in ("vocab", "head_dim", "window", "chunk", "full_layers", "full_every", "rope_context", "z_loss"):
            not_negative(f"Decoder.{name}", getattr(self, name))
        divides("Decoder.kv_heads", self.kv_heads, self.heads, "Decoder.heads")
        if not self.head_dim:
            divides("Decoder.heads", self.heads, self.width, "Decoder.width")
        require(self.head_width % 2 == 0, "Decoder.head_dim", self.head_width, "must be even, such as 16")
        kind = Rules.parse(self.mask, "Decoder.mask").kind
        check_attention("Decoder", self.attention, self.head_width, self.chunk, kind)
        one_of("Decoder.remat", self.remat, REMATS)
        self._check_window()
        self._check_rope()

    def check_media(self, modules: Sequence[str], field: str) -> None:
        """Requires that `mask`, the value of `field`, names no media but those of these modules. Raises ConfigError."""
        Rules.parse(self.mask, field).require_kinds(modules, field, self.mask)

    def _check_window(self) -> None:
        rules = Rules.parse(self.mask, "Decoder.mask")
        fix = f"must be Decoder.layers ({self.layers}) or less; set it to 0 if every layer has the window"
        require(self.full_layers <= self.layers, "Decoder.full_layers", self.full_layers, fix)
        fix = "the other layers have no window; set Decoder.window, such as 4096, or leave it 0"
        for name in ("full_layers", "full_every"):
            value = getattr(self, name)
            require(self.window + self.chunk > 0 or value == 0, f"Decoder.{name}", value, fix)
        fix = f"Decoder.full_layers={self.full_layers} says which layers are full; set one of both to 0"
        require(not (self.full_layers and self.full_every), "Decoder.full_every", self.full_every, fix)
        fix = f"Decoder.mask={self.mask!r} shows nothing 'before'; set it to 0"
        before = any(rule.how == "before" for rule in rules.rules)
        require(before or not self.window, "Decoder.window", self.window, fix)
        fix = "chunks are cut by a token's place in its sample, and Decoder.rope_sections gives three; set it to 0"
        require(not (self.chunk and self.rope_sections), "Decoder.chunk", self.chunk, fix)

    def _check_rope(self) -> None:
        one_of("Decoder.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        factor, fix = self.rope_factor, "must be 1 or more, such as 8.0"
        require(math.isfinite(factor) and factor >= 1, "Decoder.rope_factor", factor, fix)
        fix = "changes nothing without a Decoder.rope_scaling, such as 'linear'; set that, or leave it 1.0"
        require(self.rope_scaling != "none" or factor == 1, "Decoder.rope_factor", factor, fix)
        if self.rope_scaling in ROPE_TURNS:
            positive("Decoder.rope_context", self.rope_context, 8192)
        fix = "must be above 1 for frequencies that differ, such as 10000.0"
        require(self.rope_scaling == "none" or self.rope_theta > 1, "Decoder.rope_theta", self.rope_theta, fix)
        turns, fix = self.rope_turns, "must be two numbers above 0, the smaller first, such as (1.0, 4.0)"
        rising = len(turns) == 2 and 0 < turns[0] < turns[1] < math.inf
        require(not turns or rising, "Decoder.rope_turns", turns, fix)
        sections, pairs = self.rope_sections, self.head_width // 2
        fix = f"must be three numbers, 0 or more, that sum to the pairs of a head, {pairs}; or ()"
        legal = len(sections) == 3 and min(sections) >= 0 and sum(sections) == pairs
        require(not sections or legal, "Decoder.rope_sections", sections, fix)

    def idle(self) -> dict[str, str]:
        """The settings that change nothing beside the others, each with the reason."""
        if self.rope_scaling in ROPE_TURNS:
            return {}
        why = f"Decoder.rope_scaling={self.rope_scaling!r} does not read it"
        return dict.fromkeys(("rope_context", "rope_turns"), why)

    @property
    def turns(self) -> tuple[float, ...]:
        """``rope_turns`` that are given, or the scaling's own."""
        return self.rope_turns or ROPE_TURNS[self.rope_scaling]

    @property
    def runs(self) -> tuple[tuple[int, bool], ...]:
        """Runs of equal layers: how many, and whether they have the window and chunks, if there are any."""
        return tuple((len([*own]), near) for near, own in groupby(map(self._near, range(self.layers))))

    def _near(self, layer: int) -> bool:
        """Whether a layer has the window and chunks."""
        full = layer < self.full_layers or (self.full_every > 0 and (layer + 1) % self.full_every == 0)
        return bool(self.window or self.chunk) and not full

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads
