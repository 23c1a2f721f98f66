"""The records of a dataset that a run knows. They are kept in its checkpoints, since the data may change meanwhile.

A record is recognised by its key, a hash of its contents, and not by its place. So a held-out record stays held out in
data that have grown, were sorted anew or have lost records, and a record that was trained on is never held out. A copy
of a held-out record that is added later is held out too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int, UInt64

_KEY = np.dtype(">u8")


@dataclass(frozen=True, kw_only=True)
class KnownRecords:
    """A dataset's records at a step of a run.

    Attributes:
      usable: number of records that can be used.
      scanned: number of all records.
      digest: a digest of the usable records' keys in their order.
      count: `Source.held_out`.
      held_out: keys of the records held out since the run began, 16 hexadecimal digits each. Some may be gone.
      copies: keys of copies of these that existed when the run began, and are trained on.
    """

    usable: int
    scanned: int
    digest: str
    count: int
    held_out: str
    copies: str = ""

    def is_held_out(self, keys: UInt64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        """Whether each record is held out: since the beginning, or as a copy that has been added since."""
        held_out, copies = _keys(self.held_out), _keys(self.copies)
        return np.isin(keys, np.setdiff1d(np.union1d(held_out, copies_among(keys, held_out)), copies))

    @classmethod
    def at_start(
        cls, keys: UInt64[np.ndarray, " N"], scanned: int, count: int, numbers: Int[np.ndarray, " K"]
    ) -> KnownRecords:
        """The records of a run that begins.

        Args:
          keys: keys of the usable records.
          scanned: number of all records.
          count: `Source.held_out`.
          numbers: the held-out records, by place in `keys`.
        """
        held_out = keys[numbers]
        copies = written(np.setdiff1d(copies_among(keys, held_out), held_out))
        digest = digest_of(keys)
        return cls(
            usable=len(keys), scanned=scanned, digest=digest, count=count, held_out=written(held_out), copies=copies
        )

    def later(self, keys: UInt64[np.ndarray, " N"], scanned: int) -> KnownRecords:
        """The records of the same run at a later step, with the same held-out records; arguments as in `change`."""
        return replace(self, usable=len(keys), scanned=scanned, digest=digest_of(keys))

    @property
    def count_held_out(self) -> int:
        """Number of records held out since the run began."""
        return len(_keys(self.held_out))

    def change(self, keys: UInt64[np.ndarray, " N"], scanned: int) -> str:
        """The difference to the records now, in words; "" if the usable records are the same.

        Args:
          keys: keys of the usable records now.
          scanned: number of all records now.
        """
        if self.digest == digest_of(keys):
            return ""
        numbers = f"{self.usable} of {self.scanned} records could be used, and now {len(keys)} of {scanned}"
        if len(keys) > self.usable and self.digest == digest_of(keys[: self.usable]):
            return f"{numbers}, {len(keys) - self.usable} were appended"
        if len(keys) < self.usable:
            return f"{numbers}, {self.usable - len(keys)} or more are gone"
        return f"{numbers}, some are others or stand elsewhere"


def written(keys: UInt64[np.ndarray, " K"]) -> str:
    """Keys as the digits in `KnownRecords.held_out`: 16 hexadecimal digits each, ascending, without separators.

    "0000000000000001000000000000000a" for the keys 10 and 1; "" for none.
    """
    return np.sort(keys).astype(_KEY).tobytes().hex()


def _keys(digits: str) -> UInt64[np.ndarray, " K"]:
    return np.frombuffer(bytes.fromhex(digits), _KEY).astype(np.uint64)


def digest_of(keys: UInt64[np.ndarray, " N"]) -> str:
    """A digest of keys in their order, 32 hexadecimal digits."""
    return hashlib.blake2b(keys.astype(_KEY).tobytes(), digest_size=16).hexdigest()


def key_of_contents(contents: bytes) -> int:
    """The key, an int of 64 bits, of the first record with these contents; copies get others (see `unique_keys`)."""
    return int.from_bytes(hashlib.blake2b(contents, digest_size=8).digest(), "big")


def unique_keys(keys: Sequence[int]) -> UInt64[np.ndarray, " N"]:
    """Keys of records in their order, made unique: copies of a record get other keys.

    The first of equal keys stays as it is; the second and later ones get keys that follow from it and their number.

    keys: the 64-bit keys of all records, with equal keys for equal contents, as `key_of_contents` gives them.
    """
    counts: dict[int, int] = {}
    result = np.zeros(len(keys), np.uint64)
    for place, key in enumerate(keys):
        counts[key] = number = counts.get(key, -1) + 1
        result[place] = _copy(key, number) if number else key
    return result


def copies_among(keys: UInt64[np.ndarray, " N"], originals: UInt64[np.ndarray, " K"]) -> UInt64[np.ndarray, " C"]:
    """The keys of copies of the records with the keys `originals`, as far as they are in `keys`.

    Args:
      keys: the keys of all records, made unique by `unique_keys`, which gives copies other keys.
      originals: keys of some records; they are not in the result.
    """
    result, remaining, number = [np.zeros(0, np.uint64)], originals, 1
    while len(remaining):
        copies = np.asarray([_copy(int(key), number) for key in remaining], np.uint64)
        present = np.isin(copies, keys)
        result.append(copies[present])
        remaining, number = remaining[present], number + 1
    return np.concatenate(result)


def _copy(key: int, number: int) -> int:
    return key_of_contents(key.to_bytes(8, "big") + number.to_bytes(8, "big"))
