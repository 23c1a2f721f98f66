"""Reading JSON that people write: every error is one line with the field, its value and a legal value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError, suggest

MOST = 1e18
"""The most seconds or bytes that a file may give; a larger number is a slip."""


def read_json(flag: str, path: str | Path) -> Any:
    """The content of a JSON file, as `json.load` gives it.

    flag: the flag that names the file, such as "--problem"; messages start with it and the path: "--problem=plan.json".

    Raises:
      ConfigError: the file cannot be read, is not JSON, has a key twice in an object, or a number that is not finite.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise ConfigError(f"{flag}={path}: {reason or error}; give a JSON file") from None
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag}={path}: no JSON in line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{flag}={path}: {reason}") from None


def fields(
    data: Any, where: str, names: tuple[str, ...], optional: tuple[str, ...] = (), *, top: str = "the file"
) -> dict[str, Any]:
    """Returns `data`, a JSON object that has all fields `names`, may have the fields `optional`, and has no others.

    `fields({"fwd": 1}, "modules.llm", ("fwd",), ("layers",))` is {"fwd": 1}; absent optional fields are not added.
    Messages name the object `where`, such as "modules.llm", or `top` if `where` is "".

    Raises:
      ConfigError: `data` is no object, or a field is unknown or missing.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where or top}={shown(data)}: must be an object with {', '.join(names)}")
    for name in data:
        if name not in (*names, *optional):
            raise ConfigError(f"{_join(where, name)}: no such field; {suggest(name, (*names, *optional))}")
    for name in names:
        if name not in data:
            raise ConfigError(f"{_join(where, name)}: is missing; an object here has {', '.join(names)}")
    return data


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def whole_number(where: str, value: Any, most: int) -> int:
    """Returns `value`, a whole number from 1 to `most`, as an int; 8.0 counts as 8.

    `whole_number("kinds.h100.devices", 8.0, 64)` is 8.

    Raises:
      ConfigError: it is none; the message names the field `where`, such as "kinds.h100.devices".
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{where}={shown(value)}: must be a whole number from 1 to {most}")
    return value


def number(where: str, value: Any, *, least: float, positive: bool = False) -> float:
    """Returns `value`, a number from `least` to `MOST`, as a float; with `positive` it is 1 / `MOST` or more.

    `MOST` is 1e18: `number("modules.llm.param_bytes", 8, least=0)` is 8.0.

    Raises:
      ConfigError: it is none; the message names the field `where`, such as "modules.llm.param_bytes".
    """
    legal = "a number above 0" if positive else f"a number of {least:g} or more"
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
        raise ConfigError(f"{where}={shown(value)}: must be {legal}, up to {MOST:g}")
    if positive and value < 1 / MOST:
        raise ConfigError(f"{where}={shown(value)}: must be {legal}, such as 0.01")
    return float(value)


def shown(value: Any) -> str:
    """`value` as JSON of at most 60 letters, for messages of one line; longer JSON is cut and ends in "..."."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_key_twice(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{shown(key)} is there twice in one object; keep one")
        result[key] = value
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number; give a finite one")
