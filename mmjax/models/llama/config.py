"""Settings of Llama-family language models. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from mmjax.attention.language import Rules
from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require, setting_name
from mmjax.data.patches import FIRST_CODE
from mmjax.models.choices import REMATS
from mmjax.models.settings import ModuleSettings

ROPE_TURNS: Mapping[str, tuple[float, float]] = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
"""Default ``rope_turns`` of the scalings that read them."""
ROPE_SCALINGS = ("none", "linear", *ROPE_TURNS)
_QWEN2_VL_7B: Mapping[str, object] = {
    "layers": 28,
    "width": 3584,
    "heads": 28,
    "kv_heads": 4,
    "mlp": 18944,
    "vocab": 152064,
    "qkv_bias": True,
    "rope_theta": 1000000.0,
    "rope_sections": (16, 24, 24),
    "norm_eps": 1e-6,
}
"""Sizes of the language model of Qwen2-VL 7B and of Qwen2.5-VL 7B."""


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModuleSettings):
    """A language model.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      vocab: vocabulary size; 0 means the tokenizer's.
      qkv_bias, o_bias, mlp_bias: queries, keys and values, the attention's output, and the mlp have biases.
      qk_norm: whether queries and keys have a norm for each head, before rotary embedding (Qwen3).
      mask: the attention mask: "causal", another preset such as "gemma3" and "paligemma", or rules such as "text sees
        all before; vision sees vision in item" (see docs/guide/masks.md).
      window: sliding window of earlier tokens, the token itself included; 0 means no limit (Mistral).
      chunk: length of the chunks that samples are cut into: a token sees its own chunk, and by the relation "in item"
        its whole item; 0 means one chunk (Llama 4).
      full_layers: number of first layers without window and chunks (Qwen2).
      full_every: the last of each run of so many layers has no window and no chunks, such as 6 for five local layers
        and a global one (Gemma 3).
      rope_theta: base of the rotary frequencies.
      rope_scaling: change of frequencies for longer contexts: ``none``, ``linear`` (all are divided), ``llama3`` (Llama
        3.1) or ``yarn`` (Peng et al., "YaRN"), which divide low frequencies and keep high ones.
      rope_factor: divisor of the frequencies.
      rope_context: context length before scaling, in tokens, for ``llama3`` and ``yarn``.
      rope_turns: ``llama3`` and ``yarn`` divide frequencies with fewer turns in that context than the first number,
        keep those with more than the second, and interpolate between; () means (1, 4) for ``llama3``, (1, 32) for
        ``yarn``.
      rope_sections: numbers of a head's pairs of components that rotate with a token's time, row and column: M-RoPE
        (Wang et al., "Qwen2-VL", §2.1), such as (16, 24, 24). A text token has one number for all three, an image's
        token its place in the image. () rotates all pairs with the token's place in its sample.
      norm_eps: epsilon of RMSNorm.
      tied: whether the output head is the transposed embedding table.
      z_loss: weight of a second loss, the squared logarithm of the softmax's denominator, which keeps logits small
        (Chowdhery et al., "PaLM", §5); 0 leaves it out.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "vicuna-7b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "mlp": 11008, "vocab": 32000},
        "llama3-8b": {
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "mlp": 14336,
            "vocab": 128256,
            "rope_theta": 500000.0,
        },
        "llama3-70b": {
            "layers": 80,
            "width": 8192,
            "heads": 64,
            "kv_heads": 8,
            "mlp": 28672,
            "vocab": 128256,
            "rope_theta": 500000.0,
        },
        "llama3.1-8b": {
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "mlp": 14336,
            "vocab": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": "llama3",
            "rope_factor": 8.0,
            "rope_context": 8192,
        },
        "mistral-7b": {
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "mlp": 14336,
            "vocab": 32000,
            "window": 4096,
        },
        "qwen2.5-7b": {
            "layers": 28,
            "width": 3584,
            "heads": 28,
            "kv_heads": 4,
            "mlp": 18944,
            "vocab": 152064,
            "qkv_bias": True,
            "rope_theta": 1000000.0,
            "norm_eps": 1e-6,
        },
        "qwen2-vl-7b": _QWEN2_VL_7B,
        "qwen2.5-vl-7b": _QWEN2_VL_7B,
        "qwen3-8b": {
            "layers": 36,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "mlp": 12288,
            "vocab": 151936,
            "qk_norm": True,
            "rope_theta": 1000000.0,
            "norm_eps": 1e-6,
        },
    }

    divided_by_tp: ClassVar[tuple[str, ...]] = ("heads", "kv_heads", "mlp", "width")
    replicable: ClassVar[tuple[str, ...]] = ("kv_heads",)

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
    remat: str = "auto"

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
        check_backend("Decoder", self.attention, self.head_width, self.chunk, kind)
        one_of("Decoder.remat", self.remat, REMATS)
        self._check_window()
        self._check_rope()

    def check_media(self, name: str, media: Sequence[str]) -> None:
        """Raises `ConfigError` if `mask` names other media than those of the modules `media`."""
        field = setting_name(name, self, "mask")
        Rules.parse(self.mask, field).require_kinds(media, field, self.mask)

    def check_codes(self, name: str, *, example: str) -> None:
        """Raises `ConfigError` unless it has a number of codes, one position a code, and sees all codes before.

        ``example`` is a number of codes for the message, and whose it is.
        """
        fix = f"no tokenizer decides how many codes {name!r} speaks; set it, such as to {example}"
        require(self.vocab > FIRST_CODE, setting_name(name, self, "vocab"), self.vocab, fix)
        fix = "codes have no rows and columns; set it to ()"
        require(not self.rope_sections, setting_name(name, self, "rope_sections"), self.rope_sections, fix)
        fix = "codes are of no kind, and see those before; set it to 'causal'"
        require(self.mask == "causal", setting_name(name, self, "mask"), self.mask, fix)

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
        has_before = any(rule.relation == "before" for rule in rules.rules)
        require(has_before or not self.window, "Decoder.window", self.window, fix)
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
        ascending = len(turns) == 2 and 0 < turns[0] < turns[1] < math.inf
        require(not turns or ascending, "Decoder.rope_turns", turns, fix)
        sections, pairs = self.rope_sections, self.head_width // 2
        fix = f"must be three numbers, 0 or more, that sum to the pairs of a head, {pairs}; or ()"
        legal = len(sections) == 3 and min(sections) >= 0 and sum(sections) == pairs
        require(not sections or legal, "Decoder.rope_sections", sections, fix)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "rope_context" and "rope_turns", or
        {}.
        """
        if self.rope_scaling in ROPE_TURNS:
            return {}
        reason = f"Decoder.rope_scaling={self.rope_scaling!r} does not read it"
        return dict.fromkeys(("rope_context", "rope_turns"), reason)

    @property
    def turns(self) -> tuple[float, ...]:
        """``rope_turns``, or the defaults of the scaling. Only for the scalings ``llama3`` and ``yarn``."""
        return self.rope_turns or ROPE_TURNS[self.rope_scaling]

    @property
    def runs(self) -> tuple[tuple[int, bool], ...]:
        """Runs of equal layers: the number of layers, and whether they are local, with the window and chunks.

        Such as ((5, True), (1, False)); without windows and chunks all layers are one run that is not local.
        """
        return tuple((len([*run]), is_local) for is_local, run in groupby(map(self._is_local, range(self.layers))))

    def _is_local(self, layer: int) -> bool:
        """Whether a layer has the window and chunks; False if the model has neither."""
        full = layer < self.full_layers or (self.full_every > 0 and (layer + 1) % self.full_every == 0)
        return bool(self.window or self.chunk) and not full

    @property
    def grid_setting(self) -> str:
        """`rope_sections` if they are set; see `ModuleSettings`."""
        return "rope_sections" if self.rope_sections else ""

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads
