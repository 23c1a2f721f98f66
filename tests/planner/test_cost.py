"""Eq. 1, Eq. 2 and the memory of a device, by hand and against simulated schedules."""

from __future__ import annotations

import pytest

from mmjax.planner.cost import Degrees, Plan
from mmjax.planner.problem import parse_problem
from mmjax.schedule.placements import TimedModule, apart
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import simulate

PROBLEM = {
    "devices": 100,
    "global_batch": 48,
    "microbatch": 2,
    "memory": 1000,
    "modules": {
        "vision": {
            "fwd": {"1": 3.0}, "bwd": {"1": 0.0}, "param_bytes": 6, "optimizer_bytes": 36, "activation_bytes": 90,
        },
        "llm": {
            "fwd": {"2": 2.0, "4": 1.5}, "bwd": {"2": 4.0, "4": 2.5}, "param_bytes": 120, "optimizer_bytes": 480,
            "activation_bytes": 50,
        },
        "generator": {
            "fwd": {"1": 5.0}, "bwd": {"1": 10.0}, "param_bytes": 10, "optimizer_bytes": 60, "activation_bytes": 12,
        },
    },
}  # fmt: skip


def test_a_step_and_its_memory_by_hand() -> None:
    modules = {
        "vision": Degrees(tp=1, dp=3, pp=2),
        "llm": Degrees(tp=2, dp=4, pp=3),
        "generator": Degrees(tp=1, dp=8, pp=1),
    }
    plan = Plan(problem=parse_problem(PROBLEM), modules=modules)
    # A microbatch is 4 · 2 = 8 samples: 8/3 for a replica of vision, 2 for one of the LLM, 1 for one of the generator.
    assert [plan.stage_seconds(name) for name in modules] == [pytest.approx(8 / 3 * 3 / 2), 2 * 6 / 3, 15]
    assert plan.microbatches == 6 and plan.bottleneck == "generator"
    assert plan.warm_up == pytest.approx(8 + 12 + 15) and plan.steady == 5 * 15
    assert plan.objective == pytest.approx(35 + 75)
    assert plan.memory("llm") == pytest.approx(120 / 6 + 480 / 24 + 50 / 2)
    assert plan.memory("vision") == pytest.approx(6 / 2 + 36 / 6 + 90 * 4 / 3)
    assert plan.memory("generator") == pytest.approx(10 + 60 / 8 + 12 / 2)
    assert plan.devices == 6 + 24 + 8
    assert plan.as_json() == {
        "objective": pytest.approx(110),
        "modules": {
            "vision": {"devices": 6, "tp": 1, "dp": 3, "pp": 2},
            "llm": {"devices": 24, "tp": 2, "dp": 4, "pp": 3},
            "generator": {"devices": 8, "tp": 1, "dp": 8, "pp": 1},
        },
    }


def test_communication_and_chunks_by_hand() -> None:
    changes = {"vision": {"sent_bytes": 30}, "llm": {"sent_bytes": 5, "chunks": 2}, "generator": {"sent_bytes": 0}}
    modules = {name: {**costs, **changes[name]} for name, costs in PROBLEM["modules"].items()}
    problem = parse_problem({**PROBLEM, "modules": modules, "bandwidth": 10})
    degrees = {"vision": (1, 3, 2), "llm": (2, 4, 3), "generator": (1, 8, 1)}
    modules = {name: Degrees(tp=tp, dp=dp, pp=pp) for name, (tp, dp, pp) in degrees.items()}
    plan = Plan(problem=problem, modules=modules)
    # Vision has no backward, so nothing comes back; the LLM sends 2 chunks' activations of 2 samples, and gradients.
    vision, llm = 4 + 8 / 3 * 30 / 10, 4 + 2 * 2 * 2 * 5 / 10
    assert [plan.stage_seconds(name) for name in modules] == pytest.approx([vision, llm, 15])
    reduced = [6 / 2 * 2 / 3 / 10, 120 / 6 * 3 / 4 / 10, 10 * 7 / 8 / 10]
    assert [plan.reducing_seconds(name) for name in modules] == pytest.approx(reduced)
    assert plan.warm_up == pytest.approx(2 * vision + 3 * llm / 2 + 15)
    assert plan.bottleneck == "generator" and plan.steady == pytest.approx(5 * 15 + reduced[2])


def test_stages_that_send_are_as_slow_as_simulated_ones() -> None:
    """A move that computation does not hide delays each round of 1F1B; all stages but the last have one behind them."""
    sizes = {"param_bytes": 0, "optimizer_bytes": 0, "activation_bytes": 0}
    module = {"fwd": {"1": 8.0}, "bwd": {"1": 16.0}, "sent_bytes": 3, **sizes}
    problem = {"devices": 4, "global_batch": 40, "microbatch": 1, "memory": 1, "modules": {"llm": module}}
    degrees = {"llm": Degrees(tp=1, dp=1, pp=4)}
    plan, fast = (Plan(problem=parse_problem({**problem, "bandwidth": b}), modules=degrees) for b in (10, 1e15))
    placed = apart((), TimedModule(name="llm", layers=4, seconds=2.0), {"llm": 4})
    costs = placed.costs(40, move=0.3)
    simulated = simulate(make_schedule("1f1b", placed.graph, 40, costs), costs).makespan
    assert fast.objective < simulated < plan.objective < 1.03 * simulated


@pytest.mark.parametrize(("vision", "llm", "exact"), [(4.0, 6.0, True), (3.0, 6.0, True), (4.0, 3.0, False)])
def test_a_step_is_that_of_simulated_1f1b(vision: float, llm: float, exact: bool) -> None:
    """Where the slowest stage is the last; a slow first stage works while others wait, and the step is shorter."""
    sizes = {"param_bytes": 0, "optimizer_bytes": 0, "activation_bytes": 0}
    modules = {
        "vision": {"fwd": {"1": vision}, "bwd": {"1": 2 * vision}, **sizes},
        "llm": {"fwd": {"1": llm}, "bwd": {"1": 2 * llm}, **sizes},
    }
    problem = parse_problem({"devices": 5, "global_batch": 8, "microbatch": 1, "memory": 1, "modules": modules})
    plan = Plan(problem=problem, modules={"vision": Degrees(tp=1, dp=1, pp=2), "llm": Degrees(tp=1, dp=1, pp=3)})
    encoder, backbone = (
        TimedModule(name="vision", layers=2, seconds=vision / 2),
        TimedModule(name="llm", layers=3, seconds=llm / 3),
    )
    placed = apart((encoder,), backbone, {name: degrees.pp for name, degrees in plan.modules.items()})
    costs = placed.costs(8)
    simulated = simulate(make_schedule("1f1b", placed.graph, 8, costs), costs).makespan
    if exact:
        assert simulated == pytest.approx(plan.objective)
    else:
        assert simulated < plan.objective < simulated + plan.warm_up / 2
