"""Imports a user's own code that a setting names as "package.module:Name", where that is allowed.

A configuration, also that of a run directory, may come from somebody else, so reading one runs nothing. Fields that may
name code say so (`metadata=CODE`). A configuration with such a value is legal only if the command is started with
`--allow_code`, or with `allow_code=True` in Python. Code that a Python script hands over itself has a `CodeName` and
needs no permission.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Self

from mmjax.configurable import ConfigError, setting_name

CODE: Mapping[str, object] = {"code": True}
"""Metadata of a dataclass's field whose value may name code."""
SHAPE = "package.module:Name"


class CodeName(str):
    """The name "package.module:Name" of a function or class, with the object itself. It equals the mere text.

    Attributes:
      target: the function or class.
    """

    target: Any

    @classmethod
    def of(cls, target: Any) -> Self:
        """The name of a function or class at the top level of a module, also of the running script or notebook.

        A run stores the name, and commands that read the run import it.

        Raises:
          ValueError: the module has no such name for `target`: it is a lambda, an instance, or inside of a function.
        """
        module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
        if not name or getattr(sys.modules.get(module), name, None) is not target:
            raise ValueError(f"{target!r} cannot be imported by name; define it at the top level of a module")
        named = cls(f"{module}:{name}")
        named.target = target
        return named


def replace_by_name(settings: Any, field: str) -> None:
    """Replaces a function or class in ``settings.field`` by its ``CodeName``, in a frozen dataclass that is being made.

    Another value stays. The call is ``replace_by_name(self, "kind")`` in ``__post_init__``.

    Args:
      settings: the dataclass, which is changed.
      field: the name of its field, such as "kind".

    Raises:
      ValueError: the function or class cannot be imported by its name, such as a lambda.
    """
    value = getattr(settings, field)
    if callable(value):
        object.__setattr__(settings, field, CodeName.of(value))


def names_code(value: object) -> bool:
    """Whether a setting's value is a text with a colon, as in `package.module:Name`; imports nothing."""
    return isinstance(value, str) and ":" in value


def is_allowed(value: object, *, allowed: bool) -> bool:
    """Whether a setting's value may be imported: it names no code, code is `allowed`, or it is a `CodeName`."""
    return allowed or not names_code(value) or isinstance(value, CodeName)


def require_allowed(field: str, value: object, *, allowed: bool) -> None:
    """Raises ConfigError if `value` names code and code is not `allowed`.

    A `CodeName`, whose code is here already, is always allowed.

    Args:
      field: the setting for the message, such as "Source.kind".
      value: its value.
      allowed: whether the user has allowed code (`--allow_code`).
    """
    if not is_allowed(value, allowed=allowed):
        fix = "add --allow_code if you trust it (in Python allow_code=True)"
        raise ConfigError(f"{field}={value!r}: names code that would be run; {fix}")


def check_code(settings_by_scope: Iterable[tuple[str, Any]], *, allowed: bool) -> None:
    """Raises ConfigError if a setting names code and code is not `allowed`; imports nothing.

    Args:
      settings_by_scope: each configurable object with its scope, such as ("mine", `SourceConfig(…)`).
      allowed: whether the user has allowed code (`--allow_code`).
    """
    for scope, settings in settings_by_scope:
        for field in fields(settings):
            if field.metadata.get("code"):
                value = getattr(settings, field.name)
                for item in value.values() if isinstance(value, dict) else (value,):
                    require_allowed(setting_name(scope, settings, field.name), item, allowed=allowed)


def import_named(field: str, value: str) -> Any:
    """Imports the function or class that `value` names, a text as "package.module:Name".

    Args:
      field: the setting for messages, such as "Source.kind".
      value: its value.

    Raises:
      ConfigError: Python does not find the module, an import in it fails, or it has no function or class of this name.
    """
    if isinstance(value, CodeName):
        return value.target
    module_name, _, name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        fix = f"give {SHAPE!r} of a module that Python finds (PYTHONPATH)"
        raise ConfigError(f"{field}={value!r}: {' '.join(str(error).split())}; {fix}") from None
    target = getattr(module, name, None)
    if not callable(target):
        raise ConfigError(f"{field}={value!r}: {module_name} has no function or class {name!r}; name one that it has")
    return target
