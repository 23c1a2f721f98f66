"""How far losses of runs may differ. Written before any layout was compared.

Runs on one device whose samples are summed in other orders differ by rounding alone. Their spread is the largest
difference of two of them at any step. A layout sums in an order of its own too: its losses may differ from those of the
first of these runs by `SPREADS` times that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from studies.parity.runs import ORDERS, RUNS, SPREADS, Run, order_name

Losses = Mapping[str, Sequence[float]]
"""Losses of each step by the run's name."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run beside the run on one device.

    Attributes:
      run: the run.
      gaps: absolute difference of the losses of each step.
      bound: what none of them may exceed; 0 without runs in other orders.
    """

    run: Run
    gaps: Sequence[float]
    bound: float

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.gaps)

    @property
    def within(self) -> bool:
        """Whether no difference exceeds the bound."""
        return self.largest <= self.bound


def orders_of(run: Run, losses: Losses) -> list[Sequence[float]]:
    """Losses of the runs on one device that have the run's dtype and trained modules.

    Runs without results, or of another number of steps than the reference, are left out.
    """
    names = [order_name(run.dtype, order, trained=run.trained) for order in range(ORDERS)]
    steps = len(losses.get(run.reference, ()))
    return [losses[name] for name in names if name in losses and len(losses[name]) == steps]


def spread(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference of two curves at any step; 0 of fewer than two."""
    return max((max(step) - min(step) for step in zip(*curves, strict=True)), default=0.0)


def compared(losses: Losses) -> list[Compared]:
    """Each run beside its reference on one device.

    Runs in other orders are left out, and runs whose reference has no result or another number of steps.
    """
    result = []
    for name, run in RUNS.items():
        reference = losses.get(run.reference, ())
        if run.group == "order" or name not in losses or len(losses[name]) != len(reference):
            continue
        gaps = [abs(a - b) for a, b in zip(losses[name], reference, strict=True)]
        result.append(Compared(run=run, gaps=gaps, bound=SPREADS * spread(orders_of(run, losses))))
    return result
