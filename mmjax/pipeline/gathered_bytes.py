"""Bytes of gathered parameters: a lane has them from their gather to its last F or B that reads them.

Masters that are published for pulls are copied, from ``prepare`` to ``update``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mmjax.schedule.gathering import last_readers
from mmjax.schedule.ops import Op, Schedule

Buffers = Counter[tuple[str, str]]
"""Bytes by (place, kind), with kinds as in ``Memory``, such as "residuals"; the kind "host" is on no device."""
GATHERED = "gathered"
"""The kind of these bytes."""


class GatheredBytes:
    """Changes of bytes by the ops of one schedule."""

    def __init__(self, schedule: Schedule, params: Mapping[str, int], published: Mapping[str, int]):
        """Finds which gather serves which ops.

        Args:
          schedule: the order of ops.
          params: bytes of a stage's whole parameters on a device, of stages that gather: {"vision.0": 4096}.
          published: bytes of published masters on a device, likewise.
        """
        graph, self._params, self._published = schedule.graph, params, published
        self._lanes = {node.name: node.lane_names for node in graph.stages if node.gather == "pull"}
        readers = last_readers(schedule)
        self._gained: dict[Op, list[str]] = {}
        for place, gather in readers:
            self._gained.setdefault(gather, []).append(place)
        self._lost = {op: place for (place, _), op in readers.items()}

    def changes(self, op: Op) -> tuple[Buffers, Buffers]:
        """(bytes that an op allocates, bytes that it frees when it ends), on a device, by (place, kind)."""
        if op.kind in ("prepare", "update") and op.stage in self._lanes:
            size = self._published[op.stage]
            copies = Buffers({(place, GATHERED): size for place in self._lanes[op.stage]})
            return (copies, Buffers()) if op.kind == "prepare" else (Buffers(), copies)
        size = self._params.get(op.stage, 0)
        gained = Buffers({(place, GATHERED): size for place in self._gained.get(op, ())})
        return gained, Buffers({(self._lost[op], GATHERED): size} if op in self._lost else {})
