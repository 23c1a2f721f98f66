"""Finds the first value that is not finite, op by op (``Train.debug_nans``).

Checks an op's outputs: compute parameters, activations, losses, gradients, norms and the new state. It does not check
residuals, which may contain infinities, in a mask for instance. Each check waits for its op.

With several processes, those that run an op check its outputs together, by programs over the same devices: they find
and report the same value. The other processes stop when these end.

``first_nonfinite`` checks the state between steps, for every lowering: it fetches one flag of each stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.processes import Agreement
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.watch import watched
from mmjax.schedule.graph import WORLD
from mmjax.schedule.ops import ONCE, Op


class NonFiniteError(ArithmeticError):
    """An op's output is not finite; the message is one line with the op and the array."""


def finite_ops(executor: Executor) -> AbstractContextManager[None]:
    """A context in which every op's outputs are checked right after its dispatch; ``executor`` is ``Trainer.executor``.

    Raises (out of ``executor.step``):
      NonFiniteError: at the first op with an output that is not finite.
    """

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        inputs = executor.walker.inputs.get((op.stage, op.microbatch), {}) if op.kind == "F" else {}
        yield
        for description, tree in _outputs(executor, op).items():
            if problem := _first_nonfinite(tree):
                raise NonFiniteError(
                    f"{op}: {' '.join(filter(None, (description, problem)))}{_cause(executor, op, inputs)}"
                )

    return watched(executor.walker, around, in_order=True)


def first_nonfinite(placed: PlacedModel, states: Mapping[str, State]) -> str:
    """Describes the first parameter or moment that is not finite, or "". All processes have to call it.

    The text is such as "params/llm/embed is not finite (nan at [0, 3]; 2 of 4096 values)", the same in every process.
    With several processes, "process 1: " is before it, with the first process that has such a value.

    Args:
      placed: the model on its devices, such as ``Trainer.executor.placed``.
      states: the states of this process's stages, by stage, such as ``Trainer.executor.states``.
    """
    flags = {name: stage.state.is_finite(states[name]) for name, stage in placed.local_stages.items()}
    # All flags are dispatched before the first is read. Processes that share a stage find the same value.
    nonfinite = [name for name, flag in flags.items() if not np.asarray(flag.addressable_shards[0].data)]
    leaves = [_first_nonfinite_leaf(placed.local_stages[name].state.to_logical(states[name])) for name in nonfinite]
    return Agreement()(next(iter(leaves), ""))


def _first_nonfinite_leaf(leaves: Mapping[str, jax.Array]) -> str:
    """The first checkpoint leaf that is not finite; parameters come first."""
    parameters = {name: leaf for name, leaf in leaves.items() if name.startswith("params/")}
    return _first_nonfinite(parameters) or _first_nonfinite(leaves)


def _outputs(executor: Executor, op: Op) -> dict[str, Any]:
    """The outputs of the op dispatched last, by description."""
    run, graph = executor.walker, executor.schedule.graph
    key = (op.stage, op.microbatch)
    match op.kind:
        case "prepare":
            if op.stage in run.shards:
                return {"parameter": executor.states[op.stage]["master"]}  # by their names
            places = executor.placed.local_places(op.stage)
            return {"parameter" if len(places) == 1 else f"parameter on {name}": run.params[name] for name in places}
        case "F":
            outputs = {"loss": run.losses[run.place(op)][-1]} if graph.gives_loss(op.stage) else {}
            if edges := graph.out_edges(op.stage):
                outputs["activation"] = run.in_transit[edges[0].name, op.microbatch, False]
            return outputs
        case "B":
            carried = {
                e.src: run.in_transit[e.name, op.microbatch, True] for e in graph.in_edges(op.stage) if e.gradient
            }
            grads = {f"gradient of the activation of {source}": grad for source, grad in carried.items()}
            return {"gradient of": _sums(executor, op), **grads}
        case "W":
            return {"gradient of": _sums(executor, op)}
        case "unpack" if op.microbatch == ONCE:
            received = run.returned if op.backward else run.borrowed
            return {f"received {'gradient of ' * op.backward}tied weight": {op.edge: received[op.stage][op.edge]}}
        case "unpack" if op.backward:
            return {f"received gradient of {op.stage}'s activation": run.cotangents[key]}
        case "unpack":
            return {f"received activation of {source}": array for source, array in run.carry[key].items()}
        case "reduce":
            norms = {"squared gradient norm of": _by_module(executor, run.rows[op.stage])}
            carried = {t.name: run.in_transit[t.name, ONCE, True] for t in graph.in_ties(op.stage) if t.gradient}
            return {"reduced gradient of": run.reduced[op.stage], "reduced gradient of the tied": carried, **norms}
        case "norm":
            return {"squared gradient norm of": _by_module(executor, run.totals[WORLD])}
        case "update":
            state = executor.states[op.stage]
            return {"updated parameter": state["master"], "optimizer state of": moved(state["opt"], DEVICE)}
    return {}


def _sums(executor: Executor, op: Op) -> Any:
    """The sums of gradients after a B or W, or the reduced gradients where its program has reduced them."""
    if executor.walker.last_ops.get(op.stage) == op:
        return executor.walker.reduced[op.stage]
    return executor.sums[executor.walker.place(op)]


def _by_module(executor: Executor, rows: jax.Array) -> dict[str, jax.Array]:
    """The columns of norm rows."""
    return {module: rows[:, i] for i, module in enumerate(executor.placed.model.modules)}


def _cause(executor: Executor, op: Op, inputs: Mapping[str, Any]) -> str:
    problem = _first_nonfinite(inputs)
    module = executor.placed.stages[op.stage].model.module if problem else ""
    return f"; its host input {module}/{problem}" if problem else ""


def _first_nonfinite(tree: Any) -> str:
    """Name and index of the first leaf that is not finite; "" if all are finite."""
    leaves = [
        (path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if not leaves or np.asarray(_on_all_devices(_all_finite, [x for _, x in leaves])).all():
        return ""
    for path, array in leaves:
        index, value, bad = (np.asarray(result)[()] for result in _on_all_devices(_first, array))
        if bad:
            first = [int(i) for i in np.unravel_index(int(index), array.shape)]
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            where = f"{value:g} at {first}" if first else f"{value:g}"
            return f"{name} is not finite ({where}; {bad} of {array.size} values)".strip()
    return ""


def _on_all_devices(fn: Any, arrays: Any) -> Any:
    """The result of ``fn`` for ``arrays``, replicated on all of their devices."""
    sharding = jax.tree.leaves(arrays)[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return _jitted(fn, sharding)(arrays)


@functools.cache
def _jitted(fn: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(fn, out_shardings=sharding)


def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def _first(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Flat index of the first value that is not finite, that value, and the number of such values."""
    flat = array.ravel().astype(jnp.float32)
    bad = ~jnp.isfinite(flat)
    index = jnp.argmax(bad)
    return index, flat[index], bad.sum()
