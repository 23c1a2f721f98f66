"""The study `distrain`: its models, baselines and rows, and that its table is the one of the documentation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.every_plan import drawn_problem
from mmjax.models.dit.config import DiTConfig
from mmjax.models.flops import training_factors
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.planner.cost import Degrees, Plan
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.problem import parse_problem
from mmjax.planner.search import best_plan
from studies import distrain
from studies.stable_diffusion import picture_encoder, unet

BY_NAME = {case.name: case for case in distrain.CASES}
SMALL = BY_NAME["MLLM-15B, 96 devices, all"]


def test_models_have_their_names_sizes() -> None:
    for model, billions in zip(distrain.MODELS, (9, 15.5, 72), strict=True):
        problem = next(case for case in distrain.CASES if case.model is model and case.trained == "all").problem
        sizes = [costs.optimizer_bytes / 12 for costs in problem.modules.values()]
        assert sum(sizes) / 1e9 == pytest.approx(billions, rel=0.01)
        assert sizes[0] == pytest.approx(0.63e9, rel=0.01) and sizes[2] == 865_910_724


@pytest.mark.parametrize("setting", distrain.SETTINGS)
def test_backward_by_setting_is_that_of_the_flop_counts(setting: str) -> None:
    case = replace(SMALL, trained=setting)
    frozen = set(distrain.MODULES) - set(distrain.SETTINGS[setting])
    model = multimodal({distrain.ENCODER: ViTConfig()}, DecoderConfig(), {distrain.GENERATOR: DiTConfig()})
    factors = training_factors(model, frozen)
    for name in (distrain.ENCODER, distrain.LLM):
        assert 1 + case.backward[name] == factors[name]
    # The latents of pictures have a forward alone.
    drawing, latents = unet(512).flops, picture_encoder(512).flops
    assert case.flops[distrain.GENERATOR] == pytest.approx(10 * (factors[distrain.GENERATOR] * drawing + latents))
    costs = case.problem.modules
    assert (costs[distrain.ENCODER].activation_bytes == 0) == (distrain.ENCODER in frozen)
    assert {name for name, each in costs.items() if not each.optimizer_bytes} == frozen


def test_the_monolithic_layout_is_that_of_the_paper() -> None:
    """MLLM-15B on 96 devices: three replicas of 8 · 2 devices and two stages more; 64 samples are 22 microbatches."""
    assert SMALL.megatron.devices == 96 == 3 * 8 * 4
    costs = SMALL.problem.modules
    llm, side = costs["llm"].seconds[8], [costs[name].seconds[1] / 8 for name in ("vision", "generator")]
    assert max(side) < llm / 2
    assert SMALL.megatron.seconds == pytest.approx(llm + sum(side) + 21 * llm / 2)
    assert [case.megatron.devices for case in distrain.CASES[:3]] == [1296, 1280, 1152]
    assert all(case.monolithic.memory(name) <= 80e9 for case in distrain.CASES for name in distrain.MODULES)
    mfu = 64 * sum(SMALL.flops.values()) / (SMALL.megatron.seconds * 96 * 312e12)
    assert SMALL.megatron.mfu == pytest.approx(mfu) and 0.1 < mfu < 0.5


@pytest.mark.parametrize("seed", range(0, 120, 4))
def test_the_best_within_shares_is_that_of_trying_all(seed: int) -> None:
    problem = parse_problem({**drawn_problem(seed), "devices": 12})
    names = list(problem.modules)
    problem = replace(problem, modules={name: replace(costs, layers=6) for name, costs in problem.modules.items()})
    shares = {name: 12 // len(names) + index for index, name in enumerate(names)}
    steps = []
    for llm_dp in problem.llm_degrees:
        layouts = [
            [
                Degrees(tp=tp, dp=dp, pp=pp)
                for tp in problem.modules[name].forward
                for dp in ([llm_dp] if name == "llm" else problem.degrees)
                for pp in (1, 2, 3, 6)
                if tp * dp * pp <= shares[name]
            ]
            for name in names
        ]
        for chosen in itertools.product(*layouts):
            plan = Plan(problem=problem, modules=dict(zip(names, chosen, strict=True)))
            if all(plan.memory(name) <= problem.memory * (1 + 1e-9) for name in names):
                steps.append((plan.objective, plan.devices))
    if not steps:
        with pytest.raises(ValueError, match="no layout"):
            distrain.best_within(problem, shares)
        return
    found = Plan(problem=problem, modules=distrain.best_within(problem, shares))
    least = min(step for step, _ in steps)
    assert found.objective == pytest.approx(least, rel=1e-12)
    assert all(found.modules[name].devices <= shares[name] for name in names)
    # With no more in all than the modules together may have, the planner is as good or better, for it shares freely.
    try:
        assert best_plan(replace(problem, devices=sum(shares.values()))).objective <= least * (1 + 1e-12)
    except DoesNotFit:
        pytest.fail("a layout fits, and the planner says that none does")


def test_the_best_plan_is_no_slower_than_the_baselines_and_what_is_nearly_as_good_is() -> None:
    for case in (SMALL, BY_NAME["MLLM-72B, 96 devices, projectors alone"]):
        assert case.best.seconds <= case.distmm.seconds and case.best.seconds <= case.best_on_published.seconds
        assert case.best.seconds <= case.megatron.seconds
        assert case.best_on_published.devices <= case.published.devices[0]
        fewest = [best_plan(replace(case.problem, devices=case.nearly - short)).objective for short in (0, 1)]
        assert fewest[0] <= case.best.seconds / 0.95 < fewest[1]


def test_errors_are_to_the_nearest_end_of_a_range() -> None:
    assert distrain.error(1.5, (1.2, 2.0)) == 0
    assert distrain.error(1.0, (1.25, 2.0)) == pytest.approx(-0.2)
    assert distrain.error(2.2, (1.2, 2.0)) == pytest.approx(0.1)


@pytest.mark.slow
def test_rows_and_table() -> None:
    rows = list(distrain.rows())
    assert all(row.ok and row.value > 0 for row in rows) and len({row.case for row in rows}) == len(rows)
    assert {row.case.partition(": ")[0] for row in rows} == set(BY_NAME) and len(BY_NAME) == 3 + 3 + 12
    written = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    assert distrain.tables()["ablation"] in written
    for case in distrain.CASES:
        assert case.best.seconds <= min(case.megatron.seconds, case.distmm.seconds) * (1 + 1e-9)
