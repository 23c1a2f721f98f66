"""Attention by blocks under masks that hide more and more pairs of tokens, beside the one of all pairs.

Bytes are temporaries of compiled programs of one CPU device, which do not run. Times are of output and gradients, both
programs in turn in one process; the share of pairs is what the mask allows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.attention.blockwise import attention
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens
from mmjax.benches.rows import Row, Target, at_least, at_most

HEADS, GROUPS, WIDTH = 8, 2, 64
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536)
"""Tokens of a row whose program is compiled; the one of all pairs stops at the third."""
TIMED = 2_048
"""Tokens of a row that is timed."""
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A mask, and lengths of the segments of a row."""

    name: str
    mask: Mask
    segments: tuple[int, ...] = (TIMED,)

    @property
    def share(self) -> float:
        """The share of a row's pairs of tokens that the mask allows."""
        pairs = 0
        for length in self.segments:
            seen = np.full(length, length) if self.mask.kind == "full" else np.arange(1, length + 1)
            pairs += int(np.minimum(seen, self.mask.window or length).sum())
        return pairs / TIMED**2


CASES = (
    Case("full", Mask("full")),
    Case("causal", Mask("causal")),
    Case("causal, 8 packed segments", Mask("causal"), (TIMED // 8,) * 8),
    Case("full, 8 packed segments", Mask("full"), (TIMED // 8,) * 8),
    Case("window of 256", Mask("causal", window=256)),
)

Attend = Callable[..., jax.Array]


def bench_masks(rounds: int) -> Iterator[Row]:
    """Compiled temporaries against the length of a row, then times by mask."""
    bytes_of = {length: _compiled(attention, length) for length in LENGTHS}
    for length, size in bytes_of.items():
        yield _row(f"{length} tokens, by blocks: temporaries, compiled", size / MIB, "MiB")
    for length in LENGTHS[:3]:
        yield _row(
            f"{length} tokens, all pairs: temporaries, compiled", _compiled(dense_attention, length) / MIB, "MiB"
        )
    slopes = np.diff([bytes_of[length] for length in LENGTHS]) / np.diff(LENGTHS)
    more = slopes[-1] / slopes[-2]
    yield _row("bytes of each token, last doubling / the one before", more, "ratio", at_most(1.1))
    full = None
    for case in CASES:
        blocks, dense = _times(case, rounds)
        full = full or blocks
        yield _row(f"{case.name}: share of pairs", case.share, "ratio")
        yield _row(f"{case.name}: time / full", blocks / full, "ratio")
        limit = at_least(1.0) if case.share < 0.5 else None
        yield _row(f"{case.name}: time of all pairs / by blocks", dense / blocks, "ratio", limit)


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="masks", case=case, value=float(value), unit=unit, target=target)


def _program(attend: Attend, mask: Mask) -> Any:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda *x: jnp.sum(attend(*x, Tokens.of({"segments": segments}), mask)), argnums=(0, 1, 2)
        )(q, k, v)

    return jax.jit(both)


def _compiled(attend: Attend, length: int) -> int:
    """Bytes of temporaries of output and gradients of a causal row."""
    shapes = [jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32) for heads in (HEADS, GROUPS, GROUPS)]
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return _program(attend, Mask("causal")).lower(*shapes, segments).compile().memory_analysis().temp_size_in_bytes


def _times(case: Case, rounds: int) -> tuple[float, float]:
    """Median seconds by blocks and of all pairs."""
    keys = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(key, (1, TIMED, n, WIDTH)) for key, n in zip(keys, (HEADS, GROUPS, GROUPS), strict=True)]
    segments = jnp.asarray(np.repeat(np.arange(1, len(case.segments) + 1), case.segments)[None], jnp.int32)
    programs = [_program(attend, case.mask) for attend in (attention, dense_attention)]
    seconds: list[list[float]] = [[], []]
    for _ in range(min(rounds, 5) + 1):
        for program, own in zip(programs, seconds, strict=True):
            start = perf_counter()
            jax.block_until_ready(program(*given, segments))
            own.append(perf_counter() - start)
    blocks, dense = (median(own[1:]) for own in seconds)
    return blocks, dense
