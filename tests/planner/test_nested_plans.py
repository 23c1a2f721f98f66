"""Plans with lanes: estimates are what the nested schedule says, and memory and weight decide where they win."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, TERA, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import NESTED, Candidate, nested
from mmjax.planner.choose import choose, proportional
from mmjax.planner.estimate import Estimate
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.variants import instanced, interleaved, rescheduled
from mmjax.planner.work import Shares, StageMemory, Work
from mmjax.schedule.ops import Op

VISION = module("vision", 4, 0.5)
LLM = module("llm", 8, 1.0, after=("vision",))
PAINTER = module("painter", 2, 0.25, after=("llm",))
THREE = model(VISION, LLM, PAINTER, global_batch=48)


def estimate(work: Work, layouts: dict[str, Layout], microbatches: int, **others: Any) -> Estimate:
    about: dict[str, Any] = {"mode": NESTED, "schedule": "nested", **others}
    candidate = Candidate(layouts=layouts, microbatches=microbatches, **about)
    return Estimate(work=work, clock=clock(work), candidate=candidate, rows=proportional(work)(candidate))


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    pp=st.sampled_from([2, 3, 4]),
    parts=st.sampled_from([1, 1, 2]),
    inner=st.sampled_from(["1f1b", "interleaved", "zb-h1", "eager-1f1b"]),
    microbatches=st.sampled_from([4, 12, 24, 48]),
    light=st.floats(0.05, 4.0),
    frozen=st.booleans(),
    draws=st.booleans(),
    process=st.sampled_from([0, 2]),
)
@example(pp=2, parts=2, inner="zb-h1", microbatches=48, light=3.5, frozen=True, draws=False, process=0)
def test_a_long_nested_step_is_what_the_whole_simulation_says(
    pp: int, parts: int, inner: str, microbatches: int, light: float, frozen: bool, draws: bool, process: int
) -> None:
    still: dict = {"backward": Shares(), "trained": Shares()} if frozen else {}
    work = model(module("vision", 4, light, **still), LLM, *([PAINTER] if draws else []), global_batch=48)
    chunks = 2 if inner == "interleaved" and microbatches % pp == 0 else 1
    laned = Layout(lanes=pp * parts, tp=2 // parts)
    layouts = {name: Layout(tp=2, pp=pp, chunks=chunks) if name == "llm" else laned for name in work.modules}
    one = estimate(work, layouts, microbatches, inner=inner)
    one = replace(one, clock=replace(clock(work, replace(PLAIN, node=4)), process=process))
    whole = one.timeline()
    # Behind a generator in lanes, W and the moves between processes settle after more microbatches than are simulated.
    assert one.seconds == pytest.approx(whole.makespan, rel=1e-2 if draws else 1e-5)
    assert one.least <= one.most
    for name in work.modules:
        lanes = layouts[name].lanes
        for index in range(layouts[name].stages):
            held = one.in_flight(one.graph.stage(f"{name}.{index}"))
            promised = math.ceil(whole.schedule.bound(f"{name}.{index}") / lanes)
            assert held == promised or (inner == "zb-h1" and held <= promised)


def heavy(seconds: float) -> Work:
    """An encoder of one layer, which no pipeline can cut, and an LLM whose weights want more than one stage."""
    states: dict = {name: Shares(layer=GIGA / 2) for name in ("parameters", "trained")}
    eye = module("vision", 1, seconds, memory={1: StageMemory(residuals=Shares(layer=4 * GIGA))})
    mind = module("llm", 4, 1.0, after=("vision",), memory={1: StageMemory(residuals=Shares(layer=GIGA))}, **states)
    return model(eye, mind, global_batch=32)


def test_nested_wins_where_a_heavy_encoder_meets_an_llm_that_needs_stages() -> None:
    work = heavy(2.0)
    choice = choose(work, clock(work), 4, memory=20 * GIGA)
    best, others = choice.best, [one for one in choice.estimates if one.candidate.mode != NESTED]
    assert best.candidate.mode == NESTED and best.candidate.layouts["vision"].lanes == 2
    assert best.most <= 20 * GIGA and min(one.seconds for one in others) > 1.2 * best.seconds
    # All devices compute, but in the fill and drain of the LLM's two stages; a step also reduces once.
    layers = 32 * (2.0 * 3 + 4 * 3) / 4
    assert layers < best.seconds < layers + 12 * 2 / 2 + 0.1
    assert choice.why().startswith(NESTED)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(0.05, marks=pytest.mark.long)], ids=["replicas", "light"])
def test_nested_does_not_win_where_replicas_fit_or_the_encoder_is_light(seconds: float) -> None:
    work = heavy(seconds)
    choice = choose(work, clock(work), 4, memory=40 * GIGA)
    assert choice.best.candidate.mode == "homogeneous"
    assert choice.by_mode[NESTED].seconds > choice.best.seconds


def test_modes_can_be_left_out_and_a_nested_layout_that_does_not_fit_says_so() -> None:
    work = heavy(2.0)
    choice = choose(work, clock(work), 4, memory=40 * GIGA, modes=(NESTED,))
    assert {one.candidate.mode for one in choice.estimates} == {NESTED}
    # With K = 2 units a lane keeps two microbatches of its encoder, whatever cuts the LLM.
    with pytest.raises(DoesNotFit, match=r"^nested: .* misses by .*lanes="):
        choose(work, clock(work), 4, memory=6 * GIGA, modes=(NESTED,))


def test_candidates_lie_on_the_llms_ranks_and_divide_the_samples() -> None:
    seen = set()
    for one in nested(THREE, 8, 4):
        llm, samples = one.layouts["llm"], THREE.global_batch // one.microbatches
        laned = {name: own for name, own in one.layouts.items() if own.lanes > 1}
        assert llm.pp > 1 and laned and (one.schedule, one.inner) == ("nested", "1f1b")
        for own in laned.values():
            assert own.ranks == llm.ranks and own.lanes % llm.pp == 0 and own.lanes <= one.microbatches
            assert samples % own.dp == 0 and own.tp <= 4
        seen.add((tuple(laned), max(own.lanes for own in laned.values()) > llm.pp))
    assert seen == set(itertools.product([("vision", "painter"), ("vision",), ("painter",)], (False, True)))
    assert not list(nested(model(LLM, global_batch=8), 8, 8)), "nothing to nest"
    direct = model(VISION, LLM, replace(PAINTER, after=("vision", "llm")), global_batch=8)
    assert all(len({own.lanes for own in one.layouts.values()}) == 2 for one in nested(direct, 4, 4))
    assert all(one.layouts["vision"].lanes == 1 or one.layouts["painter"].lanes == 1 for one in nested(direct, 4, 4))


def test_a_device_holds_the_microbatches_of_its_lane() -> None:
    layouts = {"vision": Layout(lanes=4), "llm": Layout(pp=4), "painter": Layout(lanes=4)}
    one = estimate(THREE, layouts, 24)
    bound = one.timeline().schedule.bound
    kept = {name: 2 * own.memory[1].residuals.of(own.whole) for name, own in THREE.modules.items()}  # of two samples
    for name in ("vision", "painter"):
        assert one.device_bytes[f"{name}.0"].activations == bound(f"{name}.0") / 4 * kept[name]
        shard = 12 * GIGA / 100 * THREE.modules[name].layers / 4  # moments and masters, over all lanes
        assert one.device_bytes[f"{name}.0"].weights == pytest.approx(
            2 * GIGA / 100 * THREE.modules[name].layers + shard
        )
    assert bound("painter.0") == 4, "one unit"
    whole = {rank: one.memory[rank] for rank in range(4)}
    assert whole[0] == sum(one.device_bytes[name].total for name in ("vision.0", "llm.0", "painter.0"))
    # What waits for the LLM's first stage lies there: a unit and more, of a microbatch each.
    sends = replace(THREE, modules={**THREE.modules, "vision": replace(VISION, output_bytes=GIGA)})
    waiting = estimate(sends, layouts, 24).device_bytes["llm.0"].activations - one.device_bytes["llm.0"].activations
    assert waiting == (max(bound("vision.0"), bound("llm.0")) + 2) * 2 * GIGA


def test_lanes_move_to_where_they_have_to() -> None:
    far = replace(PLAIN, network=1e3, node=2)
    work = model(replace(VISION, output_bytes=1e3), LLM, global_batch=8)
    one = estimate(work, {"vision": Layout(lanes=4, dp=1), "llm": Layout(pp=4)}, 8)
    costs = replace(one, clock=clock(work, far)).costs
    seconds = {m: costs.of(op) for op in one.timeline().schedule.ops for m in (op.microbatch,) if _first_carry(op)}
    assert seconds == pytest.approx({m: 1.0 if m % 4 > 1 else 0.0 for m in range(8)}, abs=1e-6)


def _first_carry(op: Op) -> bool:
    """Whether an op carries an activation to the LLM: a move, or an unpack on the same ranks."""
    return op.edge == "vision.0->llm.0" and not op.backward and (op.kind == "move" or op.microbatch % 4 == 0)


def test_the_inner_schedule_is_what_is_varied() -> None:
    wide = replace(LLM, width=10**5, layers=16)
    work = model(VISION, wide, global_batch=8)
    one = estimate(work, {"vision": Layout(lanes=4), "llm": Layout(pp=4)}, 8)
    (chunked,) = interleaved(work, one.candidate)
    assert (chunked.schedule, chunked.inner, chunked.layouts["llm"].chunks) == ("nested", "interleaved", 2)
    made = {other.inner: replace(one, candidate=other) for other in rescheduled(one, one.seconds)}
    assert {"interleaved", "zb-h1"} <= set(made)
    assert all(other.seconds < one.seconds and other.candidate.schedule == "nested" for other in made.values())
    assert made["zb-h1"].candidate.traits.splits and made["interleaved"].candidate.traits.chunks


def test_once_a_step_all_lanes_are_one_group() -> None:
    far = replace(PLAIN, network=1e7, node=2)
    work = model(VISION, LLM, global_batch=8)
    layouts = {"vision": Layout(lanes=2, dp=2, optimizer_instances=2), "llm": Layout(pp=2, dp=2)}
    laned, wide = (
        replace(estimate(work, {**layouts, "vision": own}, 4, schedule="gpipe"), clock=clock(work, far)).costs.seconds
        for own in (layouts["vision"], layouts["vision"].spanned)
    )
    once = {kind: laned[kind, "vision.0", False] for kind in ("prepare", "reduce")}
    assert once == {kind: wide[kind, "vision.0", False] for kind in once} and min(once.values()) > 0
    heavy_far = clock(work, replace(far, link=TERA))
    one = replace(estimate(work, {**layouts, "vision": Layout(lanes=4)}, 8), clock=heavy_far)
    assert instanced(replace(one, candidate=replace(one.candidate, microbatches=1))) is not None
