"""`bench nested`: its formulas against numbers by hand, what systems promise, and all rows on small batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.nested import command, in_flight, measured, systems
from benchmarks.nested.cluster import memory, seconds, timed
from benchmarks.nested.models import GENERATION, LLM, MMDIT, UNDERSTANDING, VIT, Row
from benchmarks.nested.systems import NESTED, ONE_RANK, OPTIMUS, SYSTEMS, Modules, System, trials
from mmjax.planner.accelerators import H800
from mmjax.schedule.ops import Op
from mmjax.schedule.placements import TimedModule

ROW = Row(read=(1024, 512), drawn=(1500, 300))


def _system(name: str) -> System:
    return next(system for system in SYSTEMS if system.name == name)


def test_models_have_their_published_sizes() -> None:
    assert LLM.all_parameters == pytest.approx(30.5e9, rel=0.005)
    active = 48 * LLM.token / 2 + 2 * 151_936 * 2048  # embedding and head
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert VIT.all_parameters == pytest.approx(1.3e9, rel=0.03)
    assert MMDIT.all_parameters == pytest.approx(20e9, rel=0.03)


def test_times_follow_flops_and_bytes() -> None:
    reached = 4 * 0.5 * 989e12
    flops = 8192 * LLM.token + 2 * 8192**2 * 4096  # causal: half of 4 · T² · width
    sent = 2 * 8 * 2048 * 2 * 2048 * 7 / 8  # there and back, 8 experts, a quarter of the tokens, in bf16
    assert seconds(LLM, ROW) == pytest.approx(flops / reached + sent / H800.link)
    assert seconds(VIT, ROW) == pytest.approx((1536 * 24 * 1664**2 + 4 * 1664 * (1024**2 + 512**2)) / reached)
    assert seconds(MMDIT, Row(read=(), drawn=(1,))) == pytest.approx(36 * 3072**2 * 2 * 7 / 8 / 200e9), "gathers"
    assert seconds(MMDIT, Row(read=(), drawn=(60_000,))) > 2 * seconds(MMDIT, Row(read=(), drawn=(30_000,)))
    llm, vision = timed(LLM, [ROW]), timed(VIT, [ROW, Row(read=(1024,))])
    assert llm.layers == 50 and llm.backward == pytest.approx((2 * flops / reached + sent / H800.link) / llm.seconds)
    assert vision.backward == pytest.approx(3.0) and vision.weights == pytest.approx(1.0)
    of_rows = [seconds(VIT, ROW), seconds(VIT, Row((1024,)))]
    assert [factor * vision.seconds for factor in vision.factors] == pytest.approx(of_rows)


def test_bytes_are_states_and_what_is_in_flight() -> None:
    rows = [ROW] * 24
    modules = Modules(encoders=(timed(VIT, rows),), llm=timed(LLM, rows))
    (trial,) = trials(_system(OPTIMUS), modules, 16, (4,), move=0.0)
    held = memory(trial.timeline.schedule, trial.placement, (VIT, LLM), rows)
    # The first rank: 4 of 16 microbatches of the encoder, 4 of a quarter of the LLM; four GPUs share a row.
    vision, llm = 40 * 1536 * VIT.saved / 4, 12 * 8192 * LLM.saved / 4
    assert held.activations == pytest.approx(4 * vision + 4 * llm)
    dense, experts = 12 * LLM.parameters + 151_936 * 2048, 12 * LLM.experts / 8
    states = dense * (6 + 16 / 32) + experts * (6 + 16 / 4) + VIT.all_parameters * (6 + 16 / 128)
    assert held.states == pytest.approx(states, rel=1e-3)
    kept = []
    for count in (16, 24):
        (split,) = trials(_system("nested, zb-h1"), modules, count, (4,), move=0.0)
        kept.append(memory(split.timeline.schedule, split.placement, (VIT, LLM), rows).activations)
    assert kept[1] == pytest.approx(kept[0]) and kept[0] > 40 * 1536 * VIT.deferred / 4, "from B to W, and no longer"


@pytest.mark.long
def test_the_nested_step_is_that_of_optimus_with_unlimited_memory() -> None:
    for workload in (UNDERSTANDING, GENERATION):
        nested = systems.outcome(_system("nested, 1f1b"), workload, 2, even=True)
        optimus = systems.outcome(_system(OPTIMUS), workload, 2, even=True)
        assert nested.seconds == pytest.approx(optimus.seconds, rel=0.02), workload.name
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
    assert all(row.ok for row in rows.values())
    table = command.simulated_table(UNDERSTANDING).splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1


def _counted(microbatches: tuple[int, ...]) -> list[in_flight.Count]:
    """What `in_flight.counts` says, for two systems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "SYSTEMS", [_system(name) for name in (NESTED, OPTIMUS)])
        return in_flight.counts(microbatches)


def test_counts_are_flat_or_grow_and_measured_ones_are_beside_them() -> None:
    counted = _counted((12, 20))
    most = {(one.system, *one.panel, one.microbatches): one.most for one in counted}
    assert most[NESTED, "understanding", "vision.0", 20] == most[NESTED, "understanding", "vision.0", 12] == 12
    assert most[OPTIMUS, "understanding", "vision.0", 20] == 20
    assert most[NESTED, "generation", "generator.0", 20] == 4
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
