"""A process reads what its own devices need: plans from metadata alone, rows that are held, media that stay shut."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from data_samples import TOKENIZER, numbered_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepLoader, StepMaker, make_packer, make_source
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows, turn_of
from mmjax.data.sample import meta_of
from mmjax.data.spec import DataSpec
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, StepBatch

CELLS, GLOBAL_BATCH = 4, 12
SPECS = {
    "vision": EncoderSpec(patch=4, merge=2, buckets=((2, 64), (6, 64))),
    "seen": EncoderSpec(patch=4, buckets=((1, 4),)),  # an encoder without any media
}
LLM = ("tokens", "targets", "weights", "positions", "vision_index", "seen_index")


@dataclass
class Opened:
    """A source that notes which media it was asked to open, and may lie in its metadata."""

    plain: Any
    samples: list[int] = field(default_factory=list)
    media: list[tuple[int, str]] = field(default_factory=list)
    lie: SampleMeta | None = None

    def meta(self, index: int) -> SampleMeta:
        return self.lie if self.lie and index == 7 else self.plain.meta(index)

    def sample(self, index: int, media: Collection[str] | None = None, learned: bool = True) -> Sample:
        sample = self.plain.sample(index, media, learned=learned)
        self.samples.append(index)
        self.media += [(index, name) for name, arrays in sample.media.items() for _ in arrays]
        return sample

    def worst_case(self) -> Any:
        return self.plain.worst_case()


def maker(process_rows: ProcessRows | None = None) -> tuple[StepMaker, Opened]:
    config = DataConfig(sequence_length=112)
    source = Opened(make_source(DataSpec(config), SPECS, seed=3, split="train"))
    sizes: Any = {"global_batch": GLOBAL_BATCH, "microbatches": 2, "cells": CELLS}
    packer = make_packer(config, SPECS, source, make_tokenizer("", tuple(SPECS)), **sizes)
    return StepMaker(source=source, packer=packer, global_batch=GLOBAL_BATCH, process_rows=process_rows), source


def own_rows(vision: tuple[int, ...] = (), llm: tuple[int, ...] = (), later: tuple[int, ...] = ()) -> ProcessRows:
    """The cells of the encoder's first stage, of the LLM, and of a later stage of the encoder."""
    positions = tuple(sorted({*vision, *later}))
    return ProcessRows(
        cells={
            "vision": {"patches": vision, "segments": positions, "positions": positions},
            "llm": dict.fromkeys((*LLM, "segments"), llm),
        }
    )


def assert_rows(batch: StepBatch, all_rows: StepBatch, process_rows: ProcessRows) -> None:
    """All that is wanted is bit for bit what it is in the whole batch, and the rest is not there."""
    assert (batch.denominators, batch.counts, batch.step) == (all_rows.denominators, all_rows.counts, all_rows.step)
    for number, (part, full) in enumerate(zip(batch.microbatches, all_rows.microbatches, strict=True)):
        turn = turn_of(process_rows, number)
        assert turn
        assert part.bucket == full.bucket and {m: set(a) for m, a in part.inputs.items()} == {
            m: set(a) for m, a in full.inputs.items()
        }
        for module, arrays in part.inputs.items():
            for name, array in arrays.items():
                expected = full.inputs[module][name]
                assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
                cells = range(CELLS) if name == "segments" else turn.cells.get(module, {}).get(name, ())
                per = len(expected) // CELLS
                for cell in range(CELLS):
                    rows = (slice(cell * per, (cell + 1) * per), *[slice(None)] * (expected.ndim - 1))
                    if cell in cells:
                        np.testing.assert_array_equal(array[rows], expected[rows])
                    else:
                        with pytest.raises(IndexError, match="not read by this process"):
                            array[rows]


@pytest.mark.parametrize(
    "own",
    [
        own_rows(vision=(0, 1)),
        own_rows(llm=(1, 2)),
        own_rows(vision=(3,), llm=(0, 1)),
        own_rows(later=(0, 1, 2, 3)),
        own_rows(vision=(0, 1, 2, 3), llm=(2,)),
        ProcessRows.in_turns([own_rows(vision=(0, 1), llm=(1, 2)), own_rows(llm=(1, 2))]),
    ],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rows_that_are_wanted_are_those_of_the_whole_batch(own: ProcessRows, workers: int) -> None:
    all_rows = maker()[0]
    with StepLoader(maker(own)[0], steps=2, workers=workers) as batches:
        for step, batch in enumerate(batches):
            assert_rows(batch, all_rows(step), own)


def test_media_that_no_device_here_needs_stay_shut() -> None:
    per = -(-GLOBAL_BATCH // 2 // CELLS)  # LLM rows of a cell

    def rows(*cells: int) -> set[int]:  # of both microbatches of step 1
        return {
            GLOBAL_BATCH + m * GLOBAL_BATCH // 2 + row
            for m in range(2)
            for cell in cells
            for row in range(cell * per, min((cell + 1) * per, GLOBAL_BATCH // 2))
        }

    for own, texts, media in (
        (None, rows(0, 1, 2, 3), rows(0, 1, 2, 3)),
        (own_rows(vision=(1,)), rows(1), rows(1)),
        (own_rows(llm=(0, 1, 2, 3)), rows(0, 1, 2, 3), set()),
        (own_rows(later=(0, 1, 2, 3)), set(), set()),
        (own_rows(vision=(0,), llm=(2,)), rows(0, 2), rows(0)),
    ):
        make, source = maker(own)
        make(1)
        assert (set(source.samples), {index for index, _ in source.media}) == (texts, media)
        assert len(source.samples) == len(set(source.samples))


sizes = st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, cells=st.integers(1, 4), count=st.integers(1, 3), merge=st.integers(1, 2), one=st.booleans())
def test_the_plan_of_metadata_is_that_of_samples(sizes: Any, cells: int, count: int, merge: int, one: bool) -> None:
    spec = EncoderSpec(patch=2, merge=merge, buckets=((1, 14 * merge**2), (4, 20 * merge**2), (27, 12 * merge**2)))
    samples = numbered_samples(spec, sizes)
    encoders = {"vision": spec}
    packer = Packer(
        encoders=encoders, sequence_length=64, microbatches=count, cells=cells, pad=TOKENIZER.pad, one_bucket=one
    )
    metas = [
        SampleMeta(
            tokens=len(sample.tokens),
            weight=float(sum(sample.loss_weights.tolist()[1:])),
            grids={"vision": tuple((h * merge, w * merge) for h, w in of_sample)} if of_sample else {},
        )
        for sample, of_sample in zip(samples, sizes, strict=True)
    ]
    assert metas == [meta_of(sample, encoders) for sample in samples]
    plan, batch = packer.plan(3, metas), packer.step(3, samples)
    assert (plan.denominators, plan.counts) == (batch.denominators, batch.counts)
    patches = sum(int((part.inputs["vision"]["segments"] > 0).sum()) for part in batch.microbatches)
    padded = sum(part.inputs["vision"]["segments"].size for part in batch.microbatches)
    assert (patches, padded) == (plan.counts["vision_patches"], plan.counts["vision_patches_padded"])
    assert plan.counts["llm_tokens_padded"] == sum(p.inputs["llm"]["tokens"].size for p in batch.microbatches)
    left = list(samples)
    for part, microbatch in zip(plan.microbatches, batch.microbatches, strict=True):
        of_microbatch, left = left[: len(part.metas)], left[len(part.metas) :]
        # Without a sample there is what depends on lengths alone, in the places where the samples' patches lie.
        empty = packer.fill(part, {}, ProcessRows(cells={"vision": {"positions": tuple(range(cells))}}))
        assert empty.bucket == microbatch.bucket == part.bucket
        for name in ("segments", "positions"):
            np.testing.assert_array_equal(empty.inputs["vision"][name], microbatch.inputs["vision"][name])
        np.testing.assert_array_equal(empty.inputs["llm"]["segments"], microbatch.inputs["llm"]["segments"])
        assert part.needed(None).keys() == set(range(len(of_microbatch)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 1}, r"tokens, not 1$"),
        ({"weight": 77.0}, r"of loss weight, not 77\.0$"),
        ({"grids": {"vision": ((2, 2),)}}, r"vision placeholders, not 1$"),
        ({"turned": True}, r"vision patches, not "),
    ],
)
def test_metadata_that_lie_are_an_error_that_names_the_sample(changes: dict[str, Any], message: str) -> None:
    make, source = maker()
    true = source.plain.meta(7)
    if changes.pop("turned", False):
        changes = {"grids": {"vision": tuple(grid[::-1] for grid in true.grids["vision"])}}
    source.lie = replace(true, **changes)
    with pytest.raises(ConfigError, match=rf"^sample 7 \('.*'\) is not what its metadata say: .*{message}"):
        make(0)
    maker(own_rows(llm=(0,)))[0](0)  # whoever does not read the sample does not see it


def test_a_sample_that_could_not_be_read_keeps_its_place() -> None:
    make, source = maker()
    plain = source.plain.sample

    def unreadable(index: int, media: Any, *, learned: bool) -> Sample:
        sample = plain(index, media, learned=learned)
        return replace(sample, loss_weights=np.zeros_like(sample.loss_weights)) if index == 7 else sample

    all_rows = make(0)
    source.plain.sample = unreadable
    batch = make(0)
    assert batch.denominators == all_rows.denominators
    weights = [sum(float(m.inputs["llm"]["weights"].sum()) for m in b.microbatches) for b in (batch, all_rows)]
    assert weights[1] - weights[0] == source.plain.meta(7).weight > 0


def test_rows_that_are_held() -> None:
    dense = np.arange(24).reshape(8, 3)
    partial = PartialArray((1, 2), (8, 3), 4, dense[2:6])
    for rows in (pickle.loads(pickle.dumps(partial)), partial):
        assert (rows.shape, rows.dtype, rows.ndim) == (dense.shape, dense.dtype, 2)
        np.testing.assert_array_equal(rows[slice(2, 6), slice(None)], dense[2:6])
        np.testing.assert_array_equal(rows[3:5, 1:], dense[3:5, 1:])
        np.testing.assert_array_equal(np.asarray(rows), np.where(np.isin(np.arange(8), range(2, 6))[:, None], dense, 0))
        for wrong in (slice(None), slice(0, 4), slice(4, 7), slice(2, 6, 2)):
            with pytest.raises(IndexError, match="not read by this process"):
                rows[wrong]
    apart = PartialArray((0, 3), (8, 3), 4, dense[[0, 1, 6, 7]])
    np.testing.assert_array_equal(apart[6:8], dense[6:])
    with pytest.raises(IndexError):
        apart[0:8]
    assert isinstance(PartialArray((0, 1), (4, 3), 2, dense[:4]).simplified(), np.ndarray)
    assert partial.row(1) is None and np.array_equal(np.asarray(partial.row(2)), dense[2])
