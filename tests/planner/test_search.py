"""Plans from numbers: equal to trying everything, on as few devices as can be, and fast on many."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.every_plan import best_by_trying, drawn_problem
from mmjax.configurable import ConfigError
from mmjax.planner.fit import DoesNotFit, least_memory
from mmjax.planner.problem import parse_problem
from mmjax.planner.relaxation import SLACK, program, relax
from mmjax.planner.search import best_plan
from mmjax.planner.space import spaces

SLOWER = {1: 1.0, 2: 1.06, 4: 1.15, 8: 1.3}


def large(devices: int, batch: int, seed: int | None = None) -> dict[str, Any]:
    """A 70B LLM with an encoder and a generator; with a seed, of other sizes."""
    rng = random.Random(seed)
    vary = (lambda: 1.0) if seed is None else (lambda: rng.uniform(0.3, 3.0))

    def module(seconds: float, billions: float, activations: float) -> dict[str, Any]:
        seconds *= vary()
        return {
            "fwd": {str(tp): seconds * factor / tp for tp, factor in SLOWER.items()},
            "bwd": {str(tp): 2 * seconds * factor / tp for tp, factor in SLOWER.items()},
            "param_bytes": billions * 4e9,
            "optimizer_bytes": billions * 12e9,
            "activation_bytes": activations * vary(),
        }

    modules = {"llm": module(8, 70, 1e11), "vision": module(1.2, 0.63, 2e10), "generator": module(2.3, 0.9, 2e10)}
    return {"devices": devices, "global_batch": batch, "microbatch": 1, "memory": 80e9, "modules": modules}


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 2000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_best_plan_is_that_of_trying_everything(seeds: range) -> None:
    feasible = 0
    for seed in seeds:
        problem = drawn_problem(seed)
        expected = best_by_trying(problem)
        if expected is None:
            with pytest.raises(DoesNotFit):
                best_plan(parse_problem(problem))
            continue
        feasible += 1
        plan = best_plan(parse_problem(problem))
        assert (plan.objective, plan.devices) == (pytest.approx(float(expected[0]), rel=1e-12), expected[1]), seed
        _assert_legal(plan)
    assert len(seeds) / 4 < feasible < len(seeds) - 10, "both kinds are drawn"


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 1500), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_with_communication_and_chunks_too(seeds: range) -> None:
    feasible, alone = 0, 0
    for seed in seeds:
        problem = drawn_problem(seed, communication=True)
        try:
            parsed = parse_problem(problem)
        except ConfigError as error:
            assert re.fullmatch(r"modules\.\w+\.chunks=2: no pp of 2 .* divides layers \(\d\); use 1", str(error))
            continue
        expected = best_by_trying(problem)
        if expected is None:
            with pytest.raises(DoesNotFit):
                best_plan(parsed)
            continue
        feasible += 1
        plan = best_plan(parsed)
        assert (plan.objective, plan.devices) == (pytest.approx(float(expected[0]), rel=1e-12), expected[1]), seed
        alone += plan.microbatches == 1
        _assert_legal(plan)
    assert feasible > len(seeds) / 4 and alone, "a step of one microbatch is drawn too"


def _assert_legal(plan: Any) -> None:
    problem = plan.problem
    assert list(plan.modules) == list(problem.modules)
    assert plan.devices <= problem.devices
    assert problem.global_batch % (plan.modules["llm"].dp * problem.microbatch) == 0
    for name, degrees in plan.modules.items():
        assert problem.global_batch % degrees.dp == 0 and degrees.pp >= 1
        assert degrees.tp in problem.modules[name].forward
        assert plan.memory(name) <= problem.memory * (1 + 1e-9)


def by_hand(forward: dict[str, float], parameters: float = 0, activations: float = 0) -> dict[str, Any]:
    """A module without backward and optimizer."""
    sizes = {"param_bytes": parameters, "optimizer_bytes": 0, "activation_bytes": activations}
    return {"fwd": forward, "bwd": {}, **sizes}


def test_activations_of_an_encoder_grow_with_the_replicas_of_the_llm() -> None:
    """Four LLM replicas would be best, but one replica of the encoder cannot hold their samples."""
    modules = {"llm": by_hand({"1": 1}), "vision": by_hand({"1": 1e-6}, activations=10)}
    problem = {"devices": 5, "global_batch": 4, "microbatch": 1, "memory": 40, "modules": modules}
    assert best_plan(parse_problem(problem)).modules["llm"].dp == 4
    plan = best_plan(parse_problem({**problem, "memory": 10}))
    assert plan.modules["llm"].dp == 1 and plan.objective == pytest.approx(1.75, abs=1e-5)


def test_no_row_is_left_out_that_some_best_plan_needs() -> None:
    dropped = 0
    for seed in range(300):
        for space in spaces(parse_problem(drawn_problem(seed))):
            pruned = space.pruned()
            ((kind, group),) = space.groups.items()
            left = pruned.groups[kind].rows
            dropped += sum(len(rows.work) - len(left[name].work) for name, rows in group.rows.items())
            for factor in (1.0, 1.3, 1.7, 2.2, 3.0, 5.0, 20.0):
                pace = factor * space.least_pace
                assert pruned.least_work_at(pace) == space.least_work_at(pace)
    assert dropped > 100


def test_more_devices_are_left_where_they_do_not_help() -> None:
    """With one microbatch and as many replicas of the encoder as samples, more stages change nothing."""
    module = {"fwd": {"1": 1.0}, "bwd": {"1": 2.0}, "param_bytes": 1, "optimizer_bytes": 1, "activation_bytes": 1}
    problem = {"devices": 100, "global_batch": 4, "microbatch": 1, "memory": 100}
    plan = best_plan(parse_problem({**problem, "modules": {"llm": module, "vision": module}}))
    assert plan.devices < 100
    smaller = {**problem, "devices": plan.devices, "modules": {"llm": module, "vision": module}}
    assert best_plan(parse_problem(smaller)).objective == plan.objective
    fewer = {**smaller, "devices": plan.devices - 1}
    assert best_plan(parse_problem(fewer)).objective > plan.objective


@pytest.mark.parametrize("seed", range(8))
def test_large_plans_are_close_to_the_bound(seed: int) -> None:
    problem = parse_problem(large(10_000 if seed % 2 else 3000, 1920, seed))
    plan = best_plan(problem)
    _assert_legal(plan)
    bounds = []
    for real_from, most in ((1, 1.02), (16, 1.01)):
        relaxed = relax(problem, real_from)
        assert relaxed is not None
        assert relaxed.bound <= plan.objective * (1 + 1e-9) and plan.objective <= most * relaxed.bound
        assert relaxed.bound * (1 - 1e-6) <= relaxed.step <= relaxed.bound * (1 + 2 * SLACK)
        assert sum(relaxed.devices.values()) <= problem.devices * (1 + 1e-6)
        bounds.append(relaxed.bound)
    assert bounds[0] <= bounds[1] * (1 + SLACK), "with fewer choices no step is shorter"


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_bound_is_below_every_plan(seed: int) -> None:
    problem = parse_problem(drawn_problem(seed))
    relaxed = relax(problem)
    try:
        plan = best_plan(problem)
    except DoesNotFit:
        return
    for relaxation in (relaxed, relax(problem, 3)):
        assert relaxation is not None and relaxation.bound <= plan.objective * (1 + 1e-9)
    step, devices = program(problem, plan.modules)
    assert step <= plan.objective * (1 + 1e-6), "real numbers of stages include whole ones"
    assert all(devices[name] >= 0.999 * degrees.tp * degrees.dp for name, degrees in plan.modules.items())


def test_a_bound_that_cannot_be_met_is_said() -> None:
    problem = parse_problem(large(1296, 1920))
    plan = best_plan(problem)
    with pytest.raises(ValueError, match="do not fit on 1296 devices"):
        program(replace(problem, memory=problem.memory / 50), plan.modules)


def test_what_would_make_it_fit_does() -> None:
    counts = {"memory": 0, "devices": 0}
    for seed in range(90):
        problem = parse_problem(drawn_problem(seed))
        try:
            best_plan(problem)
            continue
        except DoesNotFit as error:
            message = str(error)
        assert message.startswith("modules.") and "\n" not in message
        cure = message.rpartition("fit: ")[2]
        if " and " in cure:
            values = {name: float(value) for name, value in (part.split("=") for part in cure.split(" and "))}
            best_plan(replace(problem, memory=values["memory"], devices=int(values["devices"])))
            continue
        remedies = dict(part.split("=") for part in cure.split(" or ") if "=" in part)
        if "memory" in remedies:
            counts["memory"] += 1
            enough = float(remedies["memory"])
            best_plan(replace(problem, memory=enough))
            assert least_memory(problem) == enough
            with pytest.raises(DoesNotFit):
                best_plan(replace(problem, memory=enough - 1))
        if "devices" in remedies:
            counts["devices"] += 1
            best_plan(replace(problem, devices=int(remedies["devices"])))
            with pytest.raises(DoesNotFit):
                best_plan(replace(problem, devices=int(remedies["devices"]) - 1))
    assert min(counts.values()) > 10


def test_the_module_that_is_short_is_named() -> None:
    problem = large(64, 64)
    problem["modules"]["generator"]["activation_bytes"] = 64 * 8 * 81e9
    with pytest.raises(DoesNotFit, match=r"^modules.generator misses by .* GB a device: .*memory=\d+$"):
        best_plan(parse_problem(problem))
    problem = large(16, 64)
    with pytest.raises(DoesNotFit, match=r"^modules.llm misses by .* GB a device: .*devices=\d+$"):
        best_plan(parse_problem(problem))
