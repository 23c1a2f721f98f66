"""Parameter and FLOP counts of a model by module. Parameters are counted from leaves, FLOPs by each module.

Counting rules: real (unpadded) tokens only; 2·m·n·k for a product of [m, k] and [k, n]; attention over the pairs that
the mask allows, n(n + 1)/2 in a causal segment of n and n² in a picture or a recording; the vocabulary head included;
embedding lookup, norms, activations, softmax and rotary embedding free; recomputation excluded, both of layers (see
``remat``) and of the logits, which every backward of an LLM recomputes. A backward costs two forwards: one for the
gradients of inputs, one for the gradients of weights (Narayanan et al. 2021, appendix). So frozen modules cost less.
All counts are exact `int`s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.mesh.layout import Layout
from mmjax.models.config import lora_name, projector_name
from mmjax.models.graph import MultimodalModel
from mmjax.models.lora.layers import lora_flops
from mmjax.models.module import Module
from mmjax.models.projector.layers import projector_flops

Pairs = Mapping[Mask, int]
"""The number of pairs of query and visible key, by mask."""


def parameter_count(model: MultimodalModel) -> dict[str, int]:
    """The number of parameters by module, adapters and projectors included as modules of their own, such as "llm_lora".

    ``model`` is such as ``multimodal({"vision": ViTConfig()}, DecoderConfig(vocab=64))``, which gives the keys
    "vision", "vision_projector" and "llm".

    Raises:
      ValueError: the vocabulary size is not set yet.
    """
    counts = dict.fromkeys(model.modules, 0) | {name: node.module.parameters() for name, node in model.nodes.items()}
    slices = (part for stage in model.stages(dict.fromkeys(model.nodes, Layout())) for part in stage.slices)
    for part in slices:
        if part.module not in model.nodes:  # projectors and adapters
            leaves = jax.tree.leaves(part.leaves())
            counts[part.module] += sum(len(leaf.names) * math.prod(leaf.logical_shape) for leaf in leaves)
    return counts


def segment_lengths(segments: Int[np.ndarray, "rows T"]) -> tuple[int, ...]:
    """Lengths of the segments of packed rows, row by row, without padding (segment 0)."""
    lengths: list[int] = []
    for row in np.asarray(segments):
        lengths.extend(int(count) for count in np.bincount(row)[1:] if count)
    return tuple(lengths)


def visible_pairs(module: Module, inputs: Mapping[str, np.ndarray]) -> Pairs:
    """The number of pairs that each of a module's masks allows in rows with these host inputs, by mask, in one layer.

    Args:
      module: the module; the keys of the result are the masks among ``module.masks``.
      inputs: its host inputs by name, of complete rows, ``[rows, T]`` or ``[rows, T, A]``: "segments", and all others
        that its masks read, such as "is" and "attends".

    Returns:
      The pairs of all rows together. {} if no mask has words: then they follow from the lengths of segments.
    """
    masks = dict.fromkeys(mask for _, mask in module.masks)
    if all(mask.kind != "words" for mask in masks):
        return {}
    pair_counts = dict.fromkeys(masks, 0)
    for mask, row in itertools.product(masks, range(len(inputs["segments"]))):
        row_inputs = {name: inputs[name][row] for name in mask.input_names if name in inputs}
        pair_counts[mask] += int(pairs_of(mask, row_inputs).key_counts().sum())
    return pair_counts


def forward_flops(
    model: MultimodalModel, lengths: Mapping[str, Sequence[int]], pairs: Mapping[str, Pairs] | None = None
) -> dict[str, int]:
    """Forward FLOPs by module for one or more sequences, or for a microbatch; adapters and projectors are modules too.

    Args:
      model: the module graph, as `multimodal` makes it.
      lengths: real lengths by module: the patches of every medium, or the tokens of every segment of text (see
        `segment_lengths`), such as {"vision": (196,), "llm": (300, 20)}. A missing module has no rows.
      pairs: `visible_pairs` of the same segments by module. Without them, a mask whose words depend on media is counted
        as causal.

    Raises:
      ValueError: `lengths` names an unknown module, or the vocabulary size is not set yet.
    """
    if unknown := set(lengths) - set(model.nodes):
        raise ValueError(f"lengths: {sorted(unknown)} are no modules with rows; use {list(model.nodes)}")
    flops: dict[str, int] = {}
    for name, node in model.nodes.items():
        module_lengths, module_pairs = lengths.get(name, ()), (pairs or {}).get(name)
        if module_pairs:
            flops[name] = node.module.counted_flops(module_lengths, module_pairs)
        else:
            flops[name] = node.module.forward_flops(module_lengths)
        if node.lora.rank:
            flops[lora_name(name)] = lora_flops(node.module, node.lora, module_lengths)
        if node.projector:
            flops[projector_name(name)] = _projector_flops(model, name, module_lengths)
    return flops


def _projector_flops(model: MultimodalModel, name: str, lengths: Iterable[int]) -> int:
    """Forward FLOPs of a module's projector for media with these numbers of patches."""
    module = model.nodes[name].module
    queries = module.medium.queries if module.medium else 0
    tokens = sum(queries or int(n) // module.patches_per_token for n in lengths if n)
    injecting_edges = (edge for edge in model.out_of(name) if edge.inject)
    return sum(projector_flops(*widths, tokens) for widths in model.projector_widths(name).values()) + sum(
        len(edge.inject) * projector_flops(*model.injected_widths(edge), tokens) for edge in injecting_edges
    )


def training_factors(model: MultimodalModel, frozen: Collection[str]) -> dict[str, int]:
    """The cost of a training step by module, in forwards: 3, 2 or 1.

    ``frozen`` are names among ``model.modules``, such as ["vision"].

    It is 3 for a module that trains, 2 for a frozen module behind a trainable one, through which gradients pass, and 1
    otherwise. Adapters count as before their module, whose backward passes gradients on to them. A projector at a
    module's end is behind it, and one at its start before it. By convention a first trainable module counts 3, although
    its inputs need no gradient.
    """
    factors: dict[str, int] = {}

    def add(module: str, before: Iterable[str]) -> None:
        passes = any(factors[name] > 1 for name in before)
        factors[module] = 3 if module not in frozen else 2 if passes else 1

    for name, node in model.nodes.items():
        projector, adapters = projector_name(name), [lora_name(name)] * bool(node.lora.rank)
        sources = [projector_name(e.source) if model.nodes[e.source].ends else e.source for e in model.into(name)]
        if node.starts:
            add(projector, sources)
        before = [projector] if node.starts else sources
        for adapter in adapters:
            add(adapter, before)
        add(name, [*before, *adapters])
        if node.ends:
            add(projector, [name])
    return factors


def training_flops(
    model: MultimodalModel,
    lengths: Mapping[str, Sequence[int]],
    frozen: Collection[str] = (),
    pairs: Mapping[str, Pairs] | None = None,
) -> dict[str, int]:
    """Model FLOPs of a training step by module: `forward_flops` times `training_factors`.

    The keys are ``model.modules``, adapters and projectors included.

    Args:
      model: the module graph, as `multimodal` makes it.
      lengths: real lengths by module: the patches of every medium, or the tokens of every segment of text, such as
        {"vision": (196,), "llm": (300, 20)}. A missing module has no rows.
      pairs: `visible_pairs` of the same segments by module. Without them, a mask whose words depend on media is counted
        as causal.
      frozen: names among ``model.modules`` of the modules that do not train.

    Raises:
      ValueError: `lengths` names an unknown module, or the vocabulary size is not set yet.
    """
    factors = training_factors(model, frozen)
    return {name: flops * factors[name] for name, flops in forward_flops(model, lengths, pairs).items()}
