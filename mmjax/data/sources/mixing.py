"""Maps a sample's index to a record: shuffled epochs of each source, mixed by weight. Only integer arithmetic.

There is no state: any process may compute any index, in any order, and a continued run sees the same samples as an
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from mmjax.configurable import ConfigError

FINEST = 10_000
"""Weights are rounded to fractions of one denominator, at most this."""
_ROUNDS = 6
_MASK = (1 << 64) - 1


def permuted(at: int, size: int, key: int) -> int:
    """The image of `at` under a pseudorandom permutation of 0 … size-1 that `key` chooses; O(1).

    A Feistel network over the smallest even number of bits that represents `size`. A value outside the range goes
    through it again until it is inside (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", §3 and §5).

    Args:
      at: the number to be mapped, 0 … size-1.
      size: how many numbers are permuted, 1 or more.
      key: an integer, as `key_of(seed, epoch)` makes it.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = at >> half, at & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key + _mixed(right * _ROUNDS + number)) & low)
        at = left << half | right
        if at < size:
            return at


def _mixed(value: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def key_of(*parts: int) -> int:
    """A key for `permuted`, an int of 64 bits, made of several integers, such as seed and epoch; their order counts."""
    key = 0
    for part in parts:
        key = _mixed(key ^ _mixed(part & _MASK))
    return key


def quotas(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Samples of each source in a block, in the order of `weights`: the smallest block with the weights' proportions.

    (7, 3) for {"instruct": 0.7, "captions": 0.3}. Beyond 10,000 samples a block the proportions are rounded.

    Raises ConfigError where a weight is too small beside the others to get one of 10,000.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    block = next((n for n in range(1, FINEST + 1) if all((share * n).denominator == 1 for share in shares)), FINEST)
    counts = [int(share * block) for share in shares]
    # The remaining samples of a block go to the largest remainders, the first of equals.
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * block)
    for i in by_remainder[: block - sum(counts)]:
        counts[i] += 1
    for name, count in zip(weights, counts, strict=True):
        if not count:
            fix = f"{name!r} gets fewer than one of {FINEST} samples; leave it out or give it more"
            raise ConfigError(f"Data.sources={dict(weights)!r}: {fix}")
    return tuple(counts)


class Mixing:
    """Maps the index of a training sample to (source, record).

    Within a block the sources come in random order. The records of each source come in epochs, each a permutation of
    all of them.

    Args:
      sizes: number of training records of each source.
      quotas: number of samples of each source in a block, see `quotas`.
      seed: the run's seed.
    """

    def __init__(self, sizes: Sequence[int], quotas: Sequence[int], seed: int):
        self._sizes, self._quotas, self._seed = tuple(sizes), tuple(quotas), seed
        self._block = sum(quotas)

    def __call__(self, index: int) -> tuple[int, int]:
        """The number of the source, and the number of the record among its training records, of sample `index`."""
        block, at = divmod(index, self._block)
        slot = permuted(at, self._block, key_of(self._seed, 1, block))
        source = 0
        while slot >= self._quotas[source]:
            slot -= self._quotas[source]
            source += 1
        epoch, at = divmod(block * self._quotas[source] + slot, self._sizes[source])
        return source, permuted(at, self._sizes[source], key_of(self._seed, 2, source, epoch))


def held_out(size: int, count: int) -> np.ndarray:
    """The numbers of `count` held-out records among `size`: evenly spread, ascending, int64 [count].

    They count from 0: [0, 5] for 2 of 10; empty for a `count` of 0.
    """
    return np.arange(count, dtype=np.int64) * size // max(1, count)


def nth_trained(held_out_numbers: np.ndarray, at: int) -> int:
    """The number of the record at place `at` (from 0) among the records that are not held out.

    6 for place 4 if records 0 and 5 are held out.

    held_out_numbers: the numbers of the held-out records, from 0, ascending, as `held_out` gives them.
    """
    return at + int(np.searchsorted(held_out_numbers - np.arange(len(held_out_numbers)), at, side="right"))


def in_turn(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For all N records: the numbers of their sources, and their numbers in these, int64 [N] each.

    The records of each source are in order, and evenly spread: ([0, 1, 0], [0, 0, 1]) for sizes [2, 1].

    sizes: number of records of each source; there is at least one source.
    """
    sources = np.concatenate([np.full(size, number, np.int64) for number, size in enumerate(sizes)])
    records = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    order = np.argsort((records + 0.5) / np.asarray(sizes)[sources], kind="stable")
    return sources[order], records[order]
