"""Units of a step: runs of consecutive microbatches whose encoders and generators compute side by side, one a lane.

Where stages have lanes (see `StageNode`), microbatch m runs on lane m mod lanes. A unit, as many microbatches as there
are lanes, then takes as long as its most expensive microbatch. So a unit is to its microbatches what a microbatch is to
its dp ranks, and samples are shared out in the same way ("BigMac", §5, leaves it to future work). Without
lanes a unit is a microbatch.

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
    """How `microbatches` are cut into units of `size`; the last unit may have fewer, and then no other can be last."""

    size: int
    microbatches: int

    @classmethod
    def of(cls, graph: StageGraph, stages: Iterable[str], microbatches: int) -> Units:
        """The units of a step: whole turns of the lanes of each of `stages`."""
        return cls(math.lcm(*(graph.stage(name).lanes for name in stages)), microbatches)

    @property
    def count(self) -> int:
        """Number of units."""
        return -(-self.microbatches // self.size)

    @property
    def whole(self) -> int:
        """Number of units that have all of their microbatches: those that can change places."""
        return self.microbatches // self.size

    @property
    def kept(self) -> int:
        """Number of units that have not, 0 or 1: they stay last."""
        return self.count - self.whole

    def members(self, unit: int) -> range:
        """The microbatches of a unit."""
        return range(unit * self.size, min((unit + 1) * self.size, self.microbatches))

    def expand(self, order_UK: np.ndarray) -> np.ndarray:
        """From an order of the whole units that of all microbatches [M, K]: a unit stays together, the rest is last."""
        order_MK = (order_UK[:, None] * self.size + np.arange(self.size)[:, None]).reshape(-1, order_UK.shape[-1])
        rest_M1 = np.arange(len(order_MK), self.microbatches)[:, None]
        return np.concatenate([order_MK, np.repeat(rest_M1, order_UK.shape[-1], axis=1)])

    def rising(self, sizes_CMK: np.ndarray) -> np.ndarray:
        """The whole units from the smallest to the largest [U, K], by all costs of their microbatches."""
        return np.argsort(self.longest(sizes_CMK.sum(axis=0), 1), axis=0, kind="stable")

    def longest(self, sizes_MK: np.ndarray, lanes: int) -> np.ndarray:
        """Of the sums over the microbatches of a lane, the largest in each whole unit [U, K]."""
        cases = sizes_MK.shape[-1]
        turns = sizes_MK[: self.whole * self.size].reshape(self.whole, self.size // lanes, lanes, cases)
        return turns.sum(axis=1).max(axis=1)
