"""Parameters and FLOPs of Llama-family language models, by the rules of ``flops``.

Letters: D width, H heads, G key/value heads, K head dim, F mlp width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def forward_flops(c: DecoderConfig, tokens: Iterable[int]) -> int:
    """Forward FLOPs of an LLM over causal segments of so many tokens (text and modality), all of them with logits."""
    d, k, lengths = c.width, c.head_width, [int(n) for n in tokens]
    total, pairs = sum(lengths), sum(layers * _pairs(lengths, window) for layers, window in c.windows)
    weights = 2 * d * c.heads * k + 2 * d * c.kv_heads * k + 3 * d * c.mlp
    return c.layers * 2 * total * weights + 4 * pairs * c.heads * k + 2 * total * d * _vocab(c)


def _pairs(lengths: Iterable[int], window: int) -> int:
    """Pairs of a token and one that it sees, over causal segments of so many tokens; a window of 0 is none."""
    seen = ((n, min(n, window) if window else n) for n in lengths)
    return sum(most * (most + 1) // 2 + (n - most) * most for n, most in seen)
