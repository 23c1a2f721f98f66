"""The class of the origin of samples: of the task that `Data.task` names, or of the datasets of `Data.sources`."""

from __future__ import annotations

from mmjax.configurable import ConfigError, registry
from mmjax.data.config import DataConfig
from mmjax.data.tasks.registry import SOURCES, TASKS
from mmjax.data.tasks.task import Task
from mmjax.user_code import import_named

_FIELD = "Data.task"


def task_class(name: str) -> type[Task]:
    """The class of a task: `name` is "digits", "folder", or "package.module:Class", whose code is imported.

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
    """The class of the origin of samples: of the datasets if `data.sources` has any, else of the task `data.task`.

    Raises ConfigError as `task_class`, if there is no such task.
    """
    return task_class(SOURCES if data.sources else data.task)
