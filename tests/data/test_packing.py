"""Packing: every image comes back from the packed arrays by following the index maps alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from data_samples import TOKENIZER, numbered_image, numbered_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.buckets import fill_buckets
from mmjax.data.first_fit import first_fit_decreasing, holds
from mmjax.data.packing import Packer
from mmjax.data.patches import patchify
from mmjax.data.sample import build_sample, prompt_only, swap_media
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec, Microbatch, Sample, SampleMeta, WorstCase

S = 64


def unpatchify(patches_NE: np.ndarray, at_N2: np.ndarray, spec: EncoderSpec) -> np.ndarray:
    """The image that patches and their (row, column) describe, placed one pixel block at a time."""
    rows, columns = at_N2.max(0) + 1
    p = spec.patch
    image = np.full((rows * p, columns * p, spec.channels), np.nan, np.float32)
    for patch, (row, column) in zip(patches_NE, at_N2, strict=True):
        image[row * p : (row + 1) * p, column * p : (column + 1) * p] = patch.reshape(p, p, spec.channels)
    return image


def images_from(microbatch: Microbatch, row: int, cells: int, spec: EncoderSpec) -> list[np.ndarray]:
    """The images of LLM row `row`, rebuilt from its placeholders through the cell's merged tokens."""
    llm, vision = microbatch.inputs["llm"], microbatch.inputs["vision"]
    cell = row // (llm["tokens"].shape[0] // cells)
    merged = spec.merge**2

    def in_cell(x: np.ndarray, *tail: int) -> np.ndarray:
        return x.reshape(cells, -1, merged, *tail)[cell]

    patches = in_cell(vision["patches"], vision["patches"].shape[-1])
    positions, segments = in_cell(vision["positions"], 2), in_cell(vision["segments"])
    width = vision["segments"].shape[1] // merged
    index = llm["vision_index"][row]
    runs: list[list[int]] = []
    before = None
    for token in index[index >= 0].tolist():
        owner = (token // width, segments[token, 0])
        assert len(set(segments[token])) == 1 and owner[1] > 0
        runs = [*runs, [token]] if owner != before else [*runs[:-1], [*runs[-1], token]]
        before = owner
    return [unpatchify(np.concatenate(patches[t]), np.concatenate(positions[t]), spec) for t in runs]


sizes = st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3), min_size=1, max_size=9)


def test_widths_of_rows_that_no_ranks_share_are_whole_tokens() -> None:
    """540 patches become 544, a multiple of 8, with tokens of four patches, and stay 540 with tokens of nine."""
    for merge, width in ((2, 544), (3, 540)):
        spec = EncoderSpec(patch=4, merge=merge, channels=3, buckets=((1, 540),))
        packer = Packer(encoders={"vision": spec}, sequence_length=64, microbatches=1, cells=1, pad=0)
        assert packer.split_over({}).encoders["vision"].buckets == ((1, width),)


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes,
    cells=st.integers(1, 4),
    merge=st.integers(1, 2),
    channels=st.sampled_from([1, 3]),
    width=st.integers(14, 30),
    special=st.integers(0, 2),
)
def test_every_image_comes_back_through_the_index_map(sizes, cells, merge, channels, width, special):
    buckets = ((4, width * merge**2), (27, width * merge**2))
    spec = EncoderSpec(patch=2, merge=merge, channels=channels, special=special, buckets=buckets)
    samples = numbered_samples(spec, sizes)
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=1, cells=cells, pad=TOKENIZER.pad)
    microbatch = packer.microbatch(samples, len(samples))
    rows = microbatch.inputs["llm"]["tokens"].shape[0]
    assert rows % cells == 0 and rows - len(samples) < cells
    for row, sample in enumerate(samples):
        got = images_from(microbatch, row, cells, spec)
        wanted = sample.media.get("vision", ())
        assert [g.shape for g in got] == [w.shape for w in wanted]
        assert all(np.array_equal(g, w) for g, w in zip(got, wanted, strict=True))
    segments, places = (microbatch.inputs["vision"][name] for name in ("segments", "positions"))
    images = [image for sample in samples for image in sample.media.get("vision", ())]
    patches = sum(spec.patches(*image.shape[:2]) for image in images)
    assert (segments > 0).sum() == patches + special * len(images)
    for number in range(special):
        assert ((places == -1 - number).all(axis=-1) & (segments > 0)).sum() == len(images)
    assert not microbatch.inputs["vision"]["patches"][(segments == 0) | (places[..., 0] < 0)].any()
    assert (microbatch.inputs["llm"]["vision_index"][len(samples) :] == -1).all()


def test_index_marks_exactly_the_placeholders():
    spec = EncoderSpec(patch=2, merge=2, buckets=((4, 48),))
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=1, cells=2, pad=TOKENIZER.pad)
    llm = packer.microbatch(numbered_samples(spec, [[(1, 2)], [], [(2, 2), (1, 1)]]), 3).inputs["llm"]
    assert np.array_equal(llm["vision_index"] >= 0, llm["tokens"] == TOKENIZER.media_token("vision"))


def test_llm_row_by_hand():
    spec = EncoderSpec(patch=2, buckets=((1, 4),))
    sample = build_sample(TOKENIZER, {"vision": spec}, {"vision": [numbered_image(2, 4, 1, 1)]}, (("<image>a", "7"),))
    bos, eos, media, pad = TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.media_token("vision"), TOKENIZER.pad
    packer = Packer(encoders={"vision": spec}, sequence_length=9, microbatches=1, cells=1, pad=pad)
    llm = packer.microbatch([sample], 1).inputs["llm"]
    assert llm["tokens"].tolist() == [[bos, media, media, 97, 32, 55, eos, pad, pad]]
    assert llm["targets"].tolist() == [[media, media, 97, 32, 55, eos, pad, pad, pad]]
    assert llm["weights"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0]]
    assert llm["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 0]]
    assert llm["segments"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert llm["vision_index"].tolist() == [[-1, 0, 1, -1, -1, -1, -1, -1, -1]]
    assert {name: array.dtype for name, array in llm.items()} == {
        name: np.dtype(np.float32 if name == "weights" else np.int32) for name in llm
    }


def test_patchify_keeps_merge_blocks_together():
    spec = EncoderSpec(patch=1, merge=2)
    patches, at = patchify(np.arange(16, dtype=np.float32).reshape(4, 4, 1), spec)
    assert patches[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert at[:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    with pytest.raises(ValueError, match="multiples of patch"):
        patchify(np.zeros((3, 4, 1), np.float32), spec)


def test_patchify_flattens_pixels_row_major_with_channels_last():
    spec = EncoderSpec(patch=2, channels=3)
    image = numbered_image(2, 4, 3, 0)
    patches, _ = patchify(image, spec)
    assert patches[0].tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]
    assert np.array_equal(patches[1], image[:, 2:].reshape(-1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 50))
def test_first_fit_decreasing_is_disjoint_and_keeps_its_bound(sizes, capacity):
    places = first_fit_decreasing(sizes, capacity)
    taken = set()
    for size, (row, start) in zip(sizes, places, strict=True):
        cells = {(row, at) for at in range(start, start + size)}
        assert not cells & taken and start + size <= capacity
        taken |= cells
    if sizes:
        bound = -(-len(sizes) // (capacity // max(sizes)))
        assert max(row for row, _ in places) + 1 <= bound


def test_smallest_bucket_that_fits_every_cell_is_taken_for_all_cells():
    spec = EncoderSpec(patch=2, buckets=((1, 4), (1, 8), (2, 8)))
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=1, cells=2, pad=0)

    def bucket(*sizes: list[tuple[int, int]]) -> tuple[int, int]:
        microbatch = packer.microbatch(numbered_samples(spec, sizes), 2)
        return microbatch.bucket["vision"], microbatch.inputs["vision"]["segments"].shape[0]

    assert bucket([(1, 4)], [(1, 3)]) == (0, 2)
    assert bucket([(1, 4)], [(1, 3), (1, 3)]) == (1, 2)
    assert bucket([(1, 4)], [(2, 3), (1, 3)]) == (2, 4)
    assert bucket([], []) == (0, 2)


def test_images_of_a_row_are_numbered_in_the_order_they_lie():
    spec = EncoderSpec(patch=2, buckets=((1, 8),))
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=1, cells=1, pad=0)
    microbatch = packer.microbatch(numbered_samples(spec, [[(1, 1), (1, 4), (1, 2)]]), 1)
    assert microbatch.inputs["vision"]["segments"].tolist() == [[1, 1, 1, 1, 2, 2, 3, 0]]
    index = microbatch.inputs["llm"]["vision_index"][0]
    assert index[index >= 0].tolist() == [6, 0, 1, 2, 3, 4, 5]


def test_step_splits_in_order_and_counts():
    spec = EncoderSpec(patch=2, buckets=((2, 8),))
    samples = numbered_samples(spec, [[(1, 2)], [], [(1, 1), (1, 3)], [(1, 4)], [(2, 2)]])
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=2, cells=2, pad=0)
    batch = packer.step(7, samples)
    first, second = (m.inputs["llm"] for m in batch.microbatches)
    assert first["tokens"].shape == second["tokens"].shape == (4, S)
    for row, sample in enumerate(samples):
        got = (first if row < 3 else second)["tokens"][row % 3]
        assert got[: len(sample.tokens)].tolist() == sample.tokens.tolist()
    assert batch.step == 7
    assert (
        batch.denominators == {"llm": 10.0, "vision": 14.0}
        and sum(float(m.inputs["llm"]["weights"].sum()) for m in batch.microbatches) == 10.0
    )
    assert batch.counts == {
        "samples": 5,
        "media": 5,
        "llm_tokens": sum(len(s.tokens) for s in samples),
        "llm_tokens_padded": 2 * 4 * S,
        "vision_patches": 14,
        "vision_patches_padded": 2 * 2 * 2 * 8,
    }


def test_a_class_token_is_no_padding():
    """Three patches and a class token fill a row; a fourth position more is padding."""
    for width, padding in ((4, 0), (5, 1)):
        spec = EncoderSpec(patch=2, buckets=((1, width),), special=1)
        packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=1, cells=1, pad=0)
        counts = packer.step(0, numbered_samples(spec, [[(1, 3)]])).counts
        assert counts["vision_patches"] == 3 and counts["vision_patches_padded"] == 3 + padding


def test_one_bucket_is_the_cheapest_that_holds_every_microbatch_of_a_step():
    spec = EncoderSpec(patch=2, buckets=((1, 4), (1, 8), (2, 8)))
    samples = numbered_samples(spec, [[(1, 2)], [(1, 2), (1, 3)], [(1, 4)]])
    packer = Packer(encoders={"vision": spec}, sequence_length=S, microbatches=3, cells=1, pad=0)
    assert [m.bucket["vision"] for m in packer.step(0, samples).microbatches] == [0, 1, 0]
    batch = replace(packer, one_bucket=True).step(0, samples)
    assert [m.bucket["vision"] for m in batch.microbatches] == [1, 1, 1]
    assert batch.counts["vision_patches_padded"] == 24
    for microbatch, sample in zip(batch.microbatches, samples, strict=True):
        images = images_from(microbatch, 0, 1, spec)
        assert all(np.array_equal(g, w) for g, w in zip(images, sample.media["vision"], strict=True))


def test_one_bucket_of_several_that_do_not_hold_what_cheaper_ones_hold():
    """One microbatch needs the second bucket; the other fits into the first and the third alone."""
    shapes = ((2, 64), (4, 36), (4, 72))
    metas = [SampleMeta(tokens=n, weight=1.0, grids={"vision": ((1, n),)}) for n in (*[36] * 4, *[64, 9, 9, 9])]
    settings = {"sequence_length": 72, "microbatches": 2, "cells": 1, "pad": 0, "text": shapes}
    packer = Packer(encoders={"vision": EncoderSpec(patch=2, buckets=shapes)}, **settings)
    assert packer.buckets(metas) == [{"vision": 1, "llm": 1}, {"vision": 0, "llm": 0}]
    plan = replace(packer, one_bucket=True).plan(0, metas)
    assert [part.bucket for part in plan.microbatches] == [{"vision": 2, "llm": 2}] * 2


shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(6, 30)), max_size=4, unique=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shapes, shapes, st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=9))
def test_microbatches_share_what_holds_all_of_them(vision, text, sizes):
    """Whatever shapes there are beside the one for the worst case; and no cheaper one holds all."""
    sort = lambda shapes: tuple(sorted({*shapes, (9, 20)}, key=lambda shape: shape[0] * shape[1]))  # noqa: E731
    metas = [SampleMeta(tokens=tokens, weight=1.0, grids={"vision": ((1, n),)}) for tokens, n in sizes]
    settings = {"sequence_length": 30, "microbatches": 3, "cells": 2, "pad": 0, "text": sort(text), "one_bucket": True}
    packer = Packer(encoders={"vision": EncoderSpec(patch=2, buckets=sort(vision))}, **settings)
    parts = packer.plan(0, metas).microbatches
    assert parts[0].bucket == parts[1].bucket == parts[2].bucket
    for name, chosen in parts[0].bucket.items():
        cells = [part.segments(name, cell) for part in parts for cell in range(2)]
        fits = [all(holds(shape, cell) for cell in cells) for shape in packer.buckets_of(name)]
        assert fits.index(True) == chosen


def recording(frames: int, bins: int, first: int) -> np.ndarray:
    """A recording whose values count up from `first`."""
    return np.arange(first, first + frames * bins, dtype=np.float32).reshape(frames, bins)


AUDIO = EncoderSpec(patch=2, merge=2, channels=3, axes=1, buckets=((1, 8), (3, 8)))


def test_patches_of_a_recording_are_pairs_of_frames():
    patches, at = patchify(recording(8, 3, 0), AUDIO)
    assert patches.tolist() == np.arange(24.0).reshape(4, 6).tolist() and at[:, 0].tolist() == [0, 1, 2, 3]
    assert (AUDIO.patches(8), AUDIO.tokens(8), AUDIO.block, AUDIO.patches_per_token) == (4, 2, 4, 2)
    for shape, message in (((6, 3), "recording of 6 frames.*= 4"), ((8, 2), "of 3 channels"), ((8, 8, 3), "1 axes")):
        with pytest.raises(ValueError, match=message):
            patchify(np.zeros(shape, np.float32), AUDIO)


def test_two_encoders_are_packed_apart():
    vision = EncoderSpec(patch=2, buckets=((1, 8),))
    tokenizer, encoders = ByteTokenizer(("vision", "audio")), {"vision": vision, "audio": AUDIO}
    image, sounds = numbered_image(2, 4, 1, 1), [recording(8, 3, 100), recording(4, 3, 200), recording(12, 3, 300)]
    sample = build_sample(tokenizer, encoders, {"vision": [image], "audio": sounds}, (("a<recording>b", "7"),))
    sees, hears = map(tokenizer.media_token, ("vision", "audio"))
    marks = [tokenizer.bos, *b"1:", sees, sees, *b"2:", hears, hears, *b"3:", hears, *b"a", hears, hears, hears, *b"b "]
    assert sample.tokens.tolist() == [*marks, *b"7", tokenizer.eos]
    packer = Packer(encoders=encoders, sequence_length=S, microbatches=1, cells=1, pad=0)
    inputs, llm = (packer.microbatch([sample], 1).inputs[name] for name in ("audio", "llm"))
    # The longest first; the second row holds the shortest after the other. Each has two numbers a frame and its place.
    rows = [np.concatenate([sounds[2], sounds[1]]), sounds[0]]
    assert np.array_equal(inputs["patches"][0], rows[0].reshape(8, 6))
    assert np.array_equal(inputs["patches"][1, :4], rows[1].reshape(4, 6)) and not inputs["patches"][1, 4:].any()
    assert inputs["segments"].tolist() == [[1, 1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0], [0] * 8]
    assert inputs["positions"][..., 0].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 0, 0, 0, 0], [0] * 8]
    assert [i for i in llm["audio_index"][0].tolist() if i >= 0] == [4, 5, 3, 0, 1, 2]
    assert [i for i in llm["vision_index"][0].tolist() if i >= 0] == [0, 1]
    with pytest.raises(ConfigError, match="audio"):
        replace(packer, encoders={"vision": vision}).microbatch([sample], 1)


def test_media_of_each_encoder_are_exchanged_by_themselves():
    tokenizer, encoders = ByteTokenizer(("vision", "audio")), {"vision": EncoderSpec(patch=2), "audio": AUDIO}
    samples = [
        build_sample(
            tokenizer,
            encoders,
            {"vision": [numbered_image(2, 2, 1, n)], "audio": [recording(4 * n, 3, n)]},
            ((f"q{n}", str(n)),),
            labels={"vision": [str(n)], "audio": [f"a{n}"]},
            kind="read",
        )
        for n in (1, 2, 3)
    ]
    for swapped, moved, unchanged in (("vision", "vision", "audio"), ("audio", "audio", "vision")):
        for original, next_, got in zip(
            samples, [*samples[1:], samples[0]], swap_media(tokenizer, encoders, samples, swapped), strict=True
        ):
            assert (got.question, got.answer, got.kind) == (original.question, original.answer, "read")
            assert got.media[moved] == next_.media[moved] and got.media[unchanged] == original.media[unchanged]
            assert got.labels == {moved: next_.labels[moved], unchanged: original.labels[unchanged]}
            assert (got.tokens == tokenizer.media_token(moved)).sum() == len(
                next_.media[moved][0]
            ) // 4 or moved != "audio"


def test_what_does_not_fit_is_an_error_that_names_the_field():
    spec = EncoderSpec(patch=2, buckets=((1, 4),))
    packer = Packer(encoders={"vision": spec}, sequence_length=20, microbatches=1, cells=1, pad=0)
    with pytest.raises(ConfigError, match=r"vision/Packing\.buckets.*image of 6 patches"):
        packer.microbatch(numbered_samples(spec, [[(2, 3)]]), 1)
    with pytest.raises(ConfigError, match=r"vision/Packing\.buckets.*2 rows of 4"):
        packer.microbatch(numbered_samples(spec, [[(1, 3), (1, 2)]]), 1)
    with pytest.raises(ConfigError, match=r"Data\.sequence_length=5 .* 10 tokens"):
        replace(packer, sequence_length=5).microbatch(numbered_samples(spec, [[]]), 1)
    with pytest.raises(ConfigError, match="fill_buckets"):
        replace(packer, encoders={"vision": replace(spec, buckets=())})


def worst(tokens: int = 30, media: int = 2, patches: int = 12) -> WorstCase:
    return WorstCase(tokens=tokens, media={"vision": media}, patches={"vision": patches})


def test_images_that_learned_positions_do_not_reach_are_refused():
    encoders = {"vision": EncoderSpec(patch=4, merge=2, longest=6, bounded_by="ViT.grid")}

    def fill(side: int) -> dict[str, EncoderSpec]:
        return fill_buckets(encoders, replace(worst(), sides={"vision": side}), rows_per_cell=1, sequence_length=32)

    assert fill(6)["vision"].longest == 6
    expected = r"^vision/ViT\.grid=6: an image may be 7 patches long, .* down to 24 pixels, or train with grid=7 or"
    with pytest.raises(ConfigError, match=expected):
        fill(7)


def test_buckets_are_derived_from_the_worst_case_or_hold_it():
    def fill(
        *buckets: tuple[int, int], special: int = 0, abreast: int = 1, **bounds: int
    ) -> tuple[tuple[int, int], ...]:
        encoders = {"vision": EncoderSpec(patch=4, merge=2, special=special, buckets=buckets, abreast=abreast)}
        return fill_buckets(encoders, worst(**bounds), rows_per_cell=3, sequence_length=32)["vision"].buckets

    assert fill() == ((6, 12),)
    assert fill(media=0, patches=0) == ((1, 4),)
    assert fill(abreast=2) == ((3, 24),) and fill(abreast=4) == ((2, 48),)
    assert fill((2, 24), abreast=4) == fill((2, 24)), "buckets that are given stay as they are"
    assert fill(special=1) == fill(special=4) == ((6, 16),) and fill(special=5) == ((6, 20),)
    assert fill((2, 24), special=1) == ((2, 24), (6, 24))
    assert fill((3, 24), (1, 24)) == ((1, 24), (3, 24))
    assert fill((2, 24)) == ((2, 24), (3, 24)) and fill((8, 8)) == ((8, 8), (6, 12))  # one is added
    with pytest.raises(ConfigError, match="merge"):
        fill((6, 26))
    with pytest.raises(ConfigError, match=r"Data\.sequence_length=32 .* 33"):
        fill(tokens=33)


def test_prompt_and_swapped_images():
    spec = EncoderSpec(patch=2)
    samples = numbered_samples(spec, [[(1, 1)], [(1, 2), (1, 3)]])
    prompt = prompt_only(samples[1])
    assert TOKENIZER.decode(prompt.tokens) == "1:2:read 1 "
    assert len(prompt.loss_weights) == len(prompt.tokens) == 1 + 5 + len("1:2:read 1 ")
    swapped = swap_media(TOKENIZER, {"vision": spec}, samples, "vision")
    assert [(s.question, s.answer) for s in swapped] == [("read 0", "0"), ("read 1", "1")]
    assert swapped[0].media["vision"] == samples[1].media["vision"]
    assert int(swapped[0].placeholders("vision").sum()) == 5


def answer_positions(sample: Sample) -> list[int]:
    return np.flatnonzero(sample.loss_weights).tolist()


def test_images_go_where_the_question_marks_them():
    spec = EncoderSpec(patch=2)
    images = [numbered_image(2, 2 * n, 1, 10 * n) for n in (1, 2, 3)]
    sample = build_sample(
        TOKENIZER, {"vision": spec}, {"vision": images}, (("x<image>y<image>z", "7"), ("again", "42"))
    )
    media, eos = TOKENIZER.media_token("vision"), TOKENIZER.eos
    opening = [TOKENIZER.bos, *b"1:", media, *b"x", media, media, *b"y", media, media, media]
    text = [*opening, *b"z 7", eos, *b"again 42", eos]
    assert sample.tokens.tolist() == text
    assert [sample.tokens[t] for t in answer_positions(sample)] == [*b"7", eos, *b"42", eos]
    assert (sample.question, sample.answer, sample.prompt) == ("again", "42", len(text) - 3)
    unmarked = build_sample(TOKENIZER, {"vision": spec}, {"vision": images[:2]}, (("x", "7"),))
    assert unmarked.tokens.tolist() == [TOKENIZER.bos, *b"1:", media, *b"2:", media, media, *b"x 7", eos]
    with pytest.raises(ValueError, match="marks"):
        build_sample(TOKENIZER, {"vision": spec}, {"vision": images[:1]}, (("<image><image>", "7"),))
