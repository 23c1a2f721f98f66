"""Calls: what is dialled can be heard, lengths are known beforehand, and questions have right answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_source
from mmjax.data.log_mel import LogMel
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.dtmf import HERTZ, plan_call, render_call
from mmjax.data.tasks.digits.source import DigitsSource
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec

LOG_MEL = LogMel(sample_rate=8000, window=256, hop=80, mels=40)
SPECS = {
    "vision": EncoderSpec(patch=4, merge=2),
    "audio": EncoderSpec(patch=2, merge=4, channels=40, axes=1, log_mel=LOG_MEL),
}
TOKENIZER = ByteTokenizer(tuple(SPECS))
CONFIG = DigitsConfig(images=(1, 1), calls=(1, 1), digits=(1, 4), read=1.0, hear=1.0, both=1.0, same=1.0, turns=2)
MIXED = replace(CONFIG, images=(0, 2), calls=(1, 3), count=1.0, sum=1.0)


def source(config: DigitsConfig = CONFIG, *, seed: int = 0, split: str = "train") -> DigitsSource:
    return DigitsSource(DataConfig(), SPECS, TOKENIZER, settings=config, seed=seed, split=split)


def heard(waveform: np.ndarray, edges: tuple[int, ...]) -> str:
    """The keys, by how well each pair of sines fits between a tone's edges."""
    digits = ""
    for start, end in list(pairwise(edges))[::2]:
        at, strength = np.arange(start, end) / 8000, {}
        for key, pair in HERTZ.items():
            strength[key] = min(abs(np.sum(waveform[start:end] * np.exp(-2j * np.pi * f * at))) for f in pair)
        digits += max(strength, key=lambda key: strength[key])
    return digits


def test_digits_can_be_heard_in_the_waveform() -> None:
    rng = np.random.default_rng(0)
    for digits in ("0", "123", "456789", "1190"):
        call = plan_call(rng, digits, CONFIG, 8000)
        waveform = render_call(call, 8000)
        # Tones begin at every second edge, from the first on.
        assert len(waveform) == call.samples and heard(waveform, call.edges) == digits
    assert set(HERTZ) == set("0123456789*#") and HERTZ["5"] == (770, 1336) and HERTZ["0"] == (941, 1336)


def test_calls_vary_within_the_configured_ranges() -> None:
    rng = np.random.default_rng(1)
    calls = [plan_call(rng, "42", CONFIG, 8000) for _ in range(200)]
    lengths = np.array([np.diff((0, *call.edges)) for call in calls]) / 8000
    for index, bounds in enumerate((CONFIG.gap, CONFIG.tone, CONFIG.gap, CONFIG.tone, CONFIG.gap)):
        assert bounds[0] - 2e-4 < lengths[:, index].min() < lengths[:, index].max() < bounds[1] + 2e-4
        assert np.ptp(lengths[:, index]) > 0.9 * (bounds[1] - bounds[0])
    for name in ("level", "noise"):
        values = [getattr(call, name) for call in calls]
        low, high = getattr(CONFIG, name)
        assert low <= min(values) < max(values) <= high and max(values) - min(values) > 0.9 * (high - low)
    quiet = replace(calls[0], noise=0.0)
    gap = slice(0, quiet.edges[0])
    assert not render_call(quiet, 8000)[gap].any()
    loud = replace(quiet, noise=0.5)
    assert np.std(render_call(loud, 8000) - render_call(quiet, 8000)) == pytest.approx(0.5 * quiet.level, rel=0.1)


def test_a_sample_is_a_function_of_seed_split_and_index() -> None:
    first, again = source().sample(7), source().sample(7)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.media["audio"][0], again.media["audio"][0])
    for another in (source().sample(8), source(seed=1).sample(7), source(split="test").sample(7)):
        assert first.media["audio"][0].shape != another.media["audio"][0].shape or not np.array_equal(
            first.media["audio"][0], another.media["audio"][0]
        )


def test_calls_leave_samples_without_them_as_they_were() -> None:
    plain = replace(CONFIG, calls=(0, 0), hear=0.0, both=0.0, same=0.0)
    specs = {"vision": SPECS["vision"]}
    alone = DigitsSource(DataConfig(), specs, ByteTokenizer(("vision",)), settings=plain, seed=0, split="train")
    assert alone.plan(3).calls == () and set(alone.sample(3).media) == {"vision"}


@pytest.mark.parametrize("config", [CONFIG, MIXED, replace(MIXED, images=(0, 0), calls=(1, 4))])
def test_metadata_equals_the_rendered_sample_and_stays_within_the_worst_case(config: DigitsConfig) -> None:
    samples = source(config)
    bound = samples.worst_case()
    for index in range(150):
        meta, sample = samples.meta(index), samples.sample(index)
        assert meta.tokens == len(sample.tokens) <= bound.tokens
        assert meta.patches == {
            name: tuple(SPECS[name].patches(*medium.shape[:-1]) for medium in media)
            for name, media in sample.media.items()
        }
        for name, counts in meta.patches.items():
            assert len(counts) <= bound.media[name] and max(counts) <= bound.patches[name]
            assert int(sample.placeholders(name).sum()) == sum(counts) // SPECS[name].patches_per_token
        assert all(frames.shape[1] == 40 and frames.shape[0] % 8 == 0 for frames in sample.media.get("audio", ()))
    assert set(bound.media) == {name for name in SPECS if name != "vision" or config.images[1]}


def recomputed(question: str, read: tuple[str, ...], dialled: tuple[str, ...]) -> str:
    ordinals = ("first", "second", "third", "fourth")
    words = question.split()
    image = read[ordinals.index(words[words.index("image") - 1])] if "image" in words else "".join(read[:1])
    call = dialled[ordinals.index(words[-1])] if words[-1] in ordinals else dialled[0] if dialled else ""
    if question.startswith(("are they", "is the")):
        return "yes" if image == call else "no"
    if question.startswith("what do they") or " and " in question:
        return f"{image} {call}"
    return {"read": image, "count": str(len(image)), "sum": str(sum(map(int, image or "0"))), "what": call}[words[0]]


@pytest.mark.long
@pytest.mark.parametrize("config", [CONFIG, MIXED])
def test_answers_are_right(config: DigitsConfig) -> None:
    kinds: Counter[str] = Counter()
    for index in range(400):
        plan, sample = source(config).plan(index), source(config).sample(index)
        read, dialled = (sample.labels.get(name, ()) for name in ("vision", "audio"))
        assert dialled == tuple(call.digits for call in plan.calls)
        for question, answer in plan.turns:
            assert answer == recomputed(question, read, dialled), question
        assert sample.kind == plan.kinds[-1]
        kinds.update(plan.kinds)
    assert set(kinds) == {kind for kind in ("read", "count", "sum", "hear", "both", "same") if getattr(config, kind)}


def test_what_is_compared_is_the_same_half_of_the_time_and_else_often_almost() -> None:
    config = replace(CONFIG, read=0.0, hear=0.0, both=0.0, turns=1, digits=(2, 3))
    samples = [source(config).sample(i) for i in range(400)]
    same = [s for s in samples if s.answer == "yes"]
    assert 0.42 < len(same) / len(samples) < 0.58
    one_off = [
        s
        for s in samples
        if len(s.labels["vision"][0]) == len(s.labels["audio"][0])
        and sum(a != b for a, b in zip(s.labels["vision"][0], s.labels["audio"][0], strict=True)) == 1
    ]
    assert len(one_off) > 70
    only_read = replace(CONFIG, hear=0.0, both=0.0, same=0.0, turns=1)
    told = [source(only_read).plan(i) for i in range(200)]
    assert sum(plan.rows[0].label == plan.calls[0].digits for plan in told) < 30, "a call that says what the image does"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (0, 1), "calls": (0, 1)}, r"Digits\.images=\(0, 1\): a sample may be empty"),
        (
            {"hear": 0.0, "images": (0, 1)},
            r"Digits\.hear=0\.0: nothing can be asked about a sample of 0 images and 1 calls",
        ),
        ({"calls": (0, 5)}, r"Digits\.calls=\(0, 5\).*within 0 to 4"),
        ({"tone": (0.0, 0.1)}, r"Digits\.tone=\(0\.0, 0\.1\)"),
        ({"noise": (-0.1, 0.1)}, r"Digits\.noise"),
    ],
)
def test_illegal_settings_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_calls_need_an_encoder_of_recordings_that_reaches_their_tones() -> None:
    for names, message in (
        ({"vision": SPECS["vision"]}, r"Data\.audio_encoder='audio': no encoder of the model takes recordings"),
        ({"vision": SPECS["vision"], "ear": SPECS["audio"]}, r"Data\.audio_encoder='audio'.*'ear'"),
        ({"vision": SPECS["audio"], "audio": SPECS["audio"]}, r"Data\.image_encoder='vision'.*'audio'|takes images"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_source(DataSpec(DataConfig(), task=CONFIG), names, seed=0, split="test")
    slow = replace(SPECS["audio"], log_mel=replace(LOG_MEL, sample_rate=2000))
    with pytest.raises(ConfigError, match=r"audio/Whisper\.sample_rate=2000: .* set it to 4000"):
        make_source(DataSpec(DataConfig(), task=CONFIG), {**SPECS, "audio": slow}, seed=0, split="test")
