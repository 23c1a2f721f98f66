"""Logical leaves by name: checks names, and whether two sets of leaves fit. Knows no storage.

A leaf is a parameter or a moment of one layer; its name is a path joined with "/",
such as "params/llm/layers/000/attn/q".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from mmjax.checkpoint.config import CheckpointError
from mmjax.configurable import shortened
from mmjax.weights.table import View

# Orbax joins the keys of a path with ".", so a dot inside a name could make two leaves one.
_LEAF_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")


FLOATING = ("float32", "bfloat16", "float16")
"""A leaf that is stored in one of these dtypes may be read into another: a frozen module has no float32 masters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafInfo:
    """A stored leaf.

    Attributes:
      shape, dtype: its global shape, and numpy's name of its dtype, or "bfloat16".
      crc32: the CRC-32 of its bytes; `None` if an older version saved it.
      folder: another checkpoint, an export or a folder of safetensors that has its bytes; "" if they are here.
      name: its name in that folder, such as "params/llm/embed", or its key in a folder of safetensors; "" if its bytes
        are here.
      view: the leaf as a view of that tensor, in a folder of safetensors; else `None`.
    """

    shape: tuple[int, ...]
    dtype: str
    crc32: int | None = None
    folder: str = ""
    name: str = ""
    view: View | None = None


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves as nested dicts, one level per "/": {"llm": {"embed": x}} for {"llm/embed": x}.

    Raises:
      CheckpointError: two leaves have one name, or a name has other characters than letters, digits, "_" and "-",
        joined with "/".
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if not _LEAF_NAME.fullmatch(name):
            raise CheckpointError(f"leaf name {name!r}: use letters, digits, '_' and '-', joined with '/'")
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(f"leaf name {name!r}: another leaf has the name of its folder; rename one")
        node[last] = leaf
    return tree


def lookup(tree: Mapping[str, Any], name: str) -> Any:
    """The leaf of a "/"-joined name such as "llm/embed" in nested dicts, as `nest` makes them. Raises KeyError."""
    node: Any = tree
    for key in name.split("/"):
        node = node[key]
    return node


def require_addressable(leaves: Mapping[str, jax.Array]) -> None:
    """Raises `CheckpointError` unless this process owns every shard of every leaf; `leaves` is by name."""
    # Orbax would raise deep inside and then hang in its barrier.
    foreign = [name for name, leaf in leaves.items() if not getattr(leaf, "is_fully_addressable", True)]
    if foreign:
        raise CheckpointError(f"leaves owned by other processes too: {shortened(foreign)}; save from one process")


def require_match(path: Path, stored: Mapping[str, LeafInfo], targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `CheckpointError` unless `stored` and `targets` have the same names, shapes and dtypes.

    Both are by name, such as "params/llm/embed": `stored` as in `metadata_of(path).leaves`, `targets` with shape, dtype
    and sharding. `path` is the checkpoint, for the message. One of the `FLOATING` dtypes may differ from another.

    Raises:
      CheckpointError: leaves differ, or a target has no sharding; one line with all differences.
    """
    problems = []
    if missing := [name for name in targets if name not in stored]:
        problems.append(f"missing: {shortened(missing)}")
    if unknown := [name for name in stored if name not in targets]:
        problems.append(f"not wanted: {shortened(unknown)}")
    different = []
    for name in targets.keys() & stored.keys():
        have, want = stored[name], targets[name]
        if have.shape != tuple(want.shape) or not same_kind(have.dtype, str(want.dtype)):
            different.append(f"{name} is {have.dtype}{list(have.shape)}, wanted {want.dtype}{list(want.shape)}")
    if different:
        problems.append("different: " + shortened(sorted(different), "; "))
    if problems:
        raise CheckpointError(
            f"{path} does not fit: {' | '.join(problems)}; use the config that it was saved with, or another run_dir"
        )
    unplaced = [name for name, want in targets.items() if want.sharding is None]
    if unplaced:
        raise CheckpointError(f"{path}: no sharding given for {shortened(unplaced)}; every target needs one")


def same_kind(stored: str, target: str) -> bool:
    """Whether a leaf that is stored in one dtype can be read into the other; both by name, such as "bfloat16".

    The names are equal, or both are in `FLOATING`.
    """
    return stored == target or {stored, target} <= set(FLOATING)


def as_stored(
    stored: Mapping[str, LeafInfo], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The targets, by name, with the dtypes of the `stored` leaves of the same names.

    Both are by name, such as "params/llm/embed"; `stored` may have further leaves. Raises KeyError for a target that is
    not stored.
    """
    return {name: want.update(dtype=stored[name].dtype) for name, want in targets.items()}


def in_both(
    stored: Mapping[str, LeafInfo], targets: Mapping[str, jax.ShapeDtypeStruct], group: Callable[[str], str]
) -> tuple[dict[str, LeafInfo], dict[str, jax.ShapeDtypeStruct]]:
    """Both sets of leaves (stored, targets), without groups that only one of them has; leaves of the group "" always
    stay.

    Both are by name, such as "adam_m/llm/embed". `group` is a function from such a name to its group, such as "llm", or
    "".
    """
    groups = {group(name) for name in stored} & {group(name) for name in targets} | {""}
    common = {name: leaf for name, leaf in stored.items() if group(name) in groups}
    return common, {name: leaf for name, leaf in targets.items() if group(name) in groups}
