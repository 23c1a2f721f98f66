"""The best plan: exact, by branch and bound over the pace of the pipeline.

The slowest stage sets the pace. For a dp of the LLM and a pace t, `Space.least_work_at` gives the least warm-up f(t) of
plans whose stages take at most t, and it falls with t. So for paces strictly between a and b no step is shorter than
f(b) + (n - 1)·(the pace after a), and if f(a) = f(b), no pace of the interval is better than a. The intervals of all dp
are in one queue, the most promising first. The search ends when no interval can match the best plan so far. Paces are
the possible stage times of rows. There are finitely many, so the search ends with the optimum. (The paper solves a
convex program for each combination of tp and dp, and rounds; `relaxation` uses that program for a bound.)
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from mmjax.planner.cost import ROUNDING, Plan
from mmjax.planner.fit import DoesNotFit, why
from mmjax.planner.problem import MixedProblem, Problem
from mmjax.planner.space import Space, spaces

TIE = 4 * ROUNDING
PROBES = (1.0, 1.05, 1.15, 1.4, 2.0, 4.0, 16.0)
"""Multiples of the least pace that are tried first, so that the search starts from a good plan."""

Interval = tuple[float, int, int, int, float, float]
"""(bound, space, first pace, last pace, least work at the first and at the last)."""


@dataclass(kw_only=True)
class _Search:
    spaces: list[Space]
    best: float = math.inf
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    paces: dict[int, np.ndarray] = field(default_factory=dict)
    queue: list[Interval] = field(default_factory=list)

    def evaluate(self, index: int, pace: float) -> float:
        """The least work of space `index` at `pace`; records the step if it is as good as the best."""
        space = self.spaces[index]
        work = space.least_work_at(pace)
        step = space.step(work, pace)
        if step <= self.best * (1 + TIE):
            self.steps.append((step, index, pace))
            self.best = min(self.best, step)
        return work

    def open(self, index: int) -> None:
        """Tries a few paces of space `index` and queues the interval of paces that may be better."""
        space = self.spaces[index] = self.spaces[index].pruned()
        if not space.steps:  # one microbatch: no pace matters
            self.evaluate(index, math.inf)
            return
        for factor in PROBES if math.isinf(self.best) else ():
            self.evaluate(index, space.least_pace * factor)
        slowest = (self.best * (1 + TIE) - space.least_work) / space.steps
        paces = space.paces(space.least_pace, slowest)
        if not len(paces):
            return
        self.paces[index] = paces
        last = self.evaluate(index, float(paces[-1]))
        if last + space.steps * float(paces[0]) <= self.best * (1 + TIE):
            first = self.evaluate(index, float(paces[0]))
            self.push(index, 0, len(paces) - 1, first_work=first, last_work=last)

    def push(self, index: int, first: int, last: int, *, first_work: float, last_work: float) -> None:
        """Queues the paces strictly between two if one of them may be as good as the best."""
        if last - first < 2 or first_work == last_work:
            return
        bound = last_work + self.spaces[index].steps * float(self.paces[index][first + 1])
        if bound <= self.best * (1 + TIE):
            heapq.heappush(self.queue, (bound, index, first, last, first_work, last_work))

    def run(self) -> None:
        """Searches until no space and no interval can be as good as the best."""
        unopened = sorted(range(len(self.spaces)), key=lambda index: self.spaces[index].bound, reverse=True)
        while unopened or self.queue:
            limit = self.best * (1 + TIE)
            space_bound = self.spaces[unopened[-1]].bound if unopened else math.inf
            if min(space_bound, self.queue[0][0] if self.queue else math.inf) > limit:
                return
            if not self.queue or space_bound <= self.queue[0][0]:
                self.open(unopened.pop())
                continue
            _, index, first, last, first_work, last_work = heapq.heappop(self.queue)
            middle = (first + last) // 2
            work = self.evaluate(index, float(self.paces[index][middle]))
            self.push(index, first, middle, first_work=first_work, last_work=work)
            self.push(index, middle, last, first_work=work, last_work=last_work)


def best_plan(problem: Problem | MixedProblem) -> Plan:
    """The plan with the shortest step (Eq. 1 and 2) that fits into memory; of equal ones, the one on fewest devices.

    A `Plan` has degrees by module name: `plan.modules["llm"].tp`. problem: as `read_problem` gives it.

    Raises:
      DoesNotFit: there is none; the message names a module, what it lacks, and remedies.
    """
    nonempty = list(spaces(problem))
    if not nonempty:
        raise DoesNotFit(why(problem))
    search = _Search(spaces=nonempty)
    search.run()
    return _smallest(problem, search)


def best_plans(
    problem: Problem | MixedProblem, within: float = 0.25, kinds: int = 1, below: float = math.inf
) -> list[Plan]:
    """The best plan for each dp of the LLM and each assignment of modules to kinds of device, the shortest step first.

    The result is [] if no plan fits.

    Args:
      problem: as `read_problem` or `choose.problems` gives it.
      within: plans whose step is certainly longer than the best by more than this share of it are left out.
      kinds: the least number of kinds of device in use.
      below: seconds; plans whose step is certainly longer may be left out.
    """
    plans, best = [], math.inf
    for space in sorted(spaces(problem, kinds=kinds), key=lambda space: space.bound):
        if space.bound > min(best * (1 + within), below):
            break
        search = _Search(spaces=[space])
        search.run()
        plans.append(_smallest(problem, search))
        best = min(best, search.best)
    return sorted(plans, key=lambda plan: (plan.objective, plan.devices))


def _smallest(problem: Problem | MixedProblem, search: _Search) -> Plan:
    """The plan on fewest devices among the best plans of `search`."""
    limit = search.best * (1 + TIE)
    best: tuple[int, float, int] | None = None
    plan = None
    for step, index, pace in sorted(set(search.steps)):
        if step > limit:
            break
        space = search.spaces[index]
        devices, degrees = space.chosen(pace, limit)
        key = (devices, step, space.llm_dp)
        if best is None or key < best:
            ordered = {name: degrees[name] for name in problem.names}
            best, plan = key, Plan(problem=problem, modules=ordered, kinds=space.kinds)
    assert plan is not None, "a space that is not empty has a plan at its slowest pace"
    return plan
