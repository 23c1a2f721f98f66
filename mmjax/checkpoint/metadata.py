"""The metadata of a checkpoint, and the checksums that reveal damage. Knows no storage.

Every leaf has a CRC-32 of its logical bytes (C order, unpadded, so the same under any layout), and the metadata has one
too. A CRC-32 detects every change within 32 neighbouring bits, and misses one in four billion others.
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
"""Version of the format. 2 added checksums, 3 leaves whose bytes are in another folder, and 4 leaves whose bytes are in
a folder of safetensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a checkpoint.

    Attributes:
      step: optimizer steps done.
      seed: the data seed; batches are a function of (seed, step).
      config: the operative config as gin text.
      versions: versions of the packages that wrote it, by package: "mmjax", "jax" and "orbax-checkpoint".
      leaves: every stored leaf by name, such as "params/llm/embed"; in an export "llm/embed".
      extra: further JSON values of the caller.
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
        """Waits until the shards of ``leaf`` in this process are on the host."""
        self.shape, self.dtype = leaf.shape, leaf.dtype
        # One copy of each element. The writer reads the same arrays, so they are copied to the host once.
        self._shards = [(s.index, np.asarray(s.data)) for s in leaf.addressable_shards if s.replica_id == 0]

    def checksum(self) -> int | None:
        """CRC-32 of the whole leaf, with zeros for the bytes of other processes; ``None`` if they own all bytes.

        Needs memory for one more copy of a sharded leaf.
        """
        if not self._shards:
            return None
        values = self._shards[0][1]
        if values.shape != self.shape:
            values = np.zeros(self.shape, self.dtype)
            for index, part in self._shards:
                values[index] = part
        return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, also in other processes."""
        return math.prod(self.shape) * self.dtype.itemsize


def joined_checksum(parts: Iterable[int | None], nbytes: int) -> int:
    """Joins the CRC-32s of parts, each computed with zeros in place of the other parts' bytes, to the whole's CRC-32.

    ``nbytes`` is the size of the whole; a part may be ``None`` (no bytes), but not all of them. A CRC is affine over
    exclusive or: for an even number of parts, the CRC of zeros has to be added.
    """
    checksums = [part for part in parts if part is not None]
    if len(checksums) % 2 == 0:
        checksums.append(zlib.crc32(bytes(nbytes)))
    return functools.reduce(operator.xor, checksums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsealed:
    """Metadata without the checksums of its leaves.

    Attributes:
      body: JSON values of the fields of ``Metadata``, by field, without ``leaves``.
      leaves: by name, this process's bytes of every leaf that is written.
      elsewhere: by name, leaves whose bytes are in another folder.
    """

    body: Mapping[str, Any]
    leaves: Mapping[str, HostLeaf]
    elsewhere: Mapping[str, LeafInfo] = dataclasses.field(default_factory=dict)

    def seal(self, exchange: Exchange) -> str | None:
        """Computes all checksums and returns the JSON text to store; ``None`` in all processes but the first.

        All processes call it; ``exchange`` carries the checksums to the first.
        """
        names = sorted(self.leaves)  # processes may have them in different orders
        checksums = json.dumps([self.leaves[name].checksum() for name in names])
        answers = [json.loads(answer) for answer in exchange(checksums, listen=is_first())]
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
        # The oldest format that can store these leaves, so that older versions can read it.
        views = any(leaf.view for leaf in self.elsewhere.values())
        form = FORMAT if views else 3 if self.elsewhere else 2
        body = json.loads(json.dumps({"format": form, **self.body, "leaves": info}))
        return json.dumps({**body, "crc32": _body_checksum(body)})


def unseal(stored: Mapping[str, Any]) -> Metadata:
    """Reads the stored form of metadata, a dict as ``storage.read_metadata`` gives it, and compares its checksum.

    Raises:
      CheckpointError: it is intact, but of a newer version.
      KeyError, TypeError, ValueError: it is damaged, or another program's.
    """
    body = dict(stored)
    checksum = body.pop("crc32", None)
    if checksum is None and body["format"] != 1:
        raise ValueError("the metadata has no checksum")
    if checksum is not None and checksum != _body_checksum(body):
        raise ValueError("the metadata does not have the checksum it was saved with")
    if body["format"] not in range(1, FORMAT + 1):
        raise CheckpointError(f"checkpoint format {body['format']}, this version reads {FORMAT}: update mmjax")
    leaves = {name: _leaf(leaf, sealed=checksum is not None) for name, leaf in body["leaves"].items()}
    return Metadata(leaves=leaves, **{key: body[key] for key in ("step", "seed", "config", "versions", "extra")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """One process's check of the leaves that it has read.

    Attributes:
      wrong: names of leaves whose shape, dtype or sharding is not the target's, such as "params/llm/embed".
      checksums: checksums of its shards of all other leaves, by name (see ``HostLeaf.checksum``).
    """

    wrong: list[str]
    checksums: dict[str, int | None]

    @classmethod
    def of(cls, targets: Mapping[str, jax.ShapeDtypeStruct], tree: Mapping[str, Any]) -> Findings:
        """Checks the leaves that Orbax has read.

        Args:
          targets: global shape, dtype and sharding by name, such as "params/llm/embed".
          tree: the leaves as nested dicts, with all those names.
        """
        leaves = {name: lookup(tree, name) for name in targets}
        wrong = [name for name, target in targets.items() if not _matches(target, leaves[name])]
        return cls(wrong=wrong, checksums={n: HostLeaf(x).checksum() for n, x in leaves.items() if n not in wrong})


def damaged(stored: Mapping[str, LeafInfo], findings: Sequence[Findings]) -> list[str]:
    """The names of leaves that do not match their target, or whose bytes have changed since they were saved; may be [].

    Args:
      stored: the leaves' entries in the metadata, by name.
      findings: the findings of every process.
    """
    wrong = {name for finding in findings for name in finding.wrong}
    for name, leaf in stored.items():
        parts = [finding.checksums[name] for finding in findings if name in finding.checksums]
        if leaf.crc32 is not None and parts:  # format 1 has no checksums
            nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            wrong |= {name} if joined_checksum(parts, nbytes) != leaf.crc32 else set()
    return [name for name in stored if name in wrong]


def _matches(target: jax.ShapeDtypeStruct, leaf: Any) -> bool:
    # If a type in Orbax's own metadata is damaged, it returns another object without an error.
    if not isinstance(leaf, jax.Array) or (leaf.shape, leaf.dtype) != (target.shape, target.dtype):
        return False
    return leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)


def versions() -> dict[str, str]:
    """The versions of the packages "mmjax", "jax" and "orbax-checkpoint", by package; "unknown" if not installed."""
    version_of = {}
    for package in ("mmjax", "jax", "orbax-checkpoint"):
        try:
            version_of[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version_of[package] = "unknown"  # a source tree that is not installed
    return version_of


def _leaf(stored: Mapping[str, Any], *, sealed: bool) -> LeafInfo:
    crc32 = int(stored["crc32"]) if sealed else None
    return LeafInfo(
        shape=tuple(stored["shape"]),
        dtype=stored["dtype"],
        crc32=crc32,
        folder=str(stored.get("folder", "")),
        name=str(stored.get("name", "")),
        view=_view(stored["view"]) if stored.get("view") else None,
    )


def _view(stored: Mapping[str, Any]) -> View:
    order, theirs = (tuple(map(int, stored[key])) for key in ("order", "theirs"))
    first, end = stored["rows"] or (0, 0)
    return View(order=order, theirs=theirs, rows=(int(first), int(end)) if stored["rows"] else None)


def _body_checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
