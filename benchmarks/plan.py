"""Times of planning, and the quality of plans.

Times are those of `best_plan` in a warm process, without imports, the profile and reading a file. The problems are
DistTrain's MLLM-72B (Zhang et al., SIGCOMM '25, §7 and Table 3) from an analytic profile: an LLM of Llama3-70B's shape
over 8,192 tokens, ten pictures of 1024 × 1024 a sample through ViT-H, and ten from a diffusion transformer of the size
of SD 2.1. Nothing here was measured on an accelerator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.every_plan import best_by_trying, drawn_problem
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.configurable import from_preset
from mmjax.models.dit.config import DiTConfig
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.planner.accelerators import A100, accelerator
from mmjax.planner.analytic import module_costs, module_work
from mmjax.planner.candidates import COLOCATED, HOMOGENEOUS, NON_COLOCATED
from mmjax.planner.choose import choose, choose_on
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.cost import Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.problem import Problem, parse_problem
from mmjax.planner.relaxation import relax
from mmjax.planner.search import best_plan
from mmjax.planner.work import Work

TOKENS, PICTURES, SIDE = 8192, 10, 1024
PAPER = {(1296, 1920): 922, (648, 960): 641, (324, 480): 441, (112, 240): 133}
"""Milliseconds of Table 3 by (devices, global batch)."""
TEN_THOUSAND = (10_000, 1920)
MODES = (HOMOGENEOUS, COLOCATED, NON_COLOCATED)
"""The timed modes: making a nested schedule takes longer than planning all of these."""
TWO_KINDS, TWO_KINDS_BATCH = {"h100": 112, "l20": 192}, 240
"""An L20 has an eighth of an H100's FLOPs, and half of its memory."""
MOST, MOST_SIMULATED, MOST_OF_TEN_THOUSAND = 90.0, 300.0, 1000.0
"""Limits on milliseconds of planning."""
MOST_GAP = 1.0
"""Limit on the percent by which a step is above a bound."""
REAL_FROM = 64
"""Numbers of stages below this are integers in the closer bound. With real numbers, such as 34.5 stages, the bound is
1 to 8 % too low for modules with few stages."""
LARGE, SMALL = 1000, 300
"""Devices from which on a plan with any pp is also close to the plain relaxation; number of small problems."""


def shapes_72b() -> dict[str, dict[str, Any]]:
    """FLOPs, parameters and sizes of MLLM-72B's modules, for one sample."""
    llm = from_preset(DecoderConfig, "llama3-70b")
    vit = from_preset(ViTConfig, "vit-h14")
    generator = DiTConfig(layers=34, width=1536, heads=24, mlp=6144, patch=2, channels=4)
    patches = [(SIDE // vit.patch) ** 2] * PICTURES
    latents = [(SIDE // 8 // generator.patch) ** 2] * PICTURES
    return {
        "vision": {
            "flops": module_of(vit).forward_flops(patches), "parameters": module_of(vit).parameters(),
            "layers": vit.layers, "tokens": sum(patches), "width": vit.width,
        },
        "llm": {
            "flops": module_of(llm).forward_flops([TOKENS]), "parameters": module_of(llm).parameters(),
            "layers": llm.layers, "tokens": TOKENS, "width": llm.width,
        },
        "generator": {
            "flops": module_of(generator).forward_flops(latents), "parameters": module_of(generator).parameters(),
            "layers": generator.layers, "tokens": sum(latents), "width": generator.width,
        },
    }  # fmt: skip


def mllm_72b(devices: int, batch: int, *, any_pp: bool = False) -> Problem:
    """MLLM-72B on A100s, everything trained; with `any_pp` a stage need not be whole layers, as in the paper."""
    modules = {name: module_costs(A100, **shape) for name, shape in shapes_72b().items()}
    if any_pp:
        modules = {name: replace(costs, layers=0) for name, costs in modules.items()}
    return Problem(devices=devices, global_batch=batch, microbatch=1, memory=A100.memory, modules=modules)


def work_72b(batch: int) -> Work:
    """MLLM-72B for planning all modes, with the activations of 1F1B and communication."""
    after = {"vision": (), "llm": ("vision",), "generator": ("llm",)}
    modules = {name: module_work(name, after=after[name], **shape) for name, shape in shapes_72b().items()}
    return Work(modules=modules, global_batch=batch)


def bench_plan(rounds: int) -> Iterator[Row]:
    """Yields times and gaps of MLLM-72B, and small problems beside exhaustive search."""
    sizes = [(devices, batch, any_pp) for devices, batch in (*PAPER, TEN_THOUSAND) for any_pp in (True, False)]
    problems = [mllm_72b(devices, batch, any_pp=any_pp) for devices, batch, any_pp in sizes]
    for problem, (plan, took) in zip(problems, timed_plans(problems, rounds), strict=True):
        yield from plan_rows(problem, plan, took)
    for devices, batch in (*PAPER, TEN_THOUSAND):
        yield from choice_rows(devices, batch, rounds)
    yield from kinds_rows(rounds)
    yield from small_rows(SMALL)


def plan_rows(problem: Problem, plan: Plan, milliseconds: float) -> Iterator[Row]:
    """The rows of one problem that was planned in `milliseconds`."""
    size = (problem.devices, problem.global_batch)
    any_pp = not problem.modules["llm"].layers
    name = f"{size[0]} devices, batch {size[1]}, {'any pp' if any_pp else 'whole layers'}"
    limit = at_most(MOST_OF_TEN_THOUSAND if size == TEN_THOUSAND else MOST)
    yield Row(bench="plan", case=f"{name}: planning", value=milliseconds, unit="ms", target=limit)
    if size in PAPER:
        yield Row(bench="plan", case=f"{name}: planning / DistTrain's", value=milliseconds / PAPER[size], unit="ratio")
    yield Row(bench="plan", case=f"{name}: step, analytic", value=plan.objective, unit="s")
    yield Row(bench="plan", case=f"{name}: devices used", value=plan.devices, unit="devices")
    close = at_most(MOST_GAP)
    for real_from, target in ((1, close if any_pp and problem.devices >= LARGE else None), (REAL_FROM, close)):
        relaxed = relax(problem, real_from)
        assert relaxed is not None
        bound_name = "relaxation" if real_from == 1 else f"relaxation of pp ≥ {real_from}"
        gap = (plan.objective / relaxed.bound - 1) * 100
        yield Row(bench="plan", case=f"{name}: above the {bound_name}", value=gap, unit="%", target=target)


def choice_rows(devices: int, batch: int, rounds: int) -> Iterator[Row]:
    """The rows of one size: modes are planned, and their best layouts simulated with real schedules."""
    work = work_72b(batch)
    clock = AnalyticClock(work=work, accelerator=A100)
    choice, milliseconds = choose(work, clock, devices, memory=A100.memory, modes=MODES), math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        choose(work, clock, devices, memory=A100.memory, modes=MODES)
        milliseconds = min(milliseconds, (time.perf_counter() - start) * 1e3)
    name = f"{devices} devices, batch {batch}, modes without lanes"
    limit = at_most(MOST_OF_TEN_THOUSAND if (devices, batch) == TEN_THOUSAND else MOST_SIMULATED)
    yield Row(bench="plan", case=f"{name}: planning and simulating", value=milliseconds, unit="ms", target=limit)
    for mode, estimate in choice.by_mode.items():
        yield Row(bench="plan", case=f"{name}: step, {mode}, simulated", value=estimate.seconds, unit="s")


def kinds_rows(rounds: int) -> Iterator[Row]:
    """The rows of a model whose encoder may be on cheaper devices than the LLM."""
    work, milliseconds = work_72b(TWO_KINDS_BATCH), math.inf
    kinds = {name: (accelerator(name), count) for name, count in TWO_KINDS.items()}
    fleet = Fleet(
        kinds={
            name: DeviceKind(clock=AnalyticClock(work=work, accelerator=device), devices=count, memory=device.memory)
            for name, (device, count) in kinds.items()
        }
    )
    for _ in range(1 + rounds):
        start = time.perf_counter()
        choice = choose_on(work, fleet, modes=MODES)
        milliseconds = min(milliseconds, (time.perf_counter() - start) * 1e3)
    best, first = choice.best, next(iter(kinds))
    alone = next(estimate for estimate in choice.estimates if estimate.candidate.used_kinds == (first,))
    devices = " and ".join(f"{count} {kind}" for kind, count in TWO_KINDS.items())
    name = f"{devices}, batch {TWO_KINDS_BATCH}, modes without lanes"
    yield Row(bench="plan", case=f"{name}: planning and simulating", value=milliseconds, unit="ms")
    yield Row(bench="plan", case=f"{name}: step, {best.candidate.label}, simulated", value=best.seconds, unit="s")
    yield Row(bench="plan", case=f"{name}: step, {alone.candidate.label}, simulated", value=alone.seconds, unit="s")


def timed_plans(problems: Sequence[Problem], rounds: int) -> list[tuple[Plan, float]]:
    """Plans, and milliseconds of the shortest round, since noise only adds time. Problems are planned in turn."""
    plans = [best_plan(problem) for problem in problems]
    milliseconds = [math.inf] * len(problems)
    for _ in range(rounds):
        for index, problem in enumerate(problems):
            fresh = replace(problem)  # without the cache of the round before
            start = time.perf_counter()
            best_plan(fresh)
            milliseconds[index] = min(milliseconds[index], (time.perf_counter() - start) * 1e3)
    return list(zip(plans, milliseconds, strict=True))


def small_rows(count: int) -> Iterator[Row]:
    """Yields the number of `count` random small problems that are planned as well as by exhaustive search."""
    equal, worst = 0, 0.0
    for seed in range(count):
        problem = drawn_problem(seed)
        expected = best_by_trying(problem)
        try:
            plan = best_plan(parse_problem(problem))
        except DoesNotFit:
            equal += expected is None
            continue
        if expected is None:
            continue
        gap = abs(plan.objective / float(expected[0]) - 1) * 100
        worst = max(worst, gap)
        equal += gap < 1e-9 and plan.devices == expected[1]
    case = f"{count} random small problems"
    yield Row(bench="plan", case=f"{case}: as by trying all", value=equal, unit="problems", target=at_least(count))
    yield Row(bench="plan", case=f"{case}: largest difference", value=worst, unit="%", target=at_most(1e-9))
