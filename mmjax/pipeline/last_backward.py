"""A stage's last backward of a step, which reduces its gradients over ranks too, layer by layer.

A ``reduce`` of its own comes after the last backward, and nothing lies beside it on the stage's devices. In one program
the gradient of a layer's weights is reduced as soon as their products are complete, beside the backward of the layers
before. Where the backward is split, products and reductions of the last W are in one program, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmjax.mesh.spmd import Program, Spmd
from mmjax.pipeline.overwriting import reduce_in_memory
from mmjax.pipeline.stage import StageFunctions
from mmjax.pipeline.trees import Tree
from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import Op, Schedule

REDUCING = {"B": "B+reduce", "W": "W+reduce"}
"""The kind of a program that reduces too, by the kind of its op."""


def kind_of_op(kind: str) -> str:
    """The kind of op that a kind of program is for: "B" of "B+reduce", and "F" of "F"."""
    return kind.partition("+")[0]


def reducing_stages(graph: StageGraph, functions: Mapping[str, StageFunctions]) -> frozenset[str]:
    """Names of the stages whose last B, or W, of a step reduces their gradients; their ``reduce`` has no program.

    Not those whose ``StageState.reduces_in_backward`` is false, nor those for whose B an earlier stage of the module
    waits: a ``reduce`` of its own lies beside that stage's backward.

    Args:
      graph: the schedule's graph.
      functions: those of each stage, for any buckets.
    """
    return frozenset(node.name for node in graph.stages if _reduces(graph, node, functions[node.name]))


def last_ops(schedule: Schedule, stages: Collection[str]) -> dict[str, Op]:
    """The last B, or W where the backward is split, of each of these stages, by stage."""
    return {op.stage: op for op in schedule.ops if op.stage in stages and op.kind in REDUCING}


def _reduces(graph: StageGraph, node: StageNode, functions: StageFunctions) -> bool:
    if not functions.state.reduces_in_backward:
        return False
    if node.split:
        return bool(functions.deferred_avals)
    waiting = (graph.stage(edge.src) for edge in graph.in_edges(node.name) if edge.gradient)
    return bool(functions.reduced_in_backward) and not any(source.module == node.module for source in waiting)


def reducing_program(name: str, functions: StageFunctions) -> Program:
    """The program of the last B, or W, of a stage in ``reducing_stages``.

    Its reduced gradients are those of ``reduce_program``.
    Of a B its arguments are ``backward_avals``, and the results ``(sums, reduced gradients, norm rows, gradients of
    carry)``. Of a W they are the sums and ``deferred_avals``, and the results ``(sums, reduced gradients, norm rows)``.
    The sums are ``{}`` where reduced gradients overwrite them. Elsewhere nobody reads them: as a result they are added
    to in place.
    """
    reduce, in_place = reduce_in_memory(functions.state), functions.state.reduces_in_place
    if functions.deferred_avals:
        avals = functions.state.sums_avals, functions.deferred_avals
        return Program.of(f"{REDUCING['W']} {name}", _last_weights(functions, reduce, in_place), avals, donate=(0,))
    spmd = last_backward(functions, reduce, in_place=in_place)
    return Program.of(f"{REDUCING['B']} {name}", spmd, functions.backward_avals, donate=(1,))


def last_backward(functions: StageFunctions, reduce: Spmd, *, in_place: bool) -> Spmd:
    """``StageFunctions.backward`` with a ``reduce``; see ``reducing_program``.

    Args:
      functions: those of the stage, whose backward is not split.
      reduce: ``StageState.reduce``, or ``reduce_in_memory``.
      in_place: whether reduced gradients overwrite the sums.
    """
    backward = functions.backward
    sums_specs, carry_specs = backward.out_specs
    grad_specs, _, rows_spec = reduce.out_specs

    def body(*args: Any) -> tuple[Tree, Tree, Any, Tree]:
        sums, carry_grads, reduced = functions.reducing_backward(*args)
        grads, _, rows = reduce.body(sums, {}, reduced)
        return {} if in_place else sums, grads, rows, carry_grads

    outs = ({} if in_place else sums_specs, grad_specs, rows_spec, carry_specs)
    return Spmd(body, backward.mesh, backward.in_specs, outs)


def _last_weights(functions: StageFunctions, reduce: Spmd, in_place: bool) -> Spmd:
    weights, (sums_specs, _) = functions.weights, reduce.in_specs
    grad_specs, _, rows_spec = reduce.out_specs

    def body(sums: Tree, deferred: list[Any]) -> tuple[Tree, Tree, Any]:
        new = weights.body(functions.weights_part(sums), deferred)
        new = functions.with_weights_part(sums, new)
        grads, _, rows = reduce.body(new, {})
        return {} if in_place else new, grads, rows

    in_specs = (sums_specs, weights.in_specs[1])
    return Spmd(body, weights.mesh, in_specs, ({} if in_place else sums_specs, grad_specs, rows_spec))
