"""Choosing among modes: the best of everything that was tried, legal, within memory, on no more devices than help."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, SIMPLE, TERA, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.candidates import MODES, Candidate, colocated, homogeneous
from mmjax.planner.choose import choose, longer
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import TIE, proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.variants import (
    balanced,
    everything_offloaded,
    gains,
    instanced,
    interleaved,
    offloaded,
    rescheduled,
)
from mmjax.planner.work import Shares, StageMemory, Work


def every(work: Work, devices: int) -> list[Estimate]:
    """Every non-colocated layout of two modules with one LLM stage a rank, by trying all."""
    estimates = []
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
            estimates.append(Estimate(work=work, clock=clock(work), candidate=candidate, rows=rows_of(candidate)))
    return estimates


@settings(max_examples=12, deadline=None)
@given(light=st.floats(0.02, 3.0), frozen=st.booleans(), devices=st.sampled_from([3, 5, 8]))
def test_the_plan_is_as_good_as_trying_every_layout_apart(light: float, frozen: bool, devices: int) -> None:
    changes: dict = {"backward": Shares(), "trained": Shares()} if frozen else {}
    work = model(module("vision", 2, light, **changes), module("llm", 4, 1.0, after=("vision",)), global_batch=8)
    choice = choose(work, clock(work), devices, modes=SIMPLE)
    best = min(estimate.seconds for estimate in every(work, devices) if estimate.most <= PLAIN.memory)
    assert choice.best.seconds <= best * 1.02
    for estimate in choice.estimates:
        assert estimate.candidate.devices <= devices and estimate.most <= PLAIN.memory


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


def test_a_misfit_proposes_to_recompute_only_where_something_does_not() -> None:
    recomputed: dict = {"recompute": Shares(layer=TERA)}
    for changes, advice in (({}, "GB, or remat='full'"), (recomputed, "more devices, or devices of ")):
        vision = module("vision", 2, 0.2, **changes)
        work = model(vision, module("llm", 4, 1.0, after=("vision",), **recomputed))
        with pytest.raises(DoesNotFit, match=f"what would make it fit: .*{advice}") as refused:
            choose(work, clock(work), 8, memory=GIGA / 100)
        assert ("remat" in str(refused.value)) == (not changes)


def test_a_heavy_frozen_encoder_that_overlaps_goes_apart_and_a_light_one_stays() -> None:
    frozen: dict = {"backward": Shares(), "trained": Shares()}
    heavy = model(module("vision", 2, 6.0, **frozen), module("llm", 4, 1.0, after=("vision",)), global_batch=16)
    choice = choose(heavy, clock(heavy), 8)
    assert choice.best.seconds == min(estimate.seconds for estimate in choice.estimates)
    assert set(choice.by_mode) <= set(MODES)
    assert choice.why().startswith(choice.best.candidate.mode) and "sets the pace" in choice.why()


def test_candidates_of_the_shared_modes_are_legal() -> None:
    work = model(
        module("vision", 2, 0.3), module("llm", 4, 1.0, after=("vision",)), module("painter", 2, 0.2, after=("llm",))
    )
    for candidate in homogeneous(work, 8, 8):
        llm = candidate.layouts["llm"]
        for name, ranks in (("vision", llm.stage_ranks(0)), ("painter", llm.stage_ranks(llm.pp - 1))):
            layout = candidate.layouts[name]
            assert (layout.tp, layout.dp, layout.ranks) == (llm.tp, llm.dp, ranks)
    schedules, kinds = set(), set()
    for candidate in colocated(work, 8, 8):
        llm, samples = candidate.layouts["llm"], work.global_batch // candidate.microbatches
        vision = candidate.layouts["vision"]
        assert vision.ranks == llm.ranks
        wide, laned = vision.takes_several, vision.lanes > 1
        assert not (wide and laned) and (llm.pp > 1 or not (wide or laned))
        kinds.add((wide, laned))
        assert set(candidate.layouts["painter"].ranks) == set(llm.stage_ranks(llm.pp - 1))
        assert samples * (candidate.span if wide else 1) % vision.dp == 0
        assert all(samples % candidate.layouts[name].dp == 0 for name in ("llm", "painter"))
        assert (candidate.schedule == "three-phase") == (llm.pp > 1)
        schedules.add((candidate.schedule, bool(candidate.window)))
    assert kinds == {(False, False), (True, False), (False, True)}
    assert not any(
        candidate.layouts["vision"].takes_several
        for candidate in colocated(replace(work, joins_microbatches=False), 8, 8)
    )
    assert schedules == {("1f1b", False), ("three-phase", False), ("three-phase", True)}


def test_interleaved_and_balanced_variants() -> None:
    ends = module("llm", 8, 1.0, after=("vision",), forward=Shares(layer=1e12, last=2e12))
    work = model(module("vision", 2, 0.7), ends)
    layouts = {"vision": Layout(), "llm": Layout(pp=4)}
    candidate = Candidate(mode="homogeneous", layouts=layouts, microbatches=16)
    (chunked,) = interleaved(work, candidate)
    assert chunked.layouts["llm"] == Layout(pp=4, chunks=2) and chunked.schedule == "interleaved"
    assert not list(interleaved(work, replace(candidate, microbatches=6)))
    rows = proportional(work)(candidate)
    better = balanced(work, clock(work), rows, candidate)
    assert better is not None
    # The encoder is 1.4 layers on the first stage, the head two thirds of one on the last.
    first, *middle, last = better.layouts["llm"].layers
    assert (first, sorted(middle), last) == (1, [2, 3], 2)
    before, after = (Estimate(work=work, clock=clock(work), candidate=c, rows=rows) for c in (candidate, better))
    assert after.seconds < before.seconds
    assert balanced(work, clock(work), rows, better) is None


def test_a_misfit_of_activations_is_met_by_a_window_or_fewer_stages() -> None:
    keeps = {tp: StageMemory(residuals=Shares(layer=5 * GIGA / tp)) for tp in (1, 2, 4)}
    work = model(module("vision", 2, 1.0, memory=keeps), module("llm", 8, 1.0, after=("vision",)), global_batch=64)
    choice = choose(work, clock(work), 8)
    shared = choice.by_mode["colocated"]
    assert shared.most <= PLAIN.memory and (shared.candidate.window or shared.candidate.schedule == "1f1b")


def test_what_fits_with_offload_alone_is_found_and_offloads_no_more_than_it_must() -> None:
    """28 GB of weights, 16 of gradients, 40 of activations; 24 of these and the gradients' shard of 8 can be away."""
    heavy: dict = {"parameters": Shares(layer=GIGA), "trained": Shares(layer=GIGA)}
    work = model(
        module("llm", 2, 1.0, memory={1: StageMemory(residuals=Shares(layer=20 * GIGA))}, **heavy), global_batch=8
    )
    assert not any(estimate.candidate.offloads for estimate in choose(work, clock(work), 1, memory=90 * GIGA).estimates)
    best = choose(work, clock(work), 1, memory=53 * GIGA).best
    assert best.most == 52 * GIGA and best.candidate.offloads == {"llm": OffloadConfig(optimizer=True)}
    assert "one device on rank 0, optimizer offloaded" in best.candidate.describe()
    for clock_of, memory in ((clock(work), 51), (NoHost(work=work, accelerator=PLAIN), 53)):
        with pytest.raises(DoesNotFit):
            choose(work, clock_of, 1, memory=memory * GIGA)


class NoHost(AnalyticClock):
    """A device whose host's memory was not measured."""

    def copy(self, size: float) -> float:
        return math.inf


def test_a_faster_layout_is_tried_with_offload_beside_those_that_fit() -> None:
    """tp halves the bytes of a device, but all-reduces take longer than the copies."""
    heavy: dict = {"parameters": Shares(layer=GIGA), "trained": Shares(layer=GIGA), "sums": (2, 2)}
    keeps = {tp: StageMemory(residuals=Shares(layer=20 * GIGA / tp)) for tp in (1, 2)}
    llm = module("llm", 2, 1.0, memory=keeps, **heavy)
    work = model(replace(llm, model_width=10**10), global_batch=8)
    tight = 60 * GIGA
    choice = choose(work, clock(work, replace(PLAIN, host=GIGA * 100)), 2, memory=tight)
    assert choice.best.candidate.offloads and choice.best.candidate.layouts["llm"].tp == 1
    without_offload = [estimate for estimate in choice.estimates if not estimate.candidate.offloads]
    assert without_offload and min(estimate.seconds for estimate in without_offload) > choice.best.seconds * (1 + TIE)


def test_encoders_parameters_are_away_while_the_llm_runs_where_that_is_what_misses() -> None:
    frozen: dict = {"trained": Shares(), "backward": Shares(), "parameters": Shares(layer=GIGA)}
    keeps = {tp: StageMemory(residuals=Shares(layer=GIGA / tp)) for tp in (1,)}
    work = model(
        module("vision", 10, 0.4, **frozen, memory=keeps), module("llm", 4, 1.0, after=("vision",), memory=keeps)
    )
    layouts = {"vision": Layout(dp=4), "llm": Layout(pp=4)}
    candidate = Candidate(mode="colocated", layouts=layouts, microbatches=4, schedule="three-phase")
    estimate = Estimate(work=work, clock=clock(work), candidate=candidate, rows=proportional(work)(candidate))
    reduced = offloaded(estimate, lambda changed: changed.most <= estimate.most - 15 * GIGA)
    assert reduced is not None and reduced.offloads == {"vision": OffloadConfig(parameters=True)}
    assert offloaded(estimate, lambda changed: changed.most <= estimate.most - 50 * GIGA) is None
    plain = replace(estimate, candidate=replace(candidate, schedule="1f1b"))
    assert everything_offloaded(plain).candidate.offloads["vision"] == OffloadConfig(optimizer=True), "no time for more"


def test_instances_where_a_group_spans_nodes() -> None:
    sizes: dict = {name: Shares(layer=2 * GIGA) for name in ("parameters", "trained")}
    work = replace(
        model(module("llm", 1, 2.0, **sizes, memory={1: StageMemory(residuals=Shares())}), global_batch=64), gradient=2
    )
    far = clock(work, replace(PLAIN, network=GIGA / 10, link=GIGA * 10, node=4, memory=1e15))
    layouts = {"llm": Layout(dp=16)}
    candidate = Candidate(mode="homogeneous", layouts=layouts, microbatches=1)
    nominal = Estimate(work=work, clock=far, candidate=candidate, rows=proportional(work)(candidate))
    chosen = instanced(nominal)
    assert chosen is not None
    each = {
        count: replace(nominal, candidate=replace(candidate, layouts={"llm": Layout(dp=16, optimizer_instances=count)}))
        for count in (1, 2, 4, 8, 16)
    }
    best = min(each.values(), key=lambda estimate: estimate.seconds)
    assert chosen == best.candidate and best.candidate.layouts["llm"].optimizer_instances > 1
    choice = choose(work, far, 16)
    assert choice.best.candidate.layouts["llm"].optimizer_instances > 1 and choice.best.seconds <= best.seconds
    near = replace(nominal, clock=clock(work, replace(PLAIN, network=GIGA / 10, node=16)))
    assert instanced(near) is None, "no group leaves its node"


@pytest.mark.parametrize(
    ("schedule", "microbatches", "changes"),
    [
        ("zb-h1", 5, {"width": 10**5}),  # all of a product's backward is halves; too few layers for chunks
        ("eager-1f1b", 64, {"carried": TERA}),
        ("interleaved", 8, {"layers": 16}),
    ],
)
def test_other_schedules_where_a_closed_form_expects_something(schedule: str, microbatches: int, changes: dict) -> None:
    fields = {"layers": 5, **changes}
    llm = replace(module("llm", fields.pop("layers"), 1.0), **fields)
    work = model(llm, global_batch=microbatches)
    pp = 4 if llm.layers == 16 else 5
    candidate = Candidate(mode="homogeneous", layouts={"llm": Layout(pp=pp)}, microbatches=microbatches)
    estimate = Estimate(work=work, clock=clock(work), candidate=candidate, rows=proportional(work)(candidate))
    saved = gains(estimate)
    variants = {
        variant.schedule: replace(estimate, candidate=variant) for variant in rescheduled(estimate, estimate.seconds)
    }
    assert schedule in variants
    for name, variant in variants.items():
        assert estimate.seconds - variant.seconds == pytest.approx(saved[name], rel=0.25), name
    assert not list(rescheduled(estimate, estimate.seconds * 0.3)), "none is so much better"
    assert not list(
        rescheduled(replace(estimate, candidate=replace(candidate, layouts={"llm": Layout()})), estimate.seconds)
    )


@pytest.mark.parametrize("window", [0, 4])
def test_the_llms_schedule_within_windows_is_varied(window: int) -> None:
    """Each window is idle once: the closed form's gain is that of a window, times their number."""
    llm = replace(module("llm", 16, 1.0, after=("vision",)), width=10**5)
    work = model(module("vision", 2, 0.3), llm, global_batch=8)
    layouts = {"vision": Layout(dp=4), "llm": Layout(pp=4)}
    candidate = Candidate(mode="colocated", layouts=layouts, microbatches=8, schedule="three-phase", window=window)
    estimate = Estimate(work=work, clock=clock(work), candidate=candidate, rows=proportional(work)(candidate))
    variants = {
        variant.inner: replace(estimate, candidate=variant) for variant in rescheduled(estimate, estimate.seconds)
    }
    assert {"interleaved", "zb-h1"} <= set(variants)
    for name, variant in variants.items():
        assert variant.candidate.schedule == "three-phase" and variant.candidate.window == window
        assert estimate.seconds - variant.seconds == pytest.approx(gains(estimate)[name], rel=0.25), name
        assert variant.seconds == pytest.approx(variant.timeline().makespan)


def test_the_best_of_all_modes_is_varied() -> None:
    heavy: dict = {
        "parameters": Shares(layer=GIGA),
        "trained": Shares(layer=GIGA),
        "memory": {1: StageMemory(residuals=Shares())},
    }
    work = model(replace(module("llm", 16, 1.0, **heavy), width=10**5), global_batch=8)
    choice = choose(work, clock(work), 4, memory=100 * GIGA)
    schedules = {
        (estimate.candidate.schedule, estimate.candidate.layouts["llm"].chunks) for estimate in choice.estimates
    }
    assert {("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("interleaved", 4)} <= schedules, schedules
    assert all(estimate.most <= 100 * GIGA for estimate in choice.estimates)
    assert choice.best.candidate.schedule != "1f1b"


def test_a_difference_is_never_minus_nothing() -> None:
    assert [longer(seconds, 1.0) for seconds in (0.99999, 1.0, 1.031, 0.9)] == ["+0.0%", "+0.0%", "+3.1%", "-10.0%"]
