"""The tasks: one entry each, by the name that `Data.task` gives them.

Only their settings are imported here: they are read, and refused, before the code of a task is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.data.tasks.digits.config import DigitsConfig


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: the source of its samples, its settings, and the scoring of its answers.

    Code is named as "package.module:name".

    Attributes:
      home: a function that opens the samples. It takes a `DataConfig`, the specs of the model's media and a tokenizer,
        and the keywords `settings` (the task's), `sources`, `seed`, `split`, `observer`, `skipped` and `known` (see
        `make_source`).
      config: the configurable class of its settings. It has the properties `media` (as below) and `draws` (whether
        samples have pictures to be drawn) and the method `check_generators`. None for a task without settings.
      media: the media of its samples, "image" or "recording"; None if they are known only when samples are read.
      unit: the unit of a right answer; "digit" names the scores `digit_accuracy` and "digits right".
      reader: a function that reads a drawing, from its pixels and the number of units in it; "" if drawings are not
        scored.
      speaks: whether each sample has codes for a generator that speaks its last answer.
      exchanges: whether evaluation also exchanges media between samples, which then all have room for each other's.
    """

    home: str
    config: type[Any] | None = None
    media: tuple[str, ...] | None = None
    unit: str = "character"
    reader: str = ""
    speaks: bool = False
    exchanges: bool = False

    def settings(self, candidate: Any) -> Any:
        """The settings of this task: `candidate` if it is of this task, else the defaults; None for a task without."""
        if self.config is None:
            return None
        return candidate if isinstance(candidate, self.config) else self.config()

    def open(self, *args: Any, **keywords: Any) -> Any:
        """Calls `home` with these arguments; returns the `Source` of the samples. Raises ConfigError.

        `make_source` is the usual caller.
        """
        return _named(self.home)(*args, **keywords)

    def read_drawing(self) -> Callable[[Any, int], str] | None:
        """The function that reads a drawing, as text; None if drawings are not scored.

        It takes the pixels [h, w, C] of the drawing, in -1…1, and the number of units in it.
        """
        return _named(self.reader) if self.reader else None


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


TASKS: Mapping[str, Task] = {
    "digits": Task(
        home="mmjax.data.tasks.digits.source:open_digits",
        config=DigitsConfig,
        unit="digit",
        reader="mmjax.data.tasks.digits.recognise:read_drawing",
        speaks=True,
        exchanges=True,
    ),
    "folder": Task(home="mmjax.data.sources.datasets:open_folder", media=("image",)),
}
"""The first one is the default."""
SOURCES = Task(home="mmjax.data.sources.datasets:open_sources")
"""The entry in place of a task if `Data.sources` names datasets."""
TASK_CONFIGS = tuple(task.config for task in TASKS.values() if task.config)
