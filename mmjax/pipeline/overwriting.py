"""The programs of ``reduce`` and ``update``, whose results overwrite their arguments.

If masters are whole on every dp rank, or the sums are shards as masters are, reduced gradients are as large as the
sums, and ``reduce`` writes them over the sums. Otherwise reduced gradients are shards of whole sums, and have memory of
their own. Neither program gives zeros for the next step's sums: its first backward makes them, so no sums are there in
between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spmd import Program, Spmd
from mmjax.pipeline.stage_state import StageState, State
from mmjax.pipeline.trees import Shared, by_name, nested

Tree = Any


def reduce_program(state: StageState) -> Program:
    """The program ``(sums, returned) -> (reduced gradients, borrowed gradients, norm rows)`` of a stage.

    ``state`` is such as ``placed.stages["llm.0"].state``; arguments and results are those of ``StageState.reduce``.
    Where ``reduces_in_place``, reduced gradients have the shapes of the sums, which they overwrite. Those of borrowed
    leaves are then among them; ``owned`` leaves them out.
    """
    spmd, donated = reduce_in_memory(state), 0 if state.reduces_in_place else 1
    return Program.of(f"reduce {state.model.name}", spmd, state.reduce_avals, donate=(donated,))


def reduce_in_memory(state: StageState) -> Spmd:
    """``StageState.reduce``, with reduced gradients in the shapes of the sums where they overwrite these.

    Its body takes gradients by name that are reduced already, as that of ``StageState.reduced``.
    """
    spmd = state.reduce
    if not state.reduces_in_place:
        return spmd
    gradient_axes = state.submesh.spread.gradient_axes
    axes = {name: gradient_axes(PartitionSpec(*spec[1:])) for name, spec in by_name(state.sums_specs).items()}

    def body(sums: Tree, returned: Shared, *before: Mapping[str, jax.Array]) -> tuple[Tree, Shared, jax.Array]:
        grads, borrowed_grads, rows = spmd.body(sums, returned, *before)
        named = {**by_name(grads), **borrowed_grads}
        # In the shape and type of the sums, all of them, so that JAX reuses the donated buffers of the sums.
        stacked = {name: jax_compat.to_varying(g, axes[name])[None] for name, g in named.items()}
        return nested(stacked), borrowed_grads, rows

    _, borrowed_specs, rows = spmd.out_specs
    return Spmd(body, spmd.mesh, spmd.in_specs, (state.sums_specs, borrowed_specs, rows))


def update_program(state: StageState) -> Program:
    """The program ``(state, reduced gradients, totals) -> state``, after ``reduce_program``.

    ``state`` is such as ``placed.stages["llm.0"].state``. The reduced gradients are those of ``owned`` leaves.
    ``totals`` ``[ranks, modules]`` are norm rows summed over the world.
    """
    name, spmd = f"update {state.model.name}", state.update
    if not state.reduces_in_place:
        return Program.of(name, spmd, (state.state_avals, state.grad_avals, state.rows_aval), donate=(0,))

    def body(stage_state: State, stacked_grads: Tree, totals: jax.Array) -> State:
        return spmd.body(stage_state, jax.tree.map(lambda g: g.squeeze(0), stacked_grads), totals)

    states, _, totals = spmd.in_specs
    specs = (states, owned(state, state.sums_specs), totals)
    stacked = Spmd(body, spmd.mesh, specs, spmd.out_specs, spmd.check_vma)
    return Program.of(name, stacked, (state.state_avals, owned(state, state.sums_avals), state.rows_aval), donate=(0,))


def owned(state: StageState, tree: Tree) -> Tree:
    """A tree by module, such as ``sums_avals``, without the leaves that the stage borrows."""
    return nested({name: x for name, x in by_name(tree).items() if name not in state.borrowed})
