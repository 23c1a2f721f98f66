"""The comparison of predicted and measured steps: its figures, and that its layouts are ones that a run takes."""

from __future__ import annotations

import pytest

from mmjax.benches.predictions import BINDINGS, CONFIGURATION, candidates, rank_correlation
from mmjax.benches.steps import config_file
from mmjax.config import load_config
from mmjax.planner.candidates import MODES
from mmjax.run.assembly import open_source
from mmjax.run.planned import exact_rows, planned


def test_pairs_count_that_are_predicted_far_enough_apart() -> None:
    predicted = {"a": 1.0, "b": 1.1, "c": 1.3, "d": 2.0}
    far = 5  # all but a and b
    assert rank_correlation(predicted, predicted, 1.15) == (far, 1.0)
    assert rank_correlation(predicted, {"a": 1.2, "b": 1.0, "c": 1.3, "d": 2.0}, 1.15) == (far, 1.0)
    assert rank_correlation(predicted, {name: -value for name, value in predicted.items()}, 1.15) == (far, -1.0)
    assert rank_correlation(predicted, {"a": 1.0, "b": 1.1, "c": 2.0, "d": 1.3}, 1.15) == (far, pytest.approx(3 / 5))
    assert rank_correlation(predicted, predicted, 3.0) == (0, 0.0)


def test_every_layout_is_one_that_a_run_takes_in_one_bucket() -> None:
    config = load_config([str(config_file(CONFIGURATION))], BINDINGS)
    source = open_source(config, split="train")
    found = candidates()
    assert len(found) >= 12
    assert {candidate.mode for candidate in found} == set(MODES)
    for candidate in found:
        run = planned(config, candidate, source)
        assert len(run.packing["vision"].given) == 1
        rows = exact_rows(run, source)
        assert rows["llm"][0] * candidate.microbatches >= config.train.global_batch
        assert rows["vision"][1] == 168
