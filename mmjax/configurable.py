"""Registry of the typed, frozen dataclasses that a gin file may configure, and the checks that they share.

A module that has settings declares them next to the code that reads them:

    @configurable("Layout")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Layout:
        \"""Parallel degrees of one module.

        Attributes:
          dp: data-parallel replicas.
        \"""

        dp: int = 1

        def __post_init__(self) -> None:
            positive("Layout.dp", self.dp)

`mmjax.config` turns gin text into instances. This file imports the standard library alone, so that
`--help` and every wrong value are answered before JAX, or any device, is touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

_REGISTRY: dict[str, type[Any]] = {}

C = TypeVar("C", bound=type[Any])
T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is wrong. The message is one line: the field, its value, and a value that is legal."""


PROPOSED: Mapping[str, object] = {"proposed": True}
"""Metadata of a field whose value in a folder of weights may be overridden: the weights still fit, although the model
computes something else."""


def configurable(name: str) -> Callable[[C], C]:
    """Registers a frozen, keyword-only dataclass under the gin name `name` and returns it unchanged.

    Goes above `@dataclasses.dataclass`. Messages put the gin name in front of a field's name ("Layout.tp"). Running a
    notebook cell that defines the class again replaces it.

    Raises:
      TypeError: the class is not a frozen, keyword-only dataclass.
      ValueError: another class has the name.
    """

    def register(cls: C) -> C:
        parameters = getattr(cls, "__dataclass_params__", None)
        if parameters is None:
            raise TypeError(f"{cls.__qualname__}: configurable() goes above @dataclasses.dataclass")
        loose = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
        if loose or not parameters.frozen:
            raise TypeError(f"{cls.__qualname__}: a configurable is a dataclass(frozen=True, kw_only=True)")
        if (owner := _REGISTRY.get(name)) is not None and _full_name(owner) != _full_name(cls):
            raise ValueError(f"configurable {name!r} is {_full_name(owner)}; choose another name")
        _REGISTRY[name] = cls
        return cls

    return register


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def registry() -> Mapping[str, type[Any]]:
    """The registered classes by gin name, as a read-only live view."""
    return MappingProxyType(_REGISTRY)


def gin_name(cls: type[Any]) -> str:
    """The name under which `cls` was registered: "Optimizer" for `OptimizerConfig`.

    Raises:
      KeyError: the class is not registered.
    """
    for name, registered in _REGISTRY.items():
        if registered is cls:
            return name
    raise KeyError(f"{cls.__qualname__} is not a configurable")


def setting_name(scope: str, settings: object, field: str) -> str:
    """The name of a field as a user writes it: "llm/Decoder.width", or "Train.steps" for the scope "".

    Raises:
      KeyError: the class of `settings` is not registered.
    """
    return f"{scope}/{gin_name(type(settings))}.{field}".removeprefix("/")


def preset_values(cls: type[Any], name: str) -> dict[str, object]:
    """The values of preset `name` of `cls` by field, and `name` under "preset"; {} if `name` is "".

    Args:
      cls: a configurable; its class attribute `presets` has the values of each preset, by preset and then by field.
      name: one of its presets, or "".

    Raises:
      ConfigError: the class has no such preset.
    """
    if not name:
        return {}
    presets: Mapping[str, Mapping[str, object]] = getattr(cls, "presets", {})
    one_of(f"{gin_name(cls)}.preset", name, presets)
    return {**presets[name], "preset": name}


def from_preset(cls: type[T], name: str, **overrides: object) -> T:
    """Builds `cls` with the values of its preset `name`, "" for none; `overrides` win over the preset.

    `from_preset(ViTConfig, "clip-vit-l14", layers=2)` is an object of the configurable `ViTConfig`.

    Raises:
      ConfigError: no such preset, or the resulting values are illegal.
    """
    return cls(**{**preset_values(cls, name), **overrides})


def near_misses(word: str, options: Iterable[str]) -> list[str]:
    """The options that are spelt like `word`, whatever the case, best first; at most three, [] if none is close."""
    by_lower: dict[str, str] = {}
    for option in options:
        by_lower.setdefault(option.lower(), option)
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=3, cutoff=0.6 if len(word) > 3 else 0.7)
    return [by_lower[lower] for lower in close]


def suggest(word: str, options: Iterable[str]) -> str:
    """A hint for an unknown name: "did you mean 'x'?" if an option is close, else "use 'x' or 'y'" with all options.

    With four or more it is "use one of 'w', 'x', 'y', 'z'", and "there is none to choose from" without any.
    """
    options = list(options)
    close = near_misses(word, options)
    if close:
        return f"did you mean {close[0]!r}?"
    if not options:
        return "there is none to choose from"
    return (
        "use " + " or ".join(repr(option) for option in options)
        if len(options) < 4
        else ("use one of " + ", ".join(repr(option) for option in options))
    )


def shortened(names: Sequence[str], joint: str = ", ", *, limit: int = 5) -> str:
    """The first `limit` names, joined with `joint`, and the number of further ones, if any: "a, b and 3 more"."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return joint.join(names[:limit]) + suffix


def require(condition: bool, field: str, value: object, fix: str) -> None:
    """Raises `ConfigError("<field>=<value!r>: <fix>")` unless `condition` holds.

    Args:
      condition: whether the value is legal.
      field: the setting as a user writes it, such as "Layout.tp" or "--steps".
      value: its value.
      fix: the reason, and a legal value, such as "must be above 0, such as 1".
    """
    if not condition:
        raise ConfigError(f"{field}={value!r}: {fix}")


def one_of(field: str, value: str, options: Iterable[str], meant: Mapping[str, str] | None = None) -> None:
    """Raises `ConfigError` unless `value` is one of `options`; the message has the nearest option and all of them.

    Args:
      field: the setting as a user writes it, such as "World.platform".
      value: its value.
      options: the legal values.
      meant: maps other names that people try, in lower case, to the option that they mean: {"gpu": "cuda"}.
    """
    options = list(options)
    if value in options:
        return
    legal = ", ".join(repr(option) for option in options) or "none"
    intended = (meant or {}).get(value.lower())
    close = [intended] if intended else near_misses(value, options)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"{field}={value!r}: {hint}legal: {legal}")


def positive(field: str, value: float, example: float = 1) -> None:
    """Raises `ConfigError` unless `value` is finite and above 0; the message offers `example`, a legal value.

    `field` is the setting as a user writes it, such as "Layout.dp".
    """
    require(math.isfinite(value) and value > 0, field, value, f"must be above 0, such as {example!r}")


def not_negative(field: str, value: float, example: float = 0) -> None:
    """Raises `ConfigError` unless `value` is finite and at least 0; the message offers `example`, a legal value.

    `field` is the setting as a user writes it, such as "Checkpoint.every".
    """
    require(math.isfinite(value) and value >= 0, field, value, f"must be 0 or more, such as {example!r}")


def nearest_divisor(value: int, total: int) -> int:
    """The divisor of the positive `total` that is closest to `value`; of two, the larger."""
    small = [d for d in range(1, math.isqrt(max(total, 0)) + 1) if total % d == 0]
    return min([*small, *(total // d for d in small)], key=lambda d: (abs(d - value), -d), default=1)


def divides(field: str, value: int, total: int, total_field: str) -> None:
    """Raises `ConfigError` unless `value` is above 0 and divides `total`; the message offers the nearest divisor.

    `field` and `total_field` are the settings that have these values, such as "llm/Layout.tp" and "llm/Decoder.heads".
    """
    if value <= 0 or total % value:
        fix = f"must divide {total_field} ({total}), such as {nearest_divisor(value, total)}"
        raise ConfigError(f"{field}={value!r}: {fix}")
