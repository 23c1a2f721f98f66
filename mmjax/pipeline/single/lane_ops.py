"""A step's ops on lanes: the values that each op reads, writes and sends, and its function.

The stage functions run on local shards, with ``pp`` as an additional mesh axis. All values on lanes, parameters too,
are typed as varying over ``pp``; otherwise autodiff inside the branch of one lane would sum gradients over all lanes.
Edges need no ops: a value leaves its lane when the slot of its op ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax

from mmjax.mesh.routing import Routing
from mmjax.mesh.transfer import Transfer
from mmjax.pipeline.place import PlacedModel, TracedStages
from mmjax.pipeline.single.lanes import LaneBlock, Lanes, assign, zeros
from mmjax.pipeline.single.slots import Across, Key, Place, Register, Send, SlotOp, SlotPlan, plan
from mmjax.pipeline.stage import Output, StageFunctions
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import by_name
from mmjax.schedule.graph import EdgeNode, edge_name
from mmjax.schedule.ops import ONCE, Op, Schedule

Values = Mapping[Key, list[jax.Array]]
"""The leaves of values, by key."""
OpResults = tuple[dict[Key, list[jax.Array]], list[list[jax.Array]]]
"""The leaves that an op writes, by key, and the leaves that it sends, in the order of its sends."""

STATE = ("master", "opt")


class LaneOps:
    """The ops of a step on lanes, for one combination of buckets.

    Attributes:
      lane: lane of each stage; ``None`` for one that spans all lanes.
      plan: slots and registers.
      pinned_registers: registers of the states, in the order in which a program takes them.
      input_places: by stage and host input, its numbered block.
      input_registers: all numbered blocks of host inputs.
    """

    def __init__(self, placed: PlacedModel, schedule: Schedule, lanes: Lanes, traced: TracedStages):
        """Plans the step.

        Raises:
          ValueError: when the schedule has an op that one program cannot contain.
        """
        self.placed, self.schedule, self.lanes, self.traced = placed, schedule, lanes, traced
        self.graph = schedule.graph
        self.lane = {name: lanes.of(stage.submesh) for name, stage in placed.stages.items()}
        self._summed: set[str] = set()
        self._jitted: dict[tuple[str, str], Any] = {}
        items = [item for op in schedule.ops for item in self._items(op)]
        self.plan: SlotPlan = plan(items, self.pinned, len(lanes))
        self.pinned_registers = list(dict.fromkeys(r for registers in self.plan.pinned.values() for r in registers))
        self.input_places = self._input_places()
        named = [register for places in self.input_places.values() for register in places.values()]
        self.input_registers = list(dict.fromkeys(named))

    # ---- what is on lanes --------------------------------------------------------------------------------------------

    @cached_property
    def pinned(self) -> dict[Place, tuple[LaneBlock, ...]]:
        """Blocks of the states of the stages on lanes, by place."""
        result: dict[Place, tuple[LaneBlock, ...]] = {}
        for name, lane in self.lane.items():
            if lane is not None:
                avals = self._state(name).state_avals
                result |= {(lane, (part, name)): _blocks(avals[part]) for part in STATE}
        return result

    def _input_places(self) -> dict[str, dict[str, Register]]:
        """``input_places``; stages of one lane and module share their host inputs."""
        by_lane: list[dict[tuple[str, str], LaneBlock]] = [{} for _ in range(len(self.lanes))]
        for name, lane in self.lane.items():
            if lane is not None:
                module = self.placed.stages[name].model.module
                avals = self._functions(name).forward_avals[1]
                by_lane[lane] |= {(module, key): LaneBlock.of(aval) for key, aval in avals.items()}
        numbered = assign([list(blocks.values()) for blocks in by_lane])
        places = [dict(zip(blocks, n, strict=True)) for blocks, n in zip(by_lane, numbered, strict=True)]
        result = {}
        for name, lane in self.lane.items():
            if lane is not None:
                model = self.placed.stages[name].model
                result[name] = {key: places[lane][model.module, key] for key in model.inputs}
        return result

    def _functions(self, stage: str) -> StageFunctions:
        return self.traced.stages[stage]

    def _state(self, stage: str) -> StageState:
        return self.placed.stages[stage].state

    # ---- ops on lanes ------------------------------------------------------------------------------------------------

    def _items(self, op: Op) -> list[SlotOp | Across]:
        if op.kind in ("move", "unpack") or (op.kind == "pack" and (op.microbatch != ONCE or op.backward)):
            return []
        if op.kind == "norm":
            trained = (stage.name for stage in self.graph.stages if stage.trainable)
            takes = tuple(("rows", name) for name in trained if self.lane[name] is not None)
            return [Across(op=op, takes=takes)]
        makers: dict[str, Callable[[Op], SlotOp | Across]] = {
            "F": self._forward_item,
            "B": self._backward_item,
            "W": self._weights_item,
        }
        if op.kind in makers:
            return [makers[op.kind](op)]
        on_lanes = {"prepare": self._prepare, "reduce": self._reduce, "update": self._update, "pack": self._lend}
        if op.kind not in on_lanes:
            raise ValueError(f"{op}: one program has no such op; use Executor")
        if self.lane[op.stage] is None:
            return [Across(op=op)]
        return on_lanes[op.kind](op)

    def _item(self, op: Op, reads: list[Key], writes: Any, drops: list[Key], sends: list[Send]) -> SlotOp | Across:
        """The op on its lane; for a stage that spans all lanes, only the values from and to lanes."""
        lane = self.lane[op.stage]
        if lane is None:  # a backward already has its forward's activations
            kind = "carry" if op.kind == "F" else "cotangent"
            takes = tuple(key for key in reads if key[0] == kind and self._from_lane(key))
            return Across(op=op, takes=takes, gives=tuple(send for send in sends if send.lane is not None))
        return SlotOp(op=op, lane=lane, reads=tuple(reads), writes=writes, drops=tuple(drops), sends=tuple(sends))

    def _from_lane(self, key: Key) -> bool:
        kind, _, _, name = key
        source = name if kind == "carry" else self.graph.edge(name).dst
        return self.lane[source] is not None

    def _forward_item(self, op: Op) -> SlotOp | Across:
        functions, carry = self._functions(op.stage), self.carry_keys(op)
        writes = (
            {("residuals", op.stage, op.microbatch): _blocks(functions.residual_avals)}
            if functions.has_backward
            else {}
        )
        drops = carry if not (functions.has_backward and functions.backward_reads_carry) else []
        sends = []
        for edge in self.graph.out_edges(op.stage):
            block = LaneBlock.of(self._functions(edge.dst).forward_avals[2][op.stage])
            key = ("carry", edge.dst, op.microbatch, op.stage)
            sends.append(
                Send(key=key, blocks=(self._sent(edge.src, functions.out.activation, block),), lane=self.lane[edge.dst])
            )
        if functions.out.result is not None:
            key = ("loss", op.stage, op.microbatch)
            sends.append(Send(key=key, blocks=(LaneBlock.of(functions.out.result),), lane=None))
        return self._item(op, self._param_keys(op.stage) + carry, writes, drops, sends)

    def _backward_item(self, op: Op) -> SlotOp | Across:
        functions, cotangents = self._functions(op.stage), self.cotangent_keys(op)
        residuals, sums = ("residuals", op.stage, op.microbatch), ("sums", op.stage)
        carry = self.carry_keys(op) if functions.backward_reads_carry else []
        state = self._state(op.stage)
        reads = [*self._param_keys(op.stage), *carry, residuals, *cotangents]
        reads += [sums] if op.stage in self._summed else []
        writes = {sums: _blocks(state.sums_avals)} if state.trainable else {}
        writes |= (
            {("deferred", op.stage, op.microbatch): _blocks(functions.deferred_avals)}
            if functions.deferred_avals
            else {}
        )
        self._summed |= {op.stage} if state.trainable else set()
        sends = []
        for edge in self._returning(op.stage):
            gradient = functions.forward_avals[2][edge.src]
            block = self._sent(op.stage, gradient, LaneBlock.of(self._functions(edge.src).out.activation))
            key = ("cotangent", edge.src, op.microbatch, edge.name)
            sends.append(Send(key=key, blocks=(block,), lane=self.lane[edge.src]))
        return self._item(op, reads, writes, [residuals, *carry, *cotangents], sends)

    def _weights_item(self, op: Op) -> SlotOp | Across:
        sums, deferred = ("sums", op.stage), ("deferred", op.stage, op.microbatch)
        if not self._functions(op.stage).deferred_avals:  # no trained weight is tapped
            return self._item(op, [], {}, [], [])
        writes = {sums: _blocks(self._state(op.stage).sums_avals)}
        return self._item(op, [sums, deferred], writes, [deferred], [])

    def _sent(self, sender: str, aval: Any, received: LaneBlock) -> LaneBlock:
        """The block of a sent value: of its aval at the sender if that is on a lane, else the receiver's block."""
        return LaneBlock.of(aval) if self.lane[sender] is not None else received

    def _returning(self, stage: str) -> list[EdgeNode]:
        return [edge for edge in self.graph.in_edges(stage) if edge.gradient]

    def _prepare(self, op: Op) -> list[SlotOp | Across]:
        state = self._state(op.stage)
        if state.prepare_is_identity:
            return []
        borrowed = self._borrowed_keys(op.stage, direct=False)
        writes = {("params", op.stage): _blocks(state.prepared_avals)}
        return [self._item(op, [("master", op.stage), *borrowed], writes, borrowed, [])]

    def _reduce(self, op: Op) -> list[SlotOp | Across]:
        state, name = self._state(op.stage), op.stage
        returned: list[Key] = [("returned", name, tie.name) for tie in self.graph.out_ties(name) if tie.gradient]
        reduced = {module: state.master_avals[module] for module in sorted(state.trainable)}
        sends = [Send(key=("rows", name), blocks=(LaneBlock.of(state.rows_aval),), lane=None)]
        for tie in self.graph.in_ties(name):
            if tie.gradient:
                blocks = (LaneBlock.of(state.shared_avals(state.borrowed)[tie.name]),)
                sends.append(Send(key=("returned", tie.src, tie.name), blocks=blocks, lane=self.lane[tie.src]))
        reads: list[Key] = [("sums", name), *returned]
        return [self._item(op, reads, {("reduced", name): _blocks(reduced)}, reads, sends)]

    def _update(self, op: Op) -> list[SlotOp | Across]:
        places: list[Key] = [(part, op.stage) for part in STATE]
        avals = self._state(op.stage).state_avals
        writes = {(part, op.stage): _blocks(avals[part]) for part in STATE}
        return [self._item(op, [*places, ("reduced", op.stage)], writes, [("reduced", op.stage)], [])]

    def _lend(self, op: Op) -> list[SlotOp | Across]:
        state, tie = self._state(op.stage), self.graph.edge(op.edge)
        blocks = (LaneBlock.of(state.shared_avals(state.lent)[tie.name]),)
        send = Send(key=("borrowed", tie.dst, tie.name), blocks=blocks, lane=self.lane[tie.dst])
        return [self._item(op, [("master", op.stage)], {}, [], [send])]

    # ---- names of values ---------------------------------------------------------------------------------------------

    def carry_keys(self, op: Op) -> list[Key]:
        """Keys of the activations that a forward receives: ("carry", stage, microbatch, source stage)."""
        return [("carry", op.stage, op.microbatch, edge.src) for edge in self.graph.in_edges(op.stage)]

    def cotangent_keys(self, op: Op) -> list[Key]:
        """Keys of the cotangents that a backward receives, in the order in which the schedule adds them up.

        A key is ("cotangent", stage, microbatch, edge).
        """
        edges = [edge.name for edge in self.graph.out_edges(op.stage) if edge.gradient]
        order = {o.edge: i for i, o in enumerate(self._unpacks.get((op.stage, op.microbatch), []))}
        return [("cotangent", op.stage, op.microbatch, edge) for edge in sorted(edges, key=lambda e: order[e])]

    @cached_property
    def _unpacks(self) -> dict[tuple[str, int], list[Op]]:
        result: dict[tuple[str, int], list[Op]] = {}
        for op in self.schedule.ops:
            if op.kind == "unpack" and op.backward:
                result.setdefault((op.stage, op.microbatch), []).append(op)
        return result

    def transfer(self, key: Key) -> Transfer:
        """The transfer over its edge of a value with a key of `carry_keys` or `cotangent_keys`."""
        kind, stage, _, name = key
        if kind == "carry":
            return self.traced.boundaries[edge_name(name, stage)].forward
        return self.traced.boundaries[name].backward

    def routing(self, key: Key) -> Routing:
        """The routing of that transfer."""
        return self.transfer(key).routing

    def _borrowed_keys(self, stage: str, *, direct: bool) -> list[Key]:
        """Keys of tied weights: those that a stage uses directly, or those that ``prepare`` reads."""
        state, ties = self._state(stage), {tie.name: tie for tie in self.graph.in_ties(stage)}
        _, selected = state.direct_weights({}, ties) if direct else state.prepare_inputs({}, ties)
        return [("borrowed", stage, name) for name in selected]

    def _param_keys(self, stage: str) -> list[Key]:
        state = self._state(stage)
        direct = [("master", stage), *self._borrowed_keys(stage, direct=True)] if state.direct_modules else []
        return [*direct, ("params", stage)] if state.prepared_avals else direct

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def run(self, item: SlotOp, values: Values, inputs: Mapping[str, jax.Array], seeds: Any, totals: Any) -> OpResults:
        """Runs one op on its lane.

        Args:
          item: the op.
          values: the values that it reads.
          inputs: the host inputs of its microbatch and stage.
          seeds: by stage, the cotangents ``[losses]`` of its losses.
          totals: squared gradient norms ``[modules]``, once ``norm`` has run, else None.

        Returns:
          The leaves of the values that it writes, by key, and those of each value that it sends.
        """
        name = item.op.stage
        match item.op.kind:
            case "F":
                return self._run_forward(item, values, inputs)
            case "B":
                return self._run_backward(item, values, inputs, seeds)
            case "W":
                return self._run_weights(item, values)
            case "prepare":
                masters, borrowed = self._state(name).prepare_inputs(*self._masters(name, values))
                params = self._call(name, "prepare")(masters, borrowed)
                return {("params", name): jax.tree.leaves(params)}, []
            case "pack":
                masters, _ = self._masters(name, values)
                return {}, [[by_name(masters)[item.op.edge]]]
            case "reduce":
                return self._run_reduce(item, values)
        state = self._state(name)
        avals = state.state_avals
        old = {part: jax.tree.unflatten(_structure(avals[part]), values[part, name]) for part in STATE}
        reduced = {module: avals["master"][module] for module in sorted(state.trainable)}
        grads = jax.tree.unflatten(_structure(reduced), values["reduced", name])
        new = state.update.body(old, grads, totals[None])
        return {(part, name): jax.tree.leaves(new[part]) for part in STATE}, []

    def _run_forward(self, item: SlotOp, values: Values, inputs: Any) -> OpResults:
        op, functions = item.op, self._functions(item.op.stage)
        forward, params = self._call(op.stage, "forward"), self._params(op.stage, values)
        out, residuals = forward(params, inputs, self._carry(op, values))
        writes = {("residuals", op.stage, op.microbatch): residuals} if functions.has_backward else {}
        return writes, [[out.result if send.key[0] == "loss" else out.activation] for send in item.sends]

    def _run_backward(self, item: SlotOp, values: Values, inputs: Any, seeds: Any) -> OpResults:
        op, functions, state = item.op, self._functions(item.op.stage), self._state(item.op.stage)
        key = ("sums", op.stage)
        if key in values:
            sums = jax.tree.unflatten(_structure(state.sums_avals), values[key])
        else:
            sums = jax.tree.map(lambda aval: zeros(LaneBlock.of(aval)), state.sums_avals)
        arrived = [values[key][0] for key in self.cotangent_keys(op)]
        cotangent = Output(sum(arrived[1:], start=arrived[0]) if arrived else None, seeds.get(op.stage))
        carry = self._carry(op, values) if functions.backward_reads_carry else {}
        residuals = values["residuals", op.stage, op.microbatch]
        params = self._params(op.stage, values)
        part = functions.backward_part(sums)
        new, grads, *deferred = self._call(op.stage, "backward")(params, part, inputs, carry, residuals, cotangent)
        writes: dict[Key, list[jax.Array]] = {}
        if state.trainable:
            writes[key] = jax.tree.leaves(functions.with_backward_part(sums, new))
        if functions.deferred_avals:
            writes["deferred", op.stage, op.microbatch] = deferred[0]
        return writes, [[grads[edge.src]] for edge in self._returning(op.stage)]

    def _run_weights(self, item: SlotOp, values: Values) -> OpResults:
        op, functions, key = item.op, self._functions(item.op.stage), ("sums", item.op.stage)
        if not functions.deferred_avals:
            return {}, []
        sums = jax.tree.unflatten(_structure(self._state(op.stage).sums_avals), values[key])
        deferred = values["deferred", op.stage, op.microbatch]
        new = self._call(op.stage, "weights")(functions.weights_part(sums), deferred)
        return {key: jax.tree.leaves(functions.with_weights_part(sums, new))}, []

    def _run_reduce(self, item: SlotOp, values: Values) -> OpResults:
        name, state = item.op.stage, self._state(item.op.stage)
        sums = jax.tree.unflatten(_structure(state.sums_avals), values["sums", name])
        returned = {key[2]: values[key][0] for key in item.reads if key[0] == "returned"}
        grads, borrowed_grads, rows = self._call(name, "reduce")(sums, returned)
        sends = [[rows], *([borrowed_grads[send.key[2]]] for send in item.sends[1:])]
        return {("reduced", name): jax.tree.leaves(grads)}, sends

    def _params(self, stage: str, values: Values) -> Any:
        state = self._state(stage)
        masters, borrowed = self._masters(stage, values) if state.direct_modules else ({}, {})

        def copies(*_: Any) -> Any:  # made by the op ``prepare``
            return jax.tree.unflatten(_structure(state.prepared_avals), values["params", stage])

        return state.compute_params(masters, borrowed, copies)

    def _masters(self, stage: str, values: Values) -> tuple[Any, dict[str, jax.Array]]:
        masters = jax.tree.unflatten(_structure(self._state(stage).master_avals), values["master", stage])
        borrowed = {tie.name: values["borrowed", stage, tie.name][0] for tie in self.graph.in_ties(stage)
                    if ("borrowed", stage, tie.name) in values}  # fmt: skip
        return masters, borrowed

    def _carry(self, op: Op, values: Values) -> dict[str, jax.Array]:
        return {edge.src: values["carry", op.stage, op.microbatch, edge.src][0]
                for edge in self.graph.in_edges(op.stage)}  # fmt: skip

    def _call(self, stage: str, function: str) -> Any:
        """The body of a stage's function of this name, traced once for all microbatches."""
        if (stage, function) not in self._jitted:
            owner = self._functions(stage) if function in ("forward", "backward", "weights") else self._state(stage)
            self._jitted[stage, function] = jax.jit(getattr(owner, function).body)
        return self._jitted[stage, function]


def _blocks(avals: Any) -> tuple[LaneBlock, ...]:
    return tuple(LaneBlock.of(aval) for aval in jax.tree.leaves(avals))


def _structure(avals: Any) -> Any:
    return jax.tree.structure(avals)
