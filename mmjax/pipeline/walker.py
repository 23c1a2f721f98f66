"""Walks a schedule. Implements the ops of both training and prediction: prepare and the ops of edges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.shared_out import SharedOut
from mmjax.mesh.spmd import to_devices
from mmjax.mesh.transfer import Transfer
from mmjax.pipeline.awaiting import Awaiting
from mmjax.pipeline.ends import Ends
from mmjax.pipeline.lane_views import on_lane
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.place import InputShapes, PlacedModel, Stage
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.ties import TieTransfer
from mmjax.pipeline.trees import by_name
from mmjax.schedule.graph import WORLD, StageGraph, edge_name
from mmjax.schedule.ops import EDGE_KINDS, ONCE, Op, participating_ranks

Signature = tuple[tuple[str, int], ...]
"""The bucket of each encoder's input of a microbatch, sorted by encoder: ``(("audio", 0), ("vision", 2))``."""


InTransit = tuple[str, int, bool]
"""Key of an array that an edge carries: (edge, microbatch, backward)."""


@dataclass(frozen=True, slots=True)
class OpKeys:
    """The keys under which a walker finds and stores the arrays of an op, made once for each op.

    Attributes:
      stage: (stage, microbatch).
      place: the place that runs it: its stage, or a lane of the stage; "" for a world op.
      carried: key of the array that an edge's op carries.
      between: the two places that an edge's op joins, by the name of their edge; "" for other ops and for ties.
      source: the stage that an edge leads from, in forward; "" for other ops.
      activations: keys of the activation, for each edge that leaves the stage.
      gradients: (source stage, key) of the gradients, for each edge that enters the stage and carries them.
      shared: the edges that enter the stage and share out the activation of several microbatches, or the op's own edge.
    """

    stage: tuple[str, int]
    place: str
    carried: InTransit
    between: str
    source: str
    activations: tuple[InTransit, ...]
    gradients: tuple[tuple[str, InTransit], ...]
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: StageGraph, op: Op) -> OpKeys:
        """The keys of an op of a schedule of ``graph``."""
        edge = graph.edge(op.edge) if op.kind in EDGE_KINDS else None
        is_world = op.stage == WORLD
        entering = () if is_world else graph.in_edges(op.stage)
        return cls(
            stage=(op.stage, op.microbatch),
            place="" if is_world else graph.stage(op.stage).lane_name(op.microbatch),
            carried=(op.edge, op.microbatch, op.backward),
            between=edge_name(*graph.ends(edge, op.microbatch)) if edge and op.microbatch != ONCE else "",
            source=edge.src if edge else "",
            activations=() if is_world else tuple((e.name, op.microbatch, False) for e in graph.out_edges(op.stage)),
            gradients=tuple((e.src, (e.name, graph.first_of(e, op.microbatch), True)) for e in entering if e.gradient),
            shared=frozenset(e.name for e in (entering if edge is None else (edge,)) if graph.shares_out(e)),
        )


class Walker:
    """Dispatches ops in order. Every buffer has one owner and is dropped at the op that reads it last.

    Attributes:
      states: states by stage, during the once-a-step ops.
      params: compute parameters by place (see ``PlacedModel.places``), of stages that do not gather.
      shards: compute parameters of stages that gather, by stage: shards over all lanes, or ``Published`` for pulls.
      borrowed, returned: received weights of ties and their gradients, by stage, then by tie.
      inputs: host inputs on their devices, by (stage, microbatch).
      carry: received activations by (stage, microbatch), then by source stage.
      cotangents: received gradients by (stage, microbatch).
      in_transit: arrays that an edge carries at the moment, by (edge, microbatch, backward).
      signatures: buckets by microbatch.
      handlers: functions that dispatch an op, by its kind.
      in_order: whether no op is deferred, even if it awaits others (see ``watched``).
      ends: records the ends of ops; ``None`` if they are not needed.
    """

    def __init__(
        self, placed: PlacedModel, graph: StageGraph, boundaries: Mapping[tuple[str, Signature], Boundary | SharedOut]
    ):
        self.placed, self.graph, self.boundaries = placed, graph, boundaries
        self.states: Mapping[str, State] = {}
        self.params: dict[str, Any] = {}
        self.shards: dict[str, Any] = {}
        self.borrowed: dict[str, dict[str, jax.Array]] = {}
        self.returned: dict[str, dict[str, jax.Array]] = {}
        self.inputs: dict[tuple[str, int], Any] = {}
        self.carry: dict[tuple[str, int], dict[str, jax.Array]] = {}
        self.cotangents: dict[tuple[str, int], jax.Array] = {}
        self.in_transit: dict[InTransit, Any] = {}
        self.signatures: list[Signature] = []
        self.handlers: dict[str, Callable[[Op], None]] = {"pack": self.pack, "move": self.move, "unpack": self.unpack}
        self.handlers["prepare"] = self.prepare
        self.in_order = False
        self.ends: Ends | None = None
        self._local: dict[Op, bool] = {}
        self._keys: dict[Op, OpKeys] = {}
        self._input_shardings: dict[Any, NamedSharding] = {}

    def walk(self, ops: Iterable[Op], awaiting: Awaiting | None = None) -> None:
        """Dispatches the ops that touch this process's devices, in order.

        All processes walk the same order, so that the devices of a program run it at the same turn. Returns when all
        ops are dispatched, not when they have ended. ``awaiting`` defers ops that await an op that has not ended.
        """
        run, has_all_devices = awaiting or self.dispatch, self.placed.world.processes == 1
        for op in ops:
            if has_all_devices or self.is_local(op):
                run(op)
        if awaiting:
            awaiting.finish()

    def dispatch(self, op: Op) -> None:
        """Dispatches an op; its results may not be ready when this returns."""
        if self.ends is None:
            self.handlers[op.kind](op)
            return
        self.ends.begin(op)
        self.handlers[op.kind](op)
        self.ends.dispatched(op)

    def is_local(self, op: Op) -> bool:
        """Whether an op touches this process's devices. A world op touches all devices of the world."""
        if self.placed.world.processes == 1 or op.stage == WORLD:
            return True
        if op not in self._local:
            self._local[op] = not self.placed.world.local_ranks.isdisjoint(participating_ranks(self.graph, op))
        return self._local[op]

    def keys(self, op: Op) -> OpKeys:
        """The keys of the op's arrays."""
        keys = self._keys.get(op)
        if keys is None:
            keys = self._keys[op] = OpKeys.of(self.graph, op)
        return keys

    def place(self, op: Op) -> str:
        """The place that runs an op of a microbatch: its stage, or a lane of the stage."""
        return self.keys(op).place

    def lend(self, states: Mapping[str, State]) -> None:
        """Sets the states, by stage, whose parameters ``prepare`` prepares, and puts tied weights in transit."""
        self.states = states
        for tie in (tie for tie in self.graph.ties if tie.src in states):
            self.in_transit[tie.name, ONCE, False] = moved(by_name(states[tie.src]["master"])[tie.name], DEVICE)

    def prepare(self, op: Op) -> None:
        """Makes the compute parameters of the op's stage, and stores them in ``params`` for its local places.

        If these are shards, they go to ``shards`` where the graph has gathers, and otherwise are gathered here.
        """
        state, masters = self.placed.stages[op.stage].state, self.on_devices(op.stage, self.states[op.stage]["master"])
        params = state.compute_params(masters, self.borrowed.pop(op.stage, {}))
        node = self.graph.stage(op.stage)
        if node.gather:
            gather = self.placed.lane_gathers[op.stage]
            self.shards[op.stage] = gather.publish(params) if node.gather == "pull" else params
            return
        if op.stage in self.placed.lane_gathers:
            self.params |= self.placed.lane_gathers[op.stage].collect(params)
            return
        has_lanes = node.lanes > 1
        for name, place in self.placed.local_places(op.stage).items():
            self.params[name] = on_lane(params, place.state.param_avals) if has_lanes else params

    def on_devices(self, stage: str, arrays: Any) -> Any:
        """A tree of a stage's arrays on the stage's devices; without offload they are there already."""
        offload = self.placed.offload(stage)
        return moved(arrays, DEVICE) if offload.optimizer or offload.parameters else arrays

    def place_inputs(
        self,
        microbatches: Sequence[tuple[Signature, InputShapes]],
        stages: Iterable[str],
        names: Mapping[str, Sequence[str]] | None = None,
        whole_rows: Collection[str] = (),
    ) -> None:
        """Puts the host inputs of every stage on its devices: sets ``signatures`` and fills ``inputs``.

        Args:
          microbatches: for each microbatch its buckets, and its host inputs by module, then by name.
          stages: names of the stages.
          names: names of the inputs by stage; by default those that the stage reads in training.
          whole_rows: stages whose rows are whole on every rank of cp; send lists always are.
        """
        self.signatures = [signature for signature, _ in microbatches]
        for name in stages:
            stage, places = self.graph.stage(name), self.placed.local_places(name)
            for index, (_, inputs) in enumerate(microbatches):
                place = places.get(stage.lane_name(index))
                if place and index == stage.first_of(index):  # the inputs of an op are with its first microbatch
                    module_inputs = inputs[stage.module]
                    read = names[name] if names and name in names else place.model.read(module_inputs)
                    shardings = {key: self._input_sharding(place, key, whole_rows=name in whole_rows) for key in read}
                    self.inputs[name, index] = {key: to_devices(module_inputs[key], shardings[key]) for key in read}

    def _input_sharding(self, place: Stage, name: str, *, whole_rows: bool) -> NamedSharding:
        """``Stage.input_sharding``, made once for each input of a place."""
        key = (place.name, place.submesh.ranks, name, whole_rows)
        if key not in self._input_shardings:
            self._input_shardings[key] = place.input_sharding(name, whole_rows=whole_rows)
        return self._input_shardings[key]

    def send(self, op: Op, activation: jax.Array) -> None:
        """Puts the activation of an F in transit on the edges that leave its stage."""
        for key in self.keys(op).activations:
            self.in_transit[key] = activation

    def send_back(self, op: Op, grads: Mapping[str, jax.Array]) -> None:
        """Puts the gradients of a B, by source stage, in transit on the edges that enter its stage and carry them."""
        keys = self.keys(op)
        for source, key in keys.gradients:
            if key[0] in keys.shared:  # the gradients of all of its microbatches go together
                self.in_transit[key] = (*self.in_transit.get(key, ()), grads[source])
            else:
                self.in_transit[key] = grads[source]

    def pack(self, op: Op) -> None:
        """Cuts the array that is in transit on the op's edge into pieces, on the sender."""
        keys = self.keys(op)
        self.in_transit[keys.carried] = self._transfer(op, keys).pack(self.in_transit[keys.carried])

    def move(self, op: Op) -> None:
        """Carries the packed pieces to the receiver's devices."""
        keys = self.keys(op)
        transfer = self._transfer(op, keys)
        # A process without the source's devices has sent nothing.
        moved = transfer.move(self.in_transit.pop(keys.carried, ()))
        if transfer.target.local:
            self.in_transit[keys.carried] = moved

    def unpack(self, op: Op) -> None:
        """Joins the pieces in the receiver's layout, and stores the result for the receiver.

        It goes to ``carry``, is added to ``cotangents``, or, of a tie, goes to ``borrowed`` or ``returned``.
        """
        keys = self.keys(op)
        arrived = self._transfer(op, keys).unpack(self.in_transit.pop(keys.carried))
        if op.microbatch == ONCE:
            received = self.returned if op.backward else self.borrowed
            received.setdefault(op.stage, {})[op.edge] = arrived
        elif not op.backward and keys.shared:
            for number, of_microbatch in enumerate(arrived):
                self.carry.setdefault((op.stage, op.microbatch + number), {})[keys.source] = of_microbatch
        elif not op.backward:
            self.carry.setdefault(keys.stage, {})[keys.source] = arrived
        elif keys.stage in self.cotangents:
            self.cotangents[keys.stage] = jnp.add(self.cotangents[keys.stage], arrived)
        else:
            self.cotangents[keys.stage] = arrived

    def _transfer(self, op: Op, keys: OpKeys) -> Transfer | TieTransfer:
        if op.microbatch == ONCE:
            both_ways = self.placed.ties[op.edge]
        else:
            both_ways = self.boundaries[keys.between, self.signatures[op.microbatch]]
        return both_ways.backward if op.backward else both_ways.forward
