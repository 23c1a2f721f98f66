"""Tables that map the parameters of a module to the tensors of a folder, for reading and for writing.

A *leaf* is a parameter of one layer in mmjax, such as "layers/000/attn/q". A *key* is the name of a tensor in a folder,
such as "model.layers.0.self_attn.q_proj.weight". A family of modules has a table with a ``Row`` for each leaf.

A key with "*" stands for a *list* of tensors of one shape, with the numbers 0, 1, 2, … in its place, such as
"model.layers.0.mlp.experts.*.up_proj.weight". It is used like the key of one tensor, the stack of the list. A list may
have names in place of numbers: "q_proj.[input_min|input_max]" stands for "q_proj.input_min" and "q_proj.input_max".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from math import prod
from typing import Any, Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Tensor(Protocol):
    """A tensor that can be read in parts: an array, or a tensor in a file."""

    def __getitem__(self, index: Any, /) -> Any:
        """Reads a part; `index` has a slice for each dimension."""
        ...


@dataclass(frozen=True)
class View:
    """A leaf as an invertible view of a tensor: dimensions are transposed, then joined.

    Attributes:
      order: permutation of the tensor's dimensions, such as (1, 0) for a transposed matrix; () keeps them.
      theirs: the tensor's shape, needed if the leaf joins dimensions or drops dimensions of length 1.
      rows: for a tensor with several leaves behind one another along one dimension, the first row of this leaf and the
        row after its last; ``theirs`` is then the shape of these rows.
      axis: the dimension of the tensor that ``rows`` are counted along.
    """

    order: tuple[int, ...] = ()
    theirs: Shape = ()
    rows: tuple[int, int] | None = None
    axis: int = 0

    def shape_of(self, leaf: Shape) -> Shape:
        """The shape of the tensor, or of its rows, for a leaf of this shape: (4, 2) for (2, 4) if transposed."""
        return self.theirs or tuple(leaf[place] for place in np.argsort(self._order(len(leaf))))

    def read(self, tensor: Tensor, leaf: Shape, index: Index) -> np.ndarray:
        """Reads a part of a leaf, with as little of the tensor as possible, as an array in the tensor's dtype.

        Args:
          tensor: the whole tensor, with the rows of other leaves too.
          leaf: the complete leaf's shape.
          index: the part, a slice of step 1 for each dimension of the leaf.

        Raises:
          ValueError: a leaf of this shape is no such view.
        """
        tensor_shape = self.shape_of(leaf)
        order = self._order(len(tensor_shape))
        tensor_index = [slice(0, size) for size in tensor_shape]
        # Dimensions that are not joined are cut when the tensor is read, and the others afterwards.
        leaf_index, read_shape = list(index), list(leaf)
        for place, source in enumerate(_sources([tensor_shape[o] for o in order], leaf)):
            if source is not None:
                start, stop, _ = index[place].indices(leaf[place])
                tensor_index[order[source]] = slice(start, stop)
                leaf_index[place], read_shape[place] = slice(None), stop - start
        if self.rows:
            first, part = self.rows[0], tensor_index[self.axis]
            tensor_index[self.axis] = slice(first + part.start, first + part.stop)
        part = np.asarray(tensor[tuple(tensor_index)])
        return part.transpose(order).reshape(read_shape)[tuple(leaf_index)]

    def undo(self, leaf: np.ndarray) -> np.ndarray:
        """Makes the tensor, or with ``rows`` these rows of it, from a complete leaf; an array in the leaf's dtype."""
        tensor_shape = self.shape_of(leaf.shape)
        order = self._order(len(tensor_shape))
        return leaf.reshape([tensor_shape[o] for o in order]).transpose(np.argsort(order))

    def _order(self, dimensions: int) -> tuple[int, ...]:
        return self.order or tuple(range(dimensions))


SAME = View()
"""The tensor itself."""
TRANSPOSED = View(order=(1, 0))
"""A matrix ``[inputs, outputs]`` as a view of ``[outputs, inputs]`` of torch's linear layers."""
TRANSPOSED_LIST = View(order=(0, 2, 1))
"""As ``TRANSPOSED``, for the matrices of a list."""


def third(number: int, width: int, view: View = TRANSPOSED) -> View:
    """The view of the query, key or value (``number`` 0, 1 or 2) in a tensor of ``[3 * width, ...]``.

    ``view`` is the leaf as a view of its ``width`` rows; the result is that view with ``rows`` of (number * width,
    (number + 1) * width).
    """
    return replace(view, rows=(number * width, (number + 1) * width))


@dataclass(frozen=True)
class Row:
    """A leaf of each layer, or a single leaf, and its tensor in a folder.

    Attributes:
      leaf: the leaf's name in the module, with "{}" for a layer's number, such as "layers/{}/attn/q".
      keys: the tensor's possible keys, today's first, then those of older folders; "{}" is the layer's number, and "*"
        or names in brackets make it a list.
      view: the leaf as a view of the tensor.
      copies: keys under which a folder may have a duplicate of the tensor, such as the head of tied embeddings. A
        duplicate is read if the folder has the tensor under none of `keys`.
      layers: the layers that have the leaf; ``None`` for all of them, or for a single leaf.
      other_views: the leaf as a view of tensors of other shapes, which other versions of a library write under the same
        keys. The first view that fits the tensor's shape is used, ``view`` before these.
    """

    leaf: str
    keys: tuple[str, ...]
    view: View = SAME
    copies: tuple[str, ...] = ()
    layers: Sequence[int] | None = None
    other_views: tuple[View, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A row for one leaf of one layer: as `Row`, with the layer's number in place of "{}".

    Attributes:
      leaf: the leaf's name in the module, such as "layers/000/attn/q".
      keys: the tensor's possible keys, today's first.
      view: the leaf as a view of the tensor.
      copies: keys under which a folder may have a duplicate of the tensor.
      other_views: the leaf as a view of tensors of other shapes.
    """

    leaf: str
    keys: tuple[str, ...]
    view: View
    copies: tuple[str, ...] = ()
    other_views: tuple[View, ...] = ()


@dataclass(frozen=True)
class Matches:
    """The result of comparing a table with the keys of a folder.

    Attributes:
      places: by leaf, such as "layers/000/attn/q", the key in the folder, and the leaf as a view of that tensor.
      missing: today's keys of leaves that the folder does not have.
      unexpected: keys of the folder without a leaf.
      copies: by key of a duplicate of a tensor, the leaf that is a view of it, and the view.
    """

    places: Mapping[str, tuple[str, View]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, View]] = field(default_factory=dict)


def renamed(rows: Iterable[Row], prefixes: Mapping[str, Sequence[str]]) -> tuple[Row, ...]:
    """The rows of a module in a model that contains it: replaces the prefix of each key by one or several others.

    Args:
      rows: a module's rows, such as ``Row("embed", ("model.embed_tokens.weight",))``, with the keys of a folder of that
        module alone.
      prefixes: by a key's prefix, the new prefixes, today's first: {"model.": ["model.language_model."]}. The longest
        prefix of a key counts; "" is a prefix of every key.

    Returns:
      The rows in their order, with the new keys and copies.

    Raises:
      ValueError: a key has none of the prefixes.
    """

    def new_keys(old: Sequence[str]) -> Iterator[str]:
        names = []
        for key in old:
            matching = [prefix for prefix in prefixes if key.startswith(prefix)]
            if not matching:
                raise ValueError(f"{key} begins with none of {list(prefixes)}")
            prefix = max(matching, key=len)
            names.append([new + key.removeprefix(prefix) for new in prefixes[prefix]])
        # Today's prefix before older ones, and under each the keys in their order.
        for number in range(max(map(len, names), default=0)):
            yield from (alternatives[number] for alternatives in names if number < len(alternatives))

    def several(old: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(new_keys(old)))

    return tuple(replace(row, keys=several(row.keys), copies=several(row.copies)) for row in rows)


def expand(rows: Iterable[Row], layers: int) -> tuple[Entry, ...]:
    """The entries of all rows, such as ``Row("layers/{}/attn/q", ("model.layers.{}.self_attn.q_proj.weight",))``: for a
    row with "{}" one for each of its layers, by default all of `layers` layers, else one.

    They are in the order of rows, then of layers. A layer's number has three digits in leaves, such as
    "layers/003/attn/q", and as few as it needs in keys.
    """
    entries = []
    for row in rows:
        numbers = range(layers if "{}" in row.leaf else 1) if row.layers is None else row.layers
        for number in numbers:
            keys, copies = (tuple(key.replace("{}", str(number)) for key in keys) for keys in (row.keys, row.copies))
            entries.append(Entry(row.leaf.replace("{}", f"{number:03d}"), keys, row.view, copies, row.other_views))
    return tuple(entries)


def match(entries: Iterable[Entry], keys: Collection[str], unused: Sequence[str] = ()) -> Matches:
    """Finds each leaf's tensor among the keys of a folder.

    The result's `places` has the key and the view of each leaf that is there, by leaf, such as "layers/000/attn/q";
    `missing` has the first key of each that is not, and `unexpected` the keys without a leaf.

    Args:
      entries: the table, as `expand` makes it.
      keys: the folder's keys.
      unused: regular expressions of the ends of keys, from a dot on, that no leaf needs, such as "inv_freq".
    """
    places, missing, used = {}, [], set()
    copies: dict[str, tuple[str, View]] = {}
    for entry in entries:
        key = next((key for key in (*entry.keys, *entry.copies) if keys_of(key, keys)), None)
        if key is None:
            missing.append(entry.keys[0])
            continue
        places[entry.leaf] = key, entry.view
        copies |= {copy: (entry.leaf, entry.view) for copy in entry.copies if copy in keys and copy != key}
        used |= {*keys_of(key, keys), *entry.copies}
    ignored = re.compile(rf"(?:.*\.)?(?:{'|'.join(unused)})") if unused else None
    unexpected = [key for key in keys if key not in used and not (ignored and ignored.fullmatch(key))]
    return Matches(places, tuple(dict.fromkeys(missing)), tuple(unexpected), copies)


def keys_of(key: str, keys: Collection[str]) -> list[str]:
    """The keys among ``keys`` for which a key of a table stands: of a list all from number 0 on, or those of all names;
    [] if it is not there.

    Such as ["experts.0.up", "experts.1.up"] for "experts.*.up".
    """
    if not is_list(key):
        return [key] if key in keys else []
    there = [*takewhile(lambda member: member in keys, _members(key))]
    return [] if "[" in key and len(there) < len([*_members(key)]) else there


def is_list(key: str) -> bool:
    """Whether a key of a table stands for a list of tensors."""
    return "*" in key or "[" in key


def _members(key: str) -> Iterator[str]:
    """The keys of a list's tensors, with numbers without an end."""
    begin, _, rest = key.partition("[")
    names, _, end = rest.partition("]")
    if rest:
        yield from (f"{begin}{name}{end}" for name in names.split("|"))
    else:
        yield from (key.replace("*", str(number)) for number in count())


class TensorList:
    """The stack of a list of tensors. Reading a part of it reads no other part of any tensor."""

    def __init__(self, tensors: Sequence[Tensor]):
        """Keeps the tensors, all of one shape."""
        self._tensors = tensors

    def __getitem__(self, index: Index, /) -> np.ndarray:
        """Reads a part. `index` has a slice of the list, then one for each dimension of its tensors."""
        first, *rest = index
        return np.stack([np.asarray(tensor[tuple(rest)]) for tensor in self._tensors[first]])


def assemble(entries: Iterable[Entry], leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes the tensors of a folder, by today's keys (the first of `Entry.keys`), from complete leaves.

    Args:
      entries: the table, as `expand` makes it, with all leaves of each tensor.
      leaves: the unsharded array of each entry, by `Entry.leaf`, such as "layers/000/attn/q".

    Returns:
      The tensors by key, in the leaves' dtypes; leaves that share a tensor are joined, and tensors of a list are apart.

    Raises:
      KeyError: an entry's leaf is absent.
      ValueError: the rows of a tensor overlap or leave gaps.
    """
    tensors: dict[str, np.ndarray] = {}
    parts: dict[tuple[str, int], list[tuple[int, np.ndarray]]] = {}
    for entry in entries:
        tensor = entry.view.undo(leaves[entry.leaf])
        if entry.view.rows:
            parts.setdefault((entry.keys[0], entry.view.axis), []).append((entry.view.rows[0], tensor))
        else:
            tensors[entry.keys[0]] = tensor
    for (key, axis), several in parts.items():
        ordered = [part for _, part in sorted(several, key=lambda start_and_part: start_and_part[0])]
        starts = np.cumsum([0, *(part.shape[axis] for part in ordered[:-1])])
        if list(starts) != sorted(start for start, _ in several):
            raise ValueError(f"{key}: its leaves have the rows {sorted(start for start, _ in several)} and leave gaps")
        tensors[key] = np.concatenate(ordered, axis)
    return {name: part for key, tensor in tensors.items() for name, part in _listed(key, tensor)}


def _listed(key: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the keys and tensors of a list, or the key and the tensor."""
    if is_list(key):
        yield from zip(_members(key), map(np.asarray, tensor), strict=False)
    else:
        yield key, tensor


def _sources(dimensions: Sequence[int], leaf: Shape) -> Iterator[int | None]:
    """Yields the tensor's dimension of each dimension of a leaf, or ``None`` for one that joins several.

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
