"""Estimates: graphs, steps and bytes equal those of runs, and long steps equal their simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, TERA, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.candidates import Candidate
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import Real, Shares, SplitMemory, StageMemory, StagePart, Work
from mmjax.schedule.ops import STASH_COPIES

VISION = module("vision", 4, 0.5)
LLM = module("llm", 8, 1.0, after=("vision",))
PAINTER = module("painter", 2, 0.25, after=("llm",))
THREE = model(VISION, LLM, PAINTER)


def estimated(work: Work, layouts: dict[str, Layout], microbatches: int, **fields: Any) -> Estimate:
    candidate = Candidate(mode="any", layouts=layouts, microbatches=microbatches, **fields)
    samples = work.global_batch // microbatches
    rows = {name: (samples * module.rows, module.width) for name, module in work.modules.items()}
    return Estimate(work=work, clock=clock(work), candidate=candidate, rows=rows)


@settings(max_examples=40, deadline=None)
@given(
    llm=st.sampled_from([1, 2, 4]),
    vision=st.sampled_from([1, 2, 4]),
    microbatches=st.sampled_from([1, 2, 4, 8, 16]),
    schedule=st.sampled_from(["1f1b", "three-phase", "interleaved", "zb-h1", "eager-1f1b"]),
    window=st.sampled_from([0, 2, 4]),
    together=st.sampled_from([1, 2, 0]),
    light=st.floats(0.05, 4.0),
    process=st.sampled_from([0, 1, 2]),
    inner=st.sampled_from(["1f1b", "interleaved", "zb-h1", "eager-1f1b"]),
)
def test_a_long_step_is_what_the_whole_simulation_says(
    llm: int,
    vision: int,
    microbatches: int,
    schedule: str,
    window: int,
    together: int,
    light: float,
    process: int,
    inner: str,
) -> None:
    work = model(module("vision", 4, light), LLM)
    layouts = {"vision": Layout(pp=vision, rank_offset=llm), "llm": Layout(pp=llm)}
    phased = {"window": window, "inner": inner} if schedule == "three-phase" else {}
    if "interleaved" in (schedule, phased.get("inner")):
        layouts["llm"] = Layout(pp=llm, chunks=2 if llm > 1 else 1)
    if schedule == "three-phase":
        layouts["vision"] = Layout(dp=llm, microbatches=together)
    estimate = estimated(work, layouts, microbatches, schedule=schedule, **phased)
    estimate = replace(estimate, clock=replace(clock(work), process=process))
    # Where senders wait, steps of different lengths may be ordered in different ways, which are about as long.
    assert estimate.seconds == pytest.approx(estimate.timeline().makespan, rel=1e-5 if process else 1e-9)
    assert estimate.least <= estimate.most


@pytest.mark.parametrize("light", [1.3, 2.6, 2.75])
def test_chunks_of_waiting_senders_settle_late(light: float) -> None:
    """The pace of 48 microbatches is not that of the first: steps were predicted up to 5 % too long or too short."""
    work = replace(model(module("vision", 4, light), LLM), global_batch=96)
    layouts = {"vision": Layout(pp=2, rank_offset=4), "llm": Layout(pp=4, chunks=2)}
    estimate = estimated(work, layouts, 48, schedule="interleaved")
    estimate = replace(estimate, clock=replace(clock(work), process=2))
    assert estimate.seconds == pytest.approx(estimate.timeline().makespan, rel=1e-5)


def test_seconds_of_a_step_by_hand() -> None:
    estimate = estimated(
        THREE, {"vision": Layout(rank_offset=2), "llm": Layout(pp=2), "painter": Layout(rank_offset=3)}, 4
    )
    per = {"vision.0": 4 * 0.5 * 3 * 4, "llm.0": 4 * 3 * 4, "llm.1": 4 * 3 * 4, "painter.0": 2 * 0.25 * 3 * 4}
    assert {name: estimate.stage_seconds(name) for name in estimate.parts} == pytest.approx(per)
    assert estimate.quick == pytest.approx(24 + 48 + 48 + 6 + 3 * 48, rel=1e-6)
    assert estimate.busy == pytest.approx(4 * sum(per.values()))
    assert estimate.bubble == pytest.approx(1 - estimate.busy / (estimate.seconds * 4))
    assert estimate.bottleneck == "llm.0" and estimate.depth == 4
    # All positions are real and nothing is computed twice: the devices are busy with model FLOPs alone.
    assert (
        estimate.mfu == pytest.approx(estimate.busy / (estimate.seconds * 4))
        and estimate.padding == estimate.recompute == 0
    )


def test_neither_padding_nor_recompute_is_in_mfu() -> None:
    """The same step; a quarter of the LLM's positions are real, and a third of its backward is recompute."""
    plain = estimated(THREE, {name: Layout(rank_offset=at) for at, name in enumerate(THREE.modules)}, 4)
    llm = THREE.modules["llm"]
    again = Shares(layer=llm.backward.layer / 3)
    flops = llm.computed - again.of(llm.whole)
    padded = replace(llm, recompute=again, real=Real(positions=0.25, flops=flops / 4))
    estimate = replace(plain, work=replace(THREE, modules={**THREE.modules, "llm": padded}))
    assert estimate.seconds == plain.seconds
    unpadded = sum(module.computed for name, module in THREE.modules.items() if name != "llm")
    assert plain.mfu and estimate.mfu
    assert estimate.mfu / plain.mfu == pytest.approx((unpadded + flops / 4) / (unpadded + llm.computed))
    assert estimate.padding == pytest.approx(0.75 / 3)  # a position of each module in a sample
    assert estimate.recompute == pytest.approx(again.of(llm.whole) / (unpadded + llm.computed))


def test_between_processes_both_ends_of_a_move_take_part() -> None:
    layouts = {"vision": Layout(rank_offset=2), "llm": Layout(pp=2), "painter": Layout(rank_offset=1)}
    estimate = estimated(THREE, layouts, 4)

    def kinds(process: int) -> list[str]:
        graph = replace(estimate, clock=replace(clock(THREE), process=process)).graph
        return [graph.edge(name).kind for name in ("vision.0->llm.0", "llm.0->llm.1", "llm.1->painter.0")]

    assert kinds(0) == kinds(4) == ["async", "async", "local"]
    assert kinds(2) == ["rendezvous", "async", "local"]
    assert kinds(1) == ["rendezvous", "rendezvous", "local"]


def test_devices_that_share_processors_take_turns() -> None:
    estimate = estimated(THREE, {name: Layout(rank_offset=at) for at, name in enumerate(THREE.modules)}, 16)
    shared = replace(estimate, clock=replace(clock(THREE), shared=1.0))
    assert shared.seconds == pytest.approx(estimate.busy) and shared.seconds > estimate.seconds


def test_a_layer_that_is_added_to_a_stage_is_seen() -> None:
    even, uneven = (
        estimated(THREE, {"vision": Layout(), "llm": Layout(pp=2, layers=layers), "painter": Layout(rank_offset=1)}, 8)
        for layers in ((4, 4), (3, 5))
    )
    assert uneven.parts["llm.1"] == StagePart(layers=5, last=True)
    assert uneven.stage_seconds("llm.1") / even.stage_seconds("llm.1") == pytest.approx(5 / 4)
    # The encoder shares the first stage's rank and the painter the last one's.
    loads = {name: estimate.stage_seconds for name, estimate in (("even", even), ("uneven", uneven))}
    assert loads["even"]("vision.0") + loads["even"]("llm.0") > loads["uneven"]("vision.0") + loads["uneven"]("llm.0")


def test_bytes_by_hand() -> None:
    memory = {
        1: StageMemory(
            residuals=Shares(2.0, 8.0, 4.0), inputs=Shares(first=3.0), fixed=Shares(layer=100.0), fixed_layer=10.0
        )
    }
    llm = replace(LLM, memory=memory, carried=5.0, after=(), trained=Shares(), backward=Shares(), layers=4)
    frozen = replace(
        VISION, memory=memory, carried=1.0, output_bytes=0.5, trained=Shares(layer=1.0), parameters=Shares(layer=1.0)
    )
    work = model(frozen, replace(llm, after=("vision",)))
    estimate = estimated(work, {"vision": Layout(dp=2, rank_offset=2), "llm": Layout(pp=2)}, 4)
    vision, first = estimate.device_bytes["vision.0"], estimate.device_bytes["llm.0"]
    # Two rows a replica and microbatch; in flight are three, one for each stage behind and one for itself.
    assert vision.weights == 4 * (2 + 12 / 2) and vision.gradients == 4 * 4 * (1 + 1 / 2)
    assert vision.activations == 2 * (3 * (2 + 8 * 4 + 4) + 2 * 0.5 + 2 * 4 * 3.0)
    assert vision.temporaries == 100 + 4 * 10
    # Features of four rows arrive for two microbatches; an activation leaves while its predecessor's gradient comes.
    assert first.activations == 4 * (2 * (2 + 8 * 2) + 2 * 0.5 + 2 * 5.0 + 2 * 4 * 3.0)
    assert first.gradients == 0 and first.weights == pytest.approx(2 * GIGA / 100 * 2)  # it is held as it is computed
    assert estimate.most == max(estimate.memory.values()) and set(estimate.memory) == {0, 1, 2}


def test_stages_on_one_device_add_up() -> None:
    apart = estimated(
        THREE, {"vision": Layout(rank_offset=2), "llm": Layout(pp=2), "painter": Layout(rank_offset=3)}, 4
    )
    together = estimated(THREE, {"vision": Layout(), "llm": Layout(pp=2), "painter": Layout(rank_offset=1)}, 4)
    assert set(together.memory) == {0, 1} and set(apart.memory) == {0, 1, 2, 3}
    weights = sum(apart.device_bytes[name].weights for name in ("vision.0", "llm.0"))
    assert together.memory[0] > apart.memory[0] and together.memory[0] > weights
    assert together.least <= together.most and apart.least <= apart.most


def test_in_three_phases_an_encoder_keeps_its_window() -> None:
    layouts = {"vision": Layout(dp=2), "llm": Layout(pp=2)}
    work = model(VISION, LLM)
    activations = [
        estimated(work, layouts, 8, schedule="three-phase", window=window).device_bytes["vision.0"].activations
        for window in (0, 4, 2)
    ]
    assert activations == pytest.approx([activations[2] * 4, activations[2] * 2, activations[2]])


@pytest.mark.parametrize(("window", "together", "ops"), [(0, 0, 1), (0, 4, 2), (4, 2, 4), (4, 0, 2)])
def test_an_encoder_of_a_window_takes_as_long_as_its_microbatches(window: int, together: int, ops: int) -> None:
    work, llm = model(VISION, LLM), Layout(pp=2)
    apart, joined = (
        estimated(work, {"vision": layout, "llm": llm}, 8, schedule="three-phase", window=window)
        for layout in (Layout(dp=2), Layout(dp=2, microbatches=together))
    )
    timeline = joined.timeline()
    assert sum(op.kind == "F" and op.stage == "vision.0" for op in timeline.schedule.ops) == ops
    assert joined.busy == pytest.approx(apart.busy, rel=1e-6)
    assert joined.stage_seconds("vision.0") == pytest.approx(apart.stage_seconds("vision.0"), rel=1e-6)
    assert joined.quick == pytest.approx(apart.quick, rel=1e-6)
    assert joined.device_bytes["vision.0"].activations >= apart.device_bytes["vision.0"].activations
    edge = "vision.0->llm.0"
    (kind,) = (kind for kind, name, backward in joined.costs.seconds if name == edge and not backward)
    moved = [estimate.costs.seconds[kind, edge, False] - estimate.clock.op for estimate in (apart, joined)]
    assert moved[1] == pytest.approx(8 / ops * moved[0])


def test_what_an_encoder_keeps_is_away_but_for_two_microbatches() -> None:
    work = model(VISION, LLM)
    layouts = {"vision": Layout(lanes=2), "llm": Layout(pp=2)}
    home, away = (
        estimated(work, layouts, 8, schedule="encoders-first", offloads=offloads)
        for offloads in ({}, {"vision": OffloadConfig(activations=True)})
    )
    at_home, offloaded = home.device_bytes["vision.0"], away.device_bytes["vision.0"]
    assert offloaded.host == offloaded.activations_away > 0 and not at_home.host
    assert at_home.activations - offloaded.activations == pytest.approx(offloaded.host / 2), "two of a lane's four stay"
    assert offloaded.weights == at_home.weights and away.device_bytes["llm.0"] == home.device_bytes["llm.0"]
    for kind in STASH_COPIES:
        assert away.costs.seconds[kind, "vision.0", False] == pytest.approx(offloaded.host / 4 / PLAIN.host)
    assert [node.stashes for node in away.graph.stages] == [node.module == "vision" for node in away.graph.stages]
    slow = replace(away, clock=clock(work, replace(PLAIN, host=1e3)))
    assert slow.seconds > away.seconds >= home.seconds


def test_what_is_offloaded_is_away_while_others_run() -> None:
    work = model(VISION, LLM)
    layouts = {"vision": Layout(dp=2), "llm": Layout(pp=2)}
    home, away = (
        estimated(work, layouts, 8, schedule="three-phase", offloads=offloads)
        for offloads in ({}, {"vision": OffloadConfig(parameters=True), "llm": OffloadConfig(optimizer=True)})
    )
    vision, llm = away.device_bytes["vision.0"], away.device_bytes["llm.0"]
    # 40 million parameters of the encoder, each 2 bytes; a master and two moments of as many in an LLM stage.
    assert vision.host == vision.parameters_away == 2 * 4 * GIGA / 100
    assert llm.host == llm.states_away == 12 * 4 * GIGA / 100 and not home.device_bytes["llm.0"].host
    assert llm.total == home.device_bytes["llm.0"].total
    # Activations are most of it, so the fullest moment is in the LLM's phase, where neither is there, nor the shard.
    assert home.most - away.most == pytest.approx(llm.host + llm.reduced + vision.host)
    host = PLAIN.host
    assert away.costs.seconds["offload", "vision.0", False] == pytest.approx(vision.host / host)
    assert away.costs.seconds["reload", "vision.0", False] == pytest.approx(vision.host / host)
    assert home.costs.seconds["reduce", "llm.0", False] == 0, "one replica reduces nothing"
    assert away.costs.seconds["reduce", "llm.0", False] == pytest.approx(llm.host / host)
    assert away.seconds > home.seconds
    copies = [op for op in away.timeline(2).schedule.ops if op.kind in ("offload", "reload")]
    assert [(op.kind, op.stage) for op in copies] == [("offload", "vision.0"), ("reload", "vision.0")]
    slow = replace(away, clock=clock(work, replace(PLAIN, host=1e3)))
    assert slow.seconds > 1e4 < slow.quick
    assert "vision dp=2 on ranks 0-1, parameters offloaded" in away.candidate.describe()


def test_when_a_step_ends_nothing_is_away() -> None:
    small = {tp: StageMemory(residuals=Shares(layer=1e3)) for tp in (1, 2)}
    work = model(replace(LLM, memory=small, after=()))
    offloads = {"llm": OffloadConfig(optimizer=True)}
    home, away = (estimated(work, {"llm": Layout()}, 8, offloads=settings) for settings in ({}, offloads))
    assert 0 < home.most - away.most < 2e4
    assert away.lightest <= away.most and home.least <= home.most


def test_a_frozen_stage_fetches_its_shards_before_it_gathers_them() -> None:
    work = model(replace(VISION, trained=Shares(), backward=Shares()), LLM)
    offloads = {"vision": OffloadConfig(optimizer=True)}
    for dp, host in ((2, 4 * 2 * GIGA / 100 / 2), (1, 0)):  # with one rank it is computed with as it lies
        layouts = {"vision": Layout(dp=dp, rank_offset=1), "llm": Layout()}
        home, away = (estimated(work, layouts, 4, offloads=settings) for settings in ({}, offloads))
        assert away.device_bytes["vision.0"].host == host
        took = (estimate.costs.seconds["prepare", "vision.0", False] for estimate in (away, home))
        assert next(took) - next(took) == pytest.approx(host / PLAIN.host)


def test_masters_that_serve_as_parameters_are_away_as_such() -> None:
    work = replace(model(VISION, LLM), item=4)
    offloads = {"vision": OffloadConfig(optimizer=True, parameters=True)}
    layouts = {"vision": Layout(tp=2), "llm": Layout(pp=2)}
    need = estimated(work, layouts, 4, schedule="three-phase", offloads=offloads).device_bytes["vision.0"]
    size = 4 * GIGA / 100 / 2
    assert (need.states_away, need.parameters_away) == (8 * size, 4 * size)


def test_the_weights_part_of_a_split_backward_is_its_products() -> None:
    # Of 1 TFLOP ahead and 3 back, with recompute; 0.3 of them for 10 million weights and 15,000 positions.
    work = model(replace(module("llm", 8, 1.0, backward=Shares(layer=3 * TERA)), width=15_000))
    plain, split = (estimated(work, {"llm": Layout(pp=2)}, 8, schedule=schedule) for schedule in ("1f1b", "zb-h1"))
    backward = plain.costs.seconds["B", "llm.0", False]
    back, later = (split.costs.seconds[kind, "llm.0", False] for kind in "BW")
    assert back + later == pytest.approx(backward) and later == pytest.approx(backward / 3 * 0.3)
    assert split.stage_seconds("llm.0") == pytest.approx(plain.stage_seconds("llm.0"))
    assert split.busy == pytest.approx(plain.busy) and split.seconds < plain.seconds
    table = model(replace(work.modules["llm"], parameters=Shares(first=1e9, layer=1e7), trained=Shares(1e9, 1e7)))
    assert table.modules["llm"].weight_gradients == Shares(0.0, 3e11, 0.0), "a table is looked up"
    ends = dict(forward=Shares(0.0, TERA, TERA), trained=Shares(0.0, 1e7, 1e7))
    for again, later in ((0.0, 3e11), (TERA, 0.0)):
        llm = replace(work.modules["llm"], recompute=Shares(last=again), **ends)
        assert llm.weight_gradients == Shares(0.0, 3e11, later), "a product that is computed again is the head, and B's"


def test_what_schedules_keep_at_once() -> None:
    deferred = partial(SplitMemory, deferred=Shares(layer=1.0))
    memory = {1: StageMemory(residuals=Shares(layer=8.0), split=deferred)}
    work = model(replace(LLM, memory=memory, carried=0.0, after=()))
    activations = {
        schedule: [
            estimated(work, {"llm": Layout(pp=4)}, 16, schedule=schedule).device_bytes[f"llm.{at}"].activations / 2
            for at in range(4)
        ]
        for schedule in ("1f1b", "gpipe", "eager-1f1b", "zb-h1")
    }
    assert activations["1f1b"] == [4 * 8, 3 * 8, 2 * 8, 8]
    assert activations["gpipe"] == [16 * 8] * 4
    assert activations["eager-1f1b"] == [7 * 8, 5 * 8, 3 * 8, 8]
    # While a B runs there are its own residuals and what it puts off; the first stage puts nothing else off.
    assert activations["zb-h1"][0] == 4 * 8 + 1 and all(
        activations["1f1b"][at] < activations["zb-h1"][at] <= 4 * 8 + 1 for at in range(4)
    )


def test_moves_and_collectives_across_nodes_take_the_network() -> None:
    far = replace(PLAIN, network=1e3, node=2)
    work = model(replace(VISION, output_bytes=1e3), replace(LLM, carried=1e3))
    layouts = {"vision": Layout(rank_offset=2), "llm": Layout(pp=2)}
    estimate = replace(estimated(work, layouts, 16), clock=clock(work, far))
    seconds = estimate.costs.seconds
    assert seconds["move", "vision.0->llm.0", False] == pytest.approx(1.0)
    assert seconds["move", "llm.0->llm.1", True] == pytest.approx(1e3 / PLAIN.link)
    wide = replace(estimated(work, {"vision": Layout(), "llm": Layout(dp=4, rank_offset=4)}, 4), clock=clock(work, far))
    reduced = wide.costs.seconds["reduce", "llm.0", False]
    assert reduced == pytest.approx(8 * GIGA / 100 * 4 / 2 * (3 / 4) / 1e3)  # two devices of a node share the way out
    assert math.isclose(wide.costs.seconds["prepare", "llm.0", False], reduced / 2)
