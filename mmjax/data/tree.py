"""Values of the data side as JSON: dicts, tuples, dataclasses and places of arrays. Nothing else is written or read.

    {"tuple": [1, 2]}    {"dict": {"a": 1}}    {"EncoderSpec": {"patch": 14, ...}}    {"array": ["<f4", [2, 3], 64]}
    {"rows": [[0, 3], [8, 5], 4, ["<f4", [4, 5], 64]]}    rows of cells 0 and 3 of 4, of an array of shape [8, 5]

Numbers, strings, True, False and None stand for themselves. Reading makes only the dataclasses of this package that a
batch or its description may contain: bytes from another host can name no other class and run no code.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mmjax.data.config import DataConfig
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray
from mmjax.data.reorder import StepOrder
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.types import StepBatch

MOST_AXES, MOST_SIDE = 16, 1 << 40
"""The most axes of an array, and the most elements along one of them; the latter limits offsets in a block too."""
Place = Callable[[np.ndarray], list[Any]]
"""A function that stores an array and returns its place as JSON: [dtype, shape, offset]."""
Fetch = Callable[[list[Any]], np.ndarray]
"""A function that returns the array at such a place."""


def write(value: object, place: Place | None = None) -> Any:
    """`value` as JSON, with a tag on all but scalars: (1, 2) is {"tuple": [1, 2]}.

    Written are None, booleans, numbers, strings, tuples and lists, mappings with strings as keys, arrays,
    `PartialArray`s, and the dataclasses of a batch or its description, such as `StepBatch` and `DataConfig`.

    place: stores an array and returns its place as JSON, such as [dtype, shape, offset].

    Raises TypeError for other values, and for arrays without `place`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and place:
        return {"array": place(value)}
    if isinstance(value, PartialArray) and place:
        return {"rows": [list(value.cells), list(value.shape), value.count, place(value.local_rows)]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a dict's keys must be strings: {list(value)}")
        return {"dict": {key: write(item, place) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return {"tuple": [write(item, place) for item in value]}
    if type(value) in _CLASSES.values():
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        return {type(value).__name__: {f.name: write(getattr(value, f.name), place) for f in fields if f.init}}
    raise TypeError(f"a {type(value).__name__} is not written")


def read(value: Any, fetch: Fetch | None = None) -> Any:
    """The value that `write` wrote as this JSON; lists and mappings have become tuples and dicts.

    fetch: returns the array at a place, the JSON that `place` returned when it was written. Raises ValueError for
    anything that `write` does not write, and for places without `fetch`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("not one tagged value")
    [(tag, inside)] = value.items()
    if tag == "tuple" and isinstance(inside, list):
        return tuple(read(item, fetch) for item in inside)
    if tag == "array" and isinstance(inside, list) and fetch:
        return fetch(inside)
    if tag == "rows" and isinstance(inside, list) and fetch:
        return _partial_array(inside, fetch)
    if tag == "dict" and isinstance(inside, dict):
        return {key: read(item, fetch) for key, item in inside.items()}
    if tag in _CLASSES and isinstance(inside, dict):
        values = {key: read(item, fetch) for key, item in inside.items()}
        try:
            return _CLASSES[tag](**values)
        except Exception as error:  # its checks may raise anything on values of other types
            raise ValueError(f"no {tag}: {error!s:.200}") from None
    raise ValueError(f"unknown tag {tag!r:.80}")


def _partial_array(parts: list[Any], fetch: Fetch) -> PartialArray:
    """The partial array that these parts describe. Raises ValueError if they do not fit together."""
    if len(parts) != 4:
        raise ValueError("rows are cells, a shape, a count of cells and an array")
    cells, shape, count, place = parts
    legal = is_shape(shape) and is_shape([count]) and isinstance(cells, list)
    legal = legal and all(type(cell) is int and cell >= 0 for cell in cells)
    if not legal or not count or not shape or shape[0] % count:
        raise ValueError(f"cells {cells!r:.80} of {count!r:.80} of an array of shape {shape!r:.80}")
    local_rows = fetch(place)
    expected = (len(cells) * (shape[0] // count), *shape[1:])
    if cells != sorted({*cells}) or (cells and cells[-1] >= count) or local_rows.shape != expected:
        raise ValueError(
            f"rows of shape {list(local_rows.shape)} as cells {cells} of {count} of an array of shape {shape}"
        )
    return PartialArray(cells, tuple(shape), count, local_rows)


def is_shape(value: Any) -> bool:
    """Whether `value` can be the shape of an array: a list of at most `MOST_AXES` ints from 0 to `MOST_SIDE`.

    These are 16 and 2⁴⁰. A tuple is none.
    """
    legal = isinstance(value, list) and len(value) <= MOST_AXES
    return legal and all(type(side) is int and 0 <= side <= MOST_SIDE for side in value)


def _dataclasses_in(annotation: Any, outer: tuple[type[Any], ...] = ()) -> Iterator[type[Any]]:
    """The dataclasses in an annotation, and in the annotations of their fields; ``outer`` are those around it."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) and annotation not in outer:
        yield annotation
        for hint in typing.get_type_hints(annotation).values():
            yield from _dataclasses_in(hint, (*outer, annotation))
    for argument in typing.get_args(annotation):
        yield from _dataclasses_in(argument, outer)


_ROOTS = (StepBatch, DataConfig, SourceConfig, KnownRecords, Packer, StepOrder)
_CLASSES = {cls.__name__: cls for root in _ROOTS for cls in _dataclasses_in(root)}
