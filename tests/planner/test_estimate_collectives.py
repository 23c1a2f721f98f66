"""Estimates count the time of cp, of groups that span nodes and of optimizer instances."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.models import WHOLE

from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.traffic import exchanged_bytes
from mmjax.planner.work import ModuleWork, Shares, StageMemory, Work

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
    heads=(8, 8),
    memory={tp: StageMemory(residuals=Shares(layer=1e6)) for tp in (1, 2, 4, 8)},
)


def estimated(
    layout: Layout, module: ModuleWork = LLM, *, rows: float = 1.0, gradient: int = 4, overlap: bool | str = False
) -> Estimate:
    work = Work(modules={"llm": module}, global_batch=8, gradient=gradient, overlap_grad_reduce=overlap)
    clock = AnalyticClock(work=work, accelerator=H100, efficiency=WHOLE)
    candidate = Candidate(mode="homogeneous", layouts={"llm": layout}, microbatches=8)
    return Estimate(work=work, clock=clock, candidate=candidate, rows={"llm": (rows, module.width)})


def ring(cp: int, tp: int = 1) -> Layout:
    return Layout(cp=cp, tp=tp, cp_way="ring")


def test_cp_cuts_rows_and_its_ring_takes_what_attention_does_not_hide() -> None:
    seconds = estimated(ring(cp=4)).costs.seconds
    compute = 2e12 / H100.flops / 4
    round_trip = 2 * BYTES * 3 / 4 / H100.link
    assert seconds["F", "llm.0", False] == pytest.approx(compute + round_trip - compute / 5)
    assert seconds["B", "llm.0", False] == pytest.approx(2 * compute + 3 * round_trip - 2 * compute / 5), "fp32 sums"
    hidden = estimated(ring(cp=4), replace(LLM, attention=1e12, forward=Shares(layer=9e12))).costs.seconds
    excess = max(0, round_trip - 2e12 / H100.flops / 4)
    assert hidden["F", "llm.0", False] == pytest.approx(18e12 / H100.flops / 4 + excess)
    across = estimated(ring(cp=16)).costs.seconds["F", "llm.0", False]
    assert across == pytest.approx(compute / 4 * 4 / 5 + 2 * BYTES * 15 / 16 / H100.network)
    split = estimated(ring(cp=4, tp=2)).costs.seconds["F", "llm.0", False]
    assert split == pytest.approx((compute + round_trip - compute / 5) / 2), "tp cuts heads, and with them keys, values"


def test_gathered_heads_wait_for_the_first_and_hide_the_others() -> None:
    compute, once = 2e12 / H100.flops / 4, 2 * BYTES * 3 / 4 / H100.link
    for groups, chunks in ((1, 1), (2, 2), (6, 3), (8, 4)):
        seconds = estimated(Layout(cp=4), replace(LLM, heads=(24, groups))).costs.seconds
        later_chunks = (chunks - 1) / chunks
        ahead = once / chunks + max(0.0, later_chunks * (once - compute / 5))
        assert seconds["F", "llm.0", False] == pytest.approx(compute + ahead)
        back = 3 * once / chunks + max(0.0, later_chunks * (3 * once - 2 * compute / 5))
        assert seconds["B", "llm.0", False] == pytest.approx(2 * compute + back), "again, and sums in fp32 go home"
    hidden = replace(LLM, heads=(24, 8), attention=1e13, forward=Shares(layer=2e13), backward=Shares(layer=4e13))
    seconds = estimated(Layout(cp=4), hidden).costs.seconds
    assert seconds["F", "llm.0", False] == pytest.approx(4e13 / H100.flops / 4 + once / 4)
    again = estimated(Layout(cp=4), replace(hidden, recompute=Shares(layer=2e13))).costs.seconds
    assert again["B", "llm.0", False] == pytest.approx(seconds["B", "llm.0", False] + once / 4)


def test_needed_keys_are_bounded_by_all_and_waited_for() -> None:
    compute, once = 2e12 / H100.flops / 4, 2 * BYTES * 3 / 4 / H100.link
    seconds = estimated(Layout(cp=4, cp_way="need")).costs.seconds
    assert seconds["F", "llm.0", False] == pytest.approx(compute + once)
    assert seconds["B", "llm.0", False] == pytest.approx(2 * compute + 3 * once)
    needed, fewer = (exchanged_bytes(LLM, Layout(cp=4, cp_way=way), (1.0, 128)) for way in ("need", "gather"))
    assert needed == pytest.approx(3 * BYTES) and fewer == pytest.approx(BYTES), (
        "keys and values of all heads, and sums"
    )


def test_heads_that_change_places_hide_nothing() -> None:
    compute, cp = 2e12 / H100.flops / 4, 4
    of_head = 2 * BYTES / 16 / cp * 3 / 4 / H100.link  # of 2 · 8 heads of keys and values in two layers
    seconds = estimated(Layout(cp=cp, cp_way="all-to-all"), replace(LLM, heads=(16, 8))).costs.seconds
    assert seconds["F", "llm.0", False] == pytest.approx(compute + (16 + 8 + 8 + 16) * of_head)
    back = (16 + 8 + 8 + 16 + 16) * of_head + 2 * (16 + 8 + 8) * of_head
    assert seconds["B", "llm.0", False] == pytest.approx(2 * compute + back)
    few = estimated(Layout(cp=cp, cp_way="all-to-all"), replace(LLM, heads=(16, 2))).costs.seconds
    assert few["F", "llm.0", False] == pytest.approx(compute + (16 + 4 + 4 + 16) * 4 * of_head), "repeated for 4 ranks"


def test_whole_rows_between_modules_are_gathered_and_their_gradients_summed() -> None:
    """An encoder with cp joins whole rows; an LLM with cp sums its ranks' gradients of an encoder's rows."""
    output = 1e9
    vision = replace(LLM, name="vision", output_bytes=output, ring=1e-9)
    llm = replace(LLM, after=("vision",), ring=1e-9)
    work = Work(modules={"vision": vision, "llm": llm}, global_batch=8)
    clock = AnalyticClock(work=work, accelerator=H100, efficiency=WHOLE)

    def seconds(vision_cp: int, llm_cp: int) -> dict:
        layouts = {"vision": Layout(cp=vision_cp, rank_offset=llm_cp), "llm": Layout(cp=llm_cp)}
        candidate = Candidate(mode="non-colocated", layouts=layouts, microbatches=8)
        rows = {"vision": (1.0, 128), "llm": (1.0, 128)}
        estimate = Estimate(work=work, clock=clock, candidate=candidate, rows=rows)
        needs = {stage: need.activations for stage, need in estimate.device_bytes.items()}
        return {
            (kind, stage): estimate.costs.seconds[kind, stage, False] for kind in "FB" for stage in estimate.parts
        } | needs

    few, wide, deep = seconds(1, 1), seconds(2, 1), seconds(1, 2)
    gathered = output / 2 / H100.link
    assert wide["F", "vision.0"] == pytest.approx(few["F", "vision.0"] / 2 + gathered)
    assert wide["B", "vision.0"] == pytest.approx(few["B", "vision.0"] / 2)
    assert deep["F", "llm.0"] == pytest.approx(few["F", "llm.0"] / 2)
    assert deep["B", "llm.0"] == pytest.approx(few["B", "llm.0"] / 2 + 2 * gathered)
    residuals = 2 * 1e6  # of two layers
    assert deep["llm.0"] - residuals / 2 == pytest.approx(few["llm.0"] - residuals), (
        "every rank has the encoder's whole rows"
    )


def test_edges_inside_a_module_carry_the_part_of_a_rank() -> None:
    module = replace(LLM, carried=8e9)
    single, split = (estimated(Layout(pp=2, cp=cp), module) for cp in (1, 2))
    move = "move", "llm.0->llm.1", False
    assert split.costs.seconds[move] == pytest.approx(single.costs.seconds[move] / 2)
    assert split.device_bytes["llm.1"].activations == pytest.approx(single.device_bytes["llm.1"].activations / 2)


def test_without_a_ring_cp_ranks_repeat_each_other() -> None:
    repeated = replace(LLM, ring=0.0)
    single, split = (estimated(Layout(cp=cp), repeated) for cp in (1, 4))
    assert single.costs.seconds["F", "llm.0", False] == split.costs.seconds["F", "llm.0", False]
    assert single.device_bytes["llm.0"].activations == split.device_bytes["llm.0"].activations
    assert estimated(ring(cp=4)).device_bytes["llm.0"].activations == single.device_bytes["llm.0"].activations / 4


@pytest.mark.parametrize(("tp", "members"), [(1, 8), (2, 4), (8, 1)])
def test_members_of_a_node_share_the_way_out(tp: int, members: int) -> None:
    took = estimated(Layout(tp=tp, dp=16)).costs.seconds
    size = 2e9 / tp * 4 * 15 / 16
    expected = max(size / members / H100.network, size / H100.link)
    assert took["reduce", "llm.0", False] == pytest.approx(expected)
    assert took["prepare", "llm.0", False] == pytest.approx(expected / 2), "parameters in bfloat16"


def test_a_group_that_is_not_aligned_with_nodes_leaves_them() -> None:
    inside, astride = (estimated(Layout(dp=8, rank_offset=offset)).costs.seconds for offset in (8, 4))
    key = ("reduce", "llm.0", False)
    assert astride[key] > inside[key] == pytest.approx(8e9 * 7 / 8 / H100.link)


def test_instances_reduce_within_and_then_their_shards_between() -> None:
    took = estimated(Layout(dp=16, optimizer_instances=2)).costs.seconds
    within = 8e9 * 7 / 8 / H100.link
    between = 2 * (8e9 / 8) * 1 / 2 / H100.network
    assert took["reduce", "llm.0", False] == pytest.approx(within + between)
    assert took["prepare", "llm.0", False] == pytest.approx(within / 2)


@pytest.mark.parametrize(("dp", "hidden"), [(8, True), (16, False)])
def test_a_last_backward_hides_the_reduction_of_all_layers_but_one(dp: int, hidden: bool) -> None:
    module = replace(LLM, backward=Shares(layer=8e13))
    alone, beside = (estimated(Layout(dp=dp), module, overlap=overlap).costs.seconds for overlap in (False, "auto"))
    key, backward = ("reduce", "llm.0", False), alone["B", "llm.0", False]
    longer = max(0.0, alone[key] - backward)
    assert hidden == (not longer)
    assert beside[key] == pytest.approx(alone[key] / 2 + longer / 2)
    assert {k: v for k, v in beside.items() if k != key} == {k: v for k, v in alone.items() if k != key}


def test_stages_whose_backward_another_waits_for_reduce_alone() -> None:
    alone, beside = (estimated(Layout(dp=2, pp=2), overlap=overlap).costs.seconds for overlap in (False, True))
    assert alone["reduce", "llm.1", False] == beside["reduce", "llm.1", False] > beside["reduce", "llm.0", False] / 2
    for layout in (Layout(dp=2, shard="gradients"), Layout(dp=1)):
        both = [estimated(layout, overlap=overlap).costs.seconds for overlap in (False, True)]
        assert both[0] == both[1]


def test_gradients_have_a_size_of_their_own() -> None:
    full, half = (estimated(Layout(dp=8), gradient=size).device_bytes["llm.0"] for size in (4, 2))
    assert half.gradients == full.gradients / 2 == 2e9 * 2 * (1 + 1 / 8) and half.weights == full.weights
