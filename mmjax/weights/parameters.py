"""Parameters of modules in a folder of safetensors files: checks that they fit, and reads them onto devices."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mmjax.configurable import ConfigError, shortened
from mmjax.mesh.spmd import has_local_devices
from mmjax.weights.folder import CONFIG, WeightsFolder
from mmjax.weights.table import Entry, Index, Shape, View, match

_STRIP = 16
"""Columns to copy at a time: their numbers in fp32 fill a cache line."""
_COMPARED = 4096
"""Rows of two tensors to compare at a time."""
Report = Callable[[int, int], None]
"""Called with the number of bytes read, and of bytes to read."""


@dataclass(frozen=True, kw_only=True)
class FolderParameters:
    """The places of some modules' leaves in a folder.

    Attributes:
      folder: the folder.
      places: by leaf, such as "llm/embed", the key of its tensor and the leaf as a view of it.
      copies: by key of a duplicate of a tensor, the leaf, such as "llm/embed", and the view.
    """

    folder: WeightsFolder
    places: Mapping[str, tuple[str, View]]
    copies: Mapping[str, tuple[str, View]] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, str]:
        """Numpy's name of the dtype of each leaf's tensor, by leaf: {"llm/embed": "float32"}."""
        return {leaf: self.folder.info(key).dtype for leaf, (key, _) in self.places.items()}

    def describe(self) -> str:
        """One line: the folder, and the size and dtypes of these modules in it: "models/a (12.5 MiB of float32)"."""
        tensors = [self.folder.info(key) for key in {key for key, _ in self.places.values()}]
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        return f"{self.folder.path} ({sum(tensor.bytes for tensor in tensors) / 2**20:,.1f} MiB of {dtypes})"

    def read(self, targets: Mapping[str, jax.ShapeDtypeStruct], report: Report | None = None) -> dict[str, jax.Array]:
        """Reads leaves for the devices of this process, for each shard only the slices that it needs.

        Args:
          targets: global shape, dtype and sharding by leaf, such as "llm/embed"; values are rounded to the dtype.
          report: called after each leaf, with the bytes read and the bytes to read by this process.

        Returns:
          The leaves by the same names, without leaves that have no device in this process.

        Raises:
          KeyError: a leaf is none of ``places``.
        """
        local = {leaf: target for leaf, target in targets.items() if has_local_devices(target.sharding)}
        sizes = {leaf: target.size * np.dtype(target.dtype).itemsize for leaf, target in local.items()}
        done, total, result = 0, sum(sizes.values()), {}
        for leaf, target in local.items():
            result[leaf] = self._leaf(leaf, target)
            done += sizes[leaf]
            if report:
                report(done, total)
        return result

    def checksum(self, leaf: str, shape: Shape, dtype: Any) -> int:
        """Reads a leaf, such as "llm/embed", and returns the CRC-32 of its bytes in the numpy dtype `dtype`.

        ``shape`` is the leaf's. Raises KeyError for a leaf that is none of ``places``.
        """
        key, view = self.places[leaf]
        values = view.read(self.folder.tensor(key), shape, tuple(slice(0, size) for size in shape))
        return zlib.crc32(_packed(values, dtype).reshape(-1).view(np.uint8).data)

    def _leaf(self, leaf: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        key, view = self.places[leaf]
        shape = tuple(target.shape)
        tensor, parts = self.folder.tensor(key), {}

        def part(index: Index | None) -> np.ndarray:
            slices = tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index or (), shape, strict=True))
            bounds = tuple((axis.start, axis.stop) for axis in slices)
            if bounds not in parts:  # devices with the same part share it
                parts[bounds] = _packed(view.read(tensor, shape, slices), target.dtype)
            return parts[bounds]

        return jax.make_array_from_callback(shape, target.sharding, part)


def _packed(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The values in another dtype and in row-major order.

    A column-major matrix is copied in strips of a few columns. Copied at once, every number would need a cache line of
    its own, which takes five times as long.
    """
    if values.ndim == 3:
        return np.stack([_packed(matrix, dtype) for matrix in values]) if len(values) else values.astype(dtype)
    if values.ndim != 2 or values.strides[0] >= values.strides[1]:
        return np.ascontiguousarray(values.astype(dtype))
    result = np.empty(values.shape, dtype)
    for at in range(0, values.shape[1], _STRIP):
        strip = slice(at, at + _STRIP)
        result[:, strip] = values[:, strip].astype(dtype)
    return result


def find_leaves(
    folder: WeightsFolder,
    module: str,
    entries: Sequence[Entry],
    shapes: Mapping[str, Shape],
    *,
    prefixes: Sequence[str] = ("",),
    other_prefixes: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> dict[str, tuple[str, View]]:
    """Finds the key and the view of each of a module's leaves, by name: {"llm/embed": ("model.embed_tokens.weight",
    SAME)}.

    Args:
      folder: the folder, as ``WeightsFolder.open(path)`` gives it.
      module: the module's name, such as "llm".
      entries: its table, as ``table.expand`` makes it.
      shapes: the shape of each of its leaves, by name in the module, such as "embed" or "layers/000/attn/q".
      prefixes: prefixes of this module's keys, such as ("model.language_model.",); "" is one of every key.
      other_prefixes: prefixes of the other modules' keys, such as ("model.visual.",); a key belongs to the module with
        its longest prefix.
      unused: regular expressions of the ends of keys, from a dot on, that no leaf needs, such as "inv_freq".

    Raises:
      ConfigError: keys are missing, tensors have other shapes, or the module has tensors that no leaf is a view of; one
        line with all of them.
      ValueError: the table lacks a leaf of the module, or has one too many.
    """
    names = {entry.leaf for entry in entries}
    if names != shapes.keys():
        raise ValueError(f"the table of {module} and its leaves differ: {sorted(names ^ shapes.keys())[:5]}")
    keys = [key for key in folder.tensors if _prefix_length(key, prefixes) > _prefix_length(key, other_prefixes)]
    matches = match(entries, keys, unused)
    wrong, places = [], {}
    other_views = {entry.leaf: entry.other_views for entry in entries}
    for leaf, (key, view) in matches.places.items():
        views = (view, *other_views[leaf])
        fitting = (candidate for candidate in views if _is_view(folder, shapes[leaf], key, candidate))
        places[leaf] = key, next(fitting, view)
        try:
            require_shape(folder, leaf, shapes[leaf], *places[leaf])
        except ConfigError as error:
            wrong.append(str(error))
    problems = [f"missing {shortened(matches.missing, limit=4)}"] if matches.missing else []
    problems += [f"unexpected {shortened(matches.unexpected, limit=4)}"] if matches.unexpected else []
    problems += [f"of another shape {shortened(wrong, '; ', limit=4)}"] if wrong else []
    if problems:
        raise ConfigError(f"its tensors are not those of {module}: {' | '.join(problems)}")
    return {f"{module}/{leaf}": place for leaf, place in places.items()}


def _prefix_length(key: str, prefixes: Sequence[str]) -> int:
    """The length of a key's longest prefix; -1 if it has none of them."""
    return max((len(prefix) for prefix in prefixes if key.startswith(prefix)), default=-1)


def find_copies(
    folder: WeightsFolder, module: str, entries: Sequence[Entry], places: Mapping[str, tuple[str, View]]
) -> dict[str, tuple[str, View]]:
    """Finds duplicates of tensors in a folder, by key, with the module's leaf and its view.

    Args:
      folder: the folder, as ``WeightsFolder.open(path)`` gives it.
      module: the module's name, such as "llm".
      entries: its table, as ``table.expand`` makes it.
      places: by leaf, such as "llm/embed", the key of its tensor and its view, as ``find_leaves`` returns them.

    Returns:
      By key of a duplicate, the leaf such as "llm/embed", and the leaf as a view of the duplicate; ``{}`` without any.

    Raises:
      ConfigError: a duplicate and its tensor have different values; ``transformers`` reads such a folder as another
        model.
    """
    copies = {key: (f"{module}/{leaf}", view) for key, (leaf, view) in match(entries, folder.tensors).copies.items()}
    for key, (leaf, _) in copies.items():
        first = places[leaf][0]
        fix = f"set tie_word_embeddings to false in {CONFIG} to have both, or remove {key}"
        if not _equal(folder, first, key):
            raise ConfigError(f"{first} and {key} have other values, and {CONFIG} says that they are one; {fix}")
    return copies


def _equal(folder: WeightsFolder, first: str, second: str) -> bool:
    """Whether two tensors have the same values; reads them part by part."""
    shape = folder.tensors[first].shape
    if folder.tensors[second].shape != shape:
        return False
    left, right = folder.tensor(first), folder.tensor(second)
    parts = (
        (slice(at, min(at + _COMPARED, shape[0])), *(slice(0, n) for n in shape[1:]))
        for at in range(0, shape[0], _COMPARED)
    )
    return all(np.array_equal(np.asarray(left[part]), np.asarray(right[part])) for part in parts)


def require_shape(folder: WeightsFolder, leaf: str, shape: Shape, key: str, view: View) -> None:
    """Raises ConfigError unless a leaf of this shape is ``view`` of the tensor ``key`` of the folder.

    ``folder`` is as ``WeightsFolder.open(path)`` gives it, ``shape`` that of the complete leaf, such as (32, 64).
    ``leaf`` is the leaf's name for the message.

    Raises:
      ConfigError: the tensor has another shape.
      KeyError: the folder has no such tensor.
    """
    if not _is_view(folder, shape, key, view):
        actual, expected = folder.info(key).shape, view.shape_of(shape)
        raise ConfigError(f"{key} is {list(actual)}, where {leaf} needs {list(expected)}")


def _is_view(folder: WeightsFolder, shape: Shape, key: str, view: View) -> bool:
    """Whether a leaf of this shape can be this view of a tensor of the folder."""
    actual, expected, axis = folder.info(key).shape, view.shape_of(shape), view.axis
    if view.rows is None or len(actual) != len(expected):
        return actual == expected
    # Along the axis of its rows, the tensor has those of other leaves too.
    of_leaf = (*actual[:axis], expected[axis], *actual[axis + 1 :])
    return of_leaf == expected and view.rows[1] <= actual[axis]
