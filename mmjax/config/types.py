"""Checks a gin literal against a dataclass field's annotation. gin itself checks no types."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config.gin_reader import RawText

_NAMES: Mapping[type, str] = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


class Mismatch(Exception):
    """The value has the wrong type. The message names the expected one."""


def convert(value: object, annotation: Any) -> Any:
    """`value` converted to the type `annotation`, such as `tuple[int, ...]`: an int may become a float, a list a tuple.

    `convert([1, 2], tuple[float, ...])` is (1.0, 2.0).

    Raises:
      Mismatch: the value has another type; bool is not an int here.
    """
    try:
        return _convert(value, annotation)
    except Mismatch:
        # The whole type is named: the inner one of a tuple in a tuple alone would mislead.
        raise Mismatch(f"must be {describe(annotation)}") from None


def _convert(value: object, annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if isinstance(value, RawText) and annotation is str:
        return value.text
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(annotation, type) and origin is None:
        if type(value) is annotation:
            return value
        raise Mismatch
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, annotation)
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_convert(item, kind) for item, kind in zip(value, _items(value, annotation), strict=True))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        key, item = typing.get_args(annotation)
        return {_convert(k, key): _convert(v, item) for k, v in value.items()}
    raise Mismatch


def _convert_union(value: object, annotation: Any) -> Any:
    for choice in typing.get_args(annotation):
        try:
            return _convert(value, choice) if choice is not type(None) else _convert_none(value)
        except Mismatch:
            continue
    raise Mismatch


def _convert_none(value: object) -> None:
    if value is not None:
        raise Mismatch


def _items(value: tuple[object, ...] | list[object], annotation: Any) -> Iterator[Any]:
    kinds = typing.get_args(annotation)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return iter([kinds[0]] * len(value))
    if len(kinds) != len(value):
        raise Mismatch
    return iter(kinds)


def describe(annotation: Any) -> str:
    """The annotation in words: "an integer", "a tuple of (an integer, a number)"."""
    if annotation in _NAMES:
        return _NAMES[annotation]
    if annotation is type(None):
        return "None"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a tuple of items that are each {describe(args[0])}"
    if origin is tuple:
        return f"a tuple of ({', '.join(describe(item) for item in args)})"
    if origin is not None and issubclass(origin, Mapping):
        return f"a dict from {describe(args[0])} to {describe(args[1])}"
    return str(getattr(annotation, "__name__", annotation))
