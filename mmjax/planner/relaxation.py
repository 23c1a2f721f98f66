"""A lower bound on the step: the plan for a real number of devices.

For fixed tp and dp of every module and any real number of devices x_m, the step is convex in x (Zhang et al.,
"DistTrain", §4.3): the maximum and sum of terms a / x_m. The sum is the warm-up, which tp and dp determine (Eq. 1);
`program` minimizes the maximum with cvxpy. The relaxation of a problem is the best over all combinations of tp and dp.
Only one program is solved: a search over the pace, as in ``mmjax.planner.search`` but with real numbers of stages,
finds the best combination, and a bound at most `SLACK` below it.

If a module has few stages, real numbers of stages make the bound loose. Numbers of stages below `real_from` stay whole,
which tightens it; the devices of such modules are constants of the program.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mmjax.models.config import LLM
from mmjax.planner.cost import ROUNDING, Degrees, activation_bytes, weight_bytes
from mmjax.planner.group import first_real
from mmjax.planner.problem import MixedProblem, Problem
from mmjax.planner.space import Space, spaces

SLACK = 1e-4
"""The largest relative distance of the bound below the optimum of the relaxation."""


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """The optimum of a relaxation.

    Attributes:
      bound: seconds; no plan takes less.
      step: seconds of the best combination, by cvxpy; at most `SLACK` above the bound.
      devices: number of devices by module name, a real number.
    """

    bound: float
    step: float
    devices: Mapping[str, float] = field(hash=False)


def relax(problem: Problem | MixedProblem, real_from: float = 1.0) -> Relaxed | None:
    """The relaxation of `problem` in which pp is real from `real_from` on; None if it does not fit either.

    Its `bound` is a number of seconds that no plan's step goes below, and `devices` the real numbers of devices.

    Args:
      problem: as `read_problem` gives it, with an infinite bandwidth and `chunks` of 1.
      real_from: the pp from which on it may be any real number; smaller ones are whole.
    """
    nonempty = [space.pruned() for space in spaces(problem, real_from)]
    if not nonempty:
        return None
    bound, space, pace = _best(nonempty)
    _, chosen = space.chosen(pace, -math.inf)
    step, devices = program(problem, chosen, real_from, space.kinds)
    return Relaxed(bound=bound, step=step, devices=devices)


def _best(spaces: list[Space]) -> tuple[float, Space, float]:
    """A bound on all spaces, and the space and pace of a combination that is at most `SLACK` above it."""
    best, best_space, best_pace = math.inf, spaces[0], math.inf

    def work_at(space: Space, pace: float) -> float:
        nonlocal best, best_space, best_pace
        work = space.least_work_at(pace)
        step = space.step(work, pace)
        if step < best:
            best, best_space, best_pace = step, space, pace
        return work

    queue: list[tuple[float, int, float, float]] = []  # (bound, space, fastest, slowest pace)
    for index, space in enumerate(spaces):
        slowest = 2 * space.slowest_pace if space.steps else math.inf
        work = work_at(space, slowest)
        fastest = min(space.least_pace, slowest)
        queue.append((space.step(work, fastest), index, fastest, slowest))
    heapq.heapify(queue)
    while queue[0][0] < best * (1 - SLACK / 2):
        _, index, fastest, slowest = heapq.heappop(queue)
        space, middle = spaces[index], math.sqrt(fastest * slowest)
        for low, high in ((fastest, middle), (middle, slowest)):
            bound = work_at(space, high) + space.steps * low
            if math.isfinite(bound):
                heapq.heappush(queue, (bound, index, low, high))
    return min(queue[0][0], best), best_space, best_pace


def program(
    problem: Problem | MixedProblem,
    degrees: Mapping[str, Degrees],
    real_from: float = 1.0,
    kinds: Mapping[str, str] | None = None,
) -> tuple[float, dict[str, float]]:
    """The shortest step with given tp and dp and real pp: its seconds, and by module the real number of devices.

    Each kind of device has a program of its own, and the slowest sets the pace.

    Args:
      problem: as `read_problem` gives it, with an infinite bandwidth and `chunks` of 1.
      degrees: by module name, tp and dp, and a pp that counts only if it is below `real_from`: then it stays. Such as
        {"llm": Degrees(tp=4, dp=2, pp=1)}, with every module of the problem.
      real_from: other pp may be any real number from here on.
      kinds: kind of device by module name, {"llm": "h100"}, for a `MixedProblem`; None for a `Problem`.

    Raises:
      ValueError: no number of devices fits.
    """
    llm_dp, by_kind = degrees[LLM].dp, dict[str, list[str]]()
    for name in degrees:
        by_kind.setdefault((kinds or {}).get(name, ""), []).append(name)
    devices: dict[str, float] = {}
    work, pace = 0.0, 0.0
    for kind, names in by_kind.items():
        on_kind = {name: degrees[name] for name in names}
        kind_work, kind_pace, kind_devices = _program(problem.kinds[kind], on_kind, llm_dp, real_from)
        work, pace, devices = work + kind_work, max(pace, kind_pace), devices | kind_devices
    return work + (problem.microbatches(llm_dp) - 1) * pace, devices


def _program(
    problem: Problem, degrees: Mapping[str, Degrees], llm_dp: int, real_from: float
) -> tuple[float, float, dict[str, float]]:
    """Work, pace and devices by module, for the modules on one kind of device."""
    names = list(degrees)
    work, unit, least, most = (np.zeros(len(names)) for _ in range(4))
    for index, name in enumerate(names):
        tp, dp, costs = degrees[name].tp, degrees[name].dp, problem.modules[name]
        unit[index] = tp * dp
        work[index] = llm_dp * problem.microbatch / dp * costs.seconds[tp]
        room = problem.memory - activation_bytes(costs, tp, llm_dp / dp)
        start = first_real(np.array(costs.depths), real_from)
        least[index] = unit[index] * max(start, _ratio(weight_bytes(costs, tp, dp), room))
        most[index] = unit[index] * costs.layers if costs.layers else math.inf
        if degrees[name].pp < start:
            least[index] = most[index] = degrees[name].devices
    if least.sum() > problem.devices * (1 + ROUNDING):
        raise ValueError(f"tp and dp of {', '.join(names)} do not fit on {problem.devices} devices with real pp")
    devices = divide(work * unit, least, most, problem.devices)
    pace = float((work * unit / devices).max())
    return float(work.sum()), pace, dict(zip(names, devices.tolist(), strict=True))


def divide(load: np.ndarray, least: np.ndarray, most: np.ndarray, devices: float) -> np.ndarray:
    """Numbers of devices x with the smallest max(load / x), from `least` to `most`, at most `devices` in all.

    Arrays, the result too, are float of shape [M], a number for each module. A module with `least` = `most` is no
    variable: a solver prefers ranges with an interior.

    Args:
      load: seconds times devices of each module, above 0 for those with a choice.
      least: the fewest devices of each module.
      most: the most devices of each module; infinite for no bound.
      devices: number of devices for all modules together, no fewer than the sum of `least`.
    """
    free = np.flatnonzero(most > least * (1 + ROUNDING))
    if not len(free):
        return least
    import cvxpy as cp  # slow to import, so only where it is needed

    result = least.copy()
    available = devices - (least.sum() - least[free].sum())
    load, least, most = load[free], least[free], most[free]
    # The inverse of the pace as a variable makes the program linear: x ≥ load / pace. Both are scaled to be near one: x
    # by the module's devices if all stages took equally long (or `least`), the inverse by its value in that case.
    scale = np.maximum(available * load / load.sum(), least)
    units, speed = cp.Variable(len(free)), cp.Variable()
    limits: list[cp.Constraint] = [(scale / available) @ units <= 1, units >= least / scale]
    limits.append(units >= (available * load / load.sum() / scale) * speed)
    if len(bounded := np.flatnonzero(np.isfinite(most))):
        limits.append(units[bounded] <= (most / scale)[bounded])
    cp.Problem(cp.Maximize(speed), limits).solve()
    result[free] = scale * np.asarray(units.value, dtype=float)
    return result


def _ratio(weights: float, room: float) -> float:
    if weights == 0:
        return 0.0 if room >= 0 else math.inf
    return weights / room if room > 0 else math.inf
