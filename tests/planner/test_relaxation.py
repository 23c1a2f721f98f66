"""The bound from below: no plan is shorter, whatever the problem; with whole numbers of stages it is the optimum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.every_plan import best_by_trying
from mmjax.planner.group import allowed, first_real
from mmjax.planner.problem import parse_problem
from mmjax.planner.relaxation import SLACK, divide, relax

SECONDS = st.floats(1e-4, 50)
BYTES = st.integers(0, 40)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A small problem of one to three modules, with a plan more often than not."""
    beside = draw(st.lists(st.sampled_from(["vision", "audio", "generator"]), unique=True, max_size=2))
    modules = {}
    for name in draw(st.permutations(["llm", *beside])):
        degrees = draw(st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
        forward = {str(tp): draw(SECONDS) for tp in sorted(degrees)}
        backward = draw(st.sampled_from([0.0, 1.0, 2.0]))
        sizes = {name: draw(BYTES) for name in ("param_bytes", "optimizer_bytes", "activation_bytes")}
        layers = draw(st.sampled_from([{}, {"layers": 3}, {"layers": 4}, {"layers": 6}]))
        modules[name] = {
            "fwd": forward,
            "bwd": {tp: backward * ratio for tp, ratio in forward.items()},
            **sizes,
            **layers,
        }
    batch, microbatch = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 1), (9, 3), (12, 2)]))
    memory = draw(st.sampled_from([30, 60, 100, 1000]))
    devices = draw(st.integers(len(modules), 12))
    return dict(devices=devices, global_batch=batch, microbatch=microbatch, memory=memory, modules=modules)


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=80)
@given(problems(), st.sampled_from([1, 1.5, 2, 3, 5]))
def test_no_plan_is_shorter_than_the_bound(drawn: dict[str, Any], real_from: float) -> None:
    expected, problem = best_by_trying(drawn), parse_problem(drawn)
    integral = relax(problem, math.inf)
    if expected is None:
        assert integral is None
        return
    optimum = float(expected[0])
    plain, relaxed = relax(problem), relax(problem, real_from)
    assert plain is not None and relaxed is not None and integral is not None
    assert optimum * (1 - SLACK) <= integral.bound <= optimum * (1 + 1e-9), "nothing is relaxed"
    for relaxation in (plain, relaxed):
        assert relaxation.bound <= optimum * (1 + 1e-9)
        assert relaxation.bound * (1 - 1e-6) <= relaxation.step <= relaxation.bound * (1 + 2 * SLACK), "cvxpy agrees"
        assert sum(relaxation.devices.values()) <= problem.devices * (1 + 1e-6)
    assert plain.bound <= relaxed.bound * (1 + SLACK), "with fewer choices no step is shorter"


def _module(tp: int, forward: float, backward: float = 0.0, *sizes: float) -> dict[str, Any]:
    names = ("param_bytes", "optimizer_bytes", "activation_bytes")
    both = {"fwd": {str(tp): forward}, "bwd": {str(tp): backward}}
    return both | dict(zip(names, sizes or (0, 0, 0), strict=True))


def test_a_plan_on_all_devices_is_not_lost_to_rounding() -> None:
    """11 - 6 - 3 - 25/24 + 25/24 is less than 2 in binary, and the best plan's last module has 2."""
    modules = {"llm": _module(2, 2, 4), "vision": _module(3, 1), "audio": _module(1, 1, 0, 0, 25, 3)}
    problem = parse_problem(dict(devices=11, global_batch=6, microbatch=1, memory=33, modules=modules))
    relaxed = relax(problem)
    assert relaxed is not None and relaxed.bound <= 16.5


def test_the_program_keeps_to_the_numbers_that_the_search_may_have() -> None:
    """A module that must have 1.5 stages has 2 when numbers below 2 are whole, in the program too."""
    modules = {"llm": _module(1, 1, 1), "vision": _module(1, 1, 0, 2, 1, 0)}
    problem = parse_problem(dict(devices=4, global_batch=4, microbatch=1, memory=2, modules=modules))
    steps = {real_from: relax(problem, real_from) for real_from in (1, 2)}
    assert [pytest.approx(relaxation.step) for relaxation in steps.values() if relaxation] == [5.4, 6.0]
    assert steps[2] is not None and steps[2].devices["vision"] == pytest.approx(2)


@pytest.mark.parametrize("spare", [0, 1e-9, 1e-6, 1e-3, 0.5, 0.99, 0.9999])
def test_the_program_is_sure_of_what_it_says_and_right(spare: float) -> None:
    """Against bisection, over eight orders of magnitude; a doubt of the solver is a warning, and that an error here."""
    drawn = np.random.default_rng(0)
    for _ in range(6):
        count = int(drawn.integers(1, 4))
        load_M, least_M = 10 ** drawn.uniform(-4, 4, count), np.round(10 ** drawn.uniform(0, 2, count))
        most_M = np.where(drawn.random(count) < 0.3, least_M * drawn.integers(1, 5, count), np.inf)
        devices = least_M.sum() / (1 - spare)
        fast, slow = 1e-12, 1e12
        for _ in range(200):
            pace = math.sqrt(fast * slow)
            enough = np.clip(load_M / pace, least_M, most_M).sum() <= devices
            fast, slow = (fast, pace) if enough else (pace, slow)
        best = (load_M / np.clip(load_M / slow, least_M, most_M)).max()
        found_M = divide(load_M, least_M, most_M, devices)
        assert (load_M / found_M).max() == pytest.approx(best, rel=SLACK)
        assert found_M.sum() <= devices * (1 + 1e-6) and (found_M >= least_M * (1 - 1e-6)).all()


def test_numbers_of_stages_are_real_from_the_first_that_may_be() -> None:
    depths = np.array([1, 2, 4, 8])
    stages = np.array([1.0, 1.5, 2.5, 3.5, 4.5, 7.9, 8.0, 8.1])
    assert allowed(depths, 3, stages).tolist() == [1, 2, 4, 4, 4.5, 7.9, 8, math.inf]
    assert allowed(depths, math.inf, stages).tolist() == [1, 2, 4, 4, 8, 8, 8, math.inf]
    assert allowed(np.array([]), 2.5, stages).tolist() == [1, 2, 3, 3.5, 4.5, 7.9, 8, 8.1]
    assert [first_real(depths, real_from) for real_from in (1, 3, 8, 9)] == [1, 4, 8, math.inf]
