"""The tasks: one entry each, by the name that `Data.task` gives them.

Only their settings are imported here: these are read, and refused, before the code of a task is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.data.tasks.digits.config import DigitsConfig


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: where its samples come from, its settings, and how its answers are scored.

    Code is named as "package.module:name".

    Attributes:
      home: opens the samples: a function of a `DataConfig`, the specs of the model's media and a tokenizer, and by name
        of `settings` (the task's), and `sources`, `seed`, `split`, `observer` and `skipped` (see `make_source`).
      config: the configurable class of its settings, which has the properties `media` (as below) and `draws` (whether
        samples have pictures to be drawn) and the method `check_generators`; None for a task without settings of its
        own.
      media: the media that its samples have, "image" or "recording"; None where that is seen when they are read.
      unit: what a right answer is made of; "digit" names the scores `digit_accuracy` and "digits right".
      reader: reads a drawing: a function of its pixels and the number of units in it; "" where drawings are not scored.
      exchanges: whether evaluation also exchanges media between samples, which all have room for each other's.
    """

    home: str
    config: type[Any] | None = None
    media: tuple[str, ...] | None = None
    unit: str = "character"
    reader: str = ""
    exchanges: bool = False

    def settings(self, given: Any) -> Any:
        """The settings of this task: `given` if they are its own, else the defaults; None where it has none."""
        if self.config is None:
            return None
        return given if isinstance(given, self.config) else self.config()

    def open(self, *args: Any, **about: Any) -> Any:
        """The `Source` of its samples; arguments are those of `home`. Raises ConfigError."""
        return _named(self.home)(*args, **about)

    def read_drawing(self) -> Callable[[Any, int], str] | None:
        """The function that reads a drawing; None where drawings are not scored."""
        return _named(self.reader) if self.reader else None


def _named(name: str) -> Any:
    module, _, own = name.partition(":")
    return getattr(importlib.import_module(module), own)


TASKS: Mapping[str, Task] = {
    "digits": Task(
        home="mmjax.data.tasks.digits.source:open_digits",
        config=DigitsConfig,
        unit="digit",
        reader="mmjax.data.tasks.digits.recognise:read_drawing",
        exchanges=True,
    ),
    "folder": Task(home="mmjax.data.sources.datasets:open_folder", media=("image",)),
}
"""The first one is the default."""
SOURCES = Task(home="mmjax.data.sources.datasets:open_sources")
"""What takes the place of a task where `Data.sources` names datasets."""
TASK_CONFIGS = tuple(task.config for task in TASKS.values() if task.config)
