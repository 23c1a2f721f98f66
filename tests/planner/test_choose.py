"""Choosing among modes: the best of everything that was tried, legal, within memory, on no more devices than help."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import Candidate, balanced, colocated, homogeneous, interleaved
from mmjax.planner.choose import choose, proportional
from mmjax.planner.estimate import Estimate
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.work import Held, Shares, Work


def every(work: Work, devices: int) -> list[Estimate]:
    """Every non-colocated layout of two modules with one LLM stage a rank, by trying all."""
    found = []
    dps = [dp for dp in range(1, devices + 1) if work.global_batch % dp == 0]
    layouts = [
        Layout(tp=tp, dp=dp, pp=pp)
        for tp, dp, pp in itertools.product((1, 2, 4), dps, range(1, 5))
        if tp * dp * pp < devices
    ]
    rows_of = proportional(work)
    for llm, vision in itertools.product(layouts, layouts):
        if llm.size + vision.size > devices or llm.pp > 4 or vision.pp > 2:
            continue
        for samples in (1, 2, 4, 8, 16):
            if work.global_batch % (llm.dp * samples) or llm.dp * samples % vision.dp:
                continue
            placed = {"vision": replace(vision, rank_offset=llm.size), "llm": llm}
            count = work.global_batch // (llm.dp * samples)
            candidate = Candidate(mode="non-colocated", layouts=placed, microbatches=count)
            found.append(Estimate(work=work, clock=clock(work), candidate=candidate, rows=rows_of(candidate)))
    return found


@settings(max_examples=12, deadline=None)
@given(light=st.floats(0.02, 3.0), frozen=st.booleans(), devices=st.sampled_from([3, 5, 8]))
def test_the_plan_is_as_good_as_trying_every_layout_apart(light: float, frozen: bool, devices: int) -> None:
    changes: dict = {"backward": Shares(), "trained": Shares()} if frozen else {}
    work = model(module("vision", 2, light, **changes), module("llm", 4, 1.0, after=("vision",)), global_batch=8)
    choice = choose(work, clock(work), devices)
    best = min(one.seconds for one in every(work, devices) if one.most <= PLAIN.memory)
    assert choice.best.seconds <= best * 1.02
    for one in choice.estimates:
        assert one.candidate.devices <= devices and one.most <= PLAIN.memory


def test_devices_that_do_not_help_are_left() -> None:
    work = model(module("vision", 1, 0.01), module("llm", 1, 1.0, after=("vision",)), global_batch=2)
    choice = choose(work, clock(work), 64)
    assert choice.best.candidate.devices < 64


def test_memory_decides_and_a_misfit_says_what_misses() -> None:
    work = model(module("vision", 2, 0.2), module("llm", 4, 1.0, after=("vision",)))
    wide = choose(work, clock(work), 8)
    tight = choose(work, clock(work), 8, memory=wide.best.most * 0.6)
    assert tight.best.most <= wide.best.most * 0.6
    assert tight.best.seconds >= wide.best.seconds * (1 - 1e-9)
    with pytest.raises(
        DoesNotFit, match=r"llm misses by .* GB a device: llm\.\d needs .* what would make it fit: more"
    ):
        choose(work, clock(work), 8, memory=GIGA / 100)


def test_a_heavy_frozen_encoder_that_overlaps_goes_apart_and_a_light_one_stays() -> None:
    frozen: dict = {"backward": Shares(), "trained": Shares()}
    heavy = model(module("vision", 2, 6.0, **frozen), module("llm", 4, 1.0, after=("vision",)), global_batch=16)
    choice = choose(heavy, clock(heavy), 8)
    assert choice.best.seconds == min(one.seconds for one in choice.estimates)
    assert set(choice.by_mode) <= {"homogeneous", "colocated", "non-colocated"}
    assert choice.why().startswith(choice.best.candidate.mode) and "sets the pace" in choice.why()


def test_candidates_of_the_shared_modes_are_legal() -> None:
    work = model(
        module("vision", 2, 0.3), module("llm", 4, 1.0, after=("vision",)), module("painter", 2, 0.2, after=("llm",))
    )
    for candidate in homogeneous(work, 8, 8):
        llm = candidate.layouts["llm"]
        for name, ranks in (("vision", llm.stage_ranks(0)), ("painter", llm.stage_ranks(llm.pp - 1))):
            own = candidate.layouts[name]
            assert (own.tp, own.dp, own.ranks) == (llm.tp, llm.dp, ranks)
    seen = set()
    for candidate in colocated(work, 8, 8):
        llm, samples = candidate.layouts["llm"], work.global_batch // candidate.microbatches
        assert candidate.layouts["vision"].ranks == llm.ranks
        assert set(candidate.layouts["painter"].ranks) == set(llm.stage_ranks(llm.pp - 1))
        assert all(samples % layout.dp == 0 for layout in candidate.layouts.values())
        assert (candidate.schedule == "three-phase") == (llm.pp > 1)
        seen.add((candidate.schedule, bool(candidate.window)))
    assert seen == {("1f1b", False), ("three-phase", False), ("three-phase", True)}


def test_interleaved_and_balanced_variants() -> None:
    ends = module("llm", 8, 1.0, after=("vision",), forward=Shares(layer=1e12, last=2e12))
    work = model(module("vision", 2, 0.7), ends)
    layouts = {"vision": Layout(), "llm": Layout(pp=4)}
    one = Candidate(mode="homogeneous", layouts=layouts, microbatches=16)
    (chunked,) = interleaved(work, one)
    assert chunked.layouts["llm"] == Layout(pp=4, chunks=2) and chunked.schedule == "interleaved"
    assert not list(interleaved(work, replace(one, microbatches=6)))
    rows = proportional(work)(one)
    better = balanced(work, clock(work), rows, one)
    assert better is not None
    # The encoder is 1.4 layers on the first stage, the head two thirds of one on the last.
    first, *middle, last = better.layouts["llm"].layers
    assert (first, sorted(middle), last) == (1, [2, 3], 2)
    before, after = (Estimate(work=work, clock=clock(work), candidate=c, rows=rows) for c in (one, better))
    assert after.seconds < before.seconds
    assert balanced(work, clock(work), rows, better) is None


def test_a_misfit_of_activations_is_met_by_a_window_or_fewer_stages() -> None:
    keeps = {tp: Held(kept=Shares(layer=5 * GIGA / tp)) for tp in (1, 2, 4)}
    work = model(module("vision", 2, 1.0, held=keeps), module("llm", 8, 1.0, after=("vision",)), global_batch=64)
    choice = choose(work, clock(work), 8)
    shared = choice.by_mode["colocated"]
    assert shared.most <= PLAIN.memory and (shared.candidate.window or shared.candidate.schedule == "1f1b")
