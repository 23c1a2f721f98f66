"""The programs of ``reduce`` and ``update``, whose results overwrite their arguments.

If masters are whole on every dp rank, reduced gradients are as large as the sums. ``reduce`` writes them over the sums,
and ``update`` writes zeros over them, which are the next step's sums. A step then needs no memory for gradients beside
the sums. If masters are sharded, reduced gradients are shards, and the sums have memory of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mmjax import jax_compat
from mmjax.mesh.spmd import Program, Spmd
from mmjax.pipeline.stage_state import StageState, State
from mmjax.pipeline.trees import Shared, by_name, nested

Tree = Any


def reduce_program(state: StageState) -> Program:
    """The program ``(sums, returned) -> (reduced gradients, borrowed gradients, norm rows, zeroed sums)`` of a stage.

    ``state`` is such as ``placed.stages["llm.0"].state``; arguments and results are those of ``StageState.reduce``.
    Where masters are whole on every dp rank, reduced gradients have the shapes of the sums, which they overwrite, and
    the zeroed sums are only those of borrowed leaves.
    """
    name, spmd, avals = f"reduce {state.model.name}", state.reduce, state.reduce_avals
    if not state.has_whole_masters:
        return Program.of(name, spmd, avals, donate=(0, 1))

    def body(sums: Tree, returned: Shared) -> tuple[Tree, Shared, jax.Array, Tree]:
        grads, borrowed_grads, rows, zeroed = spmd.body(sums, returned)
        # In the shape and type of the sums, so that JAX reuses the donated buffers of the sums.
        stacked = jax.tree.map(lambda g: jax_compat.to_varying(g, state.submesh.spread.data)[None], grads)
        return stacked, borrowed_grads, rows, _borrowed(state, zeroed)

    _, borrowed_specs, rows, zeroed = spmd.out_specs
    outs = (_owned(state, state.sums_specs), borrowed_specs, rows, _borrowed(state, zeroed))
    return Program.of(name, Spmd(body, spmd.mesh, spmd.in_specs, outs), avals, donate=(0,))


def update_program(state: StageState) -> Program:
    """The program ``(state, reduced gradients, totals) -> (state, zeroed sums)``, after ``reduce_program``.

    ``state`` is such as ``placed.stages["llm.0"].state``. ``totals`` ``[ranks, modules]`` are norm rows summed over the
    world.

    The zeroed sums are those that ``reduce_program`` overwrites: none, ``{}``, where masters are sharded.
    """
    name, spmd = f"update {state.model.name}", state.update
    states, grads, totals = spmd.in_specs
    in_place = state.has_whole_masters

    def body(stage_state: State, stored_grads: Tree, totals: jax.Array) -> tuple[State, Tree]:
        grads = jax.tree.map(lambda g: g.squeeze(0), stored_grads) if in_place else stored_grads
        return spmd.body(stage_state, grads, totals), jax.tree.map(jnp.zeros_like, stored_grads) if in_place else {}

    stacked = _owned(state, state.sums_specs)
    specs = (states, stacked if in_place else grads, totals)
    body_over_submesh = Spmd(body, spmd.mesh, specs, (spmd.out_specs, stacked if in_place else {}), spmd.check_vma)
    avals = (state.state_avals, _owned(state, state.sums_avals) if in_place else state.grad_avals, state.rows_aval)
    # Shards of gradients are not donated: no result has their shape, and JAX would warn.
    return Program.of(name, body_over_submesh, avals, donate=(0, 1) if in_place else (0,))


def _owned(state: StageState, tree: Tree) -> Tree:
    return nested({name: x for name, x in by_name(tree).items() if name not in state.borrowed})


def _borrowed(state: StageState, tree: Tree) -> Tree:
    return nested({name: x for name, x in by_name(tree).items() if name in state.borrowed})
