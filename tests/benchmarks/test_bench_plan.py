"""`bench plan`: its rows, and how close its plans are to what is best."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import plan as bench
from mmjax.planner.accelerators import A100, H100
from mmjax.planner.analytic import module_costs
from mmjax.planner.search import best_plan


@pytest.mark.long
def test_mllm_72b_has_legal_plans_and_whole_stages() -> None:
    problem = bench.mllm_72b(112, 240)
    ((plan, took),) = bench.timed_plans([problem], 1)
    rows = {row.case.rpartition(": ")[2]: row for row in bench.plan_rows(problem, plan, took)}
    assert rows["planning / DistTrain's"].value == pytest.approx(rows["planning"].value / 133)
    assert rows["devices used"].value <= 112 and rows["above the relaxation"].value >= 0
    for name, degrees in plan.modules.items():
        assert problem.modules[name].layers % degrees.pp == 0
        assert plan.memory(name) <= A100.memory
    assert 69e9 < problem.modules["llm"].param_bytes / 6 < 71e9, "parameters"
    assert rows["step, analytic"].value == plan.objective


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "batch", "any_pp"),
    [
        (112, 240, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((112, 240, False), (324, 480, True), (324, 480, False))
        ),
    ],
)
def test_plans_are_at_the_bound_where_the_plain_relaxation_is_far_below(devices: int, batch: int, any_pp: bool) -> None:
    problem = bench.mllm_72b(devices, batch, any_pp=any_pp)
    plain, closer = [row for row in bench.plan_rows(problem, best_plan(problem), 1.0) if "above the" in row.case]
    assert plain.value > 1.4 and plain.target is None
    assert closer.target is not None and 0 <= closer.value < 0.01


@pytest.mark.long
def test_all_modes_of_mllm_72b_are_simulated() -> None:
    work = bench.work_72b(240)
    for name, costs in bench.mllm_72b(112, 240).modules.items():
        module = work.modules[name]
        assert module.layers == costs.layers
        assert 6 * module.parameters.of(module.whole) == pytest.approx(costs.param_bytes)
        assert module.memory[4].residuals.of(module.whole) == pytest.approx(costs.activation_bytes / 4)
    took, *steps = bench.choice_rows(112, 240, 1)
    assert took.unit == "ms" and took.target is not None
    assert [row.case.rpartition(": ")[2] for row in steps] == [
        "step, homogeneous, simulated",
        "step, colocated, simulated",
        "step, non-colocated, simulated",
    ]
    # Communication, bubbles and what encoders keep are more than Eq. 1 and 2 know.
    assert steps[0].value > best_plan(bench.mllm_72b(112, 240)).objective


@pytest.mark.long
def test_an_encoder_on_cheaper_devices_beside_leaves_the_others_to_the_llm() -> None:
    took, both, alone = bench.kinds_rows(0)
    assert took.unit == "ms" and "on h100 and l20, simulated" in both.case and "on h100, simulated" in alone.case
    assert both.value < 0.95 * alone.value


def test_any_pp_is_never_slower_than_whole_layers() -> None:
    steps = [best_plan(bench.mllm_72b(112, 240, any_pp=any_pp)).objective for any_pp in (True, False)]
    assert steps[0] <= steps[1]


def test_small_problems_are_planned_as_by_trying_all() -> None:
    rows = list(bench.small_rows(25))
    assert [row.ok for row in rows] == [True, True] and rows[0].value == 25


def test_analytic_times_shrink_with_tp_by_less_than_its_degree() -> None:
    given = {"flops": 1e15, "parameters": 7e9, "layers": 32, "tokens": 4096, "width": 4096}
    costs, faster = module_costs(A100, **given), module_costs(H100, **given)
    assert costs.forward[1] == pytest.approx(1e15 / 156e12) and costs.backward[1] == 2 * costs.forward[1]
    # Two all-reduces a layer of 32 MiB in bfloat16, each of 2 · 7/8 of it over 300 GB/s.
    traffic = 2 * 32 * 4096 * 4096 * 2 * 2 * 7 / 8 / 300e9
    assert costs.forward[8] == pytest.approx(1e15 / 156e12 / 8 + traffic)
    assert all(slow / fast > 1.01 for slow, fast in zip(costs.seconds.values(), faster.seconds.values(), strict=True))
    assert all(a > b > a / 2 for a, b in pairwise(costs.seconds.values()))
    frozen = module_costs(A100, **given, backward=0.0, trained=False)
    assert set(frozen.backward.values()) == {0.0} and frozen.optimizer_bytes == 0
    assert costs.param_bytes == 3 * frozen.param_bytes == 6 * 7e9
