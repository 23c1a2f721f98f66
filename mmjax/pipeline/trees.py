"""Parameters of a stage as a tree by module, and as leaves by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
