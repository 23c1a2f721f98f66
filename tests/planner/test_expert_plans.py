"""Experts in plans: seconds and bytes by hand, every ep tried, the fastest that fits taken."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from planner.models import GIGA, PLAIN, TERA, clock, model, module

from mmjax.mesh.layout import EP_WAYS, Layout
from mmjax.planner.accelerators import Accelerator
from mmjax.planner.candidates import HOMOGENEOUS, NON_COLOCATED, Candidate
from mmjax.planner.choose import choose
from mmjax.planner.clock import AnalyticClock, Efficiency, PassSeconds, group_exchange, group_ring
from mmjax.planner.estimate import Estimate
from mmjax.planner.experts import expert_sums, with_experts
from mmjax.planner.sharding import shared_states
from mmjax.planner.state_layouts import expert_parallel
from mmjax.planner.work import ExpertWork, ModuleWork, Shares, SplitMemory, StageMemory, StagePart, Work

EXPERTS = ExpertWork(
    count=8,
    per_token=2,
    parameters=GIGA / 200,
    trained=GIGA / 200,
    forward=0.5 * TERA,
    features=GIGA,
    hidden=0.0,
    memory={(tp, way): StageMemory(residuals=Shares(layer=GIGA / 5)) for tp in (1, 2, 4) for way in EP_WAYS},
)
"""Half of the parameters and FLOPs of a layer of `module`; without ep a row keeps half of what it does with ep 2."""
SLOW = replace(PLAIN, link=GIGA, network=GIGA / 2)
"""A rank sends a row's features in a second within a node, and in two to another."""


def experts(**fields: Any) -> ModuleWork:
    return module("llm", 2, 1.0, experts=replace(EXPERTS, **fields))


def estimated(llm: ModuleWork, layout: Layout, accelerator: Accelerator = PLAIN, **fields: Any) -> Estimate:
    """One microbatch with a row for each rank."""
    work = model(llm, global_batch=layout.dp)
    candidate = Candidate(mode="any", layouts={"llm": layout}, microbatches=1, **fields)
    rows = {"llm": (float(layout.dp), 1)}
    return Estimate(work=work, clock=clock(work, accelerator), candidate=candidate, rows=rows)


def passes(llm: ModuleWork, layout: Layout, accelerator: Accelerator = SLOW) -> tuple[float, float]:
    seconds = estimated(llm, layout, accelerator).costs.seconds
    return seconds["F", "llm.0", False], seconds["B", "llm.0", False]


def test_nothing_hides_an_all_to_all_and_its_buffers_hold_the_worst_case() -> None:
    """Two layers of 1 s forward and 2 s backward; a token goes once to each rank, whatever its choices there are."""
    plain = passes(experts(), Layout(dp=4))
    assert plain == pytest.approx((2.0, 4.0), rel=1e-6)
    once = 4 * 3 / 4  # each rank may get all tokens of each other
    worst = passes(experts(), Layout(dp=4, ep=4, ep_way="all-to-all"))
    assert worst == pytest.approx((2 + 2 * 2 * once, 4 + 2 * 3 * once), rel=1e-6)
    smaller = passes(experts(buffer=1.5), Layout(dp=4, ep=4, ep_way="all-to-all"))
    once *= 1.5 * (1 - 6 / 8 * 5 / 7)  # 6 of 8 experts are on other ranks
    assert smaller == pytest.approx((2 + 2 * 2 * once, 4 + 2 * 3 * once), rel=1e-6)


def test_halves_of_an_all_to_all_lie_beside_products() -> None:
    """Half of each exchange begins or ends a layer's experts; the last of backward lies beside weights' gradients."""
    layout, of = Layout(dp=4, ep=4, ep_way="all-to-all"), model(experts())
    times, part = clock(of, SLOW), StagePart(layers=2)
    plain = PassSeconds(forward=2.0, backward=4.0)

    def seconds(rows: float, width: int, *, halves: bool) -> PassSeconds:
        module = of.modules["llm"]
        module = replace(module, width=width, experts=replace(EXPERTS, features=GIGA / rows / 10))
        return with_experts(plain, module, layout, times, shape=(rows, width), part=part, first=0, halves=halves)

    once = 4 * 3 / 4 / 10  # the experts' products of a layer take 0.5 and 1 s
    whole = PassSeconds(forward=2 + 2 * 2 * once, backward=4 + 2 * 3 * once)
    assert seconds(2, 1024, halves=False) == pytest.approx(whole)
    assert seconds(2, 1023, halves=True) == pytest.approx(whole), "of few tokens the exchange stays whole"
    assert seconds(2, 1024, halves=True) == pytest.approx(PassSeconds(forward=2 + 2 * once, backward=4 + 2 * once))


def test_a_ring_lies_beside_products_but_for_its_last_send() -> None:
    # Forward sends tokens 3 times and results 4 times, beside 0.5 s of experts; backward tokens twice and results once.
    forward, backward = 1 + 6 - 0.5, 1 + 9 - 1.0
    assert passes(experts(), Layout(dp=4, ep=4)) == pytest.approx((2 + 2 * forward, 4 + 2 * backward), rel=1e-6)
    fast = replace(SLOW, link=100 * GIGA)
    assert passes(experts(), Layout(dp=4, ep=4), fast) == pytest.approx((2 + 2 * 0.01, 4 + 2 * 0.01), rel=1e-6)
    frozen = replace(experts(trained=0.0), trained=Shares(), backward=Shares())
    assert passes(frozen, Layout(dp=4, ep=4), fast)[1] == 0


def test_ranks_wait_for_the_fullest() -> None:
    fast = replace(SLOW, link=1e3 * TERA)
    assert passes(experts(fullest=1.5), Layout(dp=4, ep=4), fast) == pytest.approx((2 + 0.5, 4 + 1), rel=1e-6)
    assert passes(experts(fullest=1.5), Layout(dp=4), fast) == pytest.approx((2, 4)), "a rank has all its experts"


def test_each_rank_sends_to_other_nodes_itself() -> None:
    times = clock(model(experts()), SLOW)
    within = dict(ranks=4, apart=2, first=0)
    assert group_exchange(times, 8 * GIGA, **within) == pytest.approx(6)
    assert group_ring(times, GIGA, **within) == pytest.approx(3)
    beyond = dict(ranks=8, apart=2, first=0)  # four of a node's eight devices are in the group, and four of the next
    assert group_exchange(times, 8 * GIGA, **beyond) == pytest.approx(2 * 4)
    assert group_ring(times, GIGA, **beyond) == pytest.approx(2 * 7)
    assert (
        group_exchange(times, GIGA, ranks=1, apart=1, first=0)
        == group_ring(times, GIGA, ranks=1, apart=1, first=0)
        == 0
    )


def test_sums_of_experts_are_passed_once_for_each_use() -> None:
    """Of few tokens each weight's sum is read and written, 8 bytes; products take no time here."""
    llm = module("llm", 1, 0.0, trained=Shares(layer=3 * GIGA), parameters=Shares(layer=3 * GIGA))
    llm = replace(llm, forward=Shares(layer=2 * GIGA), backward=Shares(layer=4 * GIGA))
    llm = replace(llm, experts=replace(EXPERTS, parameters=2 * GIGA, trained=2 * GIGA, forward=GIGA))
    times = AnalyticClock(
        work=model(llm), accelerator=replace(PLAIN, flops=1e6 * TERA), efficiency=Efficiency(compute=1.0, memory=1.0)
    )

    def seconds(layout: Layout) -> float:
        share = expert_sums(llm, layout)
        return times.stage("llm", llm.whole, rows=1, width=1, tp=1, expert_share=share).backward

    dense = 8 * (GIGA / 2) / TERA  # as many weights as half of the dense FLOPs are products of
    assert seconds(Layout()) == pytest.approx(dense + 8 * 2 * GIGA / TERA, rel=1e-3)
    assert seconds(Layout(dp=4, ep=4)) == pytest.approx(seconds(Layout())), (
        "a ring adds to a quarter of them, four times"
    )
    assert seconds(Layout(dp=4, ep=4, ep_way="all-to-all")) == pytest.approx(dense + 8 * GIGA / 2 / TERA, rel=1e-3)


def test_states_of_experts_lie_on_the_ranks_that_have_them() -> None:
    work, part, whole = model(experts()), StagePart(layers=2), GIGA / 100  # parameters of two layers' dense half
    apart = work.states("llm", part, Layout(dp=4, ep=2))
    assert apart.copies == 2 * (whole + whole / 2) and apart.sums == 4 * (whole + whole / 2)
    assert apart.optimizer == pytest.approx(12 * (whole / 4 + whole / 2 / 2)), "masters and moments as ever"
    assert apart.optimizer == pytest.approx(work.states("llm", part, Layout(dp=4)).optimizer)
    sharded = work.states("llm", part, Layout(dp=4, ep=2, shard="parameters"))
    assert sharded.parameters == pytest.approx(2 * 2 * whole / 4) and sharded.sums == pytest.approx(4 * 2 * whole / 4)
    dense, of_experts = shared_states(work, "llm", part, Layout(dp=4, ep=2, tp=2))
    assert (dense.ranks, dense.apart, of_experts.ranks, of_experts.apart) == (4, 2, 2, 4)
    assert of_experts.uses == 2 and dense.states.sums == 4 * whole / 2
    assert len(shared_states(work, "llm", part, Layout(dp=4))) == 1


@pytest.mark.parametrize(
    ("layout", "buffer", "rows"),
    [
        (Layout(), 0.0, 1),
        (Layout(dp=4, ep=4), 0.0, 4),  # two local experts, so that both choices of a token may be here
        (Layout(dp=8, ep=8), 0.0, 4),  # one local expert
        (Layout(dp=8, ep=8, ep_way="all-to-all"), 0.0, 4),
        (Layout(dp=4, ep=4, ep_way="all-to-all"), 1.5, 1.5),
        (Layout(dp=8, ep=8, ep_way="all-to-all"), 100.0, 4),
        (Layout(dp=2, ep=2, tp=4, expert_tp=1), 0.0, 1),
    ],
)
def test_buffers_have_room_for_the_rows_that_may_come(layout: Layout, buffer: float, rows: float) -> None:
    assert replace(EXPERTS, buffer=buffer).buffer_rows(layout) == rows


def test_a_split_backward_is_read_where_backwards_are_split() -> None:
    read = list[str]()

    def split(name: str, layer: float, temporaries: float) -> SplitMemory:
        read.append(name)
        return SplitMemory(deferred=Shares(layer=layer), temporaries=temporaries)

    plain = StageMemory(residuals=Shares(layer=10.0), split=partial(split, "plain", 3.0, 1.5))
    with_two = StageMemory(residuals=Shares(layer=14.0), split=partial(split, "two", 4.0, 2.0))
    work = replace(EXPERTS, memory={(1, way): with_two for way in EP_WAYS})
    four = work.stage_memory(plain, Layout(dp=4, ep=4))
    assert four.residuals.layer > 0 and not read
    assert four.split().deferred.layer == pytest.approx(3 + 3 * 1) and four.split().temporaries == 2.0
    assert work.stage_memory(plain, Layout(dp=4)).split().temporaries == 1.5 and set(read) == {"plain", "two"}


def test_bytes_grow_with_rows_and_gradients_shrink_with_experts() -> None:
    plain = StageMemory(residuals=Shares(layer=10.0), fixed=Shares(layer=60.0), fixed_layer=40.0)
    with_two = StageMemory(residuals=Shares(layer=14.0), fixed=Shares(layer=50.0), fixed_layer=30.0)
    memory = {(1, way): with_two for way in EP_WAYS}
    work = replace(EXPERTS, memory=memory)
    assert work.stage_memory(plain, Layout(dp=4)) is plain
    assert work.stage_memory(plain, Layout(dp=2, ep=2)) == with_two
    four = work.stage_memory(plain, Layout(dp=4, ep=4))
    assert four.residuals.layer == pytest.approx(10 + 3 * 4), "three times the rows beyond those without ep"
    assert four.fixed.layer == pytest.approx(45) and four.fixed_layer == pytest.approx(25)
    work, way = replace(work, hidden=GIGA, buffer=2.0), "all-to-all"
    assert work.received_tokens(Layout(dp=4, ep=4, ep_way=way)) == pytest.approx(4 * 2 * (1 - 6 / 8 * 5 / 7))
    assert work.received_tokens(Layout(dp=2, ep=2, ep_way=way)) == 2, "no more than all tokens"
    buffered = work.stage_memory(plain, Layout(dp=4, ep=4, ep_way=way))
    more = (4 * 2 * (1 - 6 / 8 * 5 / 7) - 1 + 1) / (2 - 1 + 1)  # of features and of hidden units, over those of ep 2
    assert buffered.residuals.layer == pytest.approx(10 + more * 4)


def test_every_ep_of_the_ranks_is_tried() -> None:
    work = model(experts())
    layouts = {"llm": Layout(dp=6, cp=2)}
    tried = [c.layouts["llm"] for c in expert_parallel(work, Candidate(mode="any", layouts=layouts, microbatches=1))]
    assert [(layout.ep, layout.ep_way) for layout in tried] == [
        (1, "ring"), *((ep, way) for ep in (2, 4) for way in EP_WAYS)
    ]  # fmt: skip
    dense = Candidate(mode="any", layouts=layouts, microbatches=1)
    assert list(expert_parallel(model(module("llm", 2, 1.0)), dense)) == [dense]


def test_whole_experts_on_ranks_of_tp_receive_fewer_tokens() -> None:
    """Two of eight experts: 1.5 times the mean of tokens for four of them is all, for two of them 0.7 of all."""
    buffered = experts(buffer=1.5, whole={2: EXPERTS.memory[2, "all-to-all"], 4: EXPERTS.memory[4, "all-to-all"]})
    candidate = Candidate(mode="any", layouts={"llm": Layout(dp=2, tp=2)}, microbatches=1)
    tried = [one.layouts["llm"] for one in expert_parallel(model(buffered), candidate)]
    assert [(layout.ep, layout.ep_way, layout.expert_tp) for layout in tried] == [
        (1, "ring", 0), (2, "ring", 0), (2, "all-to-all", 0), (2, "all-to-all", 1)
    ]  # fmt: skip
    divided, whole = (passes(buffered, layout) for layout in tried[-2:])
    once = 1 - 1.5 * (1 - 6 / 8 * 5 / 7)  # half of two ranks' tokens comes from the other one
    assert divided[0] - whole[0] == pytest.approx(2 * 2 * once) and divided[1] - whole[1] == pytest.approx(2 * 3 * once)
    assert len([*expert_parallel(model(replace(buffered, experts=EXPERTS)), candidate)]) == 3, "all tokens in any case"
    wider = replace(candidate, layouts={"llm": Layout(dp=4, tp=4)})
    tried = [one.layouts["llm"] for one in expert_parallel(model(buffered), wider)]
    assert [layout.ep for layout in tried if layout.expert_tp] == [2], "16 ranks have no 8 experts"


def test_whole_experts_have_fewer_rows_of_all_their_hidden_units() -> None:
    plain = StageMemory(residuals=Shares(layer=10.0))
    of_two = StageMemory(residuals=Shares(layer=14.0))
    work = replace(EXPERTS, features=GIGA, hidden=4 * GIGA, buffer=1.5, whole={2: of_two})
    layout = Layout(dp=4, tp=2, ep=2, ep_way="all-to-all", expert_tp=1)
    assert work.stage_memory(plain, layout).residuals.layer == pytest.approx(14)
    # Tokens received for two and for one of eight experts; rows have 1.5 times a quarter and an eighth of choices.
    two = 2 * 1.5 * (1 - 6 / 8 * 5 / 7) - 1 + 4 * (2 * 1.5 / 4 - 1 / 2)
    four = 4 * 1.5 * (1 - 7 / 8 * 6 / 7) - 1 + 4 * (4 * 1.5 / 8 - 1 / 2)
    growing = work.stage_memory(plain, replace(layout, ep=4))
    assert growing.residuals.layer == pytest.approx(10 + four / two * 4)


def with_states(size: float) -> Work:
    """Experts of so many parameters a layer; nothing else takes memory, and a sample takes as long in any layout."""
    tiny = {1: StageMemory(residuals=Shares(layer=1e3))}
    states = {name: Shares(layer=size + 1e3) for name in ("parameters", "trained")}
    of_ep = {(tp, way): memory for tp, memory in tiny.items() for way in EP_WAYS}
    own = experts(parameters=size, trained=size, features=50 * GIGA, memory=of_ep)
    return model(replace(own, memory=tiny, **states), global_batch=8)


@pytest.mark.parametrize("mode", [HOMOGENEOUS, NON_COLOCATED])
def test_a_plan_has_ep_where_experts_do_not_fit(mode: str) -> None:
    """Two layers of 1e9 expert parameters. With ep 1 two stages of two ranks need 14 GB a device, with ep 2 11."""
    work = with_states(GIGA)
    times = clock(work, replace(SLOW, link=TERA, network=TERA))
    roomy = choose(work, times, 4, memory=60 * GIGA, modes=[mode]).best.candidate.layouts["llm"]
    assert roomy.ep == 1, "the exchange takes time"
    best = choose(work, times, 4, memory=12.5 * GIGA, modes=[mode]).best
    assert best.candidate.layouts["llm"].ep > 1 and best.most <= 12.5 * GIGA
    assert "ep=" in best.candidate.describe() and best.candidate.layouts["llm"].shard == "states"


@pytest.mark.parametrize(("buffer", "link", "way"), [(1.0, 1.0, "all-to-all"), (0.0, 100.0, "ring")])
def test_which_way_is_faster_depends_on_the_link(buffer: float, link: float, way: str) -> None:
    """On a slow link an all-to-all of few rows sends less; on a fast one products hide a ring."""
    llm, slow = experts(buffer=buffer, per_token=1), replace(SLOW, link=link * GIGA)
    candidate = Candidate(mode="any", layouts={"llm": Layout(dp=4)}, microbatches=1)
    layouts = [one.layouts["llm"] for one in expert_parallel(model(llm), candidate)]
    fastest = min(layouts[-2:], key=lambda layout: estimated(llm, layout, slow).quick)
    assert (fastest.ep, fastest.ep_way) == (4, way)
