"""Plans by loose coupling: the LLM first, and encoders in stages as long as its own.

This is Algorithm 1 of Jang et al., "Cornstarch", §5.2. For each number i of LLM stages, one stage takes t_i for the
forward and backward of a microbatch. Every encoder then gets the fewest stages that take at most t_i, independently of
the other modules, and the combination with the shortest simulated step wins. The paper leaves tp and dp to "any
unimodal auto parallelization algorithm". Here all tp and dp of the LLM are tried; an encoder takes the tp and dp with
which it needs the fewest devices, and of equal ones those with the shortest pass through all of its stages.

The LLM always sets the pace. It may be better that an encoder is slower, since devices are worth more in the LLM; or an
encoder may have too few layers to be as fast. Then `search` finds a better plan, or a plan where there is none here. It
never finds a worse one (Eq. 1, 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mmjax.models.config import LLM
from mmjax.planner.cost import ROUNDING, Degrees, Plan
from mmjax.planner.fit import DoesNotFit, why
from mmjax.planner.group import DegreeTable
from mmjax.planner.problem import MixedProblem, Problem
from mmjax.planner.space import Space, spaces
from mmjax.schedule.placements import TimedModule, apart
from mmjax.schedule.schedules import ONE_F_ONE_B, make_schedule
from mmjax.schedule.simulate import CostKey, Costs, simulate

MOST_STAGES = 512
"""The most LLM stages that are tried: without a bound by layers, memory and devices may allow any number."""
TIE = 4 * ROUNDING


def best_coupled(problem: Problem | MixedProblem) -> Plan:
    """The plan of Algorithm 1 with the shortest simulated step; of equal ones, the one on fewest devices.

    In such a plan all other modules have stages no longer than the LLM's.

    problem: as `read_problem` gives it; has an infinite bandwidth and `chunks` of 1, since neither is simulated.

    Raises:
      DoesNotFit: there is none; the message says whether any other plan exists.
    """
    plans = sorted(coupled_plans(problem), key=lambda plan: (least_seconds(plan), plan.devices))
    best, shortest = None, math.inf
    for plan in plans:
        if least_seconds(plan) > shortest * (1 + TIE):
            break
        seconds = simulated_seconds(plan)
        equal = best is not None and abs(seconds - shortest) <= shortest * TIE
        if best is None or (plan.devices < best.devices if equal else seconds < shortest):
            best, shortest = plan, seconds
    if best is not None:
        return best
    if next(spaces(problem), None) is None:
        raise DoesNotFit(why(problem))
    raise DoesNotFit(
        "with no number of llm stages do all other modules fit in stages as short as the llm's; what would make it "
        "fit: more devices, modules of more layers, or --strategy=exact, which has a plan"
    )


def coupled_plans(problem: Problem | MixedProblem, kinds: int = 1) -> Iterator[Plan]:
    """Yields a plan for each layout of the LLM with which all other modules fit, in no order; nothing if there is none.

    The other modules have stages no longer than the LLM's, on as few devices as possible.

    Args:
      problem: as `read_problem` or `choose.problems` gives it.
      kinds: the least number of kinds of device in use.
    """
    for space in spaces(problem, kinds=kinds):
        for llm in _llm_layouts(space):
            if modules := _coupled(space, *llm):
                ordered = {name: modules[name] for name in problem.names}
                yield Plan(problem=problem, modules=ordered, kinds=space.kinds)


def _llm_layouts(space: Space) -> Iterator[tuple[Degrees, float]]:
    """Every layout of the LLM that fits into memory, and the seconds of one of its stages."""
    group = space.groups[space.kinds[LLM]]
    rows = group.rows[LLM]
    encoder_devices = sum(table.fewest for name, table in group.rows.items() if name != LLM)
    for row, (tp, dp, work, least) in enumerate(zip(rows.tp, rows.dp, rows.work, rows.least, strict=True)):
        most = min(MOST_STAGES, int((group.devices - encoder_devices) // rows.unit[row]))
        depths = rows.depths if len(rows.depths) else range(1, most + 1)
        for pp in (int(pp) for pp in depths if least <= pp <= most):
            yield Degrees(tp=int(tp), dp=int(dp), pp=pp), float(work) / pp


def _coupled(space: Space, llm: Degrees, pace: float) -> dict[str, Degrees] | None:
    """Degrees of all modules with `llm` for the LLM and stages of at most `pace` seconds; None if they do not fit."""
    chosen = {LLM: llm}
    for group in space.groups.values():
        for name, rows in group.rows.items():
            degrees = llm if name == LLM else _narrowest(rows, pace)
            if degrees is None:
                return None
            chosen[name] = degrees
        if sum(chosen[name].devices for name in group.rows) > group.devices:
            return None
    return chosen


def _narrowest(rows: DegreeTable, pace: float) -> Degrees | None:
    """The layout on fewest devices with stages of at most `pace` seconds; of equal ones, the one with least work."""
    devices = rows.unit * rows.stages(pace)
    row = int(np.lexsort((rows.work, devices))[0])
    return rows.degrees(row, pace) if np.isfinite(devices[row]) else None


# ---- the step --------------------------------------------------------------------------------------------------------


def least_seconds(plan: Plan) -> float:
    """A lower bound on the seconds of a step (`simulated_seconds`) of a plan of `coupled_plans`: the LLM sets the pace.

    The last LLM stage works on every microbatch. Before this, the first microbatch passes through an encoder forward;
    after it, the last one passes through an encoder backward.
    """
    llm, count = plan.modules[LLM], plan.microbatches
    passes = [_pass_seconds(plan, name) for name in plan.modules if name != LLM] or [(0.0, 0.0)]
    forward, backward = (max(seconds) for seconds in zip(*passes, strict=True))
    return plan.stage_seconds(LLM) * (llm.pp - 1 + count) + (forward + backward)


def simulated_seconds(plan: Plan) -> float:
    """Seconds of a 1F1B step in which every module but the LLM is an encoder before it, side by side; without moves.

    A long step is simulated until its pipeline is full; each further microbatch takes as long as the last.

    plan: degrees of each module, as `coupled_plans` yields it.
    """
    passes = {name: _pass_seconds(plan, name) for name in plan.modules}
    *encoders, llm = (
        TimedModule(name=name, layers=plan.modules[name].pp, seconds=1.0, trainable=passes[name][1] > 0)
        for name in sorted(plan.modules, key=lambda name: name == LLM)
    )
    graph = apart(encoders, llm, {name: degrees.pp for name, degrees in plan.modules.items()}).graph
    seconds: dict[CostKey, float] = {}
    for node in graph.stages:
        depth, (forward, backward) = plan.modules[node.module].pp, passes[node.module]
        seconds["F", node.name, False] = forward / depth
        seconds["B", node.name, False] = backward / depth
    costs = Costs(seconds=seconds)

    def step(count: int) -> float:
        return simulate(make_schedule(ONE_F_ONE_B, graph, count, costs), costs).makespan

    enough = max(graph.distance(node.name) for node in graph.stages) + 4
    if plan.microbatches <= enough + 1:
        return step(plan.microbatches)
    full = step(enough + 1)
    return full + (full - step(enough)) * (plan.microbatches - enough - 1)


def _pass_seconds(plan: Plan, name: str) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a microbatch through all stages of a module."""
    degrees, costs = plan.modules[name], plan.costs(name)
    samples = plan.modules[LLM].dp * plan.problem.microbatch / degrees.dp
    return samples * costs.forward[degrees.tp], samples * costs.backward[degrees.tp]
