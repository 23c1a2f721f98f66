"""Digits to be drawn: what a sample asks for, how it is packed, and what comes back of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_packer, make_source
from mmjax.data.log_mel import LogMel
from mmjax.data.packing import Packer
from mmjax.data.patches import patchify, unpatchify
from mmjax.data.process import Process
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sample import meta_of, prompt_only, swap_media
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DRAW, DigitsConfig
from mmjax.data.tasks.digits.recognise import read_drawing
from mmjax.data.tasks.digits.source import DigitsSource, load_digits, split_range
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec, StepBatch

SPECS = {"vision": EncoderSpec(patch=4, merge=2), "painter": EncoderSpec(patch=2, merge=2, channels=1, drawn=True)}
TOKENIZER = ByteTokenizer(tuple(SPECS))
DATA = DataConfig(sequence_length=160)
CONFIG = DigitsConfig(images=(1, 2), digits=(1, 3), read=1.0, count=0.0, sum=0.0, draw=1.0, turns=2)
LOG_MEL = LogMel(sample_rate=8000, window=256, hop=80, mels=5)
CELLS, BATCH = 2, 8


def source(config: DigitsConfig = CONFIG, *, split: str = "train") -> DigitsSource:
    return DigitsSource(DATA, SPECS, TOKENIZER, settings=config, seed=4, split=split)


def step(process_rows: ProcessRows | None = None) -> StepBatch:
    """The first batch; in every microbatch something is drawn."""
    samples = make_source(DataSpec(DATA, task=CONFIG), SPECS, seed=4, split="train")
    packer = make_packer(DATA, SPECS, samples, TOKENIZER, cells=CELLS, global_batch=BATCH, microbatches=2)
    return StepMaker(source=samples, packer=packer, global_batch=BATCH, process_rows=process_rows)(0)


def test_what_is_drawn_is_what_the_image_says_in_another_hand() -> None:
    pixels, digits = load_digits()
    for split in ("train", "test"):
        first, last = split_range(split)
        drawings = 0
        for index in range(60):
            plan, sample = source(split=split).plan(index), source(split=split).sample(index)
            if not plan.drawn:
                assert DRAW not in plan.kinds and "painter" not in sample.media and not sample.noise
                continue
            drawings += 1
            assert plan.kinds[0] == DRAW and DRAW not in plan.kinds[1:]
            assert plan.turns[0][0].startswith("draw the ") and plan.turns[0][0].endswith(" image <drawing>")
            number = ("first", "second").index(plan.turns[0][0].split()[2])
            label = plan.rows[number].label
            assert plan.turns[0][1] == label == "".join(str(digits[i]) for i in plan.drawn)
            assert all(first <= i < last for i in plan.drawn), "from another split"
            (canvas,), (noise,), (time,) = sample.media["painter"], sample.noise["painter"], sample.times["painter"]
            assert canvas.shape == noise.shape == (8, 24, 1) and 0 <= time < 1
            want = np.full((8, 24), -1.0)
            want[:, : 8 * len(label)] = 2 * np.concatenate([pixels[i] for i in plan.drawn], axis=1) - 1
            np.testing.assert_allclose(canvas[:, :, 0], want, atol=1e-6)
            assert sample.placeholders("painter").sum() == 2 * 6  # blocks of 4 x 4 pixels
        assert 20 < drawings < 60


def test_a_drawing_is_a_function_of_seed_split_and_index() -> None:
    indices = [i for i in range(20) if source().plan(i).drawn]
    first, second = ([source().sample(i) for i in indices] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.times == b.times
        np.testing.assert_array_equal(a.noise["painter"][0], b.noise["painter"][0])
    noises = np.stack([s.noise["painter"][0] for s in first])
    assert len({s.times["painter"] for s in first}) == len(first) == len(np.unique(noises[:, 0, 0]))
    assert abs(noises.mean()) < 0.1 and abs(noises.std() - 1) < 0.1


def test_what_was_dialled_is_drawn_too() -> None:
    specs = {"audio": EncoderSpec(patch=2, axes=1, channels=5, log_mel=LOG_MEL), "painter": SPECS["painter"]}
    config = replace(CONFIG, images=(0, 0), calls=(1, 2), hear=1.0)
    samples = DigitsSource(DATA, specs, ByteTokenizer(tuple(specs)), settings=config, seed=0, split="train")
    plans = [samples.plan(i) for i in range(30)]
    drawn = [plan for plan in plans if plan.drawn]
    assert {plan.turns[0][0] for plan in drawn} == {
        "draw what was dialled <drawing>", "draw what was dialled first <drawing>",
        "draw what was dialled second <drawing>",
    }  # fmt: skip
    for plan in drawn:
        assert plan.turns[0][1] == plan.calls["second" in plan.turns[0][0]].digits


def test_samples_that_are_not_drawn_are_as_they_were() -> None:
    plain = replace(CONFIG, draw=0.0)
    assert source(plain).worst_case().media == {"vision": 2}
    for index in range(10):
        assert not source(plain).plan(index).drawn


def test_metadata_equals_the_rendered_sample_and_stays_within_the_worst_case() -> None:
    samples = source()
    worst, longest = samples.worst_case(), 0
    for index in range(200):
        meta, sample = samples.meta(index), samples.sample(index)
        assert meta == meta_of(sample, SPECS)
        assert meta.tokens <= worst.tokens
        longest = max(longest, meta.tokens)
        for name, patches in meta.patches.items():
            assert len(patches) <= worst.media[name] and max(patches) <= worst.patches[name]
    assert longest > 0.8 * worst.tokens


def test_media_of_others_leave_the_drawing_shut() -> None:
    index = next(i for i in range(20) if source().plan(i).drawn)
    all_media, text = source().sample(index), source().sample(index, ())
    np.testing.assert_array_equal(all_media.tokens, text.tokens)
    assert not text.media and not text.noise and text.media_tokens == all_media.media_tokens


def test_an_exchange_of_images_keeps_what_is_asked() -> None:
    samples = [source(split="test").sample(i) for i in range(12)]
    for sample, swapped in zip(samples, swap_media(TOKENIZER, SPECS, samples, "vision"), strict=True):
        assert (sample.question, sample.answer) == (swapped.question, swapped.answer)
        assert sample.media.keys() == swapped.media.keys() and not swapped.noise


@settings(max_examples=30, deadline=None)
@given(
    axes=st.integers(1, 2), patch=st.integers(1, 3), merge=st.integers(1, 3), channels=st.integers(1, 3),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_patches_come_together_again(axes: int, patch: int, merge: int, channels: int, blocks: tuple[int, int]) -> None:
    spec = EncoderSpec(patch=patch, merge=merge, channels=channels, axes=axes)
    size = tuple(block * spec.block for block in blocks[:axes])
    medium = np.arange(np.prod(size) * channels, dtype=np.float32).reshape(*size, channels)
    np.testing.assert_array_equal(unpatchify(patchify(medium, spec)[0], spec.grid(*size), spec), medium)


def test_generator_rows_are_the_pictures_through_noise_and_know_where_their_hidden_states_are() -> None:
    batch, count = step(), 0
    per = BATCH // 2
    for number, part in enumerate(batch.microbatches):
        painter, llm = part.inputs["painter"], part.inputs["llm"]
        assert "painter_index" not in llm and set(painter) == {
            "patches", "segments", "positions", "times", "targets", "weights", "index",
        }  # fmt: skip
        hidden = llm["tokens"].reshape(CELLS, -1)  # a token stands for its hidden state
        real = painter["segments"] > 0
        np.testing.assert_array_equal(painter["weights"], real)
        index = painter["index"].reshape(CELLS, -1)
        np.testing.assert_array_equal(index.ravel() >= 0, real.reshape(-1, 4).all(1))
        for cell in range(CELLS):
            at = index[cell][index[cell] >= 0]
            assert len(set(at)) == len(at) and (hidden[cell][at] == TOKENIZER.media_token("painter")).all()
        picture = painter["patches"] - painter["times"][..., None] * painter["targets"]  # x = x_t - t (noise - x)
        for row, segment in {
            (r, s) for r, s in zip(*np.nonzero(real), strict=True) for s in [painter["segments"][r, s]]
        }:
            where = painter["segments"][row] == segment
            places, cell = painter["positions"][row][where], row // (len(real) // CELLS)
            canvas = np.zeros((8, 24))
            for patch, (y, x) in zip(picture[row][where], places, strict=True):
                canvas[2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = patch.reshape(2, 2)
            first = painter["index"][row][where.reshape(-1, 4)[:, 0]][0]
            sample = number * per + cell * (per // CELLS) + first // DATA.sequence_length
            np.testing.assert_allclose(canvas, source().sample(sample).media["painter"][0][:, :, 0], atol=1e-5)
            assert len(np.unique(painter["times"][row][where])) == 1
            count += 1
    assert count == sum(bool(source().plan(i).drawn) for i in range(BATCH)) > 2
    assert batch.denominators["painter"] == 8 * 24 * count == batch.counts["painter_patches"] * 4


@pytest.mark.parametrize("cells", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("names", [("patches", "times", "index"), ("targets", "weights"), ("times",), ("index",)])
def test_a_process_reads_the_rows_of_its_generators(cells: tuple[int, ...], names: tuple[str, ...]) -> None:
    rows = ProcessRows(cells={"painter": dict.fromkeys((*names, "segments", "positions"), cells)})
    for part, all_rows in zip(step(rows).microbatches, step().microbatches, strict=True):
        for name in names:
            got, want = part.inputs["painter"][name], all_rows.inputs["painter"][name]
            per = len(want) // CELLS
            for cell in cells:
                np.testing.assert_array_equal(got[cell * per : (cell + 1) * per], want[cell * per : (cell + 1) * per])


def test_what_was_drawn_goes_back_to_its_sample() -> None:
    samples = [source().sample(i) for i in range(6)]
    buckets: Any = {"vision": ((6, 128),), "painter": ((2, 48), (4, 96))}
    packer = Packer(
        encoders={name: replace(spec, buckets=buckets[name]) for name, spec in SPECS.items()},
        sequence_length=160, microbatches=1, cells=CELLS, pad=0,
    )  # fmt: skip
    prompts = [prompt_only(replace(s, times={n: (1.0,) * len(t) for n, t in s.times.items()})) for s in samples]
    plan = packer.plan_microbatch([meta_of(s, packer.encoders) for s in prompts], 6, {"painter": 1})
    assert plan.bucket["painter"] == 1
    filled = packer.fill(plan, dict(enumerate(prompts)))
    drawn = packer.media("painter", plan, filled.inputs["painter"]["patches"])  # at time 1, nothing but noise
    assert drawn.keys() == {i for i, s in enumerate(samples) if s.noise} and len(drawn) > 1
    for index, media in drawn.items():
        np.testing.assert_array_equal(media[0], samples[index].noise["painter"][0])


def test_drawings_are_read() -> None:
    pixels, digits = load_digits()
    first, last = split_range("test")
    labels = "".join(read_drawing(2 * digit[:, :, None] - 1, 1) for digit in pixels[first:last])
    right = np.array([a == str(b) for a, b in zip(labels, digits[first:last], strict=True)])
    assert 0.95 <= right.mean() < 1, "every digit that it was fitted to is read"
    assert min(right[digits[first:last] == digit].mean() for digit in range(10)) > 0.8
    wide = np.concatenate([2 * pixels[i] - 1 for i in (0, 1)], axis=1)[:, :, None]
    assert read_drawing(wide, 2) == read_drawing(wide[:, :8], 1) + read_drawing(wide[:, 8:], 1)
    assert len(read_drawing(np.full((8, 16, 1), np.nan, np.float32), 2)) == 2


def test_drawings_are_larger_by_a_scale_and_are_read_so() -> None:
    large = source(replace(CONFIG, drawn_scale=3))
    drawn = [index for index in range(20) if large.plan(index).drawn]
    assert len(drawn) > 3 and large.worst_case().patches["painter"] == 9 * source().worst_case().patches["painter"]
    for index in drawn:
        (canvas,), (small,) = (each.sample(index).media["painter"] for each in (large, source()))
        assert canvas.shape == (24, 72, 1)
        np.testing.assert_array_equal(canvas, small.repeat(3, axis=0).repeat(3, axis=1))
        digits = len(large.plan(index).drawn)
        assert read_drawing(canvas, digits, 3) == read_drawing(small, digits)


def test_a_generator_is_wanted_for_drawings() -> None:
    with pytest.raises(ConfigError, match=r"Digits\.draw=1\.0: nothing in the model draws; set it to 0\.0"):
        make_source(DataSpec(DATA, task=CONFIG), {"vision": SPECS["vision"]}, seed=0, split="train")
    with pytest.raises(ConfigError, match=r"Data\.generator='drawer'"):
        make_source(DataSpec(replace(DATA, generator="drawer"), task=CONFIG), SPECS, seed=0, split="train")


def test_a_dropped_condition_reaches_no_token_of_its_drawing() -> None:
    """The generator's pointers are -1 for such a drawing alone, and all else is as without dropping."""
    specs = {**SPECS, "painter": replace(SPECS["painter"], process=Process(drop_condition=0.5))}
    plain = make_source(DataSpec(DATA, task=CONFIG), SPECS, seed=4, split="train")
    dropping = make_source(DataSpec(DATA, task=CONFIG), specs, seed=4, split="train")
    samples = [(plain.sample(index), dropping.sample(index)) for index in range(24)]
    drops = [any(after.dropped.get("painter", ())) for _, after in samples]
    assert 2 < sum(drops) < 12
    assert [dropping.sample(index, ()).dropped for index in range(24)] == [after.dropped for _, after in samples]
    packer = make_packer(DATA, specs, dropping, TOKENIZER, cells=1, global_batch=8, microbatches=1)
    for before, after in samples:
        assert before.times == after.times and (before.tokens == after.tokens).all()
        if before.noise:
            rows = [packer.microbatch([sample], 8).inputs["painter"] for sample in (before, after)]
            is_dropped = any(after.dropped.get("painter", ()))
            assert (rows[1]["index"] == -1).all() == is_dropped and (rows[0]["index"] >= 0).any()
            for name in ("patches", "targets", "times", "weights", "segments"):
                np.testing.assert_array_equal(rows[0][name], rows[1][name])
