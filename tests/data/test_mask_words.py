"""Words of tokens: what the data side and the dense reference make of the same line about the same samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.attention.language import KINDS, PRESETS, RELATIONS
from mmjax.attention.pairs import pairs_of
from mmjax.data.mask_words import sample_items, token_kinds
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.sample import meta_of
from mmjax.data.types import EncoderSpec, Sample, Tiled
from mmjax.models.dit.config import DiTConfig
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.reference.masks import masks_of

LINES = (
    *PRESETS.values(),
    "text see all before; media see all before; vision sees second everywhere",
    "prefix and painter see prefix everywhere; suffix sees all before; media see media in item",
    "all sees vision in item; second, text sees text before",
)
VIT = ViTConfig(patch=2, merge=1, channels=1)
MODEL = multimodal(
    {"vision": VIT, "second": replace(VIT, merge=2)},
    DecoderConfig(),
    {"painter": DiTConfig(patch=2, merge=1, channels=1)},
    {"vision": ProjectorConfig(newline=True)},
)
SPECS: dict[str, EncoderSpec] = {
    name: replace(node.medium, buckets=((4, 256),)) for name, node in MODEL.nodes.items() if node.medium
}
IDS = {name: 90 + number for number, name in enumerate(SPECS)}
LENGTH = 200
PIECES = st.lists(
    st.one_of(st.integers(1, 7), st.tuples(st.sampled_from([*SPECS]), st.integers(1, 2), st.integers(1, 3))), max_size=6
)


NAMES = st.lists(st.sampled_from([*KINDS, *SPECS]), min_size=1, max_size=3, unique=True)
RULES = st.builds(
    lambda subjects, objects, how: f"{', '.join(subjects)} sees {' and '.join(objects)} {how}",
    NAMES,
    NAMES,
    st.sampled_from(RELATIONS),
)
DRAWN = st.one_of(st.sampled_from(LINES), st.lists(RULES, min_size=1, max_size=6).map("; ".join))
"""Lines that people write, and any others."""


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Runs of text that is learned or not, and media; an image may be in tiles."""
    tokens, weights, tiled = [1], [0.0], list[Tiled]()
    media: dict[str, list[np.ndarray]] = {name: [] for name in SPECS}
    for piece in draw(PIECES):
        if isinstance(piece, int):
            tokens, weights = tokens + [1] * piece, weights + [float(draw(st.booleans()))] * piece
            continue
        name, *sides = piece
        count, medium = int(np.prod(sides)), np.zeros((*(side * SPECS[name].block for side in sides), 1), np.float32)
        copies = 1
        if name == "vision":
            grid = draw(st.sampled_from([(0, 0), (1, 2)]))
            tiled.append(Tiled(size=(sides[0] * 2, sides[1] * 4), grid=grid))
            count, copies = (count + 1, 1) if not grid[0] else (count + sides[0] * (2 * sides[1] + 1), 3)
        tokens, weights = tokens + [IDS[name]] * count, weights + [0.0] * count
        media[name] += [medium] * copies
    fields: Any = {"question": "?", "answer": "", "prompt": draw(st.integers(1, len(tokens))), "media_tokens": IDS}
    media_of: Any = {name: tuple(arrays) for name, arrays in media.items() if arrays}
    if "painter" in media_of:
        zeros = tuple(np.zeros_like(drawing) for drawing in media_of["painter"])
        fields |= {"noise": {"painter": zeros}, "times": {"painter": (1.0,) * len(zeros)}}
    arrays = {"tokens": np.array(tokens, np.int32), "loss_weights": np.array(weights, np.float32)}
    return Sample(**arrays, media=media_of, tiled={"vision": tuple(tiled)} if tiled else {}, **fields)


def packer_of(line: str, cells: int = 1) -> Packer:
    settings = {"sequence_length": LENGTH, "microbatches": 1, "cells": cells, "pad": 0, "text": ((3, LENGTH),)}
    return Packer(encoders=SPECS, mask=line, **settings)


@settings(max_examples=80, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=3), DRAWN, st.integers(0, 9), st.integers(0, 9))
def test_packed_rows_see_what_each_sample_sees_alone(own: list[Sample], line: str, window: int, chunk: int) -> None:
    """Every pair of tokens of the packed rows, in layers with the window and in those without."""
    config = DecoderConfig(mask=line, layers=2, chunk=chunk, window=window if "before" in line else 0)
    config = replace(config, full_layers=int(config.window + chunk > 0))
    llm = Llama(config)
    model = replace(MODEL, nodes={**MODEL.nodes, "llm": replace(MODEL.nodes["llm"], module=llm)})
    packer = packer_of(line)
    plan = packer.plan_microbatch([meta_of(sample, SPECS) for sample in own], len(own))
    rows = packer.fill(plan, dict(enumerate(own))).inputs["llm"]
    assert set(llm.inputs(first=True, last=True)) <= rows.keys()
    dense = {False: np.zeros((3, LENGTH, LENGTH), bool), True: np.zeros((3, LENGTH, LENGTH), bool)}
    for (row, start), sample in zip(plan.llm.places, own, strict=True):
        at = np.arange(len(sample.tokens))
        causal = np.subtract.outer(at, at) >= 0
        near = causal & (np.subtract.outer(at, at) < (config.window or LENGTH))
        for far, reads in enumerate(masks_of(model, sample) or (near, causal)):
            span = slice(start, start + len(at))
            dense[bool(far)][row, span, span] = reads
    for (_, mask), (_, is_near, *_) in zip(llm.masks, config.runs, strict=True):
        for row in range(3):
            pairs = pairs_of(mask, {name: values[row] for name, values in rows.items()})
            want = dense[not is_near][row]
            np.testing.assert_array_equal(pairs.key_counts(), want.sum(axis=1))
            for key in range(0, LENGTH, 17):
                np.testing.assert_array_equal(pairs.key_counts(np.arange(LENGTH) == key), want[:, key])


def test_the_prefix_ends_with_the_prompt_or_at_what_is_learned() -> None:
    fields: Any = {"question": "", "answer": "", "media": {}, "media_tokens": {}}
    sample = Sample(
        tokens=np.arange(6, dtype=np.int32), loss_weights=np.array([1, 0, 0, 1, 0, 1.0]), prompt=5, **fields
    )
    assert token_kinds(sample, {})["prefix"].tolist() == [True] * 3 + [False] * 3
    answer = replace(sample, loss_weights=np.zeros(6))  # a part of it could not be read
    assert token_kinds(answer, {})["suffix"].tolist() == [False] * 5 + [True]
    assert token_kinds(replace(answer, prompt=9), {})["prefix"].all()


def test_items_of_what_is_not_drawn_yet_and_of_too_many_places() -> None:
    fields: Any = {"question": "?", "answer": "", "prompt": 1, "media_tokens": IDS, "media": {}}
    tokens = np.array([1, *[IDS["painter"]] * 3], np.int32)
    sample = Sample(tokens=tokens, loss_weights=np.zeros(4, np.float32), **fields)
    assert sample_items(sample, {"painter": ((1, 2), (1, 2))}, SPECS).tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="3 painter placeholders for 2 tokens"):
        sample_items(sample, {"painter": ((1, 2),)}, SPECS)


def test_a_process_makes_the_words_of_its_own_rows() -> None:
    fields: Any = {"question": "", "answer": "", "media": {}, "media_tokens": IDS, "prompt": 2}
    samples = [
        Sample(tokens=np.full(n, 7, np.int32), loss_weights=np.ones(n, np.float32), **fields) for n in (5, 6, 7, 8)
    ]
    packer = packer_of(PRESETS["paligemma"], cells=2)
    plan = packer.plan_microbatch([meta_of(sample, SPECS) for sample in samples], 4)
    all_rows = packer.fill(plan, dict(enumerate(samples))).inputs["llm"]
    mine = ProcessRows(cells={"llm": {"is": (1,), "attends": (1,)}})
    assert plan.needed(mine).keys() == {2, 3} and not plan.learned(mine)
    part = packer.fill(plan, {index: samples[index] for index in plan.needed(mine)}, mine).inputs["llm"]
    for name in ("is", "attends"):
        array: Any = part[name]
        assert isinstance(array, PartialArray) and array.cells == (1,) and array.dtype == np.uint32
        np.testing.assert_array_equal(array[3:6], all_rows[name][3:6])
        assert all_rows[name][3:6].any()
    plain = packer_of("causal").microbatch(samples, 4).inputs["llm"]
    assert not plain.keys() & {"is", "attends", "items"}
