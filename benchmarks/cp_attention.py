"""Times of the attention of single context-parallel ranks, under masks of one run of keys for each query.

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
from mmjax.attention.mask import Mask, MaskInputs
from mmjax.attention.pairs import Intervals
from mmjax.attention.tokens import Tokens

HEADS, GROUPS, WIDTH = 1, 1, 128
"""One of the 64 heads of Llama 3.1 70B, with its keys and values."""


class Runs(Mask):
    """Each query attends to one run of keys. The input "runs" holds the first key and the end of the run."""

    def inputs(self, tokens: Tokens) -> MaskInputs:
        return MaskInputs(tokens.segments_BT, tokens.inputs["order"], tokens.inputs["runs"])

    def allowed(self, queries: MaskInputs, keys: MaskInputs) -> Bool[Array, "*B T S"]:
        assert queries.windows is not None and keys.order is not None
        key = keys.order[..., None, :]
        return (key >= queries.windows[..., :, None, 0]) & (key < queries.windows[..., :, None, 1])

    def may_allow(
        self, queries: tuple[MaskInputs, MaskInputs], keys: tuple[MaskInputs, MaskInputs]
    ) -> Bool[Array, "*B P N"]:
        (queries_low, queries_high), (keys_low, keys_high) = queries, keys
        assert queries_low.windows is not None and queries_high.windows is not None
        assert keys_low.order is not None and keys_high.order is not None
        from_first = keys_high.order[..., None, :] >= queries_low.windows[..., :, None, 0]
        return from_first & (keys_low.order[..., None, :] < queries_high.windows[..., :, None, 1])


def seconds_of_ranks(mask: Intervals, shares: Sequence[Bool[np.ndarray, " N"]], block: int, rounds: int) -> list[float]:
    """Processor seconds of forward and backward of each share of the queries against all keys: the shortest round.

    Shares run in turn. Processor time varies least on a busy machine.

    Args:
      mask: the keys that each query attends to.
      shares: for each rank, its blocks of 128 queries; equally many for all ranks.
      block: tokens of a block of queries, and of keys, that is computed or skipped as a whole.
      rounds: number of runs of each share.
    """
    tokens, size = mask.tokens, mask.tokens // len(shares[0])
    runs_T2 = np.stack([mask.first_T, mask.last_T], axis=-1).astype(np.int32)
    places = [np.flatnonzero(np.repeat(share, size)) for share in shares]
    program = _program(len(places[0]), tokens, block)
    keys = [jax.random.normal(jax.random.key(n), (1, tokens, GROUPS, WIDTH)) for n in (1, 2)]
    key_inputs, seconds = token_inputs(np.arange(tokens), runs_T2), [[] for _ in shares]
    for _ in range(rounds):
        for place_t, share_seconds in zip(places, seconds, strict=True):
            q, d_out = (jax.random.normal(jax.random.key(n), (1, len(place_t), HEADS, WIDTH)) for n in (3, 4))
            query_inputs = token_inputs(place_t, runs_T2[place_t])
            arguments = jax.block_until_ready((q, *keys, query_inputs, key_inputs, d_out))
            start = process_time()
            jax.block_until_ready(program(*arguments))
            share_seconds.append(process_time() - start)
    return [min(times) for times in seconds]


def token_inputs(place_t: np.ndarray, runs_t2: np.ndarray) -> dict[str, Array]:
    """The inputs of `Runs` for the tokens at some places of a row."""
    order = jnp.asarray(place_t[None], jnp.int32)
    return {"segments": jnp.ones_like(order), "order": order, "runs": jnp.asarray(runs_t2[None])}


@cache
def _program(queries: int, tokens: int, block: int) -> Any:
    """The compiled program of output and gradients, for numbers of queries and of keys."""

    def forward_and_backward(q: Array, k: Array, v: Array, query_inputs: Any, key_inputs: Any, d_out: Array) -> Any:
        out, lse = forward(Runs("full"), q, k, v, query_inputs, key_inputs, block)
        return out, backward(Runs("full"), q, k, v, query_inputs, key_inputs, out, lse, d_out, block)

    def shapes(count: int, heads: int) -> tuple[Any, Any]:
        order, runs = (jax.ShapeDtypeStruct((1, count, *trailing), jnp.int32) for trailing in ((), (2,)))
        numbers = jax.ShapeDtypeStruct((1, count, heads, WIDTH), jnp.float32)
        return numbers, {"segments": order, "order": order, "runs": runs}

    (q, query_inputs), (k, key_inputs) = shapes(queries, HEADS), shapes(tokens, GROUPS)
    return jax.jit(forward_and_backward).lower(q, k, k, query_inputs, key_inputs, q).compile()
