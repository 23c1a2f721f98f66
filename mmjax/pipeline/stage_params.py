"""Trees of a stage's parameters and gradients inside ``shard_map``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from mmjax.models.handles import Open
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import Summed, handle
from mmjax.pipeline.gathers import OpenScattered, Scattered, composed
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import by_name, nested, with_leaves

Tree = Any


def with_handles(model: StageModel, state: StageState, params: Tree, *, predicting: bool = False) -> Tree:
    """A stage's parameters for its model: handles for those whose stored form has to be opened into a weight.

    Args:
      model, state: of one stage, ``placed.stages["llm.0"]``.
      params: a tree by module, such as {"llm": {"embed": x}}, as the result is.
      predicting: whether nothing is differentiated, and opened weights are typed as equal on all ranks of dp and cp.
    """
    named = by_name(params)
    handles = {}
    for name, param in named.items():
        gather: Open | None = None
        if isinstance(param, Scattered):
            gather = OpenScattered(state.gathers[name])
        elif name in state.gathers and state.submesh.layout.gathers_layers:
            gather = state.gathers[name].for_prediction if predicting else state.gathers[name]
        # Narrow shards are gathered, and widened at last.
        if open_stored := composed(gather, model.opens.get(name), state.opens.get(name)):
            handles[name] = handle(param, open_stored)
    return with_leaves(params, handles) if handles else params


def with_scattered(state: StageState, params: Tree, names: Collection[str]) -> Tree:
    """The parameters with ``Scattered`` in place of some: their gradients are shards, made layer by layer.

    ``names`` are such as "llm/embed"; ``params`` is a tree by module of local arrays.
    """
    named, zeros = by_name(params), {name: state.gathers[name].zero_shard(by_name(params)[name]) for name in names}
    return with_leaves(params, {name: Scattered(whole=named[name], shard=zero) for name, zero in zeros.items()})


def add_gradients(sums: Tree, grads: Tree) -> Tree:
    """The sums ``[1, ...]`` with gradients ``[...]`` added, in the sums' dtype; gradients without a sum are left out.

    Both are trees by module of local shards, such as {"llm": {"embed": x}}; every sum has a gradient. The gradient of a
    ``Summed`` weight has the new sum already, that of a ``Scattered`` one is its shard.
    """

    def added(total: jax.Array, gradient: Any) -> jax.Array:
        if isinstance(gradient, Summed):
            return gradient.total[None]
        if isinstance(gradient, Scattered):
            gradient = gradient.shard
        return total + gradient.astype(total.dtype)[None]

    named = by_name(grads)
    return nested({name: added(total, named[name]) for name, total in by_name(sums).items()})
