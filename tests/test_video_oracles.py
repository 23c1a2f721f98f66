"""Models that see videos: what transformers computes (``oracles/make_video.py``), packed, and torch's gradients.

Three sequences: an image and then a video of three temporal patches, a video alone, and two images. A temporal patch
has two frames that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from first_step import assert_gradients, first_step, leaves_of_tensors
from qwen_oracle import (
    FOLDERS,
    IMAGE,
    Oracle,
    apart,
    assert_packed_texts,
    configured,
    folder_tensors,
    opened,
    tokens_of,
)

from mmjax.data.mrope import sample_positions
from mmjax.data.packing import Packer
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample
from mmjax.reference import greedy, sample_logits

KINDS = ("qwen3_vl", "qwen3_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe")
VIDEO, LENGTH, PATCHES = 262, 120, 224
BOUNDS = {**dict.fromkeys(KINDS, 2e-5), "qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}
"""The norm behind a small output of a delta layer makes fp32 five times less exact."""
Arrays = dict[str, np.ndarray]


@cache
def oracle(kind: str) -> Oracle:
    return Oracle(*opened(FOLDERS / kind), dict(np.load(FOLDERS.parent / "video" / f"{kind}.npz")))


def sample_of(
    values: Mapping[str, np.ndarray], name: str, media: str, placeholder: int = 0, times: str = "prompt_times_"
) -> Sample:
    """A sequence, its media and times; with ``placeholder`` in place of the tokens of images and videos."""
    tokens, count = values[name], sum(key.startswith(media) for key in values)
    timed = [tuple(values[key].tolist()) for key in values if key.startswith(times)]
    seen = np.isin(tokens, (IMAGE, VIDEO))
    return Sample(
        tokens=np.where(seen, placeholder, tokens).astype(np.int32) if placeholder else tokens.astype(np.int32),
        loss_weights=(~seen).astype(np.float32),
        media={"vision": tuple(values[f"{media}{at}"] for at in range(count))},
        question="",
        answer="",
        prompt=len(tokens),
        media_tokens={"vision": placeholder or IMAGE},
        video_tokens={"vision": placeholder or VIDEO},
        video_times={"vision": tuple(timed)} if timed else {},
    )


def samples(values: Mapping[str, np.ndarray], placeholder: int = 0) -> list[Sample]:
    return [
        sample_of(values, f"tokens_{number}", f"media_{number}_", placeholder, f"times_{number}_")
        for number in range(3)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_transformers(kind: str) -> None:
    """Each temporal patch has a grid of its own, and text goes on behind its largest number.

    Of Qwen2.5-VL's video with times 0, 3 and 6 these are not 5.24's own, but those of the models' training; see
    ``oracles/make_video.py``.
    """
    of = oracle(kind)
    specs: Any = {"vision": of.model.encoders["vision"].module.medium}
    for number, sample in enumerate(samples(of.values)):
        found = sample_positions(sample, meta_of(sample, specs).grids, specs)
        np.testing.assert_array_equal(found, of.values[f"positions_{number}"])
    if kind == "qwen2_5_vl":
        assert sorted(set(of.values["positions_1"][:, 0])) == [*range(7), 9, 12, 13]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), [("qwen3_vl", 2), pytest.param("qwen3_5", 1, marks=pytest.mark.long)])
def test_a_packed_row_has_the_values_of_transformers(kind: str, tp: int) -> None:
    """All media in one row of the tower, all texts in one of the language model."""
    of = oracle(kind)
    medium: Any = of.model.encoders["vision"].module.medium
    spec: Any = replace(medium, buckets=((1, PATCHES),))
    sizes: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),), "sequence_length": LENGTH}
    packer = Packer(encoders={"vision": spec}, axes=of.model.nodes["llm"].module.position_axes, **sizes)
    batch = packer.microbatch(samples(of.values), 3)
    assert batch.inputs["vision"]["segments"].max() == 9  # six temporal patches, three images
    assert batch.inputs["vision"]["patches"].shape == (1, PATCHES, 96)
    tokens = tokens_of(of, batch, tp)

    assert_packed_texts(of, batch, tokens, tp, bound=BOUNDS[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_reference_says_what_transformers_says(kind: str) -> None:
    of = oracle(kind)
    for number, sample in enumerate(samples(of.values)):
        assert apart(sample_logits(of.leaves, of.model, sample), of.values[f"logits_{number}"]) < BOUNDS[kind]
    prompt = sample_of(of.values, "prompt", "prompt_media_")
    assert greedy(of.leaves, of.model, prompt, max_new=24, eos=-1) == of.values["generated"].tolist()


ONE_DEVICE = ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "tp and pp": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.rank_offset=4"),
    ),
    "dp": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3"),
        *("vision/Layout.dp=3", "vision/Layout.rank_offset=3"),
    ),
    "cp": (
        *("llm/Layout.tp=1", "llm/Layout.cp=2", "llm/Layout.cp_tokens='contiguous'"),
        *("vision/Layout.dp=1", "vision/Layout.cp=2", "vision/Layout.rank_offset=2"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("qwen3_vl", layout) for layout in LAYOUTS), *((kind, "cp") for kind in KINDS[1:]), ("qwen2_5_vl", "dp")],
)
def test_loss_and_gradients_are_those_of_torch(kind: str, layout: str, tmp_path: Any) -> None:
    """Temporal patches are segments, which ranks of cp and rows of dp share as they share images."""
    config = configured(
        tmp_path, kind, (*LAYOUTS[layout], "vision/Packing.buckets=((1, 240),)" if layout != "dp" else "Train.seed=1")
    )
    values = oracle(kind).values
    step = first_step(config, tmp_path / "run", partial(samples, values))
    assert step.loss == pytest.approx(float(values["loss"]), rel=5e-6)
    gradients = {key.removeprefix("gradient/"): own for key, own in values.items() if key.startswith("gradient/")}
    want = leaves_of_tensors(FOLDERS / kind, config, folder_tensors(kind, gradients), step.gradients)
    assert step.gradients.keys() == want.keys() and len(want) > 60
    assert_gradients(step.gradients, want, bound=1e-4)
    kernel = want["vision/patch/kernel"]
    first, second = np.split(kernel, 2)
    assert np.abs(first - second).max() > 0.1 * np.abs(kernel).max()  # frames differ


def test_frames_in_another_order_have_other_values() -> None:
    """The first and the second frame of every temporal patch changed places."""
    of = oracle("qwen3_vl")
    sample = samples(of.values)[1]
    turned = tuple(np.roll(medium, 3, axis=-1) for medium in sample.media["vision"])
    other = replace(sample, media={"vision": turned})
    assert apart(sample_logits(of.leaves, of.model, other), of.values["logits_1"]) > 1e-2
    assert jax.device_count() == 8
