"""``reduce`` and ``update`` as programs of their own, whose results take the memory of what they read.

Where masters are whole on every dp rank, reduced gradients are as large as the sums. They are written over them, and
``update`` writes zeros over the gradients, which are the next step's sums. So beside the sums a step needs no memory
for gradients. Where masters are sharded, reduced gradients are shards, and the sums keep memory of their own.
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
    """``(sums, returned) -> (reduced gradients, sent, norm rows, zeroed sums)``; see ``StageState.reduce``.

    Returns as zeroed only the sums whose memory the gradients do not take.
    """
    name, spmd, avals = f"reduce {state.model.name}", state.reduce, state.reduce_avals
    if not state.whole:
        return Program.of(name, spmd, avals, donate=(0, 1))

    def body(sums: Tree, returned: Shared) -> tuple[Tree, Shared, jax.Array, Tree]:
        grads, sent, rows, zeroed = spmd.body(sums, returned)
        # Given the shape and type of the sums: JAX reuses a donated buffer for a result that is alike.
        stacked = jax.tree.map(lambda g: jax_compat.to_varying(g, state.submesh.spread.data)[None], grads)
        return stacked, sent, rows, _borrowed(state, zeroed)

    _, sent, rows, zeroed = spmd.out_specs
    outs = (_owned(state, state.sums_specs), sent, rows, _borrowed(state, zeroed))
    return Program.of(name, Spmd(body, spmd.mesh, spmd.in_specs, outs), avals, donate=(0,))


def update_program(state: StageState) -> Program:
    """``(state, reduced gradients, totals) -> (state, zeroed sums)``: those sums that ``reduce_program`` leaves out."""
    name, spmd = f"update {state.model.name}", state.update
    states, grads, totals = spmd.in_specs
    in_place = state.whole

    def body(own: State, given: Tree, totals: jax.Array) -> tuple[State, Tree]:
        grads = jax.tree.map(lambda g: g.squeeze(0), given) if in_place else given
        return spmd.body(own, grads, totals), jax.tree.map(jnp.zeros_like, given) if in_place else {}

    stacked = _owned(state, state.sums_specs)
    specs = (states, stacked if in_place else grads, totals)
    whole = Spmd(body, spmd.mesh, specs, (spmd.out_specs, stacked if in_place else {}), spmd.check_vma)
    avals = (state.state_avals, _owned(state, state.sums_avals) if in_place else state.grad_avals, state.rows_aval)
    # Shards of gradients are not donated: no result could take their memory, and JAX would warn of that.
    return Program.of(name, whole, avals, donate=(0, 1) if in_place else (0,))


def _owned(state: StageState, tree: Tree) -> Tree:
    return nested({name: x for name, x in by_name(tree).items() if name not in state.borrowed})


def _borrowed(state: StageState, tree: Tree) -> Tree:
    return nested({name: x for name, x in by_name(tree).items() if name in state.borrowed})
