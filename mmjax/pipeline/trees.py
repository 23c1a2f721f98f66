"""Parameters of a stage as a tree by module, and as leaves by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

Tree = Any
Shared = Mapping[str, Any]
"""Tied leaves by name: weights that another stage lends, or the gradients that come back."""


def by_name(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by module under names such as ``llm/embed``; layers are stacked.

    {"llm": {"embed": x}} becomes {"llm/embed": x}.
    """
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def nested(named: Mapping[str, Any]) -> Tree:
    """The tree with these leaves by name, such as ``{"llm": {"embed": x}}``: the inverse of ``by_name``."""
    return traverse_util.unflatten_dict(dict(named), sep="/")


def with_leaves(tree: Tree, leaves: Shared) -> Tree:
    """A copy of the tree with these leaves added, named as by ``by_name``; a leaf replaces one of the same name."""
    return nested({**by_name(tree), **leaves})
