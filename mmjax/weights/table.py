"""Tables between the parameters of a module and the tensors of a folder, declared once and used both ways.

A *leaf* is one of our parameters, of one layer, such as "layers/000/attn/q". A *key* is the name of a tensor in a
folder, such as "model.layers.0.self_attn.q_proj.weight". A family of modules has a table with a ``Row`` for each leaf.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Tensor(Protocol):
    """A tensor of which a part can be read: an array, or a tensor in a file."""

    def __getitem__(self, index: Any, /) -> Any:
        """A part of it, by a slice for each dimension."""
        ...


@dataclass(frozen=True)
class View:
    """A leaf as a view of a tensor, which can be undone: dimensions in another order, then joined.

    Attributes:
      order: the tensor's dimensions in our order, such as (1, 0) for a transposed matrix; () keeps them.
      theirs: the tensor's shape, needed where the leaf joins dimensions of it or drops some of length 1.
      rows: first and one past the last row of the tensor that the leaf is, where a tensor holds several leaves, one
        behind the other along its first dimension; ``theirs`` is then the shape of these rows.
    """

    order: tuple[int, ...] = ()
    theirs: Shape = ()
    rows: tuple[int, int] | None = None

    def shape_of(self, leaf: Shape) -> Shape:
        """The shape of the tensor, or of its rows, that a leaf of this shape is a view of."""
        return self.theirs or tuple(leaf[place] for place in np.argsort(self._order(len(leaf))))

    def read(self, tensor: Tensor, leaf: Shape, index: Index) -> np.ndarray:
        """A part of a leaf, from no more of the tensor than it needs.

        Args:
          tensor: gives slices of itself.
          leaf: the leaf's whole shape.
          index: the part, a slice of step 1 for each dimension of the leaf.
        """
        theirs = self.shape_of(leaf)
        order = self._order(len(theirs))
        wanted = [slice(0, size) for size in theirs]
        left, got = list(index), list(leaf)
        for place, source in enumerate(_sources([theirs[o] for o in order], leaf)):
            if source is not None:
                start, stop, _ = index[place].indices(leaf[place])
                wanted[order[source]], left[place], got[place] = slice(start, stop), slice(None), stop - start
        if self.rows:
            first = self.rows[0]
            wanted[0] = slice(first + wanted[0].start, first + wanted[0].stop)
        part = np.asarray(tensor[tuple(wanted)])
        return part.transpose(order).reshape(got)[tuple(left)]

    def undo(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor, or its rows, of a whole leaf."""
        theirs = self.shape_of(leaf.shape)
        order = self._order(len(theirs))
        return leaf.reshape([theirs[o] for o in order]).transpose(np.argsort(order))

    def _order(self, dimensions: int) -> tuple[int, ...]:
        return self.order or tuple(range(dimensions))


SAME = View()
"""The tensor itself."""
TRANSPOSED = View(order=(1, 0))
"""A matrix ``[outputs, inputs]``, as torch's linear layers have it, as our ``[inputs, outputs]``."""


def third(number: int, width: int, view: View = TRANSPOSED) -> View:
    """One of query, key and value, numbered from 0, of a tensor of ``[3 * width, ...]``."""
    return replace(view, rows=(number * width, (number + 1) * width))


@dataclass(frozen=True)
class Row:
    """A leaf of each layer, or a single one, and where a folder has it.

    Attributes:
      leaf: our name inside the module, with "{}" for a layer's number, such as "layers/{}/attn/q".
      keys: their names, today's first, then those of older folders; "{}" is the layer's number.
      view: the leaf as a view of the tensor.
      copies: keys under which a folder may have the tensor once more, such as the head of tied embeddings. One of them
        stands for the tensor where the folder does not have it under its keys.
    """

    leaf: str
    keys: tuple[str, ...]
    view: View = SAME
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A row for one leaf: its name in the module, its possible keys, its view, and the keys of copies."""

    leaf: str
    keys: tuple[str, ...]
    view: View
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matches:
    """A table held against the keys of a folder.

    Attributes:
      found: by leaf, the key that the folder has, and the view.
      missing: keys, by today's name, of leaves that the folder does not have.
      unexpected: keys of the folder that no leaf is a view of.
      copies: by key of a tensor that the folder has once more, the leaf that it is a view of, and the view.
    """

    found: Mapping[str, tuple[str, View]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, View]] = field(default_factory=dict)


def renamed(rows: Iterable[Row], prefixes: Mapping[str, Sequence[str]]) -> tuple[Row, ...]:
    """The rows in a model that contains the module: each key's prefix becomes any of several.

    Args:
      rows: a module's rows, with keys as a folder of that module alone has them.
      prefixes: by a key's prefix, the prefixes that take its place, today's first. The longest that fits counts.

    Raises:
      ValueError: a key has none of the prefixes.
    """

    def new_keys(old: Sequence[str]) -> Iterator[str]:
        names = []
        for key in old:
            fitting = [prefix for prefix in prefixes if key.startswith(prefix)]
            if not fitting:
                raise ValueError(f"{key} begins with none of {list(prefixes)}")
            prefix = max(fitting, key=len)
            names.append([new + key.removeprefix(prefix) for new in prefixes[prefix]])
        # Today's prefix before older ones, and under each the keys in their order.
        for number in range(max(map(len, names), default=0)):
            yield from (own[number] for own in names if number < len(own))

    def several(old: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(new_keys(old)))

    return tuple(replace(row, keys=several(row.keys), copies=several(row.copies)) for row in rows)


def expand(rows: Iterable[Row], layers: int) -> tuple[Entry, ...]:
    """The rows for each of so many layers."""
    found = []
    for row in rows:
        for number in range(layers if "{}" in row.leaf else 1):
            keys, copies = (tuple(key.replace("{}", str(number)) for key in keys) for keys in (row.keys, row.copies))
            found.append(Entry(row.leaf.replace("{}", f"{number:03d}"), keys, row.view, copies))
    return tuple(found)


def match(entries: Iterable[Entry], keys: Collection[str], unused: Sequence[str] = ()) -> Matches:
    """Finds each leaf's tensor among the keys of a folder.

    Args:
      entries: the table.
      keys: the folder's keys.
      unused: regular expressions of the ends of keys, from a dot on, that no leaf needs, such as a table that is
        computed here.
    """
    found, missing, taken = {}, [], set()
    copies: dict[str, tuple[str, View]] = {}
    for entry in entries:
        key = next((key for key in (*entry.keys, *entry.copies) if key in keys), None)
        if key is None:
            missing.append(entry.keys[0])
            continue
        found[entry.leaf] = key, entry.view
        copies |= {copy: (entry.leaf, entry.view) for copy in entry.copies if copy in keys and copy != key}
        taken |= {key, *entry.copies}
    ignored = re.compile(rf"(?:.*\.)?(?:{'|'.join(unused)})") if unused else None
    unexpected = [key for key in keys if key not in taken and not (ignored and ignored.fullmatch(key))]
    return Matches(found, tuple(dict.fromkeys(missing)), tuple(unexpected), copies)


def assemble(entries: Iterable[Entry], leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a folder, by today's keys, from whole leaves.

    Raises:
      ValueError: the rows of a tensor overlap or leave gaps.
    """
    tensors: dict[str, np.ndarray] = {}
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for entry in entries:
        tensor = entry.view.undo(leaves[entry.leaf])
        if entry.view.rows:
            parts.setdefault(entry.keys[0], []).append((entry.view.rows[0], tensor))
        else:
            tensors[entry.keys[0]] = tensor
    for key, several in parts.items():
        ordered = [part for _, part in sorted(several, key=lambda own: own[0])]
        starts = np.cumsum([0, *(len(part) for part in ordered[:-1])])
        if list(starts) != sorted(start for start, _ in several):
            raise ValueError(f"{key}: its leaves have the rows {sorted(start for start, _ in several)} and leave gaps")
        tensors[key] = np.concatenate(ordered)
    return tensors


def _sources(dimensions: Sequence[int], leaf: Shape) -> Iterator[int | None]:
    """Yields, for each dimension of a leaf, the tensor's dimension that it is, or ``None`` where it joins several.

    Raises:
      ValueError: the leaf is no view of such a tensor.
    """
    real = [place for place, size in enumerate(dimensions) if size != 1]
    for size in leaf:
        group: list[int] = []
        while real and prod(dimensions[place] for place in group) < size:
            group.append(real.pop(0))
        if prod(dimensions[place] for place in group) != size:
            raise ValueError(f"a leaf of {list(leaf)} is no view of dimensions {list(dimensions)}")
        yield group[0] if len(group) == 1 else None
