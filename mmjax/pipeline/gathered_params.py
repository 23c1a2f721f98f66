"""The gathered parameters of a step's lanes: each is made by one gather, and dropped behind its last reader."""

from __future__ import annotations

from typing import Any

from mmjax.pipeline.lane_gathers import Pulled
from mmjax.pipeline.place import PlacedModel
from mmjax.schedule.gathering import gathers_of_readers, last_readers
from mmjax.schedule.ops import Op, Schedule


class GatheredParams:
    """Gathers parameters for the F and B of one schedule.

    Pulled shards are joined right before their first reader, so that a lane waits for them no earlier.
    """

    def __init__(self, placed: PlacedModel, schedule: Schedule):
        """For the lanes of this process; opens the sockets of pulls between processes."""
        self._gathers, graph = placed.lane_gathers, schedule.graph
        self._sources = gathers_of_readers(schedule)
        self._last_readers = last_readers(schedule)
        self._dropped = {op: key for key, op in self._last_readers.items()}
        self._pulls = {name for name in self._gathers if graph.stage(name).gather == "pull"}
        for name in self._pulls:
            self._gathers[name].open_pulls()
        self._pulled: dict[tuple[str, Op], Pulled] = {}
        self._params: dict[tuple[str, Op], Any] = {}

    def start(self, op: Op, place: str, shards: Any) -> None:
        """Starts a gather.

        Args:
          op: the gather.
          place: the lane that pulls.
          shards: ``Walker.shards`` of its stage.
        """
        gather = self._gathers[op.stage]
        if op.stage in self._pulls:
            if pulled := gather.pull(place, shards):
                self._pulled[place, op] = pulled
            return
        for lane, params in gather.collect(shards).items():
            if (lane, op) in self._last_readers:  # a lane may have no microbatch
                self._params[lane, op] = params

    def params(self, op: Op, place: str) -> Any:
        """The parameters of a lane for its F or B ``op``, a tree by module."""
        key = place, self._sources[op]
        if key in self._pulled:
            self._params[key] = self._gathers[op.stage].join(place, self._pulled.pop(key))
        return self._params[key]

    def drop(self, op: Op) -> None:
        """Drops the parameters behind their last reader; memory is free when the op has ended."""
        if op in self._dropped:
            self._params.pop(self._dropped[op])
