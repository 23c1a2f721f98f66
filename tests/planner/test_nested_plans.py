"""Plans with lanes: estimates equal the nested schedule, and memory and weight decide when they win."""

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
from mmjax.planner.choose import choose
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.variants import exchanged, instanced, interleaved, rescheduled
from mmjax.planner.work import Shares, StageMemory, Work
from mmjax.schedule.ops import Op

VISION = module("vision", 4, 0.5)
LLM = module("llm", 8, 1.0, after=("vision",))
PAINTER = module("painter", 2, 0.25, after=("llm",))
THREE = model(VISION, LLM, PAINTER, global_batch=48)


def estimated(work: Work, layouts: dict[str, Layout], microbatches: int, **fields: Any) -> Estimate:
    settings: dict[str, Any] = {"mode": NESTED, "schedule": "nested", **fields}
    candidate = Candidate(layouts=layouts, microbatches=microbatches, **settings)
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
    estimate = estimated(work, layouts, microbatches, inner=inner)
    estimate = replace(estimate, clock=replace(clock(work, replace(PLAIN, node=4)), process=process))
    timeline = estimate.timeline()
    # Behind a generator in lanes, W and the moves between processes settle after more microbatches than are simulated.
    assert estimate.seconds == pytest.approx(timeline.makespan, rel=1e-2 if draws else 1e-5)
    assert estimate.least <= estimate.most
    for name in work.modules:
        lanes = layouts[name].lanes
        for index in range(layouts[name].stages):
            in_flight = estimate.in_flight(estimate.graph.stage(f"{name}.{index}"))
            promised = math.ceil(timeline.schedule.bound(f"{name}.{index}") / lanes)
            assert in_flight == promised or (inner == "zb-h1" and in_flight <= promised)


def test_lanes_that_pull_hold_shards_and_one_copy_and_hide_their_pulls() -> None:
    """Beside lanes with whole parameters: pulls lie beside other ops; a gather of all lanes makes a step longer."""
    eye = module("vision", 4, 1.0, parameters=Shares(layer=GIGA), trained=Shares(layer=GIGA))
    work = model(eye, LLM, global_batch=48)

    def planned(process: int = 0, **fields: Any) -> Estimate:
        layouts = {"vision": Layout(lanes=4, **fields), "llm": Layout(pp=4)}
        estimate = estimated(work, layouts, 24)
        return replace(estimate, clock=replace(clock(work, replace(PLAIN, node=4)), process=process))

    whole, pulled = planned(), planned(shard="parameters", gather="pull")
    together = planned(process=1, shard="parameters", gather="pull")
    assert [each.graph.stage("vision.0").gather for each in (whole, pulled, together)] == ["", "pull", "collective"]
    (kind, seconds), (again, _) = ((key[0], cost) for key, cost in pulled.costs.seconds.items() if key[0] == "gather")
    assert kind == again == "gather" and seconds > 0
    assert pulled.seconds <= whole.seconds + 2 * seconds
    collective = pulled.graph.with_gathers({"vision.0": "collective"})  # with the same moves
    assert pulled.timeline(graph=collective).makespan > pulled.timeline().makespan
    parameters = 4 * GIGA * work.item
    states = [each._states("vision", each.parts["vision.0"]) for each in (whole, pulled)]
    assert states[1].parameters == pytest.approx(states[0].parameters / 4) == parameters / 4
    assert pulled.gathered_bytes("vision", pulled.parts["vision.0"]) == parameters
    assert pulled.most > whole.most and pulled.seconds >= whole.seconds, "so no plan searches it"


def heavy(seconds: float) -> Work:
    """An encoder of one layer, which no pipeline can cut, and an LLM whose weights want more than one stage."""
    states: dict = {name: Shares(layer=GIGA / 2) for name in ("parameters", "trained")}
    eye = module("vision", 1, seconds, memory={1: StageMemory(residuals=Shares(layer=4 * GIGA))})
    mind = module("llm", 4, 1.0, after=("vision",), memory={1: StageMemory(residuals=Shares(layer=GIGA))}, **states)
    return model(eye, mind, global_batch=32)


def test_nested_wins_where_a_heavy_encoder_meets_an_llm_that_needs_stages() -> None:
    work = heavy(2.0)
    everything = choose(work, clock(work), 4, memory=20 * GIGA)
    # The fastest fits with offload alone, so shards are tried too: those of replicas here, whose gathers are
    # free. Slower ones fit without either: an encoder that runs before a window of four microbatches and after it.
    whole = [
        e for e in everything.estimates if all(layout.shard == "states" for layout in e.candidate.layouts.values())
    ]
    assert {e.candidate.mode for e in whole if not e.candidate.offloads} == {"colocated"}
    assert everything.best.candidate.layouts["llm"].shard == "parameters"
    choice = replace(everything, estimates=whole)
    best, unnested = choice.best, [estimate for estimate in choice.estimates if estimate.candidate.mode != NESTED]
    assert best.candidate.mode == NESTED and best.candidate.layouts["vision"].lanes == 2
    assert best.most <= 20 * GIGA and min(estimate.seconds for estimate in unnested) > 1.2 * best.seconds
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
    assert {estimate.candidate.mode for estimate in choice.estimates} == {NESTED}
    # With K = 2 units a lane keeps two microbatches of its encoder, whatever cuts the LLM.
    with pytest.raises(DoesNotFit, match=r"^nested: .* misses by .*lanes="):
        choose(work, clock(work), 4, memory=6 * GIGA, modes=(NESTED,))


def test_candidates_lie_on_the_llms_ranks_and_divide_the_samples() -> None:
    placements = set()
    for candidate in nested(THREE, 8, 4):
        llm, samples = candidate.layouts["llm"], THREE.global_batch // candidate.microbatches
        laned = {name: layout for name, layout in candidate.layouts.items() if layout.lanes > 1}
        assert llm.pp > 1 and laned and (candidate.schedule, candidate.inner) == ("nested", "1f1b")
        for layout in laned.values():
            assert layout.ranks == llm.ranks and layout.lanes % llm.pp == 0 and layout.lanes <= candidate.microbatches
            assert samples % layout.dp == 0 and layout.tp <= 4
        placements.add((tuple(laned), max(layout.lanes for layout in laned.values()) > llm.pp))
    assert placements == set(itertools.product([("vision", "painter"), ("vision",), ("painter",)], (False, True)))
    assert not list(nested(model(LLM, global_batch=8), 8, 8)), "nothing to nest"
    direct = model(VISION, LLM, replace(PAINTER, after=("vision", "llm")), global_batch=8)
    assert all(len({layout.lanes for layout in candidate.layouts.values()}) == 2 for candidate in nested(direct, 4, 4))
    assert all(
        candidate.layouts["vision"].lanes == 1 or candidate.layouts["painter"].lanes == 1
        for candidate in nested(direct, 4, 4)
    )


def test_a_device_holds_the_microbatches_of_its_lane() -> None:
    layouts = {"vision": Layout(lanes=4), "llm": Layout(pp=4), "painter": Layout(lanes=4)}
    estimate = estimated(THREE, layouts, 24)
    bound = estimate.timeline().schedule.bound
    residuals = {
        name: 2 * module.memory[1].residuals.of(module.whole) for name, module in THREE.modules.items()
    }  # of two samples
    for name in ("vision", "painter"):
        assert estimate.device_bytes[f"{name}.0"].activations == bound(f"{name}.0") / 4 * residuals[name]
        shard = 12 * GIGA / 100 * THREE.modules[name].layers / 4  # moments and masters, over all lanes
        assert estimate.device_bytes[f"{name}.0"].weights == pytest.approx(
            2 * GIGA / 100 * THREE.modules[name].layers + shard
        )
    assert bound("painter.0") == 4, "one unit"
    memory = {rank: estimate.memory[rank] for rank in range(4)}
    assert memory[0] == sum(estimate.device_bytes[name].total for name in ("vision.0", "llm.0", "painter.0"))
    # What waits for the LLM's first stage lies there: a unit and more, of a microbatch each.
    sends = replace(THREE, modules={**THREE.modules, "vision": replace(VISION, output_bytes=GIGA)})
    waiting = (
        estimated(sends, layouts, 24).device_bytes["llm.0"].activations - estimate.device_bytes["llm.0"].activations
    )
    assert waiting == (max(bound("vision.0"), bound("llm.0")) + 2) * 2 * GIGA


def test_lanes_move_to_where_they_have_to() -> None:
    far = replace(PLAIN, network=1e3, node=2)
    work = model(replace(VISION, output_bytes=1e3), LLM, global_batch=8)
    estimate = estimated(work, {"vision": Layout(lanes=4, dp=1), "llm": Layout(pp=4)}, 8)
    costs = replace(estimate, clock=clock(work, far)).costs
    seconds = {m: costs.of(op) for op in estimate.timeline().schedule.ops for m in (op.microbatch,) if _first_carry(op)}
    assert seconds == pytest.approx({m: 1.0 if m % 4 > 1 else 0.0 for m in range(8)}, abs=1e-6)


def _first_carry(op: Op) -> bool:
    """Whether an op carries an activation to the LLM: a move, or an unpack on the same ranks."""
    return op.edge == "vision.0->llm.0" and not op.backward and (op.kind == "move" or op.microbatch % 4 == 0)


def test_the_inner_schedule_is_what_is_varied() -> None:
    wide = replace(LLM, width=10**5, layers=16)
    work = model(VISION, wide, global_batch=8)
    estimate = estimated(work, {"vision": Layout(lanes=4), "llm": Layout(pp=4)}, 8)
    (chunked,) = interleaved(work, estimate.candidate)
    assert (chunked.schedule, chunked.inner, chunked.layouts["llm"].chunks) == ("nested", "interleaved", 2)
    variants = {
        variant.inner: replace(estimate, candidate=variant) for variant in rescheduled(estimate, estimate.seconds)
    }
    assert {"interleaved", "zb-h1"} <= set(variants)
    assert all(
        variant.seconds < estimate.seconds and variant.candidate.schedule == "nested" for variant in variants.values()
    )
    assert variants["zb-h1"].candidate.traits.splits and variants["interleaved"].candidate.traits.chunks


def test_once_a_step_all_lanes_are_one_group() -> None:
    far = replace(PLAIN, network=1e7, node=2)
    work = model(VISION, LLM, global_batch=8)
    layouts = {"vision": Layout(lanes=2, dp=2, optimizer_instances=2), "llm": Layout(pp=2, dp=2)}
    laned, wide = (
        replace(
            estimated(work, {**layouts, "vision": layout}, 4, schedule="gpipe"), clock=clock(work, far)
        ).costs.seconds
        for layout in (layouts["vision"], layouts["vision"].across_lanes)
    )
    once = {kind: laned[kind, "vision.0", False] for kind in ("prepare", "reduce")}
    assert once == {kind: wide[kind, "vision.0", False] for kind in once} and min(once.values()) > 0
    heavy_far = clock(work, replace(far, link=TERA))
    estimate = replace(estimated(work, {**layouts, "vision": Layout(lanes=4)}, 8), clock=heavy_far)
    assert instanced(replace(estimate, candidate=replace(estimate.candidate, microbatches=1))) is not None


# ---- ranks with whole media ------------------------------------------------------------------------------------------

EYE = replace(module("vision", 4, 0.1, ring=TERA, longest=60, heads=(4, 4)), rows=4.0, width=64)
MIND = replace(module("llm", 8, 4.0, ring=1.0, heads=(4, 4), after=("vision",)), rows=0.25, width=8192)
PACKED = model(EYE, MIND, global_batch=32).limited(lambda name: (1,))
"""Four samples of four pictures fill a row of the LLM."""


def _shared(candidate: Candidate) -> bool:
    return candidate.layouts["vision"].cp_tokens == "segments"


def test_lanes_share_the_media_of_the_llms_cells() -> None:
    """A lane has the LLM's dp, or a divisor of it; the rest of it is cp, of which each rank has a picture or more."""
    candidates = list(nested(PACKED, 16, 8))
    shared = [candidate.layouts for candidate in candidates if _shared(candidate)]
    assert any(layouts["vision"].dp == 2 for layouts in shared) and len(shared) < len(candidates)
    for candidate in filter(_shared, candidates):
        vision, llm = candidate.layouts["vision"], candidate.layouts["llm"]
        assert vision.ranks == llm.ranks and vision.cp > 1 and llm.dp % vision.dp == 0 and vision.cp_way == "need"
        assert PACKED.global_batch // candidate.microbatches // llm.dp * EYE.rows >= vision.cp
    for others in ({"longest": 0}, {"ring": 0.0}):
        eye = replace(PACKED.modules["vision"], **others)
        assert not any(map(_shared, nested(model(eye, PACKED.modules["llm"], global_batch=32), 16, 8)))
    whole = replace(PACKED.modules["llm"], rows=1.0)  # a row for each sample, none of which is padded by more dp
    assert not any(map(_shared, nested(model(PACKED.modules["vision"], whole, global_batch=32), 16, 8)))


def test_ranks_with_whole_media_exchange_nothing() -> None:
    """A microbatch takes as long as with dp, which pads rows of the LLM; with parts of pictures it takes longer."""

    def estimate(**fields: Any) -> Estimate:
        return estimated(PACKED, {"vision": Layout(lanes=4, **fields), "llm": Layout(pp=4, cp=4)}, 8)

    whole = estimate(cp=4, cp_way="need", cp_tokens="segments")
    samples, parts = estimate(dp=4), estimate(cp=4, cp_way="need")
    assert (whole.rows, samples.rows) == (
        {"vision": (4, 256), "llm": (1, 8192)},
        {"vision": (16, 64), "llm": (4, 8192)},
    )
    seconds = [e.stage_seconds("vision.0") for e in (whole, samples, parts)]
    assert seconds[0] == pytest.approx(seconds[1]) and seconds[2] > 2 * seconds[0]
    assert whole.device_bytes["vision.0"].temporaries < parts.device_bytes["vision.0"].temporaries
    assert samples.stage_seconds("llm.1") == pytest.approx(4 * whole.stage_seconds("llm.1"))
    assert exchanged(whole) is None, "nothing to exchange in another way"


def test_a_plan_of_packed_rows_pads_none() -> None:
    """A lane of four ranks has pictures of the LLM's one row; with samples of its own it pads four rows."""
    choice = choose(PACKED, clock(PACKED), 16, modes=(NESTED,))
    assert choice.best.candidate.layouts["vision"].cp_tokens == "segments" and choice.best.padding < 0.1
    dealt = replace(PACKED, modules={**PACKED.modules, "vision": replace(PACKED.modules["vision"], longest=0)})
    assert choose(dealt, clock(dealt), 16, modes=(NESTED,)).best.seconds > 1.1 * choice.best.seconds
