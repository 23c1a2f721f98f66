"""Parameters and FLOPs of Llama-family language models, by the rules of ``flops``.

Letters: D width, H heads, G key/value heads, K head dim, F mlp width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from mmjax.attention.language import Rules
from mmjax.models.llama.config import DecoderConfig


def _vocab(c: DecoderConfig) -> int:
    if c.vocab <= 0:
        raise ValueError(f"Decoder.vocab: {c.vocab} is no size; set it to the tokenizer's vocabulary first")
    return c.vocab


def parameters(c: DecoderConfig) -> int:
    """Parameters of an LLM, without vocabulary padding; a tied embedding counts once."""
    d, k = c.width, c.head_width
    attention = 2 * d * c.heads * k + 2 * d * c.kv_heads * k
    biases = c.qkv_bias * (c.heads + 2 * c.kv_heads) * k + c.o_bias * d + c.mlp_bias * (2 * c.mlp + d)
    norms = 2 * d + c.qk_norm * 2 * k
    layer = attention + 3 * d * c.mlp + biases + norms
    tables = _vocab(c) * d * (1 if c.tied else 2)
    return tables + c.layers * layer + d


def forward_flops(c: DecoderConfig, tokens: Iterable[int], pairs: int | None = None) -> int:
    """Forward FLOPs of an LLM over segments of so many tokens (text and modality), all of them with logits.

    Args:
      c: the settings.
      tokens: lengths of the segments.
      pairs: pairs of a token and one that it sees, over all layers; by default those of segments that are all text
        that comes one by one, which a mask whose words depend on media does not tell.
    """
    d, k, lengths = c.width, c.head_width, [int(n) for n in tokens]
    total = sum(lengths)
    if pairs is None:
        full = Rules.parse(c.mask).kind == "full"
        pairs = sum(layers * _pairs(lengths, c, near, full) for layers, near in c.runs)
    weights = 2 * d * c.heads * k + 2 * d * c.kv_heads * k + 3 * d * c.mlp
    return c.layers * 2 * total * weights + 4 * pairs * c.heads * k + 2 * total * d * _vocab(c)


def _pairs(lengths: Iterable[int], c: DecoderConfig, near: bool, full: bool) -> int:
    """Pairs of a token and one that it sees, over segments of so many tokens, in layers with the window or without."""
    chunk, window = (c.chunk, c.window) if near else (0, 0)
    cut = [own for n in lengths for own in [*[chunk] * (n // chunk), n % chunk]] if chunk else [*lengths]
    if full:
        return sum(n * n for n in cut)
    seen = ((n, min(n, window) if window else n) for n in cut)
    return sum(most * (most + 1) // 2 + (n - most) * most for n, most in seen)
