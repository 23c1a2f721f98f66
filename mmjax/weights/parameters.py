"""Parameters of modules in a folder of safetensors files: whether they fit, and their values on the devices."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mmjax.configurable import ConfigError
from mmjax.mesh.spmd import has_local_devices
from mmjax.weights.folder import CONFIG, WeightsFolder
from mmjax.weights.table import Entry, Index, Shape, View, match

_STRIP = 16
"""Columns that are copied together: their numbers in fp32 fill a cache line."""
_COMPARED = 4096
"""Rows of two tensors that are compared at once."""
Report = Callable[[int, int], None]
"""Is told the bytes that have been read, and those that there are to read."""


@dataclass(frozen=True, kw_only=True)
class FolderParameters:
    """The places of some modules' leaves in a folder.

    Attributes:
      folder: the folder.
      places: by leaf, such as "llm/embed", the key of its tensor and its view.
      copies: by key of a tensor that the folder has once more, the leaf and the view.
    """

    folder: WeightsFolder
    places: Mapping[str, tuple[str, View]]
    copies: Mapping[str, tuple[str, View]] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each leaf's tensor."""
        return {leaf: self.folder.tensors[key].dtype for leaf, (key, _) in self.places.items()}

    def describe(self) -> str:
        """One line: the folder, how much it holds of these modules, and in which dtypes."""
        tensors = [self.folder.tensors[key] for key in {key for key, _ in self.places.values()}]
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        return f"{self.folder.path} ({sum(tensor.bytes for tensor in tensors) / 2**20:,.1f} MiB of {dtypes})"

    def read(
        self, targets: Mapping[str, jax.ShapeDtypeStruct], report: Report = lambda done, of: None
    ) -> dict[str, jax.Array]:
        """Reads the leaves that this process has devices for, each device's shard from the slices that it needs.

        Args:
          targets: shape, dtype and sharding by leaf; values are rounded to the dtype.
          report: is told of the progress after each leaf.
        """
        own = {leaf: target for leaf, target in targets.items() if has_local_devices(target.sharding)}
        sizes = {leaf: target.size * np.dtype(target.dtype).itemsize for leaf, target in own.items()}
        done, total, result = 0, sum(sizes.values()), {}
        for leaf, target in own.items():
            result[leaf] = self._leaf(leaf, target)
            done += sizes[leaf]
            report(done, total)
        return result

    def checksum(self, leaf: str, shape: Shape, dtype: Any) -> int:
        """CRC-32 of the bytes of a whole leaf in this dtype, which are read for it."""
        key, view = self.places[leaf]
        whole = view.read(self.folder.tensor(key), shape, tuple(slice(0, size) for size in shape))
        return zlib.crc32(_packed(whole, dtype).reshape(-1).view(np.uint8).data)

    def _leaf(self, leaf: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        key, view = self.places[leaf]
        shape = tuple(target.shape)
        tensor, read = self.folder.tensor(key), {}

        def part(index: Index | None) -> np.ndarray:
            whole = tuple(slice(*own.indices(size)[:2]) for own, size in zip(index or (), shape, strict=True))
            bounds = tuple((own.start, own.stop) for own in whole)
            if bounds not in read:  # devices that hold the same part share it
                read[bounds] = _packed(view.read(tensor, shape, whole), target.dtype)
            return read[bounds]

        return jax.make_array_from_callback(shape, target.sharding, part)


def _packed(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The values in another dtype, row by row in memory.

    A matrix that lies column by column is copied in strips of a few columns. Copied at once, every number would need a
    cache line of its own, which takes five times as long.
    """
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
    others: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> dict[str, tuple[str, View]]:
    """The key and the view of each of a module's leaves, by name such as "llm/embed".

    Args:
      folder: the folder.
      module: the module's name.
      entries: its table.
      shapes: the shape of each of its leaves, by name in the module.
      prefixes: what keys of this module begin with.
      others: what keys of the folder's other modules begin with; of two that fit a key the longer one counts.
      unused: see ``table.match``.

    Raises:
      ConfigError: keys are missing, tensors have other shapes, or the module has tensors that no leaf is a view of; one
        line with all of them.
      ValueError: the table lacks a leaf of the module, or has one too many.
    """
    named = {entry.leaf for entry in entries}
    if named != shapes.keys():
        raise ValueError(f"the table of {module} and its leaves differ: {sorted(named ^ shapes.keys())[:5]}")
    length = lambda key, begins: max((len(one) for one in begins if key.startswith(one)), default=-1)  # noqa: E731
    found = match(entries, [key for key in folder.tensors if length(key, prefixes) > length(key, others)], unused)
    wrong = []
    for leaf, (key, view) in found.found.items():
        try:
            require_shape(folder, leaf, shapes[leaf], key, view)
        except ConfigError as error:
            wrong.append(str(error))
    problems = [f"missing {some(found.missing)}"] if found.missing else []
    problems += [f"unexpected {some(found.unexpected)}"] if found.unexpected else []
    problems += [f"of another shape {some(wrong, '; ')}"] if wrong else []
    if problems:
        raise ConfigError(f"its tensors are not those of {module}: {' | '.join(problems)}")
    return {f"{module}/{leaf}": place for leaf, place in found.found.items()}


def find_copies(
    folder: WeightsFolder, module: str, entries: Sequence[Entry], places: Mapping[str, tuple[str, View]]
) -> dict[str, tuple[str, View]]:
    """Tensors that a folder has once more, by key, with the module's leaf and its view.

    Args:
      folder: the folder.
      module: the module's name.
      entries: its table.
      places: of the module's leaves; see ``find_leaves``.

    Raises:
      ConfigError: a copy has other values than the tensor; ``transformers`` reads such a folder as another model.
    """
    copies = {key: (f"{module}/{leaf}", view) for key, (leaf, view) in match(entries, folder.tensors).copies.items()}
    for key, (leaf, _) in copies.items():
        first = places[leaf][0]
        fix = f"set tie_word_embeddings to false in {CONFIG} to have both, or remove {key}"
        if not _equal(folder, first, key):
            raise ConfigError(f"{first} and {key} have other values, and {CONFIG} says that they are one; {fix}")
    return copies


def _equal(folder: WeightsFolder, first: str, second: str) -> bool:
    """Whether two tensors have the same values; no more than a part of them is in memory."""
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
    """Requires that a leaf of this shape is a view of a tensor.

    Raises:
      ConfigError: the tensor has another shape.
    """
    have, want = folder.tensors[key].shape, view.shape_of(shape)
    fits = have == want if view.rows is None else have[1:] == want[1:] and view.rows[1] <= have[0]
    if not fits:
        raise ConfigError(f"{key} is {list(have)}, where {leaf} needs {list(want)}")


def some(names: Sequence[str], joint: str = ", ", limit: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return joint.join(names[:limit]) + more
