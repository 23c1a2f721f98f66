"""The origin of a run's samples: the task that `Data.task` names, or the datasets of `Data.sources`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of, registry, require
from mmjax.data.config import DataConfig
from mmjax.data.tasks.registry import SOURCES, TASKS
from mmjax.data.tasks.task import Task
from mmjax.user_code import import_named

_FIELD = "Data.task"


def task_class(name: str) -> type[Task]:
    """The class of a task: `name` is a key of `TASKS`, or "package.module:Class", whose code is imported.

    Call `require_allowed` before, since importing runs code. Raises ConfigError if there is no such class, or it is no
    task.
    """
    cls = import_named(_FIELD, TASKS.get(name, name))
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"{_FIELD}={name!r}: it is no task; name a subclass of mmjax.Task")
    if cls.Config is not None and cls.Config not in registry().values():
        fix = f"put @configurable above {getattr(cls.Config, '__name__', cls.Config)}, a frozen dataclass"
        raise ConfigError(f"{_FIELD}={name!r}: its Config is not configurable; {fix}")
    return cls


def origin_class(data: DataConfig) -> type[Task]:
    """The class of the origin of samples; see `task_class`."""
    return task_class(SOURCES if data.sources else data.task)


def origin_of(data: DataConfig, settings: Any) -> Task:
    """The origin of samples, with these settings; if they are None or of another class, its defaults apply."""
    cls = origin_class(data)
    if cls.Config is None:
        return cls()
    return cls(settings if isinstance(settings, cls.Config) else cls.Config())


def drawing_generators(data: DataConfig, origin: Task) -> tuple[str, ...]:
    """Names of the generators for which some samples have a picture to draw: `Data.generator`, or none."""
    return (data.generator,) if origin.draws else ()


def speaking_generators(data: DataConfig, origin: Task) -> tuple[str, ...]:
    """Names of the generators for which samples have codes to speak, if the model has them: `Data.speaker`, or none."""
    return (data.speaker,) if origin.codes else ()


def check_modules(data: DataConfig, origin: Task, encoders: Mapping[str, str], generators: Mapping[str, str]) -> None:
    """Raises ConfigError unless the model has the named encoders and generator, if samples have media for them.

    encoders, generators: the model's, each with its medium ("image" or "recording") by name.
    """
    for named, medium in (("image_encoder", "image"), ("audio_encoder", "recording")):
        legal = [name for name, of_encoder in encoders.items() if of_encoder == medium]
        if legal if origin.media is None else medium in origin.media:
            fix = f"no encoder of the model takes {medium}s; add one to Model.encoders"
            require(bool(legal), f"Data.{named}", getattr(data, named), fix)
            one_of(f"Data.{named}", getattr(data, named), legal)
    origin.check_generator(data.generator, [name for name, medium in generators.items() if medium == "image"])
