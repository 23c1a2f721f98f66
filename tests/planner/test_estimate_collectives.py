"""Estimates count the time of cp, of groups that span nodes and of optimizer instances."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import AnalyticClock, Efficiency
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import Held, ModuleWork, Shares, Work

BYTES = 1e9
"""Bytes of all keys and values of a row in a layer."""
LLM = ModuleWork(
    name="llm",
    layers=2,
    model_width=64,
    width=128,
    rows=1.0,
    forward=Shares(layer=1e12),
    backward=Shares(layer=2e12),
    parameters=Shares(layer=1e9),
    trained=Shares(layer=1e9),
    sums=(0, 0),
    ring=BYTES,
    attention=2e11,
    held={tp: Held(kept=Shares(layer=1e6)) for tp in (1, 2, 4, 8)},
)


def estimate(layout: Layout, module: ModuleWork = LLM, *, rows: float = 1.0, gradient: int = 4) -> Estimate:
    work = Work(modules={"llm": module}, global_batch=8, gradient=gradient)
    clock = AnalyticClock(work=work, accelerator=H100, efficiency=Efficiency(compute=1.0, link=1.0, network=1.0))
    candidate = Candidate(mode="homogeneous", layouts={"llm": layout}, microbatches=8)
    return Estimate(work=work, clock=clock, candidate=candidate, rows={"llm": (rows, module.width)})


def test_cp_cuts_rows_and_its_ring_takes_what_attention_does_not_hide() -> None:
    seconds = estimate(Layout(cp=4)).costs.seconds
    compute = 2e12 / H100.flops / 4
    ring = 2 * BYTES * 3 / 4 / H100.link
    assert seconds["F", "llm.0", False] == pytest.approx(compute + ring - compute / 5)
    assert seconds["B", "llm.0", False] == pytest.approx(2 * compute + 2 * ring - 2 * compute / 5)
    hidden = estimate(Layout(cp=4), replace(LLM, attention=1e12, forward=Shares(layer=9e12))).costs.seconds
    assert hidden["F", "llm.0", False] == pytest.approx(18e12 / H100.flops / 4 + max(0, ring - 2e12 / H100.flops / 4))
    across = estimate(Layout(cp=16)).costs.seconds["F", "llm.0", False]
    assert across == pytest.approx(compute / 4 * 4 / 5 + 2 * BYTES * 15 / 16 / H100.network)
    split = estimate(Layout(cp=4, tp=2)).costs.seconds["F", "llm.0", False]
    assert split == pytest.approx((compute + ring - compute / 5) / 2), "tp cuts heads, and with them keys and values"


def test_without_a_ring_cp_ranks_repeat_each_other() -> None:
    repeated = replace(LLM, ring=0.0)
    one, four = (estimate(Layout(cp=cp), repeated) for cp in (1, 4))
    assert one.costs.seconds["F", "llm.0", False] == four.costs.seconds["F", "llm.0", False]
    assert one.needs["llm.0"].activations == four.needs["llm.0"].activations
    assert estimate(Layout(cp=4)).needs["llm.0"].activations == one.needs["llm.0"].activations / 4


@pytest.mark.parametrize(("tp", "members"), [(1, 8), (2, 4), (8, 1)])
def test_members_of_a_node_share_the_way_out(tp: int, members: int) -> None:
    took = estimate(Layout(tp=tp, dp=16)).costs.seconds
    size = 2e9 / tp * 4 * 15 / 16
    expected = max(size / members / H100.network, size / H100.link)
    assert took["reduce", "llm.0", False] == pytest.approx(expected)
    assert took["prepare", "llm.0", False] == pytest.approx(expected / 2), "parameters in bfloat16"


def test_a_group_that_is_not_aligned_with_nodes_leaves_them() -> None:
    inside, astride = (estimate(Layout(dp=8, rank_offset=offset)).costs.seconds for offset in (8, 4))
    key = ("reduce", "llm.0", False)
    assert astride[key] > inside[key] == pytest.approx(8e9 * 7 / 8 / H100.link)


def test_instances_reduce_within_and_then_their_shards_between() -> None:
    took = estimate(Layout(dp=16, optimizer_instances=2)).costs.seconds
    within = 8e9 * 7 / 8 / H100.link
    between = 2 * (8e9 / 8) * 1 / 2 / H100.network
    assert took["reduce", "llm.0", False] == pytest.approx(within + between)
    assert took["prepare", "llm.0", False] == pytest.approx(within / 2)


def test_gradients_have_a_size_of_their_own() -> None:
    full, half = (estimate(Layout(dp=8), gradient=size).needs["llm.0"] for size in (4, 2))
    assert half.gradients == full.gradients / 2 == 2e9 * 2 * (1 + 1 / 8) and half.weights == full.weights
