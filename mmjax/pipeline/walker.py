"""Walks a schedule. Implements the ops of both training and prediction: prepare and the ops of edges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.spmd import to_devices
from mmjax.mesh.transfer import Transfer
from mmjax.pipeline.awaiting import Awaiting
from mmjax.pipeline.ends import Ends
from mmjax.pipeline.lane_views import on_lane
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.ties import TieTransfer
from mmjax.pipeline.trees import by_name
from mmjax.schedule.graph import WORLD, StageGraph, edge_name
from mmjax.schedule.ops import ONCE, Op, participating_ranks

Signature = tuple[tuple[str, int], ...]
"""The bucket of each encoder's input of a microbatch, sorted by encoder: ``(("audio", 0), ("vision", 2))``."""


class Walker:
    """Dispatches ops in order. Every buffer has one owner and is dropped at the op that reads it last.

    Attributes:
      states: states by stage, during the once-a-step ops.
      params: compute parameters by place (see ``PlacedModel.places``).
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

    def __init__(self, placed: PlacedModel, graph: StageGraph, boundaries: Mapping[tuple[str, Signature], Boundary]):
        self.placed, self.graph, self.boundaries = placed, graph, boundaries
        self.states: Mapping[str, State] = {}
        self.params: dict[str, Any] = {}
        self.borrowed: dict[str, dict[str, jax.Array]] = {}
        self.returned: dict[str, dict[str, jax.Array]] = {}
        self.inputs: dict[tuple[str, int], Any] = {}
        self.carry: dict[tuple[str, int], dict[str, jax.Array]] = {}
        self.cotangents: dict[tuple[str, int], jax.Array] = {}
        self.in_transit: dict[tuple[str, int, bool], Any] = {}
        self.signatures: list[Signature] = []
        self.handlers: dict[str, Callable[[Op], None]] = {"pack": self.pack, "move": self.move, "unpack": self.unpack}
        self.handlers["prepare"] = self.prepare
        self.in_order = False
        self.ends: Ends | None = None
        self._local: dict[Op, bool] = {}

    def walk(self, ops: Iterable[Op], awaiting: Awaiting | None = None) -> None:
        """Dispatches the ops that touch this process's devices, in order.

        All processes walk the same order, so that the devices of a program run it at the same turn. Returns when all
        ops are dispatched, not when they have ended. ``awaiting`` defers ops that await an op that has not ended.
        """
        run = awaiting or self.dispatch
        for op in ops:
            if self.is_local(op):
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

    def place(self, op: Op) -> str:
        """The place that runs an op of a microbatch: its stage, or a lane of the stage."""
        return self.graph.stage(op.stage).lane_name(op.microbatch)

    def lend(self, states: Mapping[str, State]) -> None:
        """Sets the states, by stage, whose parameters ``prepare`` prepares, and puts tied weights in transit."""
        self.states = states
        for tie in (tie for tie in self.graph.ties if tie.src in states):
            self.in_transit[tie.name, ONCE, False] = moved(by_name(states[tie.src]["master"])[tie.name], DEVICE)

    def prepare(self, op: Op) -> None:
        """Makes the compute parameters of the op's stage, and stores them in ``params`` for its local places."""
        state, masters = self.placed.stages[op.stage].state, self.on_devices(op.stage, self.states[op.stage]["master"])
        params = state.compute_params(masters, self.borrowed.pop(op.stage, {}))
        has_lanes = self.graph.stage(op.stage).lanes > 1
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
                if place := places.get(stage.lane_name(index)):
                    module_inputs = inputs[stage.module]
                    read = names[name] if names and name in names else place.model.read(module_inputs)
                    stage_inputs = {key: module_inputs[key] for key in read}
                    shardings = {key: place.input_sharding(key, whole_rows=name in whole_rows) for key in read}
                    # An input may be a tree, such as ``SamplingParams``.
                    each = {key: jax.tree.map(lambda _, s=shardings[key]: s, stage_inputs[key]) for key in read}
                    self.inputs[name, index] = to_devices(stage_inputs, each)

    def send(self, stage: str, microbatch: int, out: jax.Array) -> None:
        """Puts an activation in transit on the edges that leave ``stage``."""
        for edge in self.graph.out_edges(stage):
            self.in_transit[edge.name, microbatch, False] = out

    def send_back(self, stage: str, microbatch: int, grads: Mapping[str, jax.Array]) -> None:
        """Puts gradients, by source stage, in transit on the edges that enter ``stage`` and carry gradients."""
        for edge in self.graph.in_edges(stage):
            if edge.gradient:
                self.in_transit[edge.name, microbatch, True] = grads[edge.src]

    def pack(self, op: Op) -> None:
        """Cuts the array that is in transit on the op's edge into pieces, on the sender."""
        key = (op.edge, op.microbatch, op.backward)
        self.in_transit[key] = self._transfer(op).pack(self.in_transit[key])

    def move(self, op: Op) -> None:
        """Carries the packed pieces to the receiver's devices."""
        key, transfer = (op.edge, op.microbatch, op.backward), self._transfer(op)
        moved = transfer.move(self.in_transit.pop(key, ()))  # a process without the source's devices has sent nothing
        if transfer.target.local:
            self.in_transit[key] = moved

    def unpack(self, op: Op) -> None:
        """Joins the pieces in the receiver's layout, and stores the result for the receiver.

        It goes to ``carry``, is added to ``cotangents``, or, of a tie, goes to ``borrowed`` or ``returned``.
        """
        arrived = self._transfer(op).unpack(self.in_transit.pop((op.edge, op.microbatch, op.backward)))
        key = (op.stage, op.microbatch)
        if op.microbatch == ONCE:
            received = self.returned if op.backward else self.borrowed
            received.setdefault(op.stage, {})[op.edge] = arrived
        elif not op.backward:
            self.carry.setdefault(key, {})[self.graph.edge(op.edge).src] = arrived
        elif key in self.cotangents:
            self.cotangents[key] = jnp.add(self.cotangents[key], arrived)
        else:
            self.cotangents[key] = arrived

    def _transfer(self, op: Op) -> Transfer | TieTransfer:
        if op.microbatch == ONCE:
            tie = self.placed.ties[op.edge]
            return tie.backward if op.backward else tie.forward
        ends = self.graph.ends(self.graph.edge(op.edge), op.microbatch)
        boundary = self.boundaries[edge_name(*ends), self.signatures[op.microbatch]]
        return boundary.backward if op.backward else boundary.forward
