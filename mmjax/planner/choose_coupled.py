"""Chooses layouts of a configuration by loose coupling: Algorithm 1 of Cornstarch (`loosely_coupled`)."""

from __future__ import annotations

from collections import defaultdict

from mmjax.models.config import LLM
from mmjax.planner.candidates import Candidate, apart
from mmjax.planner.choose import PlanChoice, problems, ranked
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import RowsOf, exact, finalists, proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import Fleet
from mmjax.planner.loosely_coupled import coupled_plans
from mmjax.planner.work import Work


def choose_coupled(work: Work, fleet: Fleet, *, rows_of: RowsOf | None = None) -> PlanChoice:
    """Simulates, for each number of LLM stages, the fastest layouts with encoders in stages as long as the LLM's.

    Every module is on devices of its own, and the schedule is 1F1B. For each number of LLM stages, the layouts that are
    fastest in closed form and fit into memory are tried until a run accepts one. The choice has the estimates of all
    accepted layouts, the shortest step first.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      fleet: the devices, such as `Fleet(kinds={"": DeviceKind(clock=clock, devices=16, memory=80e9)})`; of several
        kinds each module may have any.
      rows_of: returns the exact rows of a candidate's microbatches, by module (rows on all ranks, positions of a row),
        and raises ConfigError if a run would refuse the candidate; None makes rows proportional to samples.

    Raises:
      ConfigError: there are too many kinds to try all assignments of modules.
      DoesNotFit: there is no such layout; the message says why.
    """
    rows_of = rows_of or proportional(work)
    by_stages: defaultdict[int, list[Candidate]] = defaultdict(list)
    for problem in problems(work, fleet):
        for plan in coupled_plans(problem):
            by_stages[plan.modules[LLM].pp].append(apart(work, plan, fleet))
    estimates, misses = list[Estimate](), list[str]()
    for candidates in by_stages.values():
        try:
            fastest = finalists(work, fleet, candidates)
        except DoesNotFit as reason:
            misses.append(str(reason))
            continue
        accepted = (exact(work, fleet, candidate, rows_of) for candidate in fastest)
        estimates += next((estimate for estimate in accepted if estimate), [])
    if not estimates:
        raise DoesNotFit(misses[0] if misses else _nothing(fleet))
    return ranked(fleet, estimates, {})


def _nothing(fleet: Fleet) -> str:
    return (
        f"on {fleet.devices} devices there is no number of llm stages with which all other modules fit in stages as "
        "short as the llm's; what would make it fit: more devices, or --strategy=exact"
    )
