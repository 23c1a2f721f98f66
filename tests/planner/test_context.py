"""The search gives cp to modules whose rows are long, and leaves others alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner.models import model

from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import COLOCATED, LEAST_TOKENS, NON_COLOCATED, Candidate, colocated, contexts, homogeneous
from mmjax.planner.choose import PlanChoice, choose
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import estimated, proportional
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.variants import exchanged, split_rows
from mmjax.planner.work import ModuleWork, Shares, StageMemory, Work

LONG = 131_072


def transformer(
    name: str, layers: int, width: int, tokens: int, rows: float = 1.0, *, heads: int, groups: int
) -> ModuleWork:
    """A trained transformer in bfloat16, whose rows are one causal segment each."""
    head, parameters = width // heads, 12 * width**2
    attention = 2.0 * tokens * (tokens + 1) * width
    forward = 2.0 * parameters * tokens + attention
    return ModuleWork(
        name=name,
        layers=layers,
        model_width=width,
        width=tokens,
        rows=rows,
        forward=Shares(layer=forward),
        backward=Shares(layer=2 * forward),
        parameters=Shares(layer=parameters),
        trained=Shares(layer=parameters),
        ring=2.0 * 2 * tokens * groups * head,
        attention=attention,
        heads=(heads, groups),
        carried=2.0 * tokens * width,
        output_bytes=2.0 * tokens * width,
        memory={tp: StageMemory(residuals=Shares(layer=34.0 * tokens * width / tp)) for tp in (1, 2, 4, 8)},
    )


def vlm(tokens: int, global_batch: int = 8, images: float = 16.0) -> Work:
    llm = replace(transformer("llm", 8, 4096, tokens, heads=32, groups=8), after=("vision",))
    return model(transformer("vision", 8, 1024, 1024, images, heads=16, groups=16), llm, global_batch=global_batch)


def clock(work: Work) -> AnalyticClock:
    return AnalyticClock(work=work, accelerator=H100)


def planned(work: Work, devices: int = 8, **options: Any) -> PlanChoice:
    return choose(work, clock(work), devices, **options)


def test_long_rows_are_split_and_the_images_beside_them_are_not() -> None:
    layouts = planned(vlm(LONG)).best.candidate.layouts
    assert layouts["llm"].cp > 1 == layouts["vision"].cp


def test_short_rows_are_not_split() -> None:
    every = [estimate.candidate.layouts for estimate in planned(vlm(LEAST_TOKENS, global_batch=64)).estimates]
    assert all(layout.cp == 1 for layouts in every for layout in layouts.values())


def test_medium_rows_are_split_only_where_there_are_too_few() -> None:
    """Where memory is no matter and heads are not split, samples are shared if there are enough for all devices."""
    works = (vlm(8192, batch, images=1.0).limited(lambda name: (1,)) for batch in (64, 2))
    many, few = (planned(work).best.candidate.layouts["llm"] for work in works)
    assert (many.cp, many.dp) == (1, 8) and few.cp > 1


def test_activations_that_fit_with_cp_alone() -> None:
    work = vlm(LONG, global_batch=8)
    without_cp = work.limited(lambda name: (1,))
    choice = planned(without_cp, modes=("homogeneous",), memory=40e9)
    llm = choice.best.candidate.layouts["llm"]
    assert llm.cp * llm.pp == 8 and llm.cp > 1 and choice.best.most <= 40e9


def test_an_encoder_of_long_rows_has_a_cp_of_its_own() -> None:
    """Of two modules with long rows each candidate has its own degrees, and all are legal."""
    both = model(
        transformer("vision", 4, 1024, 16_384, heads=16, groups=16),
        replace(transformer("llm", 8, 4096, LONG, heads=32, groups=8), after=("vision",)),
        global_batch=8,
    )
    modes = set()
    for candidate in (*homogeneous(both, 8, 8), *colocated(both, 8, 8)):
        samples = both.global_batch // candidate.microbatches
        vision, llm = candidate.layouts["vision"], candidate.layouts["llm"]
        several = candidate.span if vision.takes_several else 1
        assert samples % llm.dp == samples * several % vision.dp == 0
        assert set(vision.ranks) <= set(llm.ranks) and vision.size in (llm.size, llm.stage_size)
        assert vision.cp <= 16_384 // LEAST_TOKENS
        modes.add((vision.cp, llm.cp))
    assert {(1, 1), (1, 8), (8, 8), (8, 1), (2, 1), (4, 8)} <= modes


def test_degrees_leave_each_rank_enough_of_a_row() -> None:
    long, short = vlm(LONG).modules["llm"], vlm(LEAST_TOKENS * 4).modules["llm"]
    assert contexts(long, 8) == [1, 2, 4, 8] and contexts(long, 6) == [1, 2, 4]
    assert contexts(short, 64) == [1, 2, 4] and contexts(replace(short, ring=0.0), 64) == [1]


def test_plans_of_modules_apart_are_varied() -> None:
    layouts = {"vision": Layout(dp=2, rank_offset=8), "llm": Layout(tp=4, dp=2)}
    work = vlm(LONG)
    candidates = list(split_rows(work, Candidate(mode=NON_COLOCATED, layouts=layouts, microbatches=4)))
    ways = {
        (candidate.layouts["llm"].tp, candidate.layouts["llm"].cp, candidate.layouts["llm"].dp)
        for candidate in candidates
    }
    assert ways == {(2, 2, 2), (1, 4, 2), (4, 2, 1)} and all(
        candidate.layouts["llm"].size == 8 for candidate in candidates
    )
    assert {candidate.layouts["vision"] for candidate in candidates} == {layouts["vision"]}
    choice = planned(work, modes=(NON_COLOCATED,))
    assert choice.best.candidate.layouts["llm"].cp > 1


def test_another_way_is_taken_where_heads_divide_and_nothing_hides_the_gather() -> None:
    """Eight ranks gather all keys and values, or exchange an eighth of queries, keys, values and outputs."""
    fast = transformer("llm", 8, 4096, 65_536, heads=32, groups=32)
    fast = replace(fast, attention=fast.attention / 100)
    fleet = Fleet(kinds={"": DeviceKind(clock=clock(model(fast)), devices=8, memory=H100.memory * 10)})

    def chosen(module: ModuleWork) -> tuple[Estimate, Candidate | None]:
        work = model(module, global_batch=8)
        candidate = Candidate(mode="homogeneous", layouts={"llm": Layout(cp=8)}, microbatches=8)
        estimate = replace(estimated(work, fleet, candidate, proportional(work)), clock=clock(work))
        return estimate, exchanged(estimate)

    estimate, exchanged_candidate = chosen(fast)
    assert exchanged_candidate and exchanged_candidate.layouts["llm"] == Layout(cp=8, cp_way="all-to-all")
    assert replace(estimate, candidate=exchanged_candidate).seconds < estimate.seconds
    assert chosen(replace(fast, heads=(28, 28)))[1] is None, "28 heads do not divide by 8"
    hidden = transformer("llm", 8, 4096, 65_536, heads=32, groups=8)
    assert chosen(hidden)[1] is None, "attention hides the gather of few heads"


def test_ranks_get_lists_of_tokens_where_these_are_shorter() -> None:
    """An image token may stand at every place of a row, so a list has as many as a rank has places."""
    plain = vlm(LONG, global_batch=16, images=64.0)  # half of a row
    vision = replace(plain.modules["vision"], together=1)
    work = replace(plain, modules={**plain.modules, "vision": vision})
    fleet = Fleet(kinds={"": DeviceKind(clock=clock(work), devices=24, memory=H100.memory)})

    def estimate(work: Work, cp: int, dp: int = 1) -> Estimate:
        layouts = {"vision": Layout(dp=2, rank_offset=16), "llm": Layout(cp=cp, dp=dp)}
        return estimated(
            work, fleet, Candidate(mode=NON_COLOCATED, layouts=layouts, microbatches=8), proportional(work)
        )

    for cp, dp, share in ((1, 1, 1.0), (2, 1, 1.0), (4, 1, 0.5), (8, 1, 0.25), (8, 2, 0.25)):
        listed, in_rows = (estimate(model_work, cp, dp) for model_work in (work, plain))
        assert listed.list_share("vision", "llm") == share and in_rows.list_share("vision", "llm") == 1
        (edge,) = (edge for edge in listed.graph.edges if edge.src == "vision.0")
        output = vision.output_bytes * 128  # of two samples
        assert (listed._arriving(edge), listed._crossing(edge)) == (
            output * share,
            output * (share * cp if share < 1 else 1),
        )
        passing = 3 * output * (1 - share) / dp  # kept, and an activation and a gradient on their way
        gap = in_rows.device_bytes["llm.0"].activations - listed.device_bytes["llm.0"].activations
        assert gap == pytest.approx(passing)
        if share < 1:  # and no sum of gradients
            assert listed.costs.seconds["B", "llm.0", False] < in_rows.costs.seconds["B", "llm.0", False]
    together = Candidate(mode=COLOCATED, layouts={"vision": Layout(tp=8), "llm": Layout(cp=8)}, microbatches=8)
    assert (
        replace(listed, candidate=together)._summed_bytes("vision", "llm") == output * 0.25 * 8 / 2
    )  # a gather on the way home
    second_reader = replace(vision, name="other", after=("vision",))  # two readers take one tensor
    assert (
        replace(listed, work=replace(work, modules={**work.modules, "other": second_reader})).list_share(
            "vision", "llm"
        )
        == 1
    )


def test_cp_halves_what_a_device_keeps() -> None:
    work = vlm(LONG)
    fleet = Fleet(kinds={"": DeviceKind(clock=clock(work), devices=8, memory=H100.memory)})

    def kept(cp: int) -> float:
        layouts = {"vision": Layout(rank_offset=8), "llm": Layout(cp=cp)}
        candidate = Candidate(mode=NON_COLOCATED, layouts=layouts, microbatches=8)
        estimated_candidate = estimated(work, fleet, candidate, proportional(work))
        return (
            estimated_candidate.device_bytes["llm.0"].activations - 3 * work.modules["vision"].output_bytes * 16
        )  # an encoder's rows are whole

    assert kept(2) == pytest.approx(kept(1) / 2)
