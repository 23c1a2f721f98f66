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
    layer = attention + 3 * d * c.mlp + 2 * d
    tables = _vocab(c) * d * (1 if c.tied else 2)
    return tables + c.layers * layer + d


def forward_flops(c: DecoderConfig, tokens: Iterable[int]) -> int:
    """Forward FLOPs of an LLM over causal segments of so many tokens (text and modality), all of them with logits."""
    d, k, lengths = c.width, c.head_width, [int(n) for n in tokens]
    total, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    weights = 2 * d * c.heads * k + 2 * d * c.kv_heads * k + 3 * d * c.mlp
    layer = 2 * total * weights + 4 * pairs * c.heads * k
    return c.layers * layer + 2 * total * d * _vocab(c)
