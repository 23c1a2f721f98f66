"""The fullest moment of a step: at which op a device holds most, counted like the table of ``memory`` and as exactly.

The table adds up kinds of memory that are each at their own peak. Where stages share devices in turns, and one's
parameters are offloaded while another's microbatches are in flight, that sum is never reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmjax.pipeline.build import InputShapes, PlacedModel
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.memory import changes_in_order, counted_states, input_bytes, largest_flow, temporaries_by_stage
from mmjax.pipeline.stage_state import StageState
from mmjax.schedule.graph import WORLD
from mmjax.schedule.ops import Op, Schedule


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes that ``rank`` holds during ``op``."""

    rank: int
    op: Op
    bytes: int


def fullest(placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]) -> Peak:
    """The op during which some device holds most, and the first such rank; arguments as ``memory_by_stage``."""
    peaks = (
        Peak(rank=rank, op=op, bytes=held)
        for op, ranks in bytes_by_op(placed, schedule, shapes)
        for rank, held in ranks.items()
    )
    return max(peaks, key=lambda peak: (peak.bytes, -peak.rank))


def bytes_by_op(
    placed: PlacedModel, schedule: Schedule, shapes: Iterable[InputShapes]
) -> Iterator[tuple[Op, dict[int, int]]]:
    """Each op of a stage with the bytes on the stage's ranks during it: arrays of all their stages, and temporaries."""
    shapes = list(shapes)
    flow, temporaries = largest_flow(placed, schedule, shapes), temporaries_by_stage(placed, schedule, shapes)
    states = {name: _State(stage.state, placed.offload(name)) for name, stage in placed.stages.items()}
    graph, inputs = schedule.graph, input_bytes(schedule, flow)
    live = Counter(
        {place: states[node.name].between + inputs[place] for node in graph.stages for place in node.lane_names}
    )
    sharing = {r: [n for n, place in placed.places.items() if r in place.submesh.ranks] for r in graph.ranks}
    for op, *buffers in changes_in_order(schedule, flow):
        if op.stage == WORLD:
            continue
        gained, lost = map(_by_place, buffers)
        more, less = states[op.stage].changes(op.kind) if not op.edge else (0, 0)
        lanes = graph.stage(op.stage).lane_names  # ops that change states span all of them
        live.update(gained + Counter(dict.fromkeys(lanes, more)))
        here = temporaries[op.stage] if op.kind in ("F", "B", "W") else 0
        ranks = graph.stage(op.stage).ranks_of(op.microbatch)
        yield op, {rank: here + sum(live[name] for name in sharing[rank]) for rank in ranks}
        live.subtract(lost + Counter(dict.fromkeys(lanes, less)))


def _by_place(buffers: Counter[tuple[str, str]]) -> Counter[str]:
    result: Counter[str] = Counter()
    for (place, kind), size in buffers.items():
        result[place] += size * (kind != "host")
    return result


class _State:
    """Bytes of a stage's parameters, masters, moments and gradients on a device, and which ops change them.

    Attributes:
      between: bytes between two steps.
    """

    def __init__(self, state: StageState, offload: OffloadConfig):
        self._held = held = counted_states(state)
        self._moments = held.moments if offload.optimizer else 0
        self._masters = held.masters - held.served if offload.optimizer else 0
        self._fetched = 0 if state.trainable else self._masters  # no update brings them back: prepare alone reads them
        self.between = held.optimizer + held.sums - self._moments - self._fetched

    def changes(self, kind: str) -> tuple[int, int]:
        """Bytes that an op of this kind adds while it runs, and bytes that are gone when it ends."""
        held = self._held
        match kind:
            case "prepare":
                return held.copies + self._fetched, self._masters
            case "offload":
                return 0, held.parameters
            case "reload":
                return held.parameters, 0
            case "reduce":
                return held.reduced + self._moments + self._masters, 0
            case "update":
                return 0, held.reduced + self._moments + held.copies
        return 0, 0
