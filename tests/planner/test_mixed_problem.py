"""Plans from numbers on several kinds of device: equal to trying everything; errors of a problem."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import MISSING, spoilt

from benchmarks.every_plan import best_by_trying, drawn_problem
from mmjax.configurable import ConfigError
from mmjax.plan import __main__ as plan
from mmjax.planner.cost import Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.problem import parse_mixed_problem, parse_problem
from mmjax.planner.relaxation import SLACK, relax
from mmjax.planner.search import best_plan, best_plans
from mmjax.planner.space import spaces

SECONDS = st.sampled_from([3 * 2**-7, 0.75, 1.5, 2.25, 3.0, 6.0, 24.0])  # a third too is exact in binary: ties are ties
BYTES = st.sampled_from([0, 1, 4, 10, 20])


@st.composite
def mixed_problems(draw: st.DrawFn) -> dict[str, Any]:
    """A small problem of one to three modules on two kinds of device; a module may have times on one of them alone."""
    beside = draw(st.lists(st.sampled_from(["vision", "audio", "generator"]), unique=True, max_size=2))
    names = draw(st.permutations(["llm", *beside]))
    modules = {}
    for name in names:
        backward, on = draw(st.sampled_from([0, 1, 2])), {}
        for kind in draw(st.sampled_from([("fast", "cheap"), ("fast", "cheap"), ("fast",), ("cheap",)])):
            degrees = sorted(draw(st.sets(st.sampled_from([1, 2, 3]), min_size=1, max_size=2)))
            forward = {str(tp): draw(SECONDS) / tp for tp in degrees}
            on[kind] = {"fwd": forward, "bwd": {tp: backward * ratio for tp, ratio in forward.items()}}
        sizes = {size: draw(BYTES) for size in ("param_bytes", "optimizer_bytes", "activation_bytes")}
        modules[name] = {"kinds": on, **sizes, **draw(st.sampled_from([{}, {}, {"layers": 4}]))}
    batch, microbatch = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 1), (12, 2)]))
    kinds = {
        kind: {"devices": draw(st.integers(1, 8)), "memory": draw(st.sampled_from([12, 30, 100, 1000]))}
        for kind in ("fast", "cheap")
    }
    return {"kinds": kinds, "global_batch": batch, "microbatch": microbatch, "modules": modules}


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=40)
@given(mixed_problems(), st.sampled_from([1, 2.5, math.inf]))
def test_the_best_plan_is_that_of_trying_everything(drawn: dict[str, Any], real_from: float) -> None:
    assert_best(drawn, real_from)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=1500)
@given(mixed_problems(), st.sampled_from([1, 2.5, math.inf]))
def test_the_best_of_many_plans_is_that_of_trying_everything(drawn: dict[str, Any], real_from: float) -> None:
    assert_best(drawn, real_from)


def assert_best(drawn: dict[str, Any], real_from: float) -> None:
    expected, problem = best_by_trying(drawn), parse_mixed_problem(drawn)
    if expected is None:
        with pytest.raises(DoesNotFit, match=r"^modules\.\w+ misses by .*; what would make it fit: [^\n]+$"):
            best_plan(problem)
        return
    plan = best_plan(problem)
    assert (plan.objective, plan.devices) == (pytest.approx(float(expected[0]), rel=1e-12), expected[1])
    assert_legal(drawn, plan)
    relaxed = relax(problem, real_from)
    assert relaxed is not None and relaxed.bound <= plan.objective * (1 + 1e-9)
    assert relaxed.bound * (1 - 1e-6) <= relaxed.step <= relaxed.bound * (1 + 2 * SLACK), "cvxpy agrees"
    if math.isinf(real_from):
        assert relaxed.bound >= plan.objective * (1 - SLACK), "nothing is relaxed"


def assert_legal(drawn: dict[str, Any], plan: Plan) -> None:
    """Each kind has room for the modules that are on it, in devices and in bytes."""
    assert list(plan.modules) == list(drawn["modules"])
    for kind, available in drawn["kinds"].items():
        on_kind = [name for name in plan.modules if plan.kinds[name] == kind]
        assert sum(plan.modules[name].devices for name in on_kind) <= available["devices"]
        for name in on_kind:
            assert plan.memory(name) <= available["memory"] * (1 + 1e-9)
            assert str(plan.modules[name].tp) in drawn["modules"][name]["kinds"][kind]["fwd"]


def as_mixed(drawn: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """A problem of one kind on several, with the same times on all."""
    modules = {}
    for name, module in drawn["modules"].items():
        times = {"fwd": module["fwd"], "bwd": module["bwd"]}
        modules[name] = {"kinds": dict.fromkeys(kinds, times)} | {k: v for k, v in module.items() if k not in times}
    batch = {name: drawn[name] for name in ("global_batch", "microbatch")}
    return {"kinds": kinds, **batch, "modules": modules}


def test_one_kind_with_a_name_is_the_problem_without() -> None:
    for seed in range(20):
        drawn = drawn_problem(seed)
        kind = {"devices": drawn["devices"], "memory": drawn["memory"]}
        none = {"devices": 1, "memory": 1}
        plans = []
        for problem in (
            parse_problem(drawn),
            parse_mixed_problem(as_mixed(drawn, {"a": kind})),
            parse_mixed_problem(as_mixed(drawn, {"none": none, "a": kind})),
        ):
            try:
                plan = best_plan(problem)
                plans.append((plan.objective, plan.devices))
            except DoesNotFit:
                plans.append(None)
        assert plans[0] == plans[1]
        if plans[0] is not None:
            assert plans[2] is not None and plans[2][0] <= plans[0][0]


def test_a_step_is_never_longer_on_another_kind_beside() -> None:
    """And the plans of a number of kinds are on as many at least."""
    both = 0
    for seed in range(16):
        drawn = drawn_problem(seed)
        kind = {"devices": drawn["devices"], "memory": drawn["memory"]}
        problem = parse_mixed_problem(as_mixed(drawn, {"a": kind, "b": {"devices": 4, "memory": 1000}}))
        try:
            alone = best_plan(parse_problem(drawn)).objective
        except DoesNotFit:
            alone = math.inf
        plans = best_plans(problem, within=1e9)
        if not plans:
            assert math.isinf(alone)
            continue
        assert plans[0].objective <= alone * (1 + 1e-9)
        assert plans[0].objective == pytest.approx(best_plan(problem).objective)
        mixed = best_plans(problem, within=1e9, kinds=2)
        assert all(len(set(plan.kinds.values())) == 2 for plan in mixed)
        both += bool(mixed)
    assert both > 4


def test_rows_that_are_left_out_change_nothing() -> None:
    for seed in range(0, 120, 3):
        kinds = {"a": {"devices": 6, "memory": 30}, "b": {"devices": 9, "memory": 20}}
        for space in spaces(parse_mixed_problem(as_mixed(drawn_problem(seed), kinds))):
            pruned = space.pruned()
            assert space.bound <= space.step(space.least_work_at(space.slowest_pace), space.slowest_pace) * (1 + 1e-9)
            for factor in (1.0, 1.4, 2.2, 5.0, 20.0):
                pace = factor * space.least_pace
                assert pruned.least_work_at(pace) == space.least_work_at(pace)


@pytest.mark.long
def test_what_would_make_it_fit_does() -> None:
    cured = 0
    for seed in range(30):
        kinds = {"a": {"devices": 3, "memory": 9}, "b": {"devices": 2, "memory": 12}}
        drawn = as_mixed(drawn_problem(seed), kinds)
        try:
            best_plan(parse_mixed_problem(drawn))
            continue
        except DoesNotFit as error:
            message = str(error)
        assert message.startswith("modules.") and "\n" not in message
        for remedy in re.findall(r"kinds\.(\w+)\.(\w+)=(\d+)", message.rpartition("fit: ")[2]):
            kind, amount, least = remedy
            changed = copy.deepcopy(drawn)
            changed["kinds"][kind][amount] = int(least)
            best_plan(parse_mixed_problem(changed))
            changed["kinds"][kind][amount] = int(least) - 1
            with pytest.raises((DoesNotFit, ConfigError)):
                best_plan(parse_mixed_problem(changed))
            cured += 1
        if every := re.search(r"fit: (\d+) times the ([a-z ]+) of every kind", message):
            for kind in drawn["kinds"].values():
                for amount in every[2].split(" and "):
                    kind[amount] *= int(every[1])
            best_plan(parse_mixed_problem(drawn))
            cured += 1
    assert cured > 8


SIZES = {"param_bytes": 8, "optimizer_bytes": 24, "activation_bytes": 2}
GOOD: dict[str, Any] = {
    "kinds": {"h100": {"devices": 6, "memory": 64}, "l20": {"devices": 2, "memory": 48}},
    "global_batch": 8,
    "microbatch": 2,
    "modules": {
        "llm": {"kinds": {"h100": {"fwd": {"1": 2.0, "2": 1.25}, "bwd": {"1": 4, "2": 2.5}}}, **SIZES},
        "vision": {
            "kinds": {"h100": {"fwd": {"1": 0.2}, "bwd": {}}, "l20": {"fwd": {"1": 1.0}, "bwd": {}}}, **SIZES,
        },
    },
}  # fmt: skip


def test_the_command_prints_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(GOOD))
    assert plan.main([f"--problem={path}", "--json", "--bound"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    output = json.loads(line)
    assert output["modules"]["llm"]["kind"] == "h100" and output["bound"] <= output["objective"] * (1 + 1e-9)
    assert {name: list(module) for name, module in output["modules"].items()} == {
        name: ["kind", "devices", "tp", "dp", "pp"] for name in ("llm", "vision")
    }
    assert plan.main([f"--problem={path}"]) == 0
    head, llm, vision, *_, devices = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["kind", "devices"] and llm.split()[:2] == ["llm", "h100"]
    assert vision.split()[:2] == ["vision", output["modules"]["vision"]["kind"]]
    used = {kind: 0 for kind in GOOD["kinds"]}
    for module in output["modules"].values():
        used[module["kind"]] += module["devices"]
    assert devices == f"{used['h100']} of 6 h100 and {used['l20']} of 2 l20 are used"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("devices", 6, "devices: no such field; "),
        ("kinds", {}, "kinds={}: must be an object of devices and memory by name"),
        ("kinds", 6, "kinds=6: must be an object of devices and memory by name"),
        ("kinds.", {"devices": 1, "memory": 1}, "kinds={"),
        ("kinds.l20", 3, "kinds.l20=3: must be an object with devices, memory"),
        ("kinds.l20.devices", 0, "kinds.l20.devices=0: must be a whole number from 1 to 1000000"),
        ("kinds.l20.memory", MISSING, "kinds.l20.memory: is missing; an object here has devices, memory"),
        ("kinds.l20.memmory", 3, "kinds.l20.memmory: no such field; did you mean 'memory'?"),
        ("modules.llm", MISSING, "modules: has 'vision'; give an object with \"llm\""),
        ("modules.llm.kinds", {}, 'modules.llm.kinds={}: must be an object of times, such as {"h100": {"fwd": …'),
        ("modules.llm.kinds.h10", {"fwd": {"1": 1}, "bwd": {}},
         "modules.llm.kinds.h10: there is no such kind; did you mean 'h100'?"),
        ("modules.llm.fwd", {"1": 1}, "modules.llm.fwd: no such field; "),
        ("modules.llm.kinds.h100.fwd", MISSING, "modules.llm.kinds.h100.fwd: is missing; an object here has fwd, bwd"),
        ("modules.llm.kinds.h100.fwd", {}, "modules.llm.kinds.h100.fwd={}: give seconds per sample"),
        ("modules.llm.kinds.h100.fwd.4", 1.0, 'modules.llm.kinds.h100.bwd: has no tp "4", which fwd has'),
        ("modules.vision.kinds.l20.fwd.1", 0, "modules.vision.kinds.l20.fwd.1=0: must be a number above 0"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line(path: str, value: Any, message: str, tmp_path: Path) -> None:
    wrong = spoilt(GOOD, path, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        parse_mixed_problem(wrong)
    assert "\n" not in str(caught.value)


def test_a_slip_of_kinds_is_found() -> None:
    wrong = {**GOOD, "kind": GOOD["kinds"]}
    del wrong["kinds"]
    with pytest.raises(ConfigError, match=r"^kind: no such field; did you mean 'kinds'"):
        parse_problem(wrong)


def test_too_many_ways_are_refused() -> None:
    many = {f"kind{index}": {"devices": 8, "memory": 64} for index in range(7)}
    times = {kind: {"fwd": {"1": 1.0}, "bwd": {}} for kind in many}
    modules = {name: {"kinds": times, **SIZES} for name in ("llm", "vision", "audio")}
    with pytest.raises(ConfigError, match=r"^kinds: 7 of them for 3 modules are 343 ways to place these, more"):
        parse_mixed_problem({**GOOD, "kinds": many, "modules": modules})
