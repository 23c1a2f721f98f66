"""Memory of a placed model, counted from shapes and shardings alone: nothing is compiled or allocated.

Every array of the executor is counted exactly. The temporaries inside a program, known only when it is compiled, are
estimated from its trace (``mmjax.temporaries``). A dry run, the choice of ``remat`` and the planner count by what is
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import jax

from mmjax import temporaries
from mmjax.pipeline.gathered_bytes import GATHERED, Buffers, GatheredBytes
from mmjax.pipeline.lane_gathers import LaneGather
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.stage import StageFunctions
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.state_bytes import StateBytes
from mmjax.schedule.graph import GatherKind, StageGraph
from mmjax.schedule.ops import ONCE, STASH_COPIES, Op, Schedule, participating_ranks


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, each kind at its own peak of the step, so that their sum is never too small.

    Attributes:
      parameters: stored parameters of frozen modules, and compute copies. If masters are used directly, the only
        copies are weights that other stages lend. Whole parameters that a lane has gathered are among them.
      optimizer: fp32 masters and moments of trained modules.
      gradients: fp32 sums over microbatches, and reduced shards; unsharded gradients overwrite the sums.
      residuals: residuals, and deferred values of a split backward, of all microbatches in flight.
      received: activations received from other stages.
      inputs: host inputs of a step's microbatches, twice: the next step's are sent while a step still runs.
      boundaries: activations, their gradients and tied weights in transit between stages.
      temporaries: estimated temporaries of the stage's largest program of a microbatch.
      host: pinned host memory of offloaded arrays; not part of the device's total.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    residuals: int = 0
    received: int = 0
    inputs: int = 0
    boundaries: int = 0
    temporaries: int = 0
    host: int = 0

    @property
    def activations(self) -> int:
        """Bytes of all kinds that depend on the microbatch."""
        return self.residuals + self.received + self.inputs + self.boundaries

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.temporaries

    def __add__(self, memory: Memory) -> Memory:
        """Memory of two stages on one device, whose programs run one after another."""
        sums = {f.name: getattr(self, f.name) + getattr(memory, f.name) for f in fields(Memory)}
        return Memory(**sums | {"temporaries": max(self.temporaries, memory.temporaries)})


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree on one of its devices: of arrays, or of ``ShapeDtypeStruct`` that have a sharding."""
    shards = ((a.sharding.shard_shape(a.shape), a.dtype.itemsize) for a in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def residual_bytes(
    placed: PlacedModel, shapes: Iterable[InputShapes], graph: StageGraph | None = None
) -> dict[str, int]:
    """Bytes that a device keeps from a microbatch's forward to its backward, by stage, such as {"llm.0": 4096}.

    They are the residuals, and the received activations if backward reads them; 0 for a stage without backward. Each
    stage has the largest number of ``shapes``. ``validate`` adds them up over the microbatches in flight;
    ``measured_residuals`` measures the same.

    Args:
      placed: the model on its devices, such as ``place_model(...).placed``.
      shapes: input shapes of each bucket combination, such as ``place_model(...).shapes.values()``.
      graph: the schedule's, ``Schedule.graph``; without it no backward is split.
    """
    traced = [placed.trace(inputs, graph).stages for inputs in shapes]
    return {name: max(in_flight_bytes(functions[name]) for functions in traced) for name in placed.stages}


def deferred_bytes(placed: PlacedModel, shapes: Iterable[InputShapes], graph: StageGraph) -> dict[str, int]:
    """Bytes that a device keeps from a microbatch's B to its W, by split stage, such as {"llm.0": 4096}; {} without
    any.

    Args:
      placed: the model on its devices, such as ``place_model(...).placed``.
      shapes: input shapes of each bucket combination, of which the largest counts, such as
        ``place_model(...).shapes.values()``.
      graph: the schedule's, ``Schedule.graph``.
    """
    traced = [placed.trace(inputs, graph).stages for inputs in shapes]
    split = [stage.name for stage in graph.stages if stage.split]
    return {name: max(shard_bytes(functions[name].deferred_avals) for functions in traced) for name in split}


def memory_by_stage(placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]) -> dict[str, Memory]:
    """Memory of a device of each stage, with every microbatch in its largest bucket, by stage, such as "llm.0".

    All devices of a stage need the same memory, except that lanes may differ: the largest is returned.

    Args:
      placed: the model on its devices, which may be planned devices, such as ``place_model(...).placed``.
      schedule: the order of ops, which determines the microbatches in flight, as ``make_schedule`` gives it.
      shapes: input shapes of every bucket combination that may occur, such as ``place_model(...).shapes.values()``.
    """
    shapes = list(shapes)
    peaks, _ = _replay(schedule, largest_microbatch(placed, schedule, shapes))
    needed = temporaries_by_stage(placed, schedule, shapes)
    result = {}
    for name, stage in placed.stages.items():
        lanes = schedule.graph.stage(name).lane_names
        kinds = ("residuals", "received", "inputs", "boundaries", "host")
        by_kind = {kind: max(peaks[place, kind] for place in lanes) for kind in kinds}
        gathered = max(peaks[place, GATHERED] for place in lanes)
        by_kind["temporaries"] = needed[name]
        states = count_state_bytes(stage.state)
        result[name] = Memory(
            parameters=states.copies + states.frozen + gathered,
            optimizer=states.optimizer - states.frozen,
            gradients=states.sums + states.reduced,
            **by_kind | {"host": by_kind["host"] + sum(states.offloaded(placed.offload(name)))},
        )
    return result


def largest_microbatch(placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]) -> MicrobatchBytes:
    """Bytes of a microbatch, each figure in the largest of ``shapes``.

    Args:
      placed: the model on its devices, such as ``place_model(...).placed``.
      schedule: the order of ops, of which the graph counts.
      shapes: input shapes of every bucket combination, one or more, such as ``place_model(...).shapes.values()``.
    """
    flows = [MicrobatchBytes(placed, inputs, schedule.graph) for inputs in shapes]
    return flows[0] if len(flows) == 1 else MicrobatchBytes.largest(flows)


def temporaries_by_stage(placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]) -> dict[str, int]:
    """The temporaries of a stage's largest program of a microbatch, by stage, such as {"llm.0": 4096}.

    Arguments as for ``temporaries_by_program``.
    """
    by_program = temporaries_by_program(placed, schedule, shapes)
    return {name: max(by_program.get((kind, name), 0) for kind in "FBW") for name in placed.stages}


def temporaries_by_program(
    placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]
) -> dict[tuple[str, str], int]:
    """Estimated bytes that a program needs while it runs, beside arguments and results.

    They are by kind of op and stage, such as {("F", "llm.0"): 4096}, for "F", "B", "W" and "reduce". ``update`` needs
    none: it is elementwise, and writes over its arguments.

    Args:
      placed: the model on its devices, such as ``place_model(...).placed``.
      schedule: the order of ops, of which the graph counts.
      shapes: input shapes of every bucket combination, of which the largest counts, such as
        ``place_model(...).shapes.values()``.
    """
    known: dict[int, dict[str, int]] = {}
    result: dict[tuple[str, str], int] = {}
    for traced in [placed.trace(inputs, schedule.graph).stages for inputs in shapes]:
        for name in placed.stages:
            functions = traced[name]
            if id(functions) not in known:  # equal buckets share them, and they are kept
                known[id(functions)] = temporaries_by_kind(functions)
            join = join_bytes(placed.lane_gathers.get(name), schedule.graph.stage(name).gather)
            for kind, size in known[id(functions)].items():
                least = join if kind in ("F", "B") else 0
                result[kind, name] = max(size, least, result.get((kind, name), 0))
    return result | {("reduce", name): reduce_temporaries(stage.state) for name, stage in placed.stages.items()}


def most_loaded(placed: PlacedModel, stages: Mapping[str, Memory]) -> tuple[int, Memory]:
    """The first rank whose stages need the most memory in total, and that memory; ranks count from 0.

    ``stages`` is a result of ``memory_by_stage``, by the name of the stage; ``placed`` is the model of it.
    """
    ranks: dict[int, Memory] = {}
    for name, memory in stages.items():
        for rank in placed.stages[name].submesh.ranks:
            ranks[rank] = ranks.get(rank, Memory()) + memory
    rank = max(sorted(ranks), key=lambda rank: ranks[rank].total)
    return rank, ranks[rank]


def count_state_bytes(state: StageState) -> StateBytes[int]:
    """Bytes of a stage's states on a device, by kind.

    ``state`` is such as ``placed.stages["llm.0"].state``. The kinds are ``masters``, ``optimizer`` (masters and
    moments), ``copies``, ``sums``, ``reduced``, ``direct`` and ``frozen``. Gradients are reduced in place where their
    shards are as large as the sums (see ``overwriting``).
    """
    direct, borrowed = state.direct_weights(state.master_avals, state.shared_avals(state.borrowed))
    return StateBytes(
        masters=shard_bytes(state.master_avals),
        optimizer=shard_bytes(state.state_avals),
        copies=shard_bytes([state.prepared_avals, borrowed]),
        sums=shard_bytes(state.sums_avals),
        reduced=0 if state.reduces_in_place else shard_bytes(state.grad_avals),
        direct=shard_bytes(direct),
        frozen=shard_bytes({m: avals for m, avals in state.master_avals.items() if m not in state.trainable}),
    )


def in_flight_bytes(functions: StageFunctions) -> int:
    """Bytes that a device keeps of a microbatch from a stage's forward to its backward; 0 for a stage without one.

    ``functions`` are such as ``placed.trace(shapes).stages["llm.0"]``.
    """
    if not functions.has_backward:
        return 0
    return shard_bytes(functions.residual_avals) + (
        shard_bytes(functions.forward_avals[2]) if functions.backward_reads_carry else 0
    )


def temporary_bytes(functions: StageFunctions) -> int:
    """Bytes that the largest of a stage's programs of a microbatch needs while it runs, estimated from its trace.

    ``functions`` are such as ``placed.trace(shapes).stages["llm.0"]``.
    """
    return max(temporaries_by_kind(functions).values())


def temporaries_by_kind(functions: StageFunctions) -> dict[str, int]:
    """``temporary_bytes`` of each of a stage's programs of a microbatch: "F", "B", and "W" if the backward is split."""
    layout, layer = functions.submesh.layout, functions.state.layer_bytes
    gathered = layer if layout.gathers_layers else 0  # the next layer's, beside a layer's products
    scattered = layer if layout.scatters_gradients else 0  # a layer's gradients, before they are sent
    result = {"F": temporaries.temporary_bytes(functions.forward, functions.forward_avals) + gathered}
    if functions.has_backward:
        backward = temporaries.temporary_bytes(functions.backward, functions.backward_avals)
        result["B"] = backward + gathered + scattered
    if functions.deferred_avals:
        result["W"] = temporaries.temporary_bytes(functions.weights, functions.weights_avals)
    return result


def reduce_temporaries(state: StageState) -> int:
    """Bytes that a stage's ``reduce`` needs while it runs, beside arguments and results.

    XLA scatters what comes first in memory. Of an array that is scattered along another dimension, as a stack of layers
    is, it makes a copy, and while that is sent, the copy of the next.
    """
    if state.reduces_in_place or not state.trainable:
        return 0
    zeros = jax.tree.leaves({m: state.zero[m] for m in state.trainable})
    copied = [
        (shard_bytes(aval), state.sharers(zero))
        for zero, aval in zip(zeros, jax.tree.leaves(state.sums_avals), strict=True)
        if zero.dimension and math.prod(zero.shape[: zero.dimension]) > 1
    ]
    copied.sort()
    return sum(size for size, _ in copied[-2:]) + sum(size // sharers for size, sharers in copied[-1:])


class MicrobatchBytes:
    """Bytes of one microbatch on a device, by stage or by edge; they are equal for all lanes of a stage.

    Attributes:
      residuals: residuals by stage, without received activations.
      deferred: deferred values of a split backward, by stage.
      keeps_carry: stages whose backward reads the received activations.
      inputs: host inputs by stage.
      ends: by edge or tie, bytes at the source and at the destination; of a source whose ops take several microbatches,
        those of an op at the source and those of a microbatch at the destination.
      gathered, published: whole parameters, and published masters, by stage, of stages whose lanes gather.
    """

    def __init__(self, placed: PlacedModel, inputs: InputShapes, graph: StageGraph):
        """Counts the bytes of a microbatch with these host inputs; ``graph`` is the schedule's."""
        traced = placed.trace(inputs, graph)
        stages = {name: traced.stages[name] for name in placed.stages}
        self.residuals = {name: shard_bytes(f.residual_avals) for name, f in stages.items()}
        self.deferred = {name: shard_bytes(f.deferred_avals) for name, f in stages.items()}
        self.keeps_carry = {name for name, f in stages.items() if f.has_backward and f.backward_reads_carry}
        self.inputs = {name: shard_bytes(f.forward_avals[1]) for name, f in stages.items()}
        self.gathered = {name: shard_bytes(placed.places[name].state.param_avals) for name in placed.lane_gathers}
        self.published = {name: gather.published_bytes for name, gather in placed.lane_gathers.items()}
        edges = {edge.name: traced.boundaries[edge.name].forward for edge in placed.graph.edges}
        self.ends = {name: (shard_bytes(f.source_aval), shard_bytes(f.target_aval)) for name, f in edges.items()}
        for tie in placed.graph.ties:
            owner, borrower = placed.stages[tie.src].state, placed.stages[tie.dst].state
            owned, borrowed = owner.shared_avals(owner.lent), borrower.shared_avals(borrower.borrowed)
            self.ends[tie.name] = (shard_bytes(owned[tie.name]), shard_bytes(borrowed[tie.name]))

    @classmethod
    def largest(cls, flows: list[MicrobatchBytes]) -> MicrobatchBytes:
        """Each figure at its largest among ``flows``, one or more."""
        result = cls.__new__(cls)
        result.residuals = {name: max(flow.residuals[name] for flow in flows) for name in flows[0].residuals}
        result.deferred = {name: max(flow.deferred[name] for flow in flows) for name in flows[0].deferred}
        result.inputs = {name: max(flow.inputs[name] for flow in flows) for name in flows[0].inputs}
        result.gathered, result.published = flows[0].gathered, flows[0].published
        result.keeps_carry = set().union(*(flow.keeps_carry for flow in flows))
        result.ends = {
            name: (max(flow.ends[name][0] for flow in flows), max(flow.ends[name][1] for flow in flows))
            for name in flows[0].ends
        }
        return result


def join_bytes(gather: LaneGather | None, kind: GatherKind) -> int:
    """Bytes that a lane needs while its gathered parameters are made whole, beside these; 0 without a gather."""
    return gather.temporary_bytes(pulls=kind == "pull") if gather and kind else 0


def _replay(schedule: Schedule, flow: MicrobatchBytes) -> tuple[Buffers, Buffers]:
    """The largest number of bytes at any op, and the bytes after the last op, by place and kind."""
    live = Buffers({(place, "inputs"): size for place, size in input_bytes(schedule, flow).items()})
    peaks = Buffers(live)
    for _, gained, lost in changes_in_order(schedule, flow):
        live.update(gained)
        for key in gained:
            peaks[key] = max(peaks[key], live[key])
        live.subtract(lost)
    return peaks, live


def input_bytes(schedule: Schedule, flow: MicrobatchBytes) -> dict[str, int]:
    """Bytes of the host inputs of this step and the next on a device of each place, by place, such as "llm.0".

    A place is a stage, or a lane of it, such as "vision.0/1". ``flow`` has the bytes of a microbatch, as
    ``largest_microbatch`` gives it.
    """
    nodes = [node for node in schedule.graph.stages if node.name in flow.inputs]
    lanes = (
        (node, lane, range(lane, schedule.microbatches, node.lanes * node.microbatches))
        for node in nodes
        for lane in range(node.lanes)
    )
    return {node.lane_name(lane): 2 * len(microbatches) * flow.inputs[node.name] for node, lane, microbatches in lanes}


def changes_in_order(schedule: Schedule, flow: MicrobatchBytes) -> Iterator[tuple[Op, Buffers, Buffers]]:
    """Yields (op, bytes that it allocates, bytes that it frees) for each op of the schedule, in order.

    Both are by (place, kind), such as ("llm.0", "residuals"). ``flow`` has the bytes of a microbatch, as
    ``largest_microbatch`` gives it.

    These are its ``changes``, but a copy to the host takes time: a stashed array stays on the device until the next op
    on its ranks has ended, or until an op starts that awaits the end of the copy.
    """
    graph, leaving, before = schedule.graph, dict[Op, Buffers](), Buffers()
    gathered = GatheredBytes(schedule, flow.gathered, flow.published)
    pending = list[tuple[Op, Buffers, Buffers]]()
    for op in schedule.ops:
        for stash in (stash_op for stash_op in schedule.awaits(op) if stash_op in leaving):
            before.update(leaving.pop(stash))
        yield from pending
        gained, lost = map(add, changes(graph, flow, op, schedule.microbatches), gathered.changes(op))
        if op.kind == "stash":
            leaving[op], lost = lost, Buffers()
        elif leaving and op.kind in ("F", "B", "W"):
            ranks = set(participating_ranks(graph, op))
            for stash in [stash for stash in leaving if not ranks.isdisjoint(participating_ranks(graph, stash))]:
                lost.update(leaving.pop(stash))
        pending, before = [(op, gained, lost)], lost
    yield from pending


def changes(graph: StageGraph, flow: MicrobatchBytes, op: Op, microbatches: int) -> tuple[Buffers, Buffers]:
    """(bytes that an op allocates, bytes that it frees when it ends), on a device, by (place, kind).

    A key is such as ("llm.0", "residuals"), with kinds as in ``Memory``. ``graph`` is ``Schedule.graph``, and ``flow``
    has the bytes of a microbatch, as ``largest_microbatch`` gives it; a step has so many ``microbatches``.
    """
    if op.microbatch == ONCE:
        return _tie_changes(graph, flow, op)
    gained, lost, stage = Buffers(), Buffers(), op.stage
    place = graph.stage(stage).lane_name(op.microbatch)
    if op.kind in ("F", "B"):
        arrived = sum(flow.ends[edge.name][1] for edge in graph.in_edges(stage))
        backward = graph.stage(stage).backward
        if op.kind == "F":
            gained[place, "boundaries"] = sum(flow.ends[edge.name][0] for edge in graph.out_edges(stage))
            gained[place, "residuals"] = flow.residuals[stage] if backward else 0
        else:
            returned = [flow.ends[edge.name][1] for edge in graph.in_edges(stage) if edge.gradient]
            gained[place, "boundaries"] = sum(returned)
            gained[place, "residuals"] = flow.deferred[stage]
            lost[place, "residuals"] = flow.residuals[stage]
            lost[place, "boundaries"] = sum(flow.ends[edge.name][0] for edge in graph.out_edges(stage) if edge.gradient)
        if (op.kind == "B") == (stage in flow.keeps_carry):
            lost[place, "received"] = arrived
        if op.kind == "B" or not backward:
            lost[place, "inputs"] = flow.inputs[stage]
    elif op.kind in STASH_COPIES:
        return _stash_changes(graph, flow, op)
    elif op.kind == "W":
        lost[place, "residuals"] = flow.deferred[stage]
    elif op.kind in ("move", "unpack"):
        return _transfer_changes(graph, flow, op, microbatches)
    return gained, lost


def _stash_changes(graph: StageGraph, flow: MicrobatchBytes, op: Op) -> tuple[Buffers, Buffers]:
    """``changes`` of a stash or unstash of a microbatch's residuals."""
    place = graph.stage(op.stage).lane_name(op.microbatch)
    received = sum(flow.ends[edge.name][1] for edge in graph.in_edges(op.stage)) * (op.stage in flow.keeps_carry)
    residuals = flow.residuals[op.stage]
    on_device = Buffers({(place, "residuals"): residuals, (place, "received"): received})
    on_host = Buffers({(place, "host"): residuals + received})
    return (on_host, on_device) if op.kind == "stash" else (on_device, on_host)


def _transfer_changes(graph: StageGraph, flow: MicrobatchBytes, op: Op, microbatches: int) -> tuple[Buffers, Buffers]:
    """``changes`` of a move or an unpack; a pack allocates as many bytes as it frees."""
    edge = graph.edge(op.edge)
    at_source, at_target = flow.ends[op.edge]
    if graph.shares_out(edge):  # at the target it is an array for each microbatch
        at_target *= len(graph.stage(edge.src).together(op.microbatch, microbatches))
    source, target = graph.ends(edge, op.microbatch)
    sender, sender_bytes = (target, at_target) if op.backward else (source, at_source)
    receiver, receiver_bytes = (source, at_source) if op.backward else (target, at_target)
    freed = Buffers({(sender, "boundaries"): sender_bytes})
    if op.kind == "move":
        return Buffers({(receiver, "boundaries"): receiver_bytes}), freed
    if graph.kind_of(edge, op.microbatch) != "local":
        freed = Buffers({(receiver, "boundaries"): receiver_bytes})
    kind = "boundaries" if op.backward else "received"
    return Buffers({(receiver, kind): receiver_bytes}), freed


def _tie_changes(graph: StageGraph, flow: MicrobatchBytes, op: Op) -> tuple[Buffers, Buffers]:
    """``changes`` of once-a-step ops: a tied weight lives until the borrower's prepare, its gradient until the owner's
    reduce."""
    gained, lost, key = Buffers(), Buffers(), (op.stage, "boundaries")
    moved = [tie for tie in graph.ties if tie.kind != "local"]
    borrowed, lent = [t for t in moved if t.dst == op.stage], [t for t in moved if t.src == op.stage]
    if op.kind == "move":
        gained[key] = flow.ends[op.edge][0 if op.backward else 1]
        if op.backward:
            lost[graph.edge(op.edge).dst, "boundaries"] = flow.ends[op.edge][1]
    elif op.kind == "prepare":
        lost[key] = sum(flow.ends[tie.name][1] for tie in borrowed)
    elif op.kind == "reduce":
        gained[key] = sum(flow.ends[tie.name][1] for tie in borrowed if tie.gradient)
        lost[key] = sum(flow.ends[tie.name][0] for tie in lent if tie.gradient)
    return gained, lost
