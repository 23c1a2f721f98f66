"""Parameter and FLOP counts of every module, from the configs alone.

Counting rules: real (unpadded) tokens only; 2·m·n·k for a product of [m, k] and [k, n]; attention over the pairs that
the mask allows, n(n + 1)/2 in a causal segment of n and n² in a picture or a recording; the vocabulary head included;
embedding lookup, norms, activations, softmax and rotary embedding free; recompute excluded (of layers, see ``remat``,
and of the logits, which every backward of an LLM computes again). A backward costs twice its forward: one forward for
the gradients of inputs, one for those of weights (Narayanan et al. 2021, appendix), so frozen modules cost less.
Everything is an exact `int`.

Letters: D width, H heads, G key/value heads, K head dim, F mlp width, V vocabulary, P patch side, C channels, M mels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    from mmjax.models.config import DecoderConfig, DiTConfig, ViTConfig, WhisperConfig
    from mmjax.models.encoder_layers import EncoderLayers
    from mmjax.models.encoders import Encoder
    from mmjax.models.generators import Generator
    from mmjax.models.multimodal import MultimodalModel

LLM = "llm"


def _head_dim(decoder: DecoderConfig) -> int:
    return decoder.head_dim or decoder.width // decoder.heads


def _vocab(decoder: DecoderConfig) -> int:
    if decoder.vocab <= 0:
        raise ValueError(f"Decoder.vocab: {decoder.vocab} is no size; set it to the tokenizer's vocabulary first")
    return decoder.vocab


def _projector_widths(encoder: Encoder, llm_width: int) -> tuple[int, int, int]:
    return encoder.merged_width, encoder.projector.hidden or llm_width, llm_width


# --- parameters ---------------------------------------------------------------------------------------------------


def _blocks_parameters(c: EncoderLayers) -> int:
    """Parameters of the attention and the mlp of all layers."""
    d, f = c.width, c.mlp
    return c.layers * (4 * (d * d + d) + d * f + f + f * d + d)


def _encoder_layers_parameters(c: EncoderLayers) -> int:
    """Parameters of an encoder's layers and last norm."""
    return _blocks_parameters(c) + (2 * c.layers + 1) * 2 * c.width


def vit_parameters(vit: ViTConfig) -> int:
    """Parameters of a ViT: patch embedding, position table when learned, layers, last norm. No class token or head."""
    patch = vit.patch**2 * vit.channels * vit.width + vit.width
    position = vit.grid**2 * vit.width if vit.positions == "learned2d" else 0
    return patch + position + _encoder_layers_parameters(vit)


def whisper_parameters(audio: WhisperConfig) -> int:
    """Parameters of an audio encoder: two convolutions of 3 taps, position table when learned, layers, last norm."""
    d = audio.width
    convolutions = 3 * audio.mels * d + d + 3 * d * d + d
    position = audio.length * d if audio.positions == "learned" else 0
    return convolutions + position + _encoder_layers_parameters(audio)


def projector_parameters(encoder: Encoder, llm_width: int) -> int:
    """Parameters of an encoder's projector to an LLM of width `llm_width`, and of those that inject into its layers."""
    inputs, hidden, outputs = _projector_widths(encoder, llm_width)
    again = len(encoder.projector.inject)
    return (inputs + again * outputs) * hidden + (1 + again) * (hidden + hidden * outputs + outputs)


def dit_parameters(dit: DiTConfig) -> int:
    """Parameters of a diffusion transformer: patch embedding, layers with their modulation, velocity head."""
    d, e, features = dit.width, dit.patch_values, 2 * dit.frequencies
    modulation = (features + 1) * (6 * dit.layers + 2) * d
    return e * d + d + _blocks_parameters(dit) + modulation + d * e + e


def generator_projector_parameters(generator: Generator, llm_width: int) -> int:
    """Parameters of a generator's projector from an LLM of width `llm_width`."""
    hidden, outputs = generator.projector.hidden or llm_width, generator.merged_width
    return llm_width * hidden + hidden + hidden * outputs + outputs


def decoder_parameters(decoder: DecoderConfig) -> int:
    """Parameters of an LLM, without vocabulary padding; a tied embedding counts once."""
    d, k = decoder.width, _head_dim(decoder)
    attention = 2 * d * decoder.heads * k + 2 * d * decoder.kv_heads * k
    layer = attention + 3 * d * decoder.mlp + 2 * d
    tables = _vocab(decoder) * d * (1 if decoder.tied else 2)
    return tables + decoder.layers * layer + d


def parameter_count(model: MultimodalModel) -> dict[str, int]:
    """Parameters per module: encoders and generators, each with its projector ("<encoder>_projector"), and "llm"."""
    counts: dict[str, int] = {}
    for name, encoder in model.encoders.items():
        counts[name] = encoder.of_kind.parameters(encoder.config)
        counts[f"{name}_projector"] = projector_parameters(encoder, model.llm.width)
    counts[LLM] = decoder_parameters(model.llm)
    for name, generator in model.generators.items():
        counts[name] = generator.of_kind.parameters(generator.config)
        counts[f"{name}_projector"] = generator_projector_parameters(generator, model.llm.width)
    return counts


# --- FLOPs --------------------------------------------------------------------------------------------------------


def segment_lengths(segments: Int[np.ndarray, "rows T"]) -> tuple[int, ...]:
    """Lengths of the segments of packed rows, row by row; segment 0 is padding and left out."""
    lengths: list[int] = []
    for row in np.asarray(segments):
        lengths.extend(int(count) for count in np.bincount(row)[1:] if count)
    return tuple(lengths)


def _encoder_layers_flops(c: EncoderLayers, lengths: Sequence[int]) -> int:
    """Forward FLOPs of the layers of an encoder over media of so many patches each."""
    d, tokens, pairs = c.width, sum(lengths), sum(n * n for n in lengths)
    return c.layers * (2 * tokens * (4 * d * d + 2 * d * c.mlp) + 4 * pairs * d)


def vit_forward_flops(vit: ViTConfig, patches: Iterable[int]) -> int:
    """Forward FLOPs of a ViT over images of so many patches each."""
    lengths = [int(n) for n in patches]
    return 2 * sum(lengths) * vit.patch**2 * vit.channels * vit.width + _encoder_layers_flops(vit, lengths)


def whisper_forward_flops(audio: WhisperConfig, patches: Iterable[int]) -> int:
    """Forward FLOPs of an audio encoder over recordings of so many patches (pairs of frames) each.

    Per patch the first convolution runs twice and the second once, each over three taps.
    """
    lengths, d = [int(n) for n in patches], audio.width
    stem = 2 * sum(lengths) * (2 * 3 * audio.mels * d + 3 * d * d)
    return stem + _encoder_layers_flops(audio, lengths)


def projector_forward_flops(encoder: Encoder, llm_width: int, patches: Iterable[int]) -> int:
    """Forward FLOPs of an encoder's projector over media of so many patches each (before merging)."""
    inputs, hidden, outputs = _projector_widths(encoder, llm_width)
    tokens = sum(int(n) // encoder.patches_per_token for n in patches)
    again = len(encoder.projector.inject)
    return 2 * tokens * hidden * (inputs + outputs + again * 2 * outputs)


def dit_forward_flops(dit: DiTConfig, patches: Iterable[int]) -> int:
    """Forward FLOPs of a diffusion transformer over pictures of so many patches each."""
    lengths = [int(n) for n in patches]
    ends = 2 * dit.patch_values * dit.width
    modulation = 2 * dit.frequencies * (6 * dit.layers + 2) * dit.width
    return 2 * sum(lengths) * (ends + modulation) + _encoder_layers_flops(dit, lengths)


def generator_projector_forward_flops(generator: Generator, llm_width: int, patches: Iterable[int]) -> int:
    """Forward FLOPs of a generator's projector over pictures of so many patches each."""
    hidden = generator.projector.hidden or llm_width
    tokens = sum(int(n) // generator.patches_per_token for n in patches)
    return 2 * tokens * hidden * (llm_width + generator.merged_width)


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
      lengths: real lengths: per encoder and generator the patches of every medium, under "llm" the tokens of every
        segment; one that is absent had none. `segment_lengths` reads them off packed rows.

    Raises:
      ValueError: `lengths` names a module without rows, or the vocabulary has no size yet.
    """
    if unknown := set(lengths) - {*model.encoders, LLM, *model.generators}:
        legal = [*model.encoders, LLM, *model.generators]
        raise ValueError(f"lengths: {sorted(unknown)} are no modules with rows; use {legal}")
    flops: dict[str, int] = {}
    for name, encoder in model.encoders.items():
        patches = lengths.get(name, ())
        flops[name] = encoder.of_kind.forward_flops(encoder.config, patches)
        flops[f"{name}_projector"] = projector_forward_flops(encoder, model.llm.width, patches)
    flops[LLM] = decoder_forward_flops(model.llm, lengths.get(LLM, ()))
    for name, generator in model.generators.items():
        patches = lengths.get(name, ())
        flops[name] = generator.of_kind.forward_flops(generator.config, patches)
        flops[f"{name}_projector"] = generator_projector_forward_flops(generator, model.llm.width, patches)
    return flops


def training_factors(
    encoders: Iterable[str], frozen: Collection[str], generators: Iterable[str] = ()
) -> dict[str, int]:
    """How many forwards a training step costs, per module, for the names of encoders, frozen modules and generators.

    3 when the module trains; 2 when it is frozen and something upstream trains, so that gradients only pass through;
    1 when neither. An encoder has nothing upstream, a projector its encoder, the LLM all of these, a generator's
    projector the LLM too, a generator its projector. By convention a first trainable module counts 3 although its
    inputs need no gradient.
    """

    def factor(module: str, upstream: bool) -> int:
        return 3 if module not in frozen else 2 if upstream else 1

    factors: dict[str, int] = {}
    for name in encoders:
        factors[name] = factor(name, upstream=False)
        factors[f"{name}_projector"] = factor(f"{name}_projector", upstream=factors[name] > 1)
    factors[LLM] = factor(LLM, upstream=any(value > 1 for value in factors.values()))
    for name in generators:
        factors[f"{name}_projector"] = factor(f"{name}_projector", upstream=factors[LLM] > 1)
        factors[name] = factor(name, upstream=factors[f"{name}_projector"] > 1)
    return factors


def training_flops(
    model: MultimodalModel, lengths: Mapping[str, Sequence[int]], frozen: Collection[str] = ()
) -> dict[str, int]:
    """Model FLOPs of a training step per module: `forward_flops` times `training_factors`."""
    factors = training_factors(model.encoders, frozen, model.generators)
    return {name: flops * factors[name] for name, flops in forward_flops(model, lengths).items()}
