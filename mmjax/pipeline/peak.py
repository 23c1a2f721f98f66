"""The peak of a step: the op during which a device holds the most bytes, counted as in ``memory``.

``memory`` adds up kinds that are each at their own peak. That sum is never reached if stages take turns on their
devices, and the parameters of one are offloaded while microbatches of another are in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.last_backward import last_ops, reducing_stages
from mmjax.pipeline.memory import (
    changes_in_order,
    count_state_bytes,
    input_bytes,
    largest_microbatch,
    temporaries_by_program,
)
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.stage_state import StageState
from mmjax.schedule.graph import WORLD
from mmjax.schedule.ops import Op, Schedule

Temporaries = Mapping[tuple[str, str], int]
"""Bytes that a program needs while it runs, beside arguments and results, by kind of op and stage: ("B", "llm.0")."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes that ``rank`` holds during ``op``."""

    rank: int
    op: Op
    bytes: int


def fullest(
    placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes], temporaries: Temporaries | None = None
) -> Peak:
    """The op during which a device holds the most bytes, with the first such rank, and these bytes.

    Args:
      placed: the model on its devices, which may be planned devices, such as ``place_model(...).placed``.
      schedule: the order of ops, as ``make_schedule`` gives it.
      shapes: input shapes of every bucket combination that may occur, such as ``place_model(...).shapes.values()``.
      temporaries: those of compiled programs; without them they are estimates.
    """
    peaks = (
        Peak(rank=rank, op=op, bytes=size)
        for op, ranks in bytes_by_op(placed, schedule, shapes, temporaries)
        for rank, size in ranks.items()
    )
    return max(peaks, key=lambda peak: (peak.bytes, -peak.rank))


def bytes_by_op(
    placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes], temporaries: Temporaries | None = None
) -> Iterator[tuple[Op, dict[int, int]]]:
    """Yields (op, bytes by rank) for each op of a stage, in order: the bytes during the op on each rank of its stage or
    lane.

    They are arrays of all stages on that rank, and temporaries of the op.

    Args:
      placed: the model on its devices, which may be planned devices, such as ``place_model(...).placed``.
      schedule: the order of ops, as ``make_schedule`` gives it.
      shapes: input shapes of every bucket combination that may occur, such as ``place_model(...).shapes.values()``.
      temporaries: as for ``fullest``.
    """
    shapes = list(shapes)
    flow = largest_microbatch(placed, schedule, shapes)
    if temporaries is None:
        temporaries = temporaries_by_program(placed, schedule, shapes)
    graph, inputs = schedule.graph, input_bytes(schedule, flow)
    last = last_ops(schedule, reducing_stages(graph, placed.trace(shapes[0], graph).stages))
    states = {name: _State(s.state, placed.offload(name), last.get(name)) for name, s in placed.stages.items()}
    live = Counter(
        {place: states[node.name].between + inputs[place] for node in graph.stages for place in node.lane_names}
    )
    sharing = {r: [n for n, place in placed.places.items() if r in place.submesh.ranks] for r in graph.ranks}
    for op, *buffers in changes_in_order(schedule, flow):
        if op.stage == WORLD:
            continue
        gained, lost = map(_by_place, buffers)
        gained_state, lost_state = states[op.stage].changes(op) if not op.edge else (0, 0)
        lanes = graph.stage(op.stage).lane_names  # ops that change states span all of them
        live.update(gained + Counter(dict.fromkeys(lanes, gained_state)))
        op_temporaries = temporaries.get((op.kind, op.stage), 0)
        ranks = graph.stage(op.stage).ranks_of(op.microbatch)
        yield op, {rank: op_temporaries + sum(live[name] for name in sharing[rank]) for rank in ranks}
        live.subtract(lost + Counter(dict.fromkeys(lanes, lost_state)))


def _by_place(buffers: Counter[tuple[str, str]]) -> Counter[str]:
    result: Counter[str] = Counter()
    for (place, kind), size in buffers.items():
        result[place] += size * (kind != "host")
    return result


class _State:
    """Bytes of a stage's parameters, masters, moments and gradients on a device, and their changes by ops.

    Attributes:
      between: bytes between two steps.
    """

    def __init__(self, state: StageState, offload: OffloadConfig, last: Op | None):
        """``last``: the op that reduces the gradients, where ``reduce`` has no program."""
        self._bytes = counted = count_state_bytes(state)
        self._moments = counted.moments if offload.optimizer else 0
        self._masters = counted.masters - counted.direct if offload.optimizer else 0
        self._fetched = 0 if state.trainable else self._masters  # no update returns them: only prepare reads them
        self._last = last
        self.between = counted.optimizer + counted.sums - self._moments - self._fetched

    def changes(self, op: Op) -> tuple[int, int]:
        """Bytes that an op of the stage allocates, and bytes that it frees when it ends."""
        counted = self._bytes
        # Where gradients are shards, sums are dropped when they are reduced; else gradients lie in them until update.
        reduced, summed = counted.reduced, counted.sums if counted.reduced else 0
        if op == self._last:
            return reduced, summed
        match op.kind:
            case "prepare":
                return counted.copies + self._fetched, self._masters
            case "offload":
                return 0, counted.parameters
            case "reload":
                return counted.parameters, 0
            case "reduce":
                fetched = self._moments + self._masters
                return (fetched, 0) if self._last else (fetched + reduced, summed)
            case "update":
                sums = 0 if counted.reduced else counted.sums
                return 0, counted.reduced + sums + self._moments + counted.copies
        return 0, 0
