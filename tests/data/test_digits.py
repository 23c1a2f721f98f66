"""Digit samples: pure functions of their index, right answers, held-out images, metadata without pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.source import SPLITS, DigitsSource, RowPlan, load_digits
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec, Sample

SPEC = EncoderSpec(patch=4, merge=2)
TOKENIZER = ByteTokenizer(("vision",))
WIDE = DigitsConfig(
    images=(1, 4), digits=(1, 6), scale=(0.8, 2.0), aspect=(0.7, 1.4), read=1.0, count=1.0, sum=1.0, turns=2
)


def source(
    config: DigitsConfig = WIDE, *, seed: int = 0, split: str = "train", spec: EncoderSpec = SPEC
) -> DigitsSource:
    return DigitsSource(DataConfig(), {"vision": spec}, TOKENIZER, settings=config, seed=seed, split=split)


def same(a: Sample, b: Sample) -> bool:
    return np.array_equal(a.tokens, b.tokens) and all(
        np.array_equal(x, y) for x, y in zip(a.media["vision"], b.media["vision"], strict=True)
    )


def test_sample_is_a_function_of_seed_split_and_index():
    first = source()
    shuffled = [first.sample(i) for i in (5, 3, 4)]
    assert all(same(x, source().sample(i)) for x, i in zip(shuffled, (5, 3, 4), strict=True))
    assert not same(source().sample(3), source(seed=1).sample(3))
    assert not same(source().sample(3), source(split="test").sample(3))
    assert len({first.sample(i).tokens.tobytes() for i in range(50)}) == 50


def test_training_never_draws_a_held_out_image():
    drawn = {
        split: {i for n in range(600) for row in source(split=split).plan(n).rows for i in row.indices}
        for split in SPLITS
    }
    total = len(load_digits()[1])
    assert max(drawn["train"]) < total - 360 <= min(drawn["test"])
    assert len(drawn["train"]) > 1300 and len(drawn["test"]) > 350 and max(drawn["test"]) == total - 1


def recomputed(question: str, labels: tuple[str, ...]) -> str:
    verb, _, ordinal, _ = question.split()
    label = labels[("first", "second", "third", "fourth").index(ordinal)]
    return {"read": label, "count": str(len(label)), "sum": str(sum(map(int, label)))}[verb]


def test_answers_are_right_and_are_what_is_learned():
    verbs = set()
    for index in range(300):
        sample = source().sample(index)
        learned = sample.tokens[sample.loss_weights > 0].tolist()
        cut = learned.index(TOKENIZER.eos) + 1
        text = TOKENIZER.decode(sample.tokens)
        assert sample.answer == recomputed(sample.question, sample.labels["vision"])
        assert TOKENIZER.decode(learned[cut:] or learned[:cut]) == sample.answer
        assert text.endswith(f"{sample.question} {sample.answer}")
        assert TOKENIZER.decode(sample.tokens[sample.prompt :]) == sample.answer
        verbs.add(sample.question.split()[0])
    assert verbs == {"read", "count", "sum"}


def test_turns_ask_different_things_and_evaluation_asks_one():
    config = replace(WIDE, images=(2, 2), count=0.0, sum=0.0)
    for index in range(50):
        assert {question for question, _ in source(config).plan(index).turns} == {
            "read the first image",
            "read the second image",
        }
        assert len(source(config, split="test").plan(index).turns) == 1


def test_metadata_equals_the_rendered_sample_and_stays_within_the_worst_case():
    for config in (WIDE, DigitsConfig()):
        samples = source(config)
        bound = samples.worst_case()
        for index in range(200):
            meta, sample = samples.meta(index), samples.sample(index)
            images = sample.media["vision"]
            assert meta.tokens == len(sample.tokens) == len(sample.loss_weights) <= bound.tokens
            assert meta.patches == {"vision": tuple(SPEC.patches(*image.shape[:2]) for image in images)}
            assert max(meta.patches["vision"]) <= bound.patches["vision"]
            assert max(max(image.shape[:2]) for image in images) <= bound.sides["vision"] * SPEC.patch
            assert config.images[0] <= len(images) <= config.images[1] == bound.media["vision"]
            assert int(sample.placeholders("vision").sum()) == sum(meta.patches["vision"]) // 4
            assert all(config.digits[0] <= len(label) <= config.digits[1] for label in sample.labels["vision"])


def test_worst_case_is_reached():
    config = DigitsConfig(images=(2, 2), digits=(4, 4), scale=(1.5, 1.5), aspect=(1.2, 1.2), turns=2)
    bound, samples = source(config).worst_case(), source(config)
    assert bound.tokens == max(samples.meta(i).tokens for i in range(5))
    assert bound.patches["vision"] == max(samples.meta(0).patches["vision"])
    assert bound.sides["vision"] * SPEC.patch == max(samples.sample(0).media["vision"][0].shape[:2])


def test_metadata_renders_nothing(monkeypatch):
    monkeypatch.setattr(DigitsSource, "render", None)
    assert source().meta(0).tokens > 0


def test_render_by_hand():
    images, labels = load_digits()
    assert (images.min(), images.max(), images.shape) == (0.0, 1.0, (1797, 8, 8))
    pixels = source(spec=replace(SPEC, channels=3)).render(RowPlan(indices=(10, 20), height=8, width=16))
    assert pixels.shape == (8, 16, 3) and pixels.dtype == np.float32
    assert np.array_equal(pixels[:, :, 1], np.concatenate([images[10], images[20]], axis=1))
    row = RowPlan(indices=(10,), height=12, width=10)
    assert row.label == str(labels[10])
    padded = source().render(row)
    assert padded.shape == (16, 16, 1) and padded[:12, :10].any()
    assert not padded[12:].any() and not padded[:, 10:].any()
    double = source().render(RowPlan(indices=(10,), height=8, width=16))[:, :, 0]
    assert np.allclose(
        double[:, 1:-1:2] * 0.75 + double[:, 2::2] * 0.25, 0.625 * images[10][:, :-1] + 0.375 * images[10][:, 1:]
    )


def test_sizes_and_images_vary():
    plans = [source().plan(i) for i in range(200)]
    assert {len(plan.rows) for plan in plans} == {1, 2, 3, 4}
    assert {len(row.indices) for plan in plans for row in plan.rows} == {1, 2, 3, 4, 5, 6}
    heights = {row.height for plan in plans for row in plan.rows}
    assert heights == set(range(6, 17))


def test_curriculum_limits_training_digits_from_its_samples_on():
    config = replace(WIDE, digits=(2, 5), curriculum=((0, 1), (100, 3), (200, 9)))

    def lengths(split: str, start: int) -> set[int]:
        samples = source(config, split=split)
        return {len(row.indices) for i in range(start, start + 100) for row in samples.plan(i).rows}

    assert lengths("train", 0) == {1}
    assert lengths("train", 100) == {2, 3}
    assert lengths("train", 200) == {2, 3, 4, 5} == lengths("test", 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task", "digit", r"Data\.task='digit'.*'digits'"),
        ("images", (0, 2), r"Digits\.images=\(0, 2\).*set it to \(1, 1\)"),
        ("images", (1, 5), r"Digits\.images=\(1, 5\).*within 0 to 4"),
        ("digits", (4, 3), r"Digits\.digits"),
        ("digits", (1, 7), r"Digits\.digits.*1 to 6"),
        ("scale", (0.0, 1.0), r"Digits\.scale"),
        ("aspect", (1.0,), r"Digits\.aspect.*pair"),
        ("curriculum", ((10, 1), (5, 2)), r"Digits\.curriculum"),
        ("read", 0.0, r"Digits\.read"),
        ("sum", -1.0, r"Digits\.sum"),
        ("workers", -1, r"Data\.workers"),
        ("audio_encoder", "", r"Data\.audio_encoder"),
        ("sequence_length", 0, r"Data\.sequence_length"),
    ],
)
def test_illegal_settings_are_named(field, value, message):
    with pytest.raises(ConfigError, match=message):
        (DigitsConfig if message.startswith("Digits") else DataConfig)(**{field: value})


def test_illegal_buckets_are_named():
    with pytest.raises(ConfigError, match=r"Packing\.buckets"):
        PackingConfig(buckets=((0, 4),))


def test_distortion_changes_training_pixels_alone_and_keeps_metadata():
    plain, config = replace(WIDE, turns=1), replace(WIDE, turns=1, distortion=0.2)
    assert same(source(plain, split="test").sample(0), source(config, split="test").sample(0))
    first = source(config)
    assert same(first.sample(0), source(config).sample(0)) and first.meta(0).tokens == len(first.sample(0).tokens)
    row = RowPlan(indices=(10, 11), height=8, width=16)
    still, shifted = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 2.0, 0.0, 1.0, 0.0)
    images = load_digits()[0]
    assert np.array_equal(first.render(replace(row, warps=(still, still))), first.render(row))
    moved = first.render(replace(row, warps=(shifted, still)))[:, :, 0]
    assert np.allclose(moved[:, :6], images[10][:, 2:]) and np.array_equal(moved[:, 8:], images[11])


def test_distortion_stays_within_its_strength():
    warps = [
        warp for i in range(100) for row in source(replace(WIDE, distortion=0.1)).plan(i).rows for warp in row.warps
    ]
    maps = np.array(warps).reshape(-1, 2, 3)
    centre = maps @ np.array([4.0, 4.0, 1.0]) - 4.0
    matrix = maps[:, :, :2] - np.eye(2)
    assert 0.09 < np.abs(matrix).max() <= 0.1 and 0.36 < np.abs(centre).max() <= 0.4
    assert len(warps) > 200 and abs(matrix.mean()) < 0.01
