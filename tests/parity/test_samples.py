"""The samples of a check: what is in them, what they are a function of, and how they are packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.data.packing import Packer
from mmjax.data.sample import disagreement, meta_of
from mmjax.data.types import EncoderSpec, Sample
from mmjax.models.dit.config import DiTConfig
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.parity.samples import KINDS, LENGTH, REPEATED, BatchSizes, Maker, Samples, Steps, buckets

LLM = DecoderConfig(vocab=37)
AUDIO = WhisperConfig(mels=3, merge=2)
VIT = ViTConfig(patch=2, merge=2)
ONE = multimodal({"vision": VIT}, LLM)
THREE = multimodal({name: replace(VIT, merge=m) for m, name in ((1, "a"), (2, "b"), (3, "c"))}, LLM)
DRAWING = multimodal({"vision": VIT}, LLM, {"painter": DiTConfig(channels=2)})
DRAWING_ALONE = multimodal({}, LLM, {"painter": DiTConfig(channels=2)})
BOTH = multimodal({"vision": VIT, "audio": AUDIO}, LLM)


def steps_of(
    model: MultimodalModel, sizes: BatchSizes, *, seed: int = 0, steps: int = 3, uniform: bool = False
) -> Steps:
    return Samples(maker=Maker.of(model, uniform=uniform), sizes=sizes, seed=seed).steps(steps)


def microbatches(steps: Steps, sizes: BatchSizes) -> list[tuple[Sample, ...]]:
    return [chosen[at : at + sizes.per] for chosen in steps for at in range(0, len(chosen), sizes.per)]


def images(sample: Sample) -> int:
    return sum(map(len, sample.media.values()))


def same(one: Steps, other: Steps) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.loss_weights, b.loss_weights)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_a_pure_function_of_the_seed() -> None:
    sizes = BatchSizes.of(4, 2)
    assert same(steps_of(ONE, sizes), steps_of(ONE, sizes))
    assert not same(steps_of(ONE, sizes), steps_of(ONE, sizes, seed=1))
    longer = steps_of(ONE, sizes, steps=5)
    assert same(longer[:3], steps_of(ONE, sizes))


def test_a_model_without_encoders_draws() -> None:
    samples = [sample for step in steps_of(DRAWING_ALONE, BatchSizes.of(4, 4)) for sample in step]
    assert {images(sample) for sample in samples} == {0, 1}
    drawn = [sample for sample in samples if sample.noise]
    assert drawn and all(sample.noise["painter"][0].shape == sample.media["painter"][0].shape for sample in drawn)


@pytest.mark.parametrize(("cells", "count"), [(4, 4), (8, 3), (2, 8), (12, 3)])
def test_everything_that_is_hard_is_there(cells: int, count: int) -> None:
    sizes = BatchSizes.of(cells, count)
    parts = microbatches(steps_of(ONE, sizes), sizes)
    samples = [sample for part in parts for sample in part]
    assert {images(s) for s in samples} == {0, 1, 2, 3}
    assert len({i.shape for s in samples for i in s.media["vision"]}) == 3
    held = [s.placeholders("vision") for s in samples]
    assert (
        any(p[0] for p in held) and any(p[-1] for p in held) and any(p.any() and not p[0] and not p[-1] for p in held)
    )
    assert any(images(s) and not s.loss_weights[p.argmax() + 1 :].any() for s, p in zip(samples, held, strict=True))
    assert any(not s.loss_weights.any() for s in samples)
    assert any((s.loss_weights == 0).any() and s.loss_weights.any() for s in samples)
    halves = [[sum(map(images, half)) for half in (part[: sizes.rows // 2], part[sizes.rows // 2 :])] for part in parts]
    assert any(first and not second for first, second in halves)
    assert any(second and not first for first, second in halves)
    assert [0, 0] in halves
    assert all(len(part) < sizes.rows for part in parts), "a microbatch without an empty row"
    assert len({len(s.tokens) for s in samples}) == 3 and max(len(s.tokens) for s in samples) == LENGTH


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("cells", [1, 2, 3, 8])
def test_every_encoder_has_images_that_count(cells: int, count: int) -> None:
    sizes = BatchSizes.of(cells, count)
    for model in (ONE, THREE, BOTH, DRAWING):
        first = steps_of(model, sizes)[0]
        for encoder in model.encoders:
            learned = [
                s for s in first if s.media[encoder] and s.loss_weights[s.placeholders(encoder).argmax() + 1 :].any()
            ]
            assert learned, f"no image of {encoder} has a gradient in the first step"


def test_two_encoders_have_media_of_their_own_in_one_sample() -> None:
    samples = steps_of(BOTH, BatchSizes.of(4, 4))[0]
    counts = {tuple(len(s.media[name]) for name in BOTH.encoders) for s in samples}
    assert {(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)} <= counts
    for sample in samples:
        for name, axes in (("vision", 2), ("audio", 1)):
            spec = BOTH.nodes[name].module.medium
            assert spec and all(medium.ndim == axes + 1 for medium in sample.media[name])
            tokens = sum(spec.tokens(*medium.shape[:-1]) for medium in sample.media[name])
            assert sample.placeholders(name).sum() == tokens
    lengths = {len(medium) for s in samples for medium in s.media["audio"]}
    assert lengths == {8, 12, 16}  # two, three and four tokens of two pairs of frames


def test_pictures_are_drawn_from_noise_that_is_theirs() -> None:
    for cells, count in ((1, 1), (2, 2), (4, 3), (8, 4)):
        sizes = BatchSizes.of(cells, count)
        steps = steps_of(DRAWING, sizes)
        assert any(sample.noise for sample in steps[0]), "nothing to draw in the first step"
        samples = [sample for chosen in steps for sample in chosen]
        for sample in samples:
            own = sample.media["painter"]
            assert bool(own) == bool(sample.noise) and sample.placeholders("painter").sum() == sum(
                m.shape[0] * m.shape[1] // 16 for m in own
            )
            noises, times = sample.noise.get("painter", ()), sample.times.get("painter", ())
            for medium, noise, time in zip(own, noises, times, strict=True):
                assert medium.shape == noise.shape and not np.array_equal(medium, noise) and 0 <= time < 1
    drawn = [s for s in samples if s.noise]
    assert any(s.media["vision"] for s in drawn) and any(not s.media["vision"] for s in drawn)
    assert any(not s.loss_weights[s.placeholders("painter").argmax() + 1 :].any() for s in drawn)


def test_recordings_are_no_longer_than_learned_positions() -> None:
    short = multimodal({"audio": replace(AUDIO, positions="learned", length=5)}, LLM)
    samples = steps_of(short, BatchSizes.of(4, 4))[0]
    assert {len(medium) for s in samples for medium in s.media["audio"]} == {8}


def test_uniform_weights() -> None:
    samples = steps_of(ONE, BatchSizes.of(4, 2), uniform=True)[0]
    assert {w for s in samples for w in s.loss_weights} == {0.0, 1.0}  # 0 where nothing is to be learned


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("cells", [1, 2, 8])
def test_a_token_is_read_a_thousand_times_in_every_microbatch(cells: int, count: int) -> None:
    """For each of its cells, on average. Texts that repeat it weigh no more than others, and leave room for media."""
    sizes = BatchSizes.of(cells, count, many=True)
    for model in (ONE, THREE, BOTH, DRAWING):
        samples = Samples(maker=Maker.of(model, repeated=True), sizes=sizes, seed=0)
        (first,) = samples.steps(1)
        texts = [s for s in first if not images(s)]
        assert all((s.tokens == REPEATED).all() and s.loss_weights.sum() == LENGTH for s in texts)
        assert max(len(s.tokens) for s in first) == samples.worst_case().tokens
        for part in microbatches((first,), sizes):
            assert sum(int((s.tokens == REPEATED).sum()) for s in part) >= 950 * cells
        for name in model.encoders:
            shown = [s for s in first if s.media[name]]
            assert any(s.loss_weights[s.placeholders(name).argmax() + 1 :].any() for s in shown)


@settings(deadline=None, derandomize=True)
@given(
    cells=st.integers(1, 12),
    count=st.integers(1, 8),
    several=st.booleans(),
    merge=st.integers(1, 3),
    grid=st.integers(3, 9),
)
def test_the_buckets_hold_them(cells: int, count: int, several: bool, merge: int, grid: int) -> None:
    sizes, vit = BatchSizes.of(cells, count), replace(VIT, merge=merge, grid=grid, positions="learned2d")
    model = multimodal({"vision": vit}, LLM)
    spec = EncoderSpec(patch=vit.patch, merge=merge, buckets=())
    spec = replace(spec, buckets=buckets(spec, sizes.per_cell, several=several))
    packer = Packer(encoders={"vision": spec}, sequence_length=LENGTH, microbatches=count, cells=cells, pad=0)
    used = set()
    for step, samples in enumerate(steps_of(model, sizes)):
        assert (
            max(max(i.shape[:2]) for s in samples for i in (*s.media["vision"], np.zeros((1, 1)))) <= grid * vit.patch
        )
        batch = packer.step(step, samples)
        assert batch.denominators["llm"] > 0
        used |= {part.bucket["vision"] for part in batch.microbatches}
        assert all(len(part.inputs["llm"]["tokens"]) == sizes.rows for part in batch.microbatches)
    assert used <= {0, 1} and (several or used == {0})


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8, 12, 16])
def test_any_number_of_queries_fits_into_every_kind_of_sample(queries: int) -> None:
    """A rank of cp and tp has equal parts of a condition: a check has as many places as there are ranks, and more."""
    painter = MMDiTConfig(channels=2, patch=2, queries=queries)
    maker = Maker.of(multimodal({"vision": VIT}, LLM, {"painter": painter}))
    for kind in range(2 * len(KINDS)):
        sample = maker.sample(np.random.default_rng(kind), kind)
        assert not disagreement(sample, meta_of(sample, maker.encoders), list(sample.media), maker.encoders)
        assert (sample.tokens == maker.placeholders["painter"]).sum() == queries * len(sample.media["painter"])


def test_a_sample_without_room_for_queries_is_refused() -> None:
    painter = MMDiTConfig(channels=2, patch=2, queries=20)
    maker = Maker.of(multimodal({"vision": VIT}, LLM, {"painter": painter}))
    with pytest.raises(ValueError, match=r"^a sample of 20 tokens has no room for media of \[4, 20\]: use fewer"):
        maker.sample(np.random.default_rng(0), 2)
