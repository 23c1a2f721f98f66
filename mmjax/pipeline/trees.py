"""Parameters of a stage as a tree by module, and as leaves by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any
Shared = Mapping[str, Any]
"""Tied leaves by name: weights that another stage lends, or the gradients that come back."""


def by_name(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by module under names such as ``llm/embed``; layers are stacked.

    {"llm": {"embed": x}} becomes {"llm/embed": x}.
    """
    named: dict[str, Any] = {}
    _add_leaves(named, "", tree)
    return named


def _add_leaves(named: dict[str, Any], prefix: str, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _add_leaves(named, f"{prefix}{key}/", value)
        else:
            named[prefix + key] = value


def nested(named: Mapping[str, Any]) -> Tree:
    """The tree with these leaves by name, such as ``{"llm": {"embed": x}}``: the inverse of ``by_name``."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *path, key = name.split("/")
        subtree = tree
        for part in path:
            subtree = subtree.setdefault(part, {})
        subtree[key] = leaf
    return tree


def with_leaves(tree: Tree, leaves: Shared) -> Tree:
    """A copy of the tree with these leaves added, named as by ``by_name``; a leaf replaces one of the same name."""
    return nested({**by_name(tree), **leaves})


@dataclass(frozen=True, eq=False)
class Part:
    """Some leaves of trees of one structure, found once by their names.

    Attributes:
      structure, part_structure: structure of the trees, and of those leaves as a tree of their own.
      places: places of those leaves among all, in the order of the part.
    """

    structure: Any
    part_structure: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, tree: Tree, contains: Callable[[str], bool]) -> Part:
        """The leaves of trees like ``tree``, nested dicts, whose names such as "llm/embed" are contained."""
        leaves, structure = jax.tree.flatten(tree)
        places = by_name(jax.tree.unflatten(structure, range(len(leaves))))
        chosen, part_structure = jax.tree.flatten(
            nested({name: place for name, place in places.items() if contains(name)})
        )
        return cls(structure, part_structure, tuple(chosen))

    def select(self, tree: Tree) -> Tree:
        """The part of a tree."""
        leaves = jax.tree.leaves(tree)
        return jax.tree.unflatten(self.part_structure, [leaves[place] for place in self.places])

    def put(self, tree: Tree, part: Tree) -> Tree:
        """The tree with another part."""
        leaves = jax.tree.leaves(tree)
        for place, leaf in zip(self.places, jax.tree.leaves(part), strict=True):
            leaves[place] = leaf
        return jax.tree.unflatten(self.structure, leaves)
