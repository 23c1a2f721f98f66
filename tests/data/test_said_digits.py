"""Digits that are said by recordings: their metadata, the classifier that hears them, and a model that makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trial_runs import REPOSITORY

from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample
from mmjax.eval.report import evaluate
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

CONFIG = REPOSITORY / "configs" / "digits_say.gin"


def heard(of: Recipe, sample: Sample, frames_FM: np.ndarray) -> bool:
    """Whether a recording says the digit of the sample."""
    log_mel = encoder_specs(of)["talker"].log_mel
    assert log_mel is not None
    (label,) = sample.labels["talker"]
    return of.data.origin.read_recording(frames_FM, len(label), log_mel) == label


@pytest.mark.parametrize("bindings", [(), ("Digits.digits=(1, 3)", "Digits.images=(2, 2)", "Data.sequence_length=256")])
def test_metadata_and_labels(bindings: tuple[str, ...]) -> None:
    of = load_config([CONFIG], bindings)
    source, specs = open_source(of, split="test"), encoder_specs(of)
    worst, right = source.worst_case(), list[bool]()
    for index in range(60):
        sample, meta = source.sample(index), source.meta(index)
        actual = meta_of(sample, specs)
        assert (actual.grids, actual.padding, actual.tokens) == (meta.grids, meta.padding, meta.tokens)
        assert meta.tokens <= worst.tokens
        for grid in meta.grids.get("talker", ()):
            assert (
                grid[0] <= worst.patches["talker"]
                and sample.noise["talker"][0].shape == sample.media["talker"][0].shape
            )
            right.append(heard(of, sample, sample.media["talker"][0]))
    assert len(right) > 20 and np.mean(right) > 0.9


def test_a_rate_below_the_tones_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"talker/SoundDiT\.sample_rate=3000: calls have tones of up to 1477 Hz"):
        open_source(
            load_config([CONFIG], ["talker/SoundDiT.sample_rate=3000", "talker/SoundDiT.high=0.0"]), split="test"
        )
    with pytest.raises(ConfigError, match="nothing in the model makes recordings"):
        load_config([], ["Model.generators={'painter': 'dit'}", "Digits.draw=1.0", "Digits.say=1.0"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_says_what_it_reads(tmp_path: Path) -> None:
    """Of recordings made of held-out images; those made of the next image say the digit by chance alone."""
    of = load_config([CONFIG])
    with Trainer(of, tmp_path, style="silent") as trainer:
        trainer.train()
    report = evaluate(of, tmp_path, style="silent")
    pairs = [
        (sample, drawings["talker"][0])
        for sample, drawings in zip(report.samples, report.evaluation.drawings, strict=True)
        if drawings
    ]
    samples, made = zip(*pairs, strict=True)
    right = np.mean([heard(of, *pair) for pair in pairs])
    exchanged = np.mean([heard(of, *pair) for pair in zip(samples, (*made[1:], made[0]), strict=True)])
    assert right > 0.8 and exchanged < 0.25 and len(pairs) > 100
