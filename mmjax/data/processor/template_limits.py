"""Limits of a chat template: it is foreign code, and short code may run for ever or write endless text.

All limits but the seconds are counts, which depend only on template and dialogue: a batch must not depend on chance.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

MOST_TEXT = 1 << 24
"""Characters of a text that a template makes."""
MOST_ELEMENTS = 1 << 19
"""Elements of a list, with those of the lists in it."""
MOST_IN_ALL = 1 << 28
"""Characters of all texts that it makes, intermediate ones included."""
MOST_STEPS = 500_000
"""Iterations of its loops, calls and filters."""
_BETWEEN_LOOKS, _LONG = 256, 1 << 16
"""Steps between two readings of the clock, and characters of a text that cause one more."""
MOST_SECONDS = 60.0
"""Seconds of processor time: far more than the steps take, even on a busy machine."""
_PRINTF = re.compile(r"%(?:\([^)]*\))?[#0\-_^ +]*(\d+|\*)?(?:\.(\d+|\*))?")
_WIDTHS = re.compile(r"\{[^{}]*?[:.<>^=](\d+)(?:\.(\d+))?")
_NESTED = re.compile(r"\{[^{}]*\{")
_PLAIN = ("length", "count", "first", "last", "default", "d", "select", "reject", "selectattr", "rejectattr", "map")
"""Filters whose work does not depend on the contents of a list's elements."""
_PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs")


class LimitError(Exception):
    """A template exceeds a limit, which the message names; the message does not name a file."""


class Meter(threading.local):
    """Counts the work of one rendering, in each thread. All methods but `start` raise LimitError beyond a limit."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Resets all counts."""
        self._steps = self._made = 0
        self._until = time.thread_time() + MOST_SECONDS

    def step(self) -> str:
        """Counts an iteration of a loop, or a call. Returns "", since templates write its value."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise LimitError(f"takes more than {MOST_STEPS} steps")
        if not self._steps % _BETWEEN_LOOKS:
            self._look()
        return ""

    def _look(self) -> None:
        if time.thread_time() > self._until:
            raise LimitError(f"takes more than {MOST_SECONDS:.0f} seconds")

    def make(self, size: int) -> None:
        """Counts a text of `size` characters, or a list of that size, before it is made."""
        self._made += size
        if size > MOST_TEXT or self._made > MOST_IN_ALL:
            raise LimitError(f"makes a text of more than {MOST_TEXT} characters")
        if size >= _LONG:
            self._look()

    def joined(self, pieces: Iterable[str]) -> str:
        """The pieces as one text, which is counted."""
        texts, size = [], 0
        for piece in pieces:
            texts.append(piece)
            size += len(piece)
            if size > MOST_TEXT:
                break
        self.make(size)
        return "".join(texts)

    def weighed(self, value: Any) -> Any:
        """Returns the value if its size, with all nested values, is within the limits, and else raises LimitError.

        A list may contain another list twice, which contains a third list twice, and so on.
        """
        if value is None or isinstance(value, str | int):
            return value  # a text was counted when it was made
        left, size, elements = [value], 0, 0
        while left:
            inner, elements = left.pop(), elements + 1
            size += len(inner) if isinstance(inner, str | bytes) else 1
            if isinstance(inner, Mapping):
                left += [*inner.keys(), *inner.values()]
            elif isinstance(inner, list | tuple | set | frozenset):
                left += inner
            if size > MOST_TEXT or elements + len(left) > MOST_ELEMENTS:
                raise LimitError(f"makes a value of more than {MOST_TEXT} characters or {MOST_ELEMENTS} elements")
        return value

    def operate(self, operator: str, left: Any, right: Any) -> None:
        """Counts the value of a binary operator, "+", "*", "%" or "**", before it is computed."""
        if operator == "+":
            if type(left) is str and type(right) is str:  # nearly all of them
                self.make(len(left) + len(right))
            elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self._make_like(left, len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self.make(len(left) + _printf_widths(left, right if isinstance(right, tuple) else (right,)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.make(left.bit_length() * abs(right) // 8)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self.make((left.bit_length() + right.bit_length()) // 8)
        elif operator == "*":
            for several, times in ((left, right), (right, left)):
                if isinstance(several, str | bytes | list | tuple) and isinstance(times, int):
                    self._make_like(several, len(several) * max(0, times))

    def _make_like(self, value: Any, size: int) -> None:
        scale = 1 if isinstance(value, str | bytes) else MOST_TEXT // MOST_ELEMENTS
        self.make(scale * size)

    def call(self, called: Any, args: Sequence[Any], keys: Mapping[str, Any]) -> None:
        """Counts a call and the text that it makes if `called` is a method of a string, before it runs."""
        self.step()
        for value in (*args, *keys.values()):
            if isinstance(value, list | tuple | dict):
                self.weighed(value)
        text = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(text, str | bytes):
            self._call_of_text(getattr(called, "__name__", ""), text, args, keys)

    def _call_of_text(self, name: str, text: Any, args: Sequence[Any], keys: Mapping[str, Any]) -> None:
        values = (*args, *keys.values())
        if name == "replace" and len(args) > 1:
            self.make(len(text) + text.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            self.make(_joined_size(text, args[0]))
        elif name == "translate" and args and isinstance(args[0], dict):
            longest = max((len(value) for value in args[0].values() if isinstance(value, str)), default=1)
            self.make(len(text) * longest)
        elif name in _PADDING:
            tabs = text.count("\t") if name == "expandtabs" else 1
            self.make(len(text) + tabs * max((n for n in values if isinstance(n, int)), default=8))
        elif name in ("format", "format_map"):
            self.make(len(text) + _format_widths(text, values))
        else:
            self.make(len(text))

    def filter(self, name: str, args: Sequence[Any], keys: Mapping[str, Any]) -> None:
        """Counts the value of filter `name` before it runs; `args` begins with the filtered value."""
        self.step()
        if len(args) == 1 and not keys and type(args[0]) is str:  # nearly all of them
            self.make(len(args[0]))
            return
        value, *settings = (*args, *keys.values()) or ("",)
        if name in ("default", "d"):
            return
        size = len(value) if isinstance(value, str) else 1
        if name not in _PLAIN and isinstance(value, list | tuple | dict):
            self.weighed(value)
        numbers = sum(abs(n) for n in settings if isinstance(n, int))
        texts = max((len(text) for text in settings if isinstance(text, str)), default=0)
        if name == "replace" and len(settings) > 1:
            self.make(size + str(value).count(str(settings[0])) * len(str(settings[1])))
        elif name == "join":
            self.make(_joined_size(settings[0] if settings else "", value))
        elif name == "format" and isinstance(value, str):
            self.make(size + _printf_widths(value, settings))
        elif name in ("indent", "tojson", "wordwrap"):
            lines = len(value) + 1 if name == "wordwrap" and isinstance(value, str) else str(value).count("\n") + 1
            self.make(size + lines * (texts + (0 if name == "wordwrap" else numbers)))
        else:
            self.make(size + numbers)


def limited(filters: Mapping[str, Callable[..., Any]], meter: Meter) -> dict[str, Callable[..., Any]]:
    """The Jinja `filters`, by name, each counted by `meter` before it runs.

    Args:
      filters: functions by name, such as `environment.filters` of Jinja: {"join": …}.
      meter: counts the work of a rendering, a new `Meter()`; a filter raises LimitError beyond its limits.
    """
    return {name: _limited(name, filter, meter) for name, filter in filters.items()}


def _limited(name: str, filter: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0  # a context or an environment comes before the value

    @wraps(filter)
    def counted(*args: Any, **keys: Any) -> Any:
        meter.filter(name, args[first:], keys)
        return filter(*args, **keys)

    return counted


def _joined_size(between: Any, pieces: Any) -> int:
    if not isinstance(pieces, list | tuple):
        return len(str(between))
    return sum(len(piece) if isinstance(piece, str) else 1 for piece in pieces) + len(pieces) * len(str(between))


def _printf_widths(text: str, values: Sequence[Any]) -> int:
    """Characters of padding by "%9d" and "%*d"."""
    widths = [width for match in _PRINTF.finditer(text) for width in match.groups() if width]
    stars = sum(abs(n) for n in values if isinstance(n, int)) if "*" in widths else 0
    return stars + sum(int(width) for width in widths if width != "*" and len(width) < 30)


def _format_widths(text: Any, values: Sequence[Any]) -> int:
    """Characters of padding by "{:9}" and "{:{}}"."""
    text = text if isinstance(text, str) else ""
    nested = sum(abs(n) for n in values if isinstance(n, int)) if _NESTED.search(text) else 0
    return nested + sum(int(width) for match in _WIDTHS.finditer(text) for width in match.groups() if width)
