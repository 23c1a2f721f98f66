"""Units of a step: runs of consecutive microbatches whose encoders and generators run side by side, one on each lane.

If stages have lanes (see `StageNode`), microbatch m runs on lane m mod lanes. A unit has as many microbatches as there
are lanes, and takes as long as its most expensive one. So the microbatches of a unit wait for each other as the dp
ranks of a microbatch do, and samples are shared among them in the same way ("BigMac", §5, leaves it to future work).
Without lanes a unit is one microbatch.

Legend: C costs that vary, M microbatches, U whole units, K cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mmjax.schedule.graph import StageGraph


@dataclass(frozen=True)
class Units:
    """`microbatches` cut into units of `size`; the last unit may be shorter, and then it stays last."""

    size: int
    microbatches: int

    @classmethod
    def of(cls, graph: StageGraph, stages: Iterable[str], microbatches: int) -> Units:
        """The units of a step: whole turns of the lanes of each of the stages with the names `stages`."""
        return cls(math.lcm(*(graph.stage(name).lanes for name in stages)), microbatches)

    @property
    def count(self) -> int:
        """Number of units."""
        return -(-self.microbatches // self.size)

    @property
    def whole(self) -> int:
        """Number of units with all of their microbatches, which can change places."""
        return self.microbatches // self.size

    @property
    def kept(self) -> int:
        """Number of shorter units, 0 or 1, which stay last."""
        return self.count - self.whole

    def members(self, unit: int) -> range:
        """The microbatches of a unit."""
        return range(unit * self.size, min((unit + 1) * self.size, self.microbatches))

    def expand(self, order_UK: np.ndarray) -> np.ndarray:
        """The order of all microbatches [M, K] from an order of the whole units [U, K]; a shorter unit stays last."""
        order_MK = (order_UK[:, None] * self.size + np.arange(self.size)[:, None]).reshape(-1, order_UK.shape[-1])
        last_M1 = np.arange(len(order_MK), self.microbatches)[:, None]
        return np.concatenate([order_MK, np.repeat(last_M1, order_UK.shape[-1], axis=1)])

    def rising(self, sizes_CMK: np.ndarray) -> np.ndarray:
        """The whole units from the smallest to the largest [U, K], by the sum of all costs of their microbatches."""
        return np.argsort(self.longest(sizes_CMK.sum(axis=0), 1), axis=0, kind="stable")

    def longest(self, sizes_MK: np.ndarray, lanes: int) -> np.ndarray:
        """The largest sum over the microbatches of a lane, in each whole unit [U, K].

        lanes: number of lanes, a divisor of `size`; microbatch m is on lane m mod `lanes`.
        """
        cases = sizes_MK.shape[-1]
        turns = sizes_MK[: self.whole * self.size].reshape(self.whole, self.size // lanes, lanes, cases)
        return turns.sum(axis=1).max(axis=1)
