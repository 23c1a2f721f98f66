"""The order of a step's samples, from their costs on the run's stages by the FLOPs of its modules."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mmjax.assembly.model import build_modules
from mmjax.assembly.parts import PlacedRun
from mmjax.data.reorder import ModuleCost, StepOrder, rows_of_ranks
from mmjax.data.split import UNSPLIT
from mmjax.models.config import LLM
from mmjax.recipe import Recipe


def pair_costs(recipe: Recipe) -> dict[str, float]:
    """Forward FLOPs of a pair of positions that attend to each other over those of a position alone, by module name.

    {"vision": 0.002, "llm": 0.0004}. ``recipe``: the run's configuration.
    """
    pairs = {}
    for name, module in build_modules(recipe).items():
        # Most vocabularies have no size yet: with one entry the head costs next to nothing.
        sized = replace(module, config=replace(module.config, vocab=1)) if name == LLM else module
        flops_1, flops_2, flops_3 = (sized.forward_flops([n]) for n in (1, 2, 3))
        # The FLOPs of n patches with s special positions are a·n + b·(n + s)² + c, of n tokens a·n + b·n·(n + 1).
        pair, special = (flops_3 - 2 * flops_2 + flops_1) / 2, module.medium.special if module.medium else 0
        pairs[name] = pair / (flops_2 - flops_1 - pair * (4 if name == LLM else 3 + 2 * special))
    return pairs


def step_order(recipe: Recipe, parts: PlacedRun) -> StepOrder | None:
    """How the samples of a step are reordered; ``None`` where they keep the order of the data.

    The cost of a stage is its ``nominal_costs``, spread over the positions of their bucket, plus the attention of its
    module, by FLOPs. Where ranks of cp have parts of a row, it is the cost of the fullest rank. The LLM's costs vary
    where its rows are packed.

    Args:
      recipe: the run's configuration, whose ``Data.reorder`` is the method.
      parts: the run, as ``place(recipe)`` or ``plan(recipe)`` gives it.

    Returns:
      A function of a step's ``metas``: ``order(metas, packer).order`` has their indices, from 0, in the new order.
    """
    return None if recipe.data.settings.reorder == "none" else order_of(recipe, parts, recipe.data.settings.reorder)


def order_of(recipe: Recipe, parts: PlacedRun, method: str) -> StepOrder:
    """How the samples of a step are reordered by a method, instead of the configured one.

    Args:
      recipe: the run's configuration.
      parts: the run, as ``place(recipe)`` or ``plan(recipe)`` gives it.
      method: one of ``METHODS`` of ``mmjax.data.reorder``: "none", "disttrain" or "best".

    Returns:
      A function of a step's ``metas``: ``order(metas, packer).order`` has their indices, from 0, in the new order.
    """
    inputs, train, packer = next(iter(parts.shapes.values())), recipe.train, parts.packer
    costs, length = parts.placed.nominal_costs(inputs), recipe.data.settings.sequence_length
    widths = {name: arrays["segments"].shape[1] for name, arrays in inputs.items()}
    pairs = {
        name: cost * packer.splits.get(name, UNSPLIT).imbalance(widths[name]) for name, cost in packer.pairs.items()
    }
    modules = {}
    for name in packer.bucket_counts:
        # All cells are worked on at once: a position in one cell costs as much as one in each of them.
        each = packer.cells / prod(inputs[name]["segments"].shape)
        stages = [node for node in parts.placed.graph.stages if node.module == name]
        modules[name] = ModuleCost(
            forward={node.name: costs.seconds["F", node.name, False] * each for node in stages},
            backward={node.name: costs.seconds["B", node.name, False] * each * node.backward for node in stages},
            pairs=pairs[name],
        )
    return StepOrder(
        method=method,
        graph=parts.placed.graph.with_moves("async"),  # a data server knows nothing of this run's processes
        schedule=train.schedule,
        inner=train.inner,
        microbatches=train.microbatches,
        window=train.window,
        costs=tuple((*key, seconds) for key, seconds in costs.seconds.items()),
        constant_scale=1 + pairs[LLM] * length,
        modules=modules,
        rows=rows_of_ranks(train.global_batch // train.microbatches, packer.cells),
    )
