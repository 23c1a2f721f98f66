"""Parameter and FLOP counts of a whole model, by module. A module counts its own; here are projectors,
adapters and the sums.

Counting rules: real (unpadded) tokens only; 2·m·n·k for a product of [m, k] and [k, n]; attention over the pairs that
the mask allows, n(n + 1)/2 in a causal segment of n and n² in a picture or a recording; the vocabulary head included;
embedding lookup, norms, activations, softmax and rotary embedding free; recompute excluded (of layers, see ``remat``,
and of the logits, which every backward of an LLM computes again). A backward costs twice its forward: one forward for
the gradients of inputs, one for those of weights (Narayanan et al. 2021, appendix), so frozen modules cost less.
Everything is an exact `int`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.models.config import lora_name, projector_name
from mmjax.models.graph import MultimodalModel
from mmjax.models.lora.layers import lora_flops, lora_parameters
from mmjax.models.module import Module
from mmjax.models.projector.layers import projector_flops, projector_parameters

Pairs = Mapping[Mask, int]
"""By mask, pairs of a token and one that it sees."""


def parameter_count(model: MultimodalModel) -> dict[str, int]:
    """Parameters per module; adapters and projectors are modules."""
    counts: dict[str, int] = {}
    for name, node in model.nodes.items():
        counts[name] = node.module.parameters()
        if node.lora.rank:
            counts[lora_name(name)] = lora_parameters(node.module, node.lora)
        if node.projector:
            counts[projector_name(name)] = projector_parameters(
                *model.projector_widths(name), **model.projector_norm(name)
            ) + sum(
                len(edge.inject) * projector_parameters(*model.injected_widths(edge), norm=node.projector.norm)
                for edge in model.out_of(name)
                if edge.inject
            )
            counts[projector_name(name)] += model.token_width(name) * node.projector.newline
    return counts


def segment_lengths(segments: Int[np.ndarray, "rows T"]) -> tuple[int, ...]:
    """Lengths of the segments of packed rows, row by row; segment 0 is padding and left out."""
    lengths: list[int] = []
    for row in np.asarray(segments):
        lengths.extend(int(count) for count in np.bincount(row)[1:] if count)
    return tuple(lengths)


def seen_pairs(module: Module, inputs: Mapping[str, np.ndarray]) -> Pairs:
    """The pairs that each of a module's masks allows in rows with these host inputs.

    There are none where the lengths of segments tell as much: where no mask has words.
    """
    masks = dict.fromkeys(mask for _, mask in module.masks)
    if all(mask.kind != "words" for mask in masks):
        return {}
    found = dict.fromkeys(masks, 0)
    for mask, row in itertools.product(masks, range(len(inputs["segments"]))):
        own = {name: inputs[name][row] for name in mask.reads if name in inputs}
        found[mask] += int(pairs_of(mask, own).counted().sum())
    return found


def forward_flops(
    model: MultimodalModel, lengths: Mapping[str, Sequence[int]], pairs: Mapping[str, Pairs] | None = None
) -> dict[str, int]:
    """Forward FLOPs per module of one or more sequences, or of a microbatch.

    Args:
      model: the module graph.
      lengths: real lengths by module: the patches of every medium, or the tokens of every segment of text; one that is
        absent had none. `segment_lengths` reads them off packed rows.
      pairs: by module, `seen_pairs` of the same segments; where there are none, a mask whose words depend on media is
        counted as causal.

    Raises:
      ValueError: `lengths` names a module without rows, or the vocabulary has no size yet.
    """
    if unknown := set(lengths) - set(model.nodes):
        raise ValueError(f"lengths: {sorted(unknown)} are no modules with rows; use {list(model.nodes)}")
    flops: dict[str, int] = {}
    for name, node in model.nodes.items():
        own, seen = lengths.get(name, ()), (pairs or {}).get(name)
        flops[name] = node.module.counted_flops(own, seen) if seen else node.module.forward_flops(own)
        if node.lora.rank:
            flops[lora_name(name)] = lora_flops(node.module, node.lora, own)
        if node.projector:
            flops[projector_name(name)] = _projector_flops(model, name, own)
    return flops


def _projector_flops(model: MultimodalModel, name: str, lengths: Iterable[int]) -> int:
    """Forward FLOPs of a module's projector over media of so many patches each."""
    tokens = sum(int(n) // model.nodes[name].module.patches_per_token for n in lengths)
    again = (edge for edge in model.out_of(name) if edge.inject)
    return projector_flops(*model.projector_widths(name), tokens) + sum(
        len(edge.inject) * projector_flops(*model.injected_widths(edge), tokens) for edge in again
    )


def training_factors(model: MultimodalModel, frozen: Collection[str]) -> dict[str, int]:
    """How many forwards a training step costs, per module, where some modules are frozen.

    3 when the module trains; 2 when it is frozen and something upstream trains, so that gradients only pass through;
    1 when neither. Adapters stand before their module: its backward passes gradients on to them. A projector that ends
    a module is behind it, one that starts a module is before it. By convention a first trainable module counts 3
    although its inputs need no gradient.
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
        for own in adapters:
            add(own, before)
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
    """Model FLOPs of a training step per module: `forward_flops` times `training_factors`."""
    factors = training_factors(model, frozen)
    return {name: flops * factors[name] for name, flops in forward_flops(model, lengths, pairs).items()}
