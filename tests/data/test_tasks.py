"""Tasks by name: those that come with mmjax, a user's own, and samples that a function makes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.config import DataConfig
from mmjax.data.examples import Example, Examples
from mmjax.data.loader import StepMaker, make_packer, make_source, tokenizer_of
from mmjax.data.log_mel import LogMel
from mmjax.data.origin import origin_class, task_class
from mmjax.data.sample import disagreement
from mmjax.data.service.identity import identity
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.task import Digits
from mmjax.data.tasks.records import Folder, Sources
from mmjax.data.tasks.registry import SOURCES, TASKS
from mmjax.data.tasks.task import Task, TaskContext
from mmjax.data.types import EncoderSpec
from mmjax.eval.scores import describe, figures, score

SPECS = {
    "vision": EncoderSpec(patch=4, merge=2, channels=3),
    "audio": EncoderSpec(patch=2, axes=1, channels=5, log_mel=LogMel(sample_rate=8000, window=256, hop=80, mels=5)),
    "painter": EncoderSpec(patch=2, merge=2, drawn=True),
    "talker": EncoderSpec(patch=1, axes=1, drawn=True, codes=5),
}


class Words(Task):
    """A task of a user's own: every medium, in turn."""

    scores: ClassVar = {"begins": lambda sample, answer: float(sample.answer[:1] == answer[:1])}

    @property
    def media(self) -> tuple[str, ...]:
        return ("image", "recording")

    def open(self, context: TaskContext) -> Examples:
        return Examples(context, self.make, largest=[self.whole(9)])

    def make(self, rng: np.random.Generator) -> Example:
        return self.whole(int(rng.integers(1, 9)))

    def whole(self, size: int) -> Example:
        return Example(
            turns=[("say it <drawing>", "a" * size)],
            images=[np.full((size, 8, 3), 0.5)],
            recordings=[np.zeros(500 * size)],
            drawing=np.zeros((4, size, 1)),
            codes=[2] * size + [1],
            kind="whole",
        )


class Careless(Words):
    """Its examples are larger than it says."""

    def make(self, rng: np.random.Generator) -> Example:
        return self.whole(10)


class Grey(Words):
    """Its images have one channel."""

    def whole(self, size: int) -> Example:
        return Example(turns=[("what?", "a")], images=[np.zeros((8, 8, 1))])


class Plain:
    """Settings that are not configurable."""


class Unset(Task):
    Config = Plain


OWN = f"{__name__}:Words"
DATA = DataConfig(task=OWN, sequence_length=160)


def opened(data: DataConfig = DATA, specs: dict[str, EncoderSpec] = SPECS, split: str = "train") -> Any:
    return make_source(DataSpec(data), specs, seed=3, split=split)


def test_what_entries_name_is_there() -> None:
    assert [task_class(name) for name in TASKS] == [Digits, Folder] and task_class(SOURCES) is Sources
    assert task_class(OWN) is Words


def test_settings_are_those_of_the_task() -> None:
    settings = DigitsConfig(turns=2)
    assert DataSpec(DataConfig(), settings).origin.config is settings
    assert DataSpec().origin == DataSpec(task=SOURCES).origin == Digits(DigitsConfig())
    assert DataSpec(DataConfig(task="folder"), settings).origin.config is None
    assert origin_class(DataConfig(task=OWN, sources={"mine": 1.0})) is Sources


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("word", r"Data\.task='word': did you mean 'folder'\? legal: 'digits', 'folder'$|legal: 'digits', 'folder'$"),
        ("no_such.module:X", r"Data\.task='no_such\.module:X': No module named 'no_such'; give "),
        ("json:Task", r"Data\.task='json:Task': json has no function or class 'Task'; name one that it has$"),
        ("json:dumps", r"Data\.task='json:dumps': it is no task; name a subclass of mmjax\.Task$"),
        (f"{__name__}:Unset", r"its Config is not configurable; put @configurable above Plain, a frozen dataclass$"),
    ],
)
def test_refused(task: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        task_class(DataConfig(task=task).task)
    assert "\n" not in str(refusal.value)


def test_a_task_of_a_users_own_needs_its_modules() -> None:
    with pytest.raises(ConfigError, match=r"Data\.image_encoder='ear'.*'vision'"):
        opened(replace(DATA, image_encoder="ear"))
    without = {name: spec for name, spec in SPECS.items() if name != "painter"}
    with pytest.raises(ConfigError, match=r"^Data\.task='test_tasks:Words': examples have images for 'painter', which"):
        opened(specs=without)
    with pytest.raises(ConfigError, match=r"an image has shape \(8, 8, 1\), and 'vision' takes 3 channels; make"):
        opened(replace(DATA, task=f"{__name__}:Grey"))


def test_examples_are_samples() -> None:
    source, held_out = opened(), opened(split="test")
    for index in range(20):
        sample, meta = source.sample(index), source.meta(index)
        assert not disagreement(sample, meta, [*SPECS], SPECS)
        assert {name: len(media) for name, media in sample.media.items()} == dict.fromkeys(SPECS, 1)
        assert sample.media["vision"][0].shape[0] % 8 == 0 and sample.media["vision"][0].dtype == np.float32
        assert sample.kind == "whole" and sample.noise["painter"][0].shape == sample.media["painter"][0].shape
        again = pickle.loads(pickle.dumps(source)).sample(index, ["vision"])
        assert [*again.media] == ["vision"] and np.array_equal(again.tokens, sample.tokens)
        worst = source.worst_case()
        assert meta.tokens <= worst.tokens and all(max(meta.lengths(n)) <= worst.patches[n] for n in meta.grids)
    answers = [[samples.sample(index).answer for index in range(20)] for samples in (source, held_out)]
    assert answers[0] != answers[1] and len({*answers[0]}) > 4


def test_an_example_larger_than_the_largest_is_named() -> None:
    with pytest.raises(ConfigError, match=r"example 4 has \d+ tokens, and those in `largest` have \d+ at most"):
        opened(replace(DATA, task=f"{__name__}:Careless")).meta(4)


def test_a_task_of_a_users_own_is_packed_and_reaches_a_server() -> None:
    source = opened()
    tokenizer = tokenizer_of(DATA, tuple(SPECS))
    packer = make_packer(DATA, SPECS, source, tokenizer, global_batch=8, microbatches=2, cells=1)
    spec = BatchSpec(data=DataSpec(DATA), packer=packer, seed=3, global_batch=8)
    received = BatchSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert received == spec
    batch, again = StepMaker(source=source, packer=packer, global_batch=8)(5), received.maker()(5)
    for first, second in zip(batch.microbatches, again.microbatches, strict=True):
        np.testing.assert_array_equal(first.inputs["vision"]["patches"], second.inputs["vision"]["patches"])
    described = identity(spec, source)
    assert described["Data.task"] == OWN and described["Data.task (its code)"]


def test_its_own_scores_are_figures() -> None:
    samples = [opened().sample(index) for index in range(4)]
    evaluation = score(samples, ["a", "ab", "b", "aa"], task=Words())
    assert evaluation.scores == {"begins": 0.75} and figures(evaluation, {})["begins"] == 0.75
    assert "begins 75.0%" in describe(evaluation, {})
