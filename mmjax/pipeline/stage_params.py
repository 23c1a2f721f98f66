"""Trees of a stage's parameters and gradients inside ``shard_map``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from mmjax.models.handles import Open
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import Summed, handle
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import by_name, nested, with_leaves

Tree = Any


def with_handles(model: StageModel, state: StageState, params: Tree) -> Tree:
    """A stage's parameters for its model: handles for those whose stored form has to be opened into a weight.

    ``params`` and the result are trees by module, such as {"llm": {"embed": x}}; ``model`` and ``state`` are of one
    stage, ``placed.stages["llm.0"]``.
    """
    if not (state.opens or model.opens):
        return params
    named = by_name(params)
    opens = _composed(model.opens, state.opens)
    return with_leaves(params, {name: handle(named[name], open_stored) for name, open_stored in opens.items()})


def _composed(first: Mapping[str, Open], second: Mapping[str, Open]) -> dict[str, Open]:
    """The functions of both mappings; for a name in both, ``second`` applied to the result of ``first``."""
    shared = {name: partial(_apply_both, first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **shared}


def _apply_both(first: Open, second: Open, stored: jax.Array) -> jax.Array:
    return second(first(stored))


def add_gradients(sums: Tree, grads: Tree) -> Tree:
    """The sums ``[1, ...]`` with gradients ``[...]`` added, in the sums' dtype; gradients without a sum are left out.

    Both are trees by module of local shards, such as {"llm": {"embed": x}}; every sum has a gradient. The gradient of a
    ``Summed`` weight has the new sum already.
    """

    def added(total: jax.Array, gradient: Any) -> jax.Array:
        if isinstance(gradient, Summed):
            return gradient.total[None]
        return total + gradient.astype(total.dtype)[None]

    named = by_name(grads)
    return nested({name: added(total, named[name]) for name, total in by_name(sums).items()})
