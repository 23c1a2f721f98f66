"""Attention by blocks under masks that hide more and more pairs of tokens, beside attention of all pairs.

Bytes are temporaries of compiled programs of one CPU device, which do not run. Times are of output and gradients, both
programs in turn in one process; the share of pairs is the share that the mask allows.
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

from mmjax.attention.blockwise import BLOCK, attention
from mmjax.attention.language import Rules
from mmjax.attention.mask import Mask, bounds
from mmjax.attention.pairs import pairs_of
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens
from mmjax.bench.rows import Row, Target, at_least, at_most

HEADS, GROUPS, WIDTH = 8, 2, 64
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536)
"""Tokens of a row whose program is compiled; attention of all pairs is compiled for the first three."""
TIMED = 2_048
"""Tokens of a row that is timed."""
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A mask, and the samples of a row: for each sample the lengths of text and of media in turn, text first."""

    name: str
    mask: Mask
    samples: tuple[tuple[int, ...], ...] = ((TIMED,),)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The row's host inputs; a mask of words is Cornstarch's."""
        lengths = [sum(parts) for parts in self.samples]
        segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        numbers = [number // 2 + 1 if number % 2 else 0 for parts in self.samples for number in range(len(parts))]
        items = np.repeat(numbers, [length for parts in self.samples for length in parts])
        media, rules = items > 0, Rules.parse("cornstarch")
        is_words, attends = rules.words({"text": ~media, "media": media, "all": items >= 0}, items)
        arrays = {"segments": segments, "items": items, "positions": np.arange(TIMED)}
        return {name: array.astype(np.int32) for name, array in arrays.items()} | {"is": is_words, "attends": attends}

    @property
    def share(self) -> float:
        """The share of a row's pairs of tokens that the mask allows."""
        return int(pairs_of(self.mask, self.inputs).key_counts().sum()) / TIMED**2

    @property
    def computed(self) -> float:
        """The share of pairs of blocks that are computed."""
        inputs = {
            name: jnp.asarray(array[None]) for name, array in self.inputs.items() if name in self.mask.input_names
        }
        ends = bounds(self.mask.inputs(Tokens.of(inputs)), BLOCK)
        return float(self.mask.may_allow(ends, ends).mean())


_WORDS, _PART = Mask.of("cornstarch"), TIMED // 16
CASES = (
    Case("full", Mask("full")),
    Case("causal", Mask("causal")),
    Case("causal, 8 packed segments", Mask("causal"), ((TIMED // 8,),) * 8),
    Case("full, 8 packed segments", Mask("full"), ((TIMED // 8,),) * 8),
    Case("window of 256", Mask("causal", window=256)),
    Case("chunks of 256", Mask("causal", grid_window=256)),
    Case("EP: 4 media, then text", _WORDS, ((0, *(2 * _PART, 0) * 3, 2 * _PART, 8 * _PART),)),
    Case("EE: 8 media in a text", _WORDS, ((_PART, _PART) * 8,)),
    Case("MP: 4 samples, each a text with 2 media", _WORDS, ((_PART, _PART, _PART, _PART),) * 4),
)

Attend = Callable[..., jax.Array]


def bench_masks(rounds: int) -> Iterator[Row]:
    """Yields compiled temporaries by length of a row, then times by mask."""
    bytes_of = {length: _compiled(attention, length) for length in LENGTHS}
    for length, size in bytes_of.items():
        yield _row(f"{length} tokens, by blocks: temporaries, compiled", size / MIB, "MiB")
    for length in LENGTHS[:3]:
        yield _row(
            f"{length} tokens, all pairs: temporaries, compiled", _compiled(dense_attention, length) / MIB, "MiB"
        )
    with_words = [_compiled(attention, length, _WORDS) for length in LENGTHS[-2:]]
    yield _row(f"{LENGTHS[-1]} tokens, words, by blocks: temporaries, compiled", with_words[-1] / MIB, "MiB")
    slope = (with_words[1] - with_words[0]) / (bytes_of[LENGTHS[-1]] - bytes_of[LENGTHS[-2]])
    yield _row("bytes of each token, words / causal, last doubling", slope, "ratio", at_most(1.2))
    slopes = np.diff([bytes_of[length] for length in LENGTHS]) / np.diff(LENGTHS)
    slope_ratio = slopes[-1] / slopes[-2]
    yield _row("bytes of each token, last doubling / the one before", slope_ratio, "ratio", at_most(1.1))
    full = None
    for case in CASES:
        blocks, dense = _times(case, rounds)
        full = full or blocks
        yield _row(f"{case.name}: share of pairs", case.share, "ratio")
        yield _row(f"{case.name}: share of pairs of blocks", case.computed, "ratio")
        yield _row(f"{case.name}: time / full", blocks / full, "ratio")
        limit = at_least(1.0) if case.share < 0.5 else None
        yield _row(f"{case.name}: time of all pairs / by blocks", dense / blocks, "ratio", limit)


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="masks", case=case, value=float(value), unit=unit, target=target)


def _program(attend: Attend, mask: Mask) -> Any:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Any) -> Any:
        return jax.value_and_grad(lambda *x: jnp.sum(attend(*x, Tokens.of(inputs), mask)), argnums=(0, 1, 2))(q, k, v)

    return jax.jit(both)


def _compiled(attend: Attend, length: int, mask: Mask = Mask("causal")) -> int:  # noqa: B008
    """Bytes of temporaries of output and gradients of a row."""
    shapes = [jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32) for heads in (HEADS, GROUPS, GROUPS)]
    kinds = {"is": jnp.uint32, "attends": jnp.uint32}
    inputs = {n: jax.ShapeDtypeStruct((1, length), kinds.get(n, jnp.int32)) for n in mask.input_names if n != "order"}
    return _program(attend, mask).lower(*shapes, inputs).compile().memory_analysis().temp_size_in_bytes


def _times(case: Case, rounds: int) -> tuple[float, float]:
    """Median seconds by blocks and of all pairs."""
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = [
        jax.random.normal(key, (1, TIMED, n, WIDTH)) for key, n in zip(keys, (HEADS, GROUPS, GROUPS), strict=True)
    ]
    inputs = {
        name: jnp.asarray(program_seconds[None])
        for name, program_seconds in case.inputs.items()
        if name in case.mask.input_names
    }
    programs = [_program(attend, case.mask) for attend in (attention, dense_attention)]
    seconds: list[list[float]] = [[], []]
    for _ in range(min(rounds, 5) + 1):
        for program, program_seconds in zip(programs, seconds, strict=True):
            start = perf_counter()
            jax.block_until_ready(program(*arguments, inputs))
            program_seconds.append(perf_counter() - start)
    blocks, dense = (median(program_seconds[1:]) for program_seconds in seconds)
    return blocks, dense
