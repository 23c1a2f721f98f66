"""Times of the attention of single context-parallel ranks, under masks that are runs of keys.

Shapes: T tokens, N blocks, t tokens of a rank, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from mmjax.attention.blockwise import backward, forward
from mmjax.attention.mask import Columns, Mask
from mmjax.attention.pairs import Intervals
from mmjax.attention.tokens import Tokens

HEADS, GROUPS, WIDTH = 1, 1, 128
"""A head of 64 of Llama 3.1 70B, and its keys and values."""


class Runs(Mask):
    """Each query sees a run of keys: those from its first to before its last, which the input "runs" holds."""

    def columns(self, tokens: Tokens) -> Columns:
        return Columns(tokens.segments_BT, tokens.inputs["order"], tokens.inputs["runs"])

    def allowed(self, asking: Columns, asked: Columns) -> Bool[Array, "*B T S"]:
        assert asking.windows is not None and asked.order is not None
        key = asked.order[..., None, :]
        return (key >= asking.windows[..., :, None, 0]) & (key < asking.windows[..., :, None, 1])

    def may_meet(self, asking: tuple[Columns, Columns], asked: tuple[Columns, Columns]) -> Bool[Array, "*B P N"]:
        (low, high), (asked_low, asked_high) = asking, asked
        assert low.windows is not None and high.windows is not None
        assert asked_low.order is not None and asked_high.order is not None
        from_first = asked_high.order[..., None, :] >= low.windows[..., :, None, 0]
        return from_first & (asked_low.order[..., None, :] < high.windows[..., :, None, 1])


def seconds_of_ranks(mask: Intervals, shares: Sequence[Bool[np.ndarray, " N"]], block: int, rounds: int) -> list[float]:
    """Processor seconds of forward and backward of each share of the queries against all keys, the least of rounds.

    They run in turn. Processor time is what a busy machine changes least.

    Args:
      mask: which keys each query sees.
      shares: which blocks of 128 queries are a rank's; equally many in each.
      block: tokens of a block of queries, and of keys, that is computed whole or not at all.
      rounds: how often each runs.
    """
    tokens, size = mask.tokens, mask.tokens // len(shares[0])
    runs_T2 = np.stack([mask.first_T, mask.last_T], axis=-1).astype(np.int32)
    places = [np.flatnonzero(np.repeat(share, size)) for share in shares]
    program = _program(len(places[0]), tokens, block)
    keys = [jax.random.normal(jax.random.key(n), (1, tokens, GROUPS, WIDTH)) for n in (1, 2)]
    asked, seconds = known(np.arange(tokens), runs_T2), [[] for _ in shares]
    for _ in range(rounds):
        for place_t, own in zip(places, seconds, strict=True):
            q, d_out = (jax.random.normal(jax.random.key(n), (1, len(place_t), HEADS, WIDTH)) for n in (3, 4))
            given = jax.block_until_ready((q, *keys, known(place_t, runs_T2[place_t]), asked, d_out))
            begun = process_time()
            jax.block_until_ready(program(*given))
            own.append(process_time() - begun)
    return [min(own) for own in seconds]


def known(place_t: np.ndarray, runs_t2: np.ndarray) -> dict[str, Array]:
    """The inputs of tokens at some places of a row that `Runs` reads."""
    order = jnp.asarray(place_t[None], jnp.int32)
    return {"segments": jnp.ones_like(order), "order": order, "runs": jnp.asarray(runs_t2[None])}


@cache
def _program(asking: int, tokens: int, block: int) -> Any:
    """The compiled program of output and gradients of so many queries."""

    def both(q: Array, k: Array, v: Array, own: Any, asked: Any, d_out: Array) -> Any:
        out, lse = forward(Runs("full"), q, k, v, own, asked, block)
        return out, backward(Runs("full"), q, k, v, own, asked, out, lse, d_out, block)

    def shapes(count: int, heads: int) -> tuple[Any, Any]:
        order, runs = (jax.ShapeDtypeStruct((1, count, *more), jnp.int32) for more in ((), (2,)))
        numbers = jax.ShapeDtypeStruct((1, count, heads, WIDTH), jnp.float32)
        return numbers, {"segments": order, "order": order, "runs": runs}

    (q, own), (k, asked) = shapes(asking, HEADS), shapes(tokens, GROUPS)
    return jax.jit(both).lower(q, k, k, own, asked, q).compile()
