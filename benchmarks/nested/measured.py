"""The systems with real processes: one for each rank of a small pipeline, whose ops sleep for their modelled time.

A vision encoder whose microbatches differ, an LLM, and in the second model a generator. The measurement is of
the time that ops wait for one another (`benchmarks.replay`), not of the speed of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.nested.systems import SYSTEMS, Modules, System, Trial, fastest, trials
from benchmarks.schedules import LAYER, MOVE, ONCE
from benchmarks.simulate import MOST_REPEATS, shortest
from mmjax.schedule.placements import TimedModule
from mmjax.schedule.simulate import Timeline

DEPTHS = (4,)
MICROBATCHES = 16
FACTORS = (0.4, 1.6, 0.7, 1.9, 0.3, 1.2, 0.5, 1.4, 1.7, 0.6, 1.0, 0.8, 0.2, 1.5, 1.3, 0.9)
"""Seconds of each microbatch of an encoder over their mean; a generator has them in reverse."""

_LLM = TimedModule(name="llm", layers=16, seconds=LAYER)
_VISION = TimedModule(name="vision", layers=8, seconds=LAYER, factors=FACTORS)
_GENERATOR = TimedModule(name="generator", layers=8, seconds=LAYER, factors=FACTORS[::-1])
MODELS = {
    "encoder": Modules(encoders=(_VISION,), llm=_LLM),
    "encoder and generator": Modules(encoders=(_VISION,), llm=_LLM, generators=(_GENERATOR,)),
}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A system's step, simulated and measured."""

    model: str
    trial: Trial
    measured: Timeline

    @property
    def ratio(self) -> float:
        """Measured over simulated seconds."""
        return self.measured.makespan / self.trial.timeline.makespan


def replayed(rounds: int) -> Iterator[Replayed]:
    """Yields every system on every model that it can train; the shortest of up to three measured steps counts."""
    for model, modules in MODELS.items():
        for system in SYSTEMS:
            if system.generates or not modules.generators:
                trial = chosen(system, modules)
                simulated, repeats = trial.timeline, min(rounds, MOST_REPEATS)
                measured = shortest(simulated.schedule, trial.costs, simulated.makespan, repeats)
                yield Replayed(model=model, trial=trial, measured=measured)


def chosen(system: System, modules: Modules) -> Trial:
    """The system's trial with the shortest simulated step."""
    if system.by_cost:
        modules = modules.ordered(modules.by_cost(MICROBATCHES))
    best = fastest(trials(system, modules, MICROBATCHES, DEPTHS, move=MOVE, once=ONCE))
    assert best is not None
    return best
