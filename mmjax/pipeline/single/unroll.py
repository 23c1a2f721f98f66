"""Traces a planned step into one program: segments of slots over lanes, and the ops across all lanes between them.

A slot is a ``lax.switch`` on the device's index along ``pp``, then a ``ppermute`` for each hop. No ``ppermute`` is in
a branch, where it would wait for lanes in another branch; collectives in branches run along axes on which all devices
take the same branch. A module that spans all lanes in other degrees runs in separate ``shard_map``s: one ``shard_map``
cannot contain two factorisations of the same devices, one ``jit`` can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mmjax.mesh.collectives import exchange
from mmjax.mesh.routing import Routing
from mmjax.mesh.spmd import Spmd, zeros_of
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transfer import LocalTransfer
from mmjax.pipeline.one_program import ByStage
from mmjax.pipeline.single.lane_ops import LaneOps
from mmjax.pipeline.single.lanes import PP, Lanes, typed, zeros
from mmjax.pipeline.single.slots import Across, Key, Register, Segment, Slot
from mmjax.pipeline.stage import Output
from mmjax.pipeline.world_norm import traced_total
from mmjax.schedule.ops import Op

Registers = dict[Register, jax.Array]


class Unrolling:
    """One trace of a step."""

    def __init__(self, ops: LaneOps, arrays: Any, inputs: Any, seeds: ByStage):
        """The last three are the traced arguments of the program (see ``SingleExecutor``)."""
        self.ops, self.lanes, self.seeds, self.inputs = ops, ops.lanes, seeds, inputs
        self.registers: Registers = dict(zip(ops.pinned_registers, arrays["lanes"], strict=True))
        self.arriving: dict[Key, jax.Array] = {}
        self.departed: dict[Key, jax.Array] = {}
        self.totals: jax.Array | None = None
        self.spanning = _SpanningStages(ops, arrays["whole"], inputs["whole"], seeds)

    def step(self) -> tuple[Any, ByStage, Any]:
        """Traces the step; returns new arrays, losses by stage, and totals ``[1, modules]`` or ``None``.

        Losses are ``[microbatches, dp · losses]``, of a stage that spans all lanes ``[microbatches, dp, losses]``.
        """
        for part in self.ops.plan.parts:
            self._segment(part) if isinstance(part, Segment) else self._across(part)
        arrays = {"lanes": [self.registers[r] for r in self.ops.pinned_registers], "whole": self.spanning.states}
        losses = {node.name: self._losses(node.name) for node in self.ops.graph.losses}
        return arrays, losses, None if self.totals is None else self.totals[None]

    def _losses(self, stage: str) -> jax.Array:
        lane = self.ops.lane[stage]
        if lane is None:
            return jnp.stack(self.spanning.losses[stage])
        stacked = [self.departed["loss", stage, m] for m in range(self.ops.schedule.microbatches)]
        return jnp.stack([loss.reshape(len(self.lanes), -1)[lane] for loss in stacked])

    # ---- across lanes ------------------------------------------------------------------------------------------------

    def _across(self, part: Across) -> None:
        if part.op.kind == "norm":
            rows = [self.departed.pop(key) for key in part.takes]
            of_lanes = [(self.lanes.mesh, self.lanes.axes, sum(rows[1:], start=rows[0]))] if rows else []
            self.totals = traced_total([*of_lanes, *self.spanning.rows()])
            return
        arrived = {key: self._from_lanes(key) for key in part.takes}
        results = self.spanning.run(part.op, arrived, self.totals)
        for send in part.gives:
            self.arriving[send.key] = self._to_lanes(send.key, results)

    def _from_lanes(self, key: Key) -> jax.Array:
        routing = self.ops.routing(key)
        return _carried(routing, _over_lanes(self.lanes), _over(routing.target), self.lanes, self.departed.pop(key))

    def _to_lanes(self, key: Key, results: Callable[[Key], jax.Array]) -> jax.Array:
        routing = self.ops.routing(key)
        return _carried(routing, _over(routing.source), _over_lanes(self.lanes), self.lanes, results(key))

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _segment(self, part: Segment) -> None:
        before, after = list(self.registers), part.registers_after(self.registers)
        arrived = [self.arriving.pop(arrival.key) for arrival in part.arrivals]
        used = {item.op.microbatch for slot in part.slots for item in slot.ops.values()}
        inputs = {m: blocks for m, blocks in enumerate(self.inputs["lanes"]) if m in used}
        once = [self.seeds, *([] if self.totals is None else [self.totals])]
        in_specs = (
            [block.spec for block, _ in before],
            [arrival.registers[0][0].spec for arrival in part.arrivals],
            {m: [block.spec for block, _ in self.ops.input_registers] for m in inputs},
            [PartitionSpec()] * len(once),
        )
        out_specs = [block.spec for block, _ in after], [block.spec for _, block in part.departures]
        body = partial(self._run, part, before, after)
        spmd = Spmd(body, self.lanes.mesh, in_specs, out_specs)
        registers, departed = spmd([self.registers[register] for register in before], arrived, inputs, once)
        self.registers = dict(zip(after, registers, strict=True))
        self.departed |= {key: array for (key, _), array in zip(part.departures, departed, strict=True)}

    def _run(
        self,
        part: Segment,
        before: Sequence[Register],
        after: Sequence[Register],
        registers: Sequence[jax.Array],
        arrived: Sequence[jax.Array],
        inputs: dict[int, list[jax.Array]],
        once: Sequence[Any],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs a segment on one device: local shards in, local shards out."""
        this_lane = lax.axis_index(PP)
        live = {register: x.reshape(register[0].shape) for register, x in zip(before, registers, strict=True)}
        for arrival, array in zip(part.arrivals, arrived, strict=True):
            register = arrival.registers[0]
            live[register] = _stored(live, register, array, this_lane == arrival.lane, shared=arrival.shared)
        departed: dict[Key, jax.Array] = {}
        seeds, totals = once[0], once[1] if len(once) > 1 else None
        for slot in part.slots:
            named = {m: dict(zip(self.ops.input_registers, blocks, strict=True)) for m, blocks in inputs.items()}
            departed |= _Lockstep(self.ops, slot, live=live, inputs=named, seeds=seeds, totals=totals).run(this_lane)
        out = [live[register].reshape(register[0].shape or (1,)) for register in after]
        return out, [departed[key] for key, _ in part.departures]


@dataclass(frozen=True)
class _Lockstep:
    """One slot on one device."""

    ops: LaneOps
    slot: Slot
    live: Registers
    inputs: dict[int, Registers]
    seeds: ByStage
    totals: jax.Array | None

    def run(self, this_lane: jax.Array) -> dict[Key, jax.Array]:
        """Runs this device's op, moves sent values into ``live``, and returns the values that leave the lanes."""
        slot, live, busy = self.slot, self.live, sorted(self.slot.ops)
        branches = [partial(self._branch, lane) for lane in busy]
        if len(busy) < len(self.ops.lanes):
            branches.append(partial(self._branch, None))
        if len(branches) == 1:
            written, wires, leaving = branches[0]()
        else:
            table = [busy.index(lane) if lane in busy else len(busy) for lane in range(len(self.ops.lanes))]
            written, wires, leaving = lax.switch(jnp.asarray(table)[this_lane], branches)
        live.update(zip(slot.written, written, strict=True))
        for hop, wire in zip(slot.hops, wires, strict=True):
            arrived = lax.ppermute(wire, PP, hop.pairs)
            for lane, (register, shared) in hop.targets.items():
                live[register] = _stored(live, register, arrived, this_lane == lane, shared=shared)
        for register in slot.dead:
            live.pop(register, None)
        return dict(zip((send.key for _, _, send in slot.leaving), leaving, strict=True))

    def _branch(self, lane: int | None) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """One lane's branch of the slot: the registers that any lane writes, the arrays of hops, the leaving values."""
        results, sends = ({}, []) if lane is None else self._run_op(lane)
        registers = []
        for register in self.slot.written:
            if register in results:
                registers.append(typed(results[register], register[0]))
            else:  # unchanged
                registers.append(self.live[register] if register in self.live else zeros(register[0]))
        wires = []
        for hop in self.slot.hops:
            number = hop.sources.get(lane) if lane is not None else None
            wires.append(zeros(hop.block) if number is None else typed(sends[number[0]][number[1]], hop.block))
        leaving = []
        for sender, i, send in self.slot.leaving:
            leaving.append(typed(sends[i][0], send.blocks[0]) if sender == lane else zeros(send.blocks[0]))
        return registers, wires, leaving

    def _run_op(self, lane: int) -> tuple[Registers, list[list[jax.Array]]]:
        slot, item = self.slot, self.slot.ops[lane]
        values = {key: [self.live[r] for r in registers] for key, registers in slot.reads[lane].items()}
        blocks, places = self.inputs.get(item.op.microbatch, {}), self.ops.input_places[item.op.stage]
        inputs = {name: blocks[register] for name, register in places.items()} if blocks else {}
        writes, sends = self.ops.run(item, values, inputs, self.seeds, self.totals)
        results: Registers = {}
        for key, registers in slot.writes[lane].items():
            results.update(zip(registers, writes[key], strict=True))
        for i, registers in slot.stays[lane]:
            results.update(zip(registers, sends[i], strict=True))
        return results, sends


def _stored(live: Registers, register: Register, x: jax.Array, is_target: jax.Array, *, shared: bool) -> jax.Array:
    """The register after ``x`` is stored on the target lane; in a ``shared`` register other lanes keep their values."""
    return jnp.where(is_target, x, live[register]) if shared and register in live else x


# ---- stages that span all lanes --------------------------------------------------------------------------------------


class _SpanningStages:
    """Runs stages that are on all ranks in other degrees: every op is a ``shard_map``, as in the straight line."""

    def __init__(self, ops: LaneOps, states: Any, inputs: Any, seeds: ByStage):
        self.ops, self.states, self.inputs, self.seeds = ops, dict(states), inputs, seeds
        self.losses: dict[str, list[jax.Array]] = {}
        self._params: dict[str, Any] = {}
        self._sums: dict[str, Any] = {}
        self._residuals: dict[tuple[str, int], Any] = {}
        self._deferred: dict[tuple[str, int], Any] = {}
        self._carry: dict[tuple[str, int], Any] = {}
        self._results: dict[Key, jax.Array] = {}
        self._reduced: dict[str, Any] = {}
        self._rows: dict[str, jax.Array] = {}

    def rows(self) -> list[tuple[Mesh, tuple[str, ...], jax.Array]]:
        """Norm rows with their meshes."""
        submeshes = {name: self.ops.placed.stages[name].submesh for name in self._rows}
        return [(submeshes[name].mesh, submeshes[name].axes.all, rows) for name, rows in self._rows.items()]

    def run(self, op: Op, arrived: dict[Key, jax.Array], totals: jax.Array | None) -> Callable[[Key], jax.Array]:
        """Runs one op with the values that arrived from lanes; returns a lookup of its results by key."""
        handlers = {"F": self._forward, "B": self._backward, "W": self._weights}
        handlers.get(op.kind, self._once)(op, arrived, totals)
        return self._results.__getitem__

    def _once(self, op: Op, arrived: dict[Key, jax.Array], totals: jax.Array | None) -> None:
        name, state = op.stage, self.ops.placed.stages[op.stage].state
        if op.kind == "prepare":
            self._params[name] = state.compute_params(self.states[name]["master"], {}, state.prepare)
        elif op.kind == "reduce":
            self._reduced[name], _, self._rows[name] = state.reduce(self._sums.pop(name), {})
        else:
            assert op.kind == "update" and totals is not None
            rows = jnp.broadcast_to(totals, (len(self.ops.placed.stages[name].submesh.ranks), *totals.shape))
            self.states[name] = state.update(self.states[name], self._reduced.pop(name), rows)

    def _forward(self, op: Op, arrived: dict[Key, jax.Array], totals: Any) -> None:
        functions, place = self.ops.traced.stages[op.stage], (op.stage, op.microbatch)
        carry = {key[3]: self._received(key, arrived) for key in self.ops.carry_keys(op)}
        inputs = self.inputs[op.stage][op.microbatch]
        out, self._residuals[place] = functions.forward(self._params[op.stage], inputs, carry)
        self._carry[place] = carry
        for edge in self.ops.graph.out_edges(op.stage):
            self._results["carry", edge.dst, op.microbatch, op.stage] = out.activation
        if out.result is not None:
            self.losses.setdefault(op.stage, []).append(out.result)

    def _backward(self, op: Op, arrived: dict[Key, jax.Array], totals: Any) -> None:
        functions, place = self.ops.traced.stages[op.stage], (op.stage, op.microbatch)
        state = self.ops.placed.stages[op.stage].state
        cotangents = [self._received(key, arrived) for key in self.ops.cotangent_keys(op)]
        summed = sum(cotangents[1:], start=cotangents[0]) if cotangents else None
        cotangent = Output(summed, self.seeds.get(op.stage))
        sums = self._sums.get(op.stage)
        if sums is None:
            sums = jax.tree.map(zeros_of, state.sums_avals)
        carry = self._carry.pop(place) if functions.backward_reads_carry else {}
        inputs, residuals = self.inputs[op.stage][op.microbatch], self._residuals.pop(place)
        part = functions.backward_part(sums)
        new, grads, *deferred = functions.backward(self._params[op.stage], part, inputs, carry, residuals, cotangent)
        self._sums[op.stage] = functions.with_backward_part(sums, new)
        if functions.deferred_avals:
            (self._deferred[place],) = deferred
        for edge in self.ops.graph.in_edges(op.stage):
            if edge.gradient:
                self._results["cotangent", edge.src, op.microbatch, edge.name] = grads[edge.src]

    def _weights(self, op: Op, arrived: dict[Key, jax.Array], totals: Any) -> None:
        functions, sums = self.ops.traced.stages[op.stage], self._sums[op.stage]
        if functions.deferred_avals:
            new = functions.weights(functions.weights_part(sums), self._deferred.pop((op.stage, op.microbatch)))
            self._sums[op.stage] = functions.with_weights_part(sums, new)

    def _received(self, key: Key, arrived: dict[Key, jax.Array]) -> jax.Array:
        if key in arrived:
            return arrived[key]
        transfer = self.ops.transfer(key)
        assert isinstance(transfer, LocalTransfer)
        return transfer.trace(self._results.pop(key))


# ---- between lanes and stages that span them -------------------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    """One end of a transfer: a mesh over all ranks in rank order, the spec of rows on it, and the mesh's axes."""

    mesh: Mesh
    rows: PartitionSpec
    axes: tuple[str, ...]


def _over(submesh: Submesh) -> _End:
    return _End(submesh.mesh, submesh.spread.whole_rows, submesh.axes.all)


def _over_lanes(lanes: Lanes) -> _End:
    return _End(lanes.mesh, lanes.rows, lanes.axes)


def _carried(routing: Routing, source: _End, target: _End, lanes: Lanes, rows: jax.Array) -> jax.Array:
    """Carries rows along a boundary's routes from or to a lane; other lanes send no rows and receive zeros."""
    cutting, joining = routing.cutting(), routing.joining()
    position = {rank: i for i, rank in enumerate(lanes.layout.ranks)}

    def send(rows: jax.Array) -> tuple[jax.Array, ...]:
        pieces = cutting.body(rows) if cutting else (rows,)
        return exchange(pieces, routing.routes, routing.target_pieces, position, source.axes)

    def receive(*pieces: jax.Array) -> jax.Array:
        return joining.body(*pieces) if joining else pieces[0]

    stacked = [PartitionSpec(end.axes) for end in (source, target)]
    moved = Spmd(send, source.mesh, (source.rows,), stacked[0], check_vma=False)(rows)
    return Spmd(receive, target.mesh, stacked[1], target.rows, check_vma=False)(*moved)
