"""Parameter and FLOP counts of every module, from the configs alone.

Counting rules: real (unpadded) tokens only; 2·m·n·k for a product of [m, k] and [k, n]; attention over the pairs that
the mask allows, n(n + 1)/2 in a causal segment of n and n² in an image; the vocabulary head included; embedding lookup,
norms, activations, softmax and rotary embedding free; recompute (remat) excluded. A backward costs twice its forward:
one forward for the gradients of inputs, one for those of weights (Narayanan et al. 2021, appendix), so frozen modules
cost less. Everything is an exact `int`.

Letters: D width, H heads, G key/value heads, K head dim, F mlp width, V vocabulary, P patch side, C channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    from mmjax.models.decoder import DecoderConfig
    from mmjax.models.multimodal import MultimodalModel
    from mmjax.models.projector import ProjectorConfig
    from mmjax.models.vit import ViTConfig

LLM = "llm"


def _head_dim(decoder: DecoderConfig) -> int:
    return decoder.head_dim or decoder.width // decoder.heads


def _vocab(decoder: DecoderConfig) -> int:
    if decoder.vocab <= 0:
        raise ValueError(f"Decoder.vocab: {decoder.vocab} is no size; set it to the tokenizer's vocabulary first")
    return decoder.vocab


def _projector_widths(vit: ViTConfig, projector: ProjectorConfig, llm_width: int) -> tuple[int, int, int]:
    return vit.merge**2 * vit.width, projector.hidden or llm_width, llm_width


# --- parameters ---------------------------------------------------------------------------------------------------


def vit_parameters(vit: ViTConfig) -> int:
    """Parameters of a ViT: patch embedding, position table when learned, layers, last norm. No class token or head."""
    d, f = vit.width, vit.mlp
    patch = vit.patch**2 * vit.channels * d + d
    position = vit.grid**2 * d if vit.positions == "learned2d" else 0
    attention, mlp, norms = 4 * (d * d + d), d * f + f + f * d + d, 2 * 2 * d
    return patch + position + vit.layers * (attention + mlp + norms) + 2 * d


def projector_parameters(vit: ViTConfig, projector: ProjectorConfig, llm_width: int) -> int:
    """Parameters of the projector from `vit` to an LLM of width `llm_width`."""
    inputs, hidden, outputs = _projector_widths(vit, projector, llm_width)
    return inputs * hidden + hidden + hidden * outputs + outputs


def decoder_parameters(decoder: DecoderConfig) -> int:
    """Parameters of an LLM, without vocabulary padding; a tied embedding counts once."""
    d, k = decoder.width, _head_dim(decoder)
    attention = 2 * d * decoder.heads * k + 2 * d * decoder.kv_heads * k
    layer = attention + 3 * d * decoder.mlp + 2 * d
    tables = _vocab(decoder) * d * (1 if decoder.tied else 2)
    return tables + decoder.layers * layer + d


def parameter_count(model: MultimodalModel) -> dict[str, int]:
    """Parameters per module: every encoder, its projector ("<encoder>_projector") and "llm"."""
    counts = {}
    for name, encoder in model.encoders.items():
        counts[name] = vit_parameters(encoder.config)
        counts[f"{name}_projector"] = projector_parameters(encoder.config, encoder.projector, model.llm.width)
    return {**counts, LLM: decoder_parameters(model.llm)}


# --- FLOPs --------------------------------------------------------------------------------------------------------


def segment_lengths(segments: Int[np.ndarray, "rows T"]) -> tuple[int, ...]:
    """Lengths of the segments of packed rows, row by row; segment 0 is padding and left out."""
    lengths: list[int] = []
    for row in np.asarray(segments):
        lengths.extend(int(count) for count in np.bincount(row)[1:] if count)
    return tuple(lengths)


def vit_forward_flops(vit: ViTConfig, patches: Iterable[int]) -> int:
    """Forward FLOPs of a ViT over images of so many patches each."""
    d, lengths = vit.width, [int(n) for n in patches]
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    layer = 2 * tokens * (4 * d * d + 2 * d * vit.mlp) + 4 * pairs * d
    return 2 * tokens * vit.patch**2 * vit.channels * d + vit.layers * layer


def projector_forward_flops(vit: ViTConfig, projector: ProjectorConfig, llm_width: int, patches: Iterable[int]) -> int:
    """Forward FLOPs of a projector over images of so many patches each (before merging)."""
    inputs, hidden, outputs = _projector_widths(vit, projector, llm_width)
    tokens = sum(int(n) // vit.merge**2 for n in patches)
    return 2 * tokens * (inputs * hidden + hidden * outputs)


def decoder_forward_flops(decoder: DecoderConfig, tokens: Iterable[int]) -> int:
    """Forward FLOPs of an LLM over causal segments of so many tokens (text and modality), all of them with logits."""
    d, k, lengths = decoder.width, _head_dim(decoder), [int(n) for n in tokens]
    total, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    weights = 2 * d * decoder.heads * k + 2 * d * decoder.kv_heads * k + 3 * d * decoder.mlp
    layer = 2 * total * weights + 4 * pairs * decoder.heads * k
    return decoder.layers * layer + 2 * total * d * _vocab(decoder)


def forward_flops(model: MultimodalModel, lengths: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Forward FLOPs per module of one or more sequences, or of a microbatch.

    Args:
      model: the module graph.
      lengths: real lengths: per encoder the patches of every image, under "llm" the tokens of every segment; an
        encoder that is absent saw no image. `segment_lengths` reads them off packed rows.

    Raises:
      ValueError: `lengths` names a module that is neither an encoder nor "llm", or the vocabulary has no size yet.
    """
    if unknown := set(lengths) - {*model.encoders, LLM}:
        raise ValueError(f"lengths: {sorted(unknown)} are no modules with rows; use {[*model.encoders, LLM]}")
    flops = {}
    for name, encoder in model.encoders.items():
        vit, patches = encoder.config, lengths.get(name, ())
        flops[name] = vit_forward_flops(vit, patches)
        flops[f"{name}_projector"] = projector_forward_flops(vit, encoder.projector, model.llm.width, patches)
    return {**flops, LLM: decoder_forward_flops(model.llm, lengths.get(LLM, ()))}


def training_factors(encoders: Iterable[str], frozen: Collection[str]) -> dict[str, int]:
    """How many forwards a training step costs, per module, for the names of the encoders and of the frozen modules.

    3 when the module trains; 2 when it is frozen and something upstream trains, so that gradients only pass through;
    1 when neither. An encoder has nothing upstream, a projector its encoder, the LLM everything. By convention a first
    trainable module counts 3 although its inputs need no gradient.
    """

    def factor(module: str, upstream: bool) -> int:
        return 3 if module not in frozen else 2 if upstream else 1

    factors: dict[str, int] = {}
    for name in encoders:
        factors[name] = factor(name, upstream=False)
        factors[f"{name}_projector"] = factor(f"{name}_projector", upstream=factors[name] > 1)
    return {**factors, LLM: factor(LLM, upstream=any(value > 1 for value in factors.values()))}


def training_flops(
    model: MultimodalModel, lengths: Mapping[str, Sequence[int]], frozen: Collection[str] = ()
) -> dict[str, int]:
    """Model FLOPs of a training step per module: `forward_flops` times `training_factors`."""
    factors = training_factors(model.encoders, frozen)
    return {name: flops * factors[name] for name, flops in forward_flops(model, lengths).items()}
