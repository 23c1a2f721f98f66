"""The comparison of predicted and measured steps: its figures, and that its layouts are ones that a run takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import pytest

from benchmarks import measured_layouts, predictions
from benchmarks.predictions import DEVICES, candidates, configuration, rank_correlation
from benchmarks.steps import Stepper
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row
from mmjax.configurable import ConfigError
from mmjax.plan.planned import exact_rows, planned
from mmjax.planner.candidates import MODES
from mmjax.planner.profile_file import Compiled, Device, Profile, Trial, model_of, parse_profile
from mmjax.planner.work import StagePart


def test_pairs_count_that_are_predicted_far_enough_apart() -> None:
    predicted = {"a": 1.0, "b": 1.1, "c": 1.3, "d": 2.0}
    far = 5  # all but a and b
    assert rank_correlation(predicted, predicted, 1.15) == (far, 1.0)
    assert rank_correlation(predicted, {"a": 1.2, "b": 1.0, "c": 1.3, "d": 2.0}, 1.15) == (far, 1.0)
    assert rank_correlation(predicted, {name: -value for name, value in predicted.items()}, 1.15) == (far, -1.0)
    assert rank_correlation(predicted, {"a": 1.0, "b": 1.1, "c": 2.0, "d": 1.3}, 1.15) == (far, pytest.approx(3 / 5))
    assert rank_correlation(predicted, predicted, 3.0) == (0, 0.0)


def test_every_layout_is_one_that_a_run_takes_in_one_bucket() -> None:
    config = configuration()
    source = open_source(config, split="train")
    found = candidates()
    assert len(found) >= 12
    assert {candidate.mode for candidate in found.values()} == set(MODES) - {"nested"}
    assert {candidate.devices for candidate in found.values()} == {1, DEVICES}
    for candidate in found.values():
        run = planned(config, candidate)
        assert len(run.model["vision"].packing.given) == 1
        rows = exact_rows(run, source)
        assert rows["llm"][0] * candidate.microbatches >= config.train.global_batch
        assert rows["vision"][1] == 168


@pytest.mark.long
def test_what_is_measured_and_what_is_predicted_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as predicted, every target is met; measured the other way round, both are missed."""
    profile = profile_json()
    estimates = predictions.estimates_of(parse_profile(profile))
    alone = {name: one.seconds for name, one in estimates.items()}

    def rows(seconds: Callable[[float], float]) -> list[Row]:
        def measured(devices: int, rounds: int) -> dict[str, Any]:
            own = {n: seconds(alone[n]) for n, one in candidates().items() if one.devices == devices}
            return {"seconds": own, "profile": profile if devices > 1 else None}

        monkeypatch.setattr(predictions, "_measured", measured)
        monkeypatch.setattr(predictions, "estimates_of", lambda _: estimates)
        return list(predictions.bench_predictions(1))

    right, wrong = rows(lambda one: 1.3 * one), rows(lambda one: 1 / one)
    ratios = [row.value for row in right if row.case.endswith("predicted / measured")]
    assert len(ratios) == len(candidates())
    assert ratios == pytest.approx([1 / 1.3] * len(ratios))
    assert [row.value for row in right[-2:]] == [1.0, pytest.approx(1.0, abs=0.01)]
    assert all(row.ok for row in right)
    assert wrong[-2].value == -1.0
    assert not wrong[-2].ok and not wrong[-1].ok


def profile_json() -> dict[str, Any]:
    """A profile of made-up times: in proportion to positions and layers, halved by tp 2."""
    config = configuration()
    positions = lambda one: one["rows"] * one["width"] * one["part"].layers / one["tp"]  # noqa: E731
    stages = [
        {
            "module": module,
            "part": StagePart(layers=layers, first=first, last=last),
            "tp": tp,
            "rows": rows,
            "width": width,
        }
        for module, width in (("vision", 168), ("llm", 88))
        for tp in (1, 2)
        for rows in (1, 16)
        for layers, first, last in ((1, True, True), (2, True, True), (3, True, True), (1, True, False))
    ]
    device = Device(kind="cpu", platform="cpu", count=2, memory=1e9, processes=2)
    samples = ((1e3, 1e-4), (1e6, 1e-3))
    return Profile(
        device=device,
        jax="0",
        dtype=config.train.dtype,
        model=model_of(config),
        data={},
        trials=tuple(Trial(**one, forward=1e-6 * positions(one), backward=2e-6 * positions(one)) for one in stages),
        compiled=tuple(Compiled(**one, forward=0.0, backward=0.0) for one in stages),
        moves=samples,
        copies=samples,
        gathers={2: samples},
        reduces={2: samples},
        op=1e-5,
        shared=2.0,
    ).as_json()


def test_the_shortest_step_is_that_of_the_slowest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([["", ""], ["0.1", "3.0"], ["", ""], ["0.2", "2.0"], ["", ""], ["0.1", "4.0"]])
    monkeypatch.setattr(measured_layouts.processes, "gather_texts", lambda _: next(said))
    step = cast(Stepper, lambda: None)
    assert measured_layouts.shortest({"one": step}, 3) == {"one": 2.0}


def test_each_process_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: own.append(cores))
    for index in range(3):
        measured_layouts.pin_to_core(index)
    assert own == [{3}, {5}, {3}]


def test_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "cores", lambda: 1)
    with pytest.raises(ConfigError, match="has 1 core, and needs one for each of 2 devices"):
        next(predictions.bench_predictions(1))
