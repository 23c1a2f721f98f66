"""`Task`: samples that are made or read, and the scoring of answers; the base class of tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmjax.configurable import one_of, require
from mmjax.data.config import DataConfig
from mmjax.data.log_mel import LogMel
from mmjax.data.source import Source
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.sources.observer import IndexObserver
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample

Score = Callable[[Sample, str], float]
"""A function of a sample and the model's answer to its last question; returns how right the answer is, in 0…1."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The surroundings of a task's samples, on which they depend beside the task's settings.

    Attributes:
      data: the data's settings; they name the encoders and generators, such as `data.image_encoder`.
      encoders: specs of the model's encoders and generators by name.
      tokenizer: the tokenizer.
      seed: the run's seed.
      split: "train" or "test".
      sources: the settings of each of `data.sources`, by name.
      observer: receives the progress of collecting metadata, where that is necessary; it is not pickled.
      skipped: path of a file for the names of records that cannot be read.
      known: by name of `data.sources`, the records that the run knows; its held-out records stay held out.
    """

    data: DataConfig
    encoders: Mapping[str, EncoderSpec]
    tokenizer: Tokenizer
    seed: int
    split: str
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)
    observer: IndexObserver | None = None
    skipped: str | os.PathLike[str] | None = None
    known: Mapping[str, KnownRecords] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Samples that keep their context go to worker processes; an observer belongs to this one.
        return {**self.__dict__, "observer": None}


@dataclass(frozen=True)
class Task:
    """A task: its samples, and the scoring of answers. A subclass defines `open`; all else has a default.

    `Data.task = 'package.module:Class'` names a user's own. Its file is imported by worker processes too, which are
    without JAX.

    Attributes:
      config: its settings, of class `Config`; None for a task without settings.
      Config: a class under `@configurable`, whose fields all have defaults; None for a task without settings.
      media: the media of its samples, "image" or "recording"; None if they are known only when samples are read.
      draws: whether some samples have a picture to be drawn by `Data.generator`; None if that is known only when they
        are read.
      says: whether some samples have a recording to be made by `Data.speaker`; None as for `draws`.
      drawing_fix: the setting, and its value, with which samples have such pictures, as in "Digits.draw to 1.0"; "" if
        there is none. It is part of a message.
      saying_fix: the same of such recordings.
      codes: the number of codes in which `Data.speaker` speaks a sample's last answer; 0 if answers are not spoken.
      unit: the unit of a right answer; "digit" names the scores `digit_accuracy` and "digits right".
      scores: further scores of answers by name; a figure of `eval.jsonl` is the mean of one over samples.
      reads_drawings: whether what is drawn is scored, by `read_drawing`, or `read_recording`.
      exchanges: whether evaluation also exchanges media between samples, which then all have room for each other's.
    """

    config: Any = None

    Config: ClassVar[type[Any] | None] = None
    drawing_fix: ClassVar[str] = ""
    saying_fix: ClassVar[str] = ""
    codes: ClassVar[int] = 0
    unit: ClassVar[str] = "character"
    scores: ClassVar[Mapping[str, Score]] = {}
    reads_drawings: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False

    @property
    def media(self) -> tuple[str, ...] | None:
        """See the attributes."""
        return None

    @property
    def draws(self) -> bool | None:
        """See the attributes."""
        return False

    @property
    def says(self) -> bool | None:
        """See the attributes; by default as for pictures where that is unknown."""
        return None if self.draws is None else False

    def open(self, context: TaskContext) -> Source:
        """Opens the samples of `context.split`. They are picklable. Raises ConfigError if they do not fit the model."""
        raise NotImplementedError(f"{type(self).__name__} defines no open(context)")

    def check_generator(self, name: str, legal: Sequence[str]) -> None:
        """Raises ConfigError if pictures are to be drawn and `name`, the value of `Data.generator`, draws none.

        legal: names of the model's generators that draw pictures.
        """
        if self.draws:
            fix = "nothing in the model draws; set Model.generators to {'painter': 'dit'}"
            require(bool(legal), "Data.generator", name, fix)
            one_of("Data.generator", name, legal)

    def read_drawing(self, drawing: Any, count: int) -> str:
        """The first `count` units that are recognised in a drawing, as text; `drawing` is [h, w, C], in -1…1."""
        raise NotImplementedError(f"{type(self).__name__} defines no read_drawing(drawing, count)")

    def read_recording(self, frames_FM: Any, count: int, log_mel: LogMel) -> str:
        """The first `count` units that are recognised in a recording that was made, as text.

        Its log-mel frames are those that `log_mel` makes of recordings.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no read_recording(frames_FM, count, log_mel)")

    def changes(self, global_batch: int) -> Mapping[int, str]:
        """Changes of the training samples, in words, by the first step (from 1) with each: {251: "up to 4 digits"}.

        They are marked in `curves.png`. global_batch: samples of a step.
        """
        del global_batch
        return {}
