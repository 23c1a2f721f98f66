"""`bench nested`: its formulas against numbers by hand, what systems promise, and all rows on small batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.nested import command, in_flight, measured, systems
from benchmarks.nested.cluster import estimate, head_layers, memory, pull_seconds, timed
from benchmarks.nested.models import GENERATION, LLM, PAINTER, UNDERSTANDING, VISION, Row
from benchmarks.nested.systems import NESTED, ONE_RANK, OPTIMUS, SYSTEMS, Modules, System, modules_of, trials
from mmjax.planner.accelerators import H800
from mmjax.planner.work import StagePart
from mmjax.schedule.ops import Op
from mmjax.schedule.placements import TimedModule

ROW = Row(read=(2048, 1024, 512), drawn=(1500, 300))
PATCHES = 3584
LINK, REACHED = 0.8 * 200e9, 4 * 0.5 * 989e12
"""Bytes per second of a GPU over NVLink; FLOPs per second of four GPUs."""


def _system(name: str) -> System:
    return next(system for system in SYSTEMS if system.name == name)


@pytest.mark.long
def test_models_have_their_published_sizes() -> None:
    sizes = {name: module.parameters.of(module.whole) for name, module in GENERATION.work.modules.items()}
    assert sizes[LLM] == pytest.approx(30.5e9, rel=0.005)
    llm, experts = GENERATION.work.modules[LLM], GENERATION.work.modules[LLM].experts
    assert experts and experts.count == 128
    active = llm.dense.parameters.of(llm.whole) + llm.layers * experts.parameters * 8 / 128
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert sizes[VISION] == pytest.approx(1.3e9, rel=0.05), "with its projector"
    assert sizes[PAINTER] == pytest.approx(20e9, rel=0.03)


@pytest.mark.long
def test_times_follow_flops_and_bytes() -> None:
    """By hand, from widths and the datasheet: of a layer for a row of each module."""
    llm = timed(GENERATION, LLM, [ROW], lanes=4)
    token = 2 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768)
    flops = 8192 * token + 4 * 4096 * 8192 * 8193 / 2  # causal: half of all pairs
    share = 1 - math.comb(112, 8) / math.comb(128, 8)  # of tokens go to a GPU with 16 experts
    sent = 2048 * 2048 * 2 * 8 * 1.5 * share * 7 / 8 / LINK  # once to each GPU in bf16, by a buffer of 1.5
    experts = 8192 * 2 * 8 * 3 * 2048 * 768 / REACHED  # beside which one half of the tokens is sent
    keys = 8192 * 4 * 256 * 2 / 4 * 3 / 4  # the first of four heads of the other GPUs' tokens
    assert llm.seconds == pytest.approx(flops / REACHED + 2 * sent - min(sent, experts) + keys / LINK, rel=1e-3)
    # With recompute; gradients of keys are in fp32.
    backward = 3 * flops / REACHED + 3 * sent - min(2 * sent, 3 * experts) + 4 * keys / LINK
    assert llm.backward == pytest.approx(backward / llm.seconds, rel=1e-3)
    assert llm.layers == 48 + head_layers(GENERATION, LLM)
    flops = PATCHES * 24 * 1664**2 + 4 * 1664 * (2048**2 + 1024**2 + 512**2)
    vision = timed(GENERATION, VISION, [ROW, Row(read=(3072,))], lanes=4)
    assert vision.seconds * vision.factors[0] == pytest.approx(flops / REACHED, rel=0.01)
    assert vision.backward == pytest.approx(3.0)
    flops = 1800 * 24 * 5120**2 + 4 * 5120 * (1500**2 + 300**2)
    sums = 2 * 2 * 1800 * 5120 * 2 * 3 / 4  # all-reduces over tp 4, two in a layer
    painter = timed(GENERATION, PAINTER, [ROW], lanes=4)
    assert painter.seconds == pytest.approx(flops / REACHED + sums / LINK, rel=0.01)
    apart = timed(GENERATION, PAINTER, [ROW], lanes=1)
    gathers = 2 * 12 * 5120**2 * 31 / 32 / LINK * 65 / 64  # a layer's in a node; the first one's with nothing beside it
    assert apart.seconds == pytest.approx(gathers, rel=0.01), "longer than the products of so few patches"
    pulls = pull_seconds(GENERATION, 4)
    part = GENERATION.work.modules[PAINTER].parameters.of(GENERATION.work.modules[PAINTER].whole) * 2 / 4
    assert pulls[PAINTER] == pytest.approx(part / 2 * 31 / 32 / (0.8 * H800.network)), (
        "two ranks of a node have a share"
    )


@pytest.mark.long
def test_bytes_are_states_and_what_is_in_flight() -> None:
    rows, workload = [ROW] * 24, UNDERSTANDING
    modules = modules_of(workload, rows, lanes=4, even=False)
    (trial,) = trials(_system(OPTIMUS), modules, 16, (4,), move=0.0, pulls=pull_seconds(workload, 4))
    held = memory(trial.timeline.schedule, trial.placement, workload, rows, lanes=4)
    # The first rank: 4 of 16 microbatches of the encoder, 4 of a quarter of the LLM; four GPUs share a row.
    made, vision = estimate(workload, ROW, 4, 8), workload.work.modules[VISION]
    encoder, quarter = vision.whole, StagePart(layers=12, first=True)
    kept = [
        made.stage_memory(name).residuals.of(part) * rows / 4
        for name, part, rows in ((VISION, encoder, PATCHES / vision.width), (LLM, quarter, 1))
    ]
    inputs = [made.stage_memory(name).inputs.of(part) for name, part in ((VISION, encoder), (LLM, quarter))]
    inputs_of_steps = 2 * (4 * PATCHES / vision.width * inputs[0] + 16 * inputs[1]) / 4
    assert held.activations == pytest.approx(4 * kept[0] + 4 * kept[1] + inputs_of_steps)
    experts = 12 * 128 * 3 * 2048 * 768
    dense = 12 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128) + 151_936 * 2048
    encoders = vision.parameters.of(encoder)
    states = dense * (6 + 16 / 32) + experts / 8 * (6 + 16 / 4)
    states += encoders * (2 + 4 + 18 / 128)  # pulled, whole sums; masters, moments, reduced and compute parameters
    assert held.states == pytest.approx(states, rel=2e-3)
    most = []
    for count in (16, 24):
        (split,) = trials(_system("nested, zb-h1"), modules, count, (4,), move=0.0)
        most.append(memory(split.timeline.schedule, split.placement, workload, rows, lanes=4))
    deferred = made.stage_memory(VISION).split().deferred.of(encoder) * PATCHES / vision.width / 4
    assert most[0].activations > deferred, "from B to W"
    last = made.stage_memory(LLM).inputs.last  # the last stage's ranks are the fullest
    more_inputs = 2 * (2 * PATCHES / vision.width * inputs[0] + 8 * last) / 4
    assert most[1].activations - most[0].activations == pytest.approx(more_inputs), "and no longer"


@pytest.mark.long
def test_the_nested_step_is_that_of_optimus_with_unlimited_memory() -> None:
    for workload in (UNDERSTANDING, GENERATION):
        nested = systems.outcome(_system("nested, 1f1b"), workload, 2, even=True)
        optimus = systems.outcome(_system(OPTIMUS), workload, 2, even=True)
        exposed = 0.06 * workload.generator  # a generator's pull is longer than the op beside it
        assert -0.02 < nested.seconds / optimus.seconds - 1 < 0.02 + exposed, workload.name
        assert nested.memory.fits


def test_a_system_has_the_fastest_placement_that_fits() -> None:
    vision, llm = (TimedModule(name=name, layers=4, seconds=1.0) for name in ("vision", "llm"))
    made = trials(_system("DistTrain, any ranks"), Modules((vision,), llm), 4, (4,), move=0.0)
    assert [trial.bound for trial in made] == sorted(trial.bound for trial in made)
    spans = {trial.layout: trial.timeline.makespan for trial in made}
    best = systems.fastest(made)
    assert best and best.timeline.makespan == min(spans.values())
    slower = systems.fastest(made, lambda trial: trial.layout != best.layout)
    assert slower and slower.timeline.makespan == min(span for name, span in spans.items() if name != best.layout)
    assert systems.fastest(made, lambda _: False) is None


def test_rows_of_like_cost_are_together() -> None:
    vision = TimedModule(name="vision", layers=2, seconds=1.0, factors=(0.1, 2.0, 0.3, 1.0))
    painter = replace(vision, name="painter", factors=(1.0, 1.0, 4.0, 0.0))
    modules = Modules((vision,), TimedModule(name="llm", layers=4, seconds=1.0), (painter,))
    order = modules.by_cost(4)
    assert order == [2, 1, 0, 3]  # ends with 1.1 and 1.0
    assert modules.ordered(order).encoders[0].factors == (0.3, 2.0, 0.1, 1.0)


@pytest.mark.long
def test_rows_of_small_steps(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(command, "BATCHES", (1,))
    monkeypatch.setattr(command, "EVEN_BATCH", 1)
    monkeypatch.setattr(command, "SYSTEMS", [_system(name) for name in (NESTED, OPTIMUS, ONE_RANK)])
    monkeypatch.setattr(command, "replayed", lambda _: iter(()))
    counted = _counted((8, 16))
    monkeypatch.setattr(in_flight, "counts", lambda: counted)
    path = tmp_path / "nested.png"
    rows = {row.case: row for row in command.bench_nested(1, str(path))}
    assert path.stat().st_size > 20_000
    for workload in ("understanding", "generation"):
        steps = {name: rows[f"{workload}, batch 1, {name}: step, simulated"].value for name in (NESTED, ONE_RANK)}
        over = rows[f"{workload}, batch 1, {ONE_RANK} / nested: simulated"].value
        assert over == pytest.approx(steps[ONE_RANK] / steps[NESTED]) and over > 1.3
    assert rows[f"understanding, {OPTIMUS} / nested: published to"].value == 1.1
    assert rows[f"generation, batch 1, {OPTIMUS}: out of memory, published"].value
    assert not rows[f"generation, batch 1, {NESTED}: out of memory, published"].value
    flat = rows[f"in flight, encoder, {NESTED}: of 16"]
    assert flat.value == 12 and flat.target and flat.target.value == 12
    assert {row.case for row in rows.values() if not row.ok} <= {
        f"generation, batch 1, {OPTIMUS} / nested: simulated, even rows"
    }
    table = command.simulated_table(UNDERSTANDING).splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1


def _counted(microbatches: tuple[int, ...]) -> list[in_flight.Count]:
    """What `in_flight.counts` says, for two systems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "SYSTEMS", [_system(name) for name in (NESTED, OPTIMUS)])
        return in_flight.counts(microbatches)


@pytest.mark.long
def test_counts_are_flat_or_grow_and_measured_ones_are_beside_them() -> None:
    counted = _counted((12, 20))
    most = {(one.system, *one.panel, one.microbatches): one.most for one in counted}
    assert most[NESTED, "understanding", "vision.0", 20] == most[NESTED, "understanding", "vision.0", 12] == 12
    assert most[OPTIMUS, "understanding", "vision.0", 20] == 20
    assert most[NESTED, "generation", "painter.0", 20] == 4
    seen = [replace(one, most=one.most + 1) for one in counted if one.system == NESTED and one.microbatches == 20]
    lines = in_flight.table(counted, seen).splitlines()
    assert f"| encoder | {NESTED} | 12 | 12 (measured 13) |" in lines and f"| encoder | {OPTIMUS} | 12 | 20 |" in lines


@pytest.mark.long
def test_a_step_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SYSTEMS", [_system("nested, 1f1b")])
    monkeypatch.setattr(measured, "MODELS", {"encoder": measured.MODELS["encoder"]})
    (one,) = measured.replayed(1)
    schedule = one.trial.timeline.schedule
    assert one.measured.schedule == schedule and schedule.name == "nested"
    # A busy machine adds time and takes none off. One op after another would take four times the time.
    assert 0.999 <= one.ratio < 1.8
    start, end = one.measured.span(Op("F", "vision.0", 3))
    assert end - start >= 8 * 3.5e-3 * measured.FACTORS[3] * 0.999


@pytest.mark.slow
def test_every_step_of_processes_is_within_the_target_of_its_simulation() -> None:
    found = list(measured.replayed(3))
    assert len(found) == 2 * len(SYSTEMS) - 1
    assert not [f"{one.model}, {one.trial.system.name}: {one.ratio:.3f}" for one in found if one.ratio > 1.05]
