"""The metadata of a checkpoint, and the checksums that reveal damage. Knows no storage.

Every leaf has a CRC-32 of its logical bytes (C order, unpadded, so the same under any layout), and the metadata have
one of their own. A CRC-32 detects every change within 32 neighbouring bits, and misses one in four billion others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mmjax.checkpoint.config import CheckpointError
from mmjax.checkpoint.leaves import LeafInfo, lookup
from mmjax.mesh.processes import Exchange, is_first
from mmjax.weights.table import View

FORMAT = 4
"""Version of the format: 1 had no checksums, 2 no leaves whose bytes are in another folder, and 3 none whose bytes are
in a folder of safetensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a checkpoint.

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
    """A leaf's bytes on the host, shard by shard: a copy on an accelerator, a view that pins the buffer on CPU.

    If several processes own the leaf, it has this process's shards.
    """

    def __init__(self, leaf: jax.Array):
        self.shape, self.dtype = leaf.shape, leaf.dtype
        # Where each element is, once; the checkpoint's writer asks the same arrays, so they cross to the host once.
        self._shards = [(s.index, np.asarray(s.data)) for s in leaf.addressable_shards if s.replica_id == 0]

    def checksum(self) -> int | None:
        """CRC-32 of the whole leaf, with zeros for the bytes of other processes; ``None`` if they own all bytes.

        Holds one more copy of the leaf while it runs, if it is sharded.
        """
        if not self._shards:
            return None
        whole = self._shards[0][1]
        if whole.shape != self.shape:
            whole = np.zeros(self.shape, self.dtype)
            for index, part in self._shards:
                whole[index] = part
        return zlib.crc32(np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


def joined_checksum(parts: Iterable[int | None], nbytes: int) -> int:
    """CRC-32 of a whole from those of its parts, each with zeros in place of the other parts' bytes.

    A CRC is affine over exclusive or: for an even number of parts, the CRC of zeros has to be added.
    """
    own = [part for part in parts if part is not None]
    if len(own) % 2 == 0:
        own.append(zlib.crc32(bytes(nbytes)))
    return functools.reduce(operator.xor, own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsealed:
    """Metadata that lacks only the checksums of its leaves.

    Attributes:
      body: everything else.
      leaves: this process's bytes of every leaf that is written.
      elsewhere: the other leaves, whose bytes are in another folder.
    """

    body: Mapping[str, Any]
    leaves: Mapping[str, HostLeaf]
    elsewhere: Mapping[str, LeafInfo] = dataclasses.field(default_factory=dict)

    def seal(self, exchange: Exchange) -> str | None:
        """The text that is stored; ``None`` in all processes but the first. Reads every byte of every leaf here."""
        names = sorted(self.leaves)  # processes may have them in different orders
        own = json.dumps([self.leaves[name].checksum() for name in names])
        answers = [json.loads(answer) for answer in exchange(own, listen=is_first())]
        if not answers:
            return None
        parts = dict(zip(names, zip(*answers, strict=True), strict=True))
        info = {
            name: {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "crc32": joined_checksum(parts[name], leaf.nbytes),
            }
            for name, leaf in self.leaves.items()
        }
        info |= {name: dataclasses.asdict(leaf) for name, leaf in self.elsewhere.items()}
        # What an older version can read, it shall.
        views = any(leaf.view for leaf in self.elsewhere.values())
        form = FORMAT if views else 3 if self.elsewhere else 2
        body = json.loads(json.dumps({"format": form, **self.body, "leaves": info}))
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
    if body["format"] not in range(1, FORMAT + 1):
        raise CheckpointError(f"checkpoint format {body['format']}, this version reads {FORMAT}: update mmjax")
    leaves = {name: _leaf(leaf, sealed=own is not None) for name, leaf in body["leaves"].items()}
    return Metadata(leaves=leaves, **{key: body[key] for key in ("step", "seed", "config", "versions", "extra")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """One process's check of the leaves that it has read.

    Attributes:
      wrong: names of leaves with another shape, dtype or sharding than was asked for.
      checksums: checksums of its shards by name of the other leaves (see ``HostLeaf.checksum``).
    """

    wrong: list[str]
    checksums: dict[str, int | None]

    @classmethod
    def of(cls, wanted: Mapping[str, jax.ShapeDtypeStruct], leaves: Any) -> Findings:
        """Checks the leaves that Orbax has read.

        Args:
          wanted: shape, dtype and sharding by name.
          leaves: the leaves as nested dicts.
        """
        found = {name: lookup(leaves, name) for name in wanted}
        wrong = [name for name, want in wanted.items() if not _is_wanted(want, found[name])]
        return cls(wrong=wrong, checksums={n: HostLeaf(x).checksum() for n, x in found.items() if n not in wrong})


def damaged(stored: Mapping[str, LeafInfo], found: Sequence[Findings]) -> list[str]:
    """The names of the leaves that do not match the target, or whose bytes differ from those that were saved.

    Args:
      stored: the leaves' entries in the metadata.
      found: the findings of every process.
    """
    wrong = {name for one in found for name in one.wrong}
    for name, leaf in stored.items():
        parts = [one.checksums[name] for one in found if name in one.checksums]
        if leaf.crc32 is not None and parts:  # one of format 1 has none
            nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            wrong |= {name} if joined_checksum(parts, nbytes) != leaf.crc32 else set()
    return [name for name in stored if name in wrong]


def _is_wanted(want: jax.ShapeDtypeStruct, leaf: Any) -> bool:
    # A damaged type in Orbax's own metadata makes it return something else, without an error.
    if not isinstance(leaf, jax.Array) or (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
        return False
    return leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)


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
    where = {key: str(stored.get(key, "")) for key in ("folder", "name")}
    view = _view(stored["view"]) if stored.get("view") else None
    return LeafInfo(shape=tuple(stored["shape"]), dtype=stored["dtype"], crc32=crc32, view=view, **where)


def _view(stored: Mapping[str, Any]) -> View:
    order, theirs = (tuple(map(int, stored[key])) for key in ("order", "theirs"))
    first, end = stored["rows"] or (0, 0)
    return View(order=order, theirs=theirs, rows=(int(first), int(end)) if stored["rows"] else None)


def _own_checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
