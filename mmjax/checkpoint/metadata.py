"""What a checkpoint says about itself, and the checksums by which damage is noticed. Knows no storage.

Every leaf has a CRC-32 of its logical bytes (C order, unpadded, so no layout shows in it), and the metadata has one of
itself. A CRC-32 misses no change of up to 32 neighbouring bits, and one in four billion others.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mmjax.checkpoint.leaves import CheckpointError, LeafInfo, lookup

FORMAT = 2
"""1 had no checksums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a checkpoint says about itself.

    Attributes:
      step: optimizer steps done.
      seed: the data seed; batches are a function of (seed, step).
      config: the operative config as text.
      versions: package -> version that wrote it.
      leaves: every stored leaf by name.
      extra: whatever else the caller stored; JSON values.
    """

    step: int
    seed: int
    config: str
    versions: dict[str, str]
    leaves: dict[str, LeafInfo]
    extra: dict[str, Any]


class HostLeaf:
    """A leaf's bytes on the host, shard by shard: a copy on an accelerator, a view that pins the buffer on CPU."""

    def __init__(self, leaf: jax.Array):
        self.shape, self.dtype = leaf.shape, leaf.dtype
        # Where each element is, once; the checkpoint's writer asks the same arrays, so they cross to the host once.
        self._shards = [(s.index, np.asarray(s.data)) for s in leaf.addressable_shards if s.replica_id == 0]

    def checksum(self) -> int:
        """CRC-32 of the whole leaf's bytes; holds one more copy of the leaf while it runs, if it is sharded."""
        if len(self._shards) == 1:
            whole = self._shards[0][1]
        else:
            whole = np.empty(self.shape, self.dtype)
            for index, part in self._shards:
                whole[index] = part
        return zlib.crc32(np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsealed:
    """Metadata that is complete but for the checksums of its leaves."""

    body: Mapping[str, Any]
    leaves: Mapping[str, HostLeaf]

    def seal(self) -> str:
        """The text that is stored. Reads every byte of every leaf."""
        info = {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "crc32": leaf.checksum()}
            for name, leaf in self.leaves.items()
        }
        body = json.loads(json.dumps({"format": FORMAT, **self.body, "leaves": info}))
        return json.dumps({**body, "crc32": _own_checksum(body)})


def unseal(stored: Mapping[str, Any]) -> Metadata:
    """The metadata in what was stored.

    Raises:
      CheckpointError: it is whole, but of a newer version.
      KeyError, TypeError, ValueError: it is damaged, or somebody else's.
    """
    body = dict(stored)
    own = body.pop("crc32", None)
    if own is None and body["format"] != 1:
        raise ValueError("the metadata has no checksum")
    if own is not None and own != _own_checksum(body):
        raise ValueError("the metadata does not have the checksum it was saved with")
    if body["format"] not in (1, FORMAT):
        raise CheckpointError(f"checkpoint format {body['format']}, this version reads {FORMAT}: update mmjax")
    leaves = {name: _leaf(leaf, sealed=own is not None) for name, leaf in body["leaves"].items()}
    return Metadata(leaves=leaves, **{key: body[key] for key in ("step", "seed", "config", "versions", "extra")})


def damaged(stored: Mapping[str, LeafInfo], wanted: Mapping[str, jax.ShapeDtypeStruct], leaves: Any) -> list[str]:
    """The names of the leaves that are not what was wanted, or whose bytes are not those that were saved.

    Args:
      stored: what the metadata says of them.
      wanted: shape, dtype and sharding by name.
      leaves: nested dicts of what Orbax has read.
    """
    return [name for name, want in wanted.items() if not _is_whole(stored[name], want, lookup(leaves, name))]


def _is_whole(stored: LeafInfo, want: jax.ShapeDtypeStruct, leaf: Any) -> bool:
    # A damaged type in Orbax's own metadata makes it return something else, without an error.
    if not isinstance(leaf, jax.Array) or (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
        return False
    if not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim):
        return False
    return stored.crc32 is None or stored.crc32 == HostLeaf(leaf).checksum()  # one of format 1 has none


def versions() -> dict[str, str]:
    """The versions of the packages that write a checkpoint."""
    known = {}
    for package in ("mmjax", "jax", "orbax-checkpoint"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = "unknown"  # a source tree that is not installed
    return known


def _leaf(stored: Mapping[str, Any], *, sealed: bool) -> LeafInfo:
    crc32 = int(stored["crc32"]) if sealed else None
    return LeafInfo(shape=tuple(stored["shape"]), dtype=stored["dtype"], crc32=crc32)


def _own_checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
