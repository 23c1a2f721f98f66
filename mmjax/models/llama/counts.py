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
    """The number of an LLM's parameters, without vocabulary padding; a tied embedding counts once.

    Raises:
      ValueError: the vocabulary size is not set.
    """
    d, k = c.width, c.head_width
    attention = 2 * d * c.heads * k + 2 * d * c.kv_heads * k
    biases = c.qkv_bias * (c.heads + 2 * c.kv_heads) * k + c.o_bias * d + c.mlp_bias * (2 * c.mlp + d)
    norms = 2 * d + c.qk_norm * 2 * k
    layer = attention + 3 * d * c.mlp + biases + norms
    tables = _vocab(c) * d * (1 if c.tied else 2)
    return tables + c.layers * layer + d


def forward_flops(c: DecoderConfig, tokens: Iterable[int], pairs: int | None = None) -> int:
    """Forward FLOPs of an LLM over segments of text and modality tokens, with logits of all tokens.

    A multiply-add is 2 FLOPs. A token sees only tokens of its own segment.

    Args:
      c: the settings.
      tokens: lengths of the segments.
      pairs: the number of pairs of query and visible key, summed over layers. By default it follows from the lengths,
        with masks of words counted as causal.

    Raises:
      ValueError: the vocabulary size is not set.
    """
    d, k, lengths = c.width, c.head_width, [int(n) for n in tokens]
    total = sum(lengths)
    if pairs is None:
        full = Rules.parse(c.mask).kind == "full"
        pairs = sum(layers * _pairs(lengths, c, local=local, full=full) for layers, local in c.runs)
    weights = 2 * d * c.heads * k + 2 * d * c.kv_heads * k + 3 * d * c.mlp
    return c.layers * 2 * total * weights + 4 * pairs * c.heads * k + 2 * total * d * _vocab(c)


def _pairs(lengths: Iterable[int], c: DecoderConfig, *, local: bool, full: bool) -> int:
    """The number of pairs in segments of these lengths, in one layer.

    Args:
      lengths: lengths of the segments in tokens.
      c: the settings.
      local: whether the layer has the window and chunks.
      full: whether the mask is full; otherwise it is counted as causal.
    """
    chunk, window = (c.chunk, c.window) if local else (0, 0)
    runs = [run for n in lengths for run in [*[chunk] * (n // chunk), n % chunk]] if chunk else [*lengths]
    if full:
        return sum(n * n for n in runs)
    widths = ((n, min(n, window) if window else n) for n in runs)
    return sum(width * (width + 1) // 2 + (n - width) * width for n, width in widths)
