"""The gated delta rule over packed rows as a ``custom_vjp``, on local shards inside ``shard_map``.

Forward goes over blocks of chunks (see ``chunks``) and keeps the state at the start of each. Backward goes over them
from the last to the first and computes each again, so memory and work grow in proportion to the tokens.

*Context parallelism*: to a rank the tokens before its own are a state S, and S behind its tokens is M S + U: an affine
function, whose M is ``[K, K]`` and U ``[K, V]`` for a value head. Each rank computes M and U of its tokens, gathers
those of all ranks, and has the state at the start of its own. Backward goes the other way with Mᵀ. Where a sample
begins, M is exactly 0.

Shapes: B rows, T tokens, G key heads, H value heads, R value heads of a key head, K width of keys, V of values (heads
are local to this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.delta.chunks import BLOCK, CHUNK, ChunkRule, Heads
from mmjax.models.taps import Value


class TokenHeads(NamedTuple):
    """Inputs of the rule.

    Attributes:
      q, k: queries and keys, of any length, ``[B, T, G, K]``.
      v: values ``[B, T, H, V]``; value head h reads key head h // R.
      log_decay: the logarithm of each token's decay, fp32 ``[B, T, H]``, 0 or less.
      strength: b, from 0 to 1, fp32 ``[B, T, H]``.
    """

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H"]
    strength: Float[Array, "B T H"]


def starts_of(segments_BT: Int[Array, "B T"], before_B1: Int[Array, "B 1"]) -> Bool[Array, "B T"]:
    """Whether a token begins a sample; padding, segment 0, does not. ``before_B1``: the segments of tokens before."""
    previous_BT = jnp.concatenate([before_B1, segments_BT[:, :-1]], axis=1)
    return (segments_BT != previous_BT) & (segments_BT != 0)


def delta_rule(
    heads: TokenHeads,
    segments_BT: Int[Array, "B T"],
    starts_BT: Bool[Array, "B T"],
    *,
    state: Float[Array, "B H K V"] | None = None,
    axes: tuple[str, ...] = (),
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The values that tokens read, and the fp32 state behind the last token, which has no gradient.

    Args:
      heads: of the tokens.
      segments_BT: their segments; padding changes no state and reads 0.
      starts_BT: where a sample begins, which reads nothing of the tokens before.
      state: the state before the first token; none is 0. Without gradient, and not over several ranks.
      axes: mesh axes that split the tokens of rows in contiguous runs.
    """
    is_token = (segments_BT != 0)[..., None]
    heads = heads._replace(
        # At a start nothing is there to decay.
        log_decay=jnp.where(is_token & ~starts_BT[..., None], heads.log_decay, 0),
        strength=jnp.where(is_token, heads.strength, 0),
    )
    known = [] if state is None else [state]
    starts_BT, segments_BT, *arrays = jax_compat.alike(starts_BT.astype(jnp.int32), segments_BT, *heads, *known)
    heads = TokenHeads(*arrays[: len(heads)])
    if state is None:
        (B, _, G, K), (_, _, H, V) = heads.k.shape, heads.v.shape
        start = Value((B, G, H // G, K, V), jnp.float32, jax_compat.varying_axes(heads.v)).zeros()
    else:
        _, _, K, V = state.shape
        start = arrays[-1].reshape(len(state), heads.k.shape[2], -1, K, V)
    # Rounded features gain nothing of products that are exact in fp32.
    precision = lax.Precision.HIGHEST if heads.v.dtype == jnp.float32 else lax.Precision.DEFAULT
    results: Any = _rule(_Rule(ChunkRule(precision), axes), heads, starts_BT, start)
    out_BTHV, last = results
    out_BTHV = jnp.where((segments_BT != 0)[..., None, None], out_BTHV, 0)
    return out_BTHV, lax.stop_gradient(last).reshape(last.shape[0], -1, *last.shape[3:])


@dataclass(frozen=True)
class _Rule:
    """Static settings: the rule of chunks, and the axes that split the tokens."""

    chunks: ChunkRule
    axes: tuple[str, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(rule: _Rule, heads: TokenHeads, starts_BT: Array, state: Array) -> tuple[Array, Array]:
    return _rule_forward(rule, heads, starts_BT, state)[0]


def _rule_forward(rule: _Rule, heads: TokenHeads, starts_BT: Array, state: Array) -> tuple[tuple[Array, Array], Any]:
    blocks = _blocks(heads, starts_BT)
    transfers = None
    if rule.axes:
        transfers = lax.all_gather(_transfer(rule.chunks, blocks, state), rule.axes)
        state = _state_of_rank(transfers, state, rule.axes)

    def step(state: Array, heads: Heads) -> tuple[Array, tuple[Array, Array]]:
        block = rule.chunks.block(heads)
        last, states = rule.chunks.states(block, state)
        return last, (rule.chunks.outputs(block, states).astype(heads.v.dtype), state)

    last, (out, states) = lax.scan(step, state, blocks)
    out_BTHV = _tokens(out, heads.v.shape)
    out_BTHV, states = (checkpoint_name(x, RESIDUAL_NAME) for x in (out_BTHV, states))
    if transfers is not None:
        transfers = checkpoint_name(transfers, RESIDUAL_NAME)
    return (out_BTHV, last), (heads, starts_BT, states, transfers)


def _rule_backward(rule: _Rule, residuals: Any, gradients: tuple[Array, Array]) -> tuple[TokenHeads, None, None]:
    heads, starts_BT, states, transfers = residuals
    blocks, d_out = (
        _blocks(heads, starts_BT),
        _value_blocks(gradients[0], _chunk_sizes(heads.v.shape[1]), heads.k.shape[2]),
    )
    d_state = jnp.zeros_like(states[0])
    if rule.axes:
        d_starts = lax.all_gather(_state_gradient(rule.chunks, blocks, d_out, d_state), rule.axes)
        d_state = _gradient_of_rank(transfers, d_starts, rule.axes)

    def step(d_state: Array, xs: tuple[Heads, Array, Array]) -> tuple[Array, Heads]:
        heads, d_out, state = xs
        block, d_out = rule.chunks.block(heads), d_out.astype(jnp.float32)
        _, states = rule.chunks.states(block, state)
        d_first, d_states = rule.chunks.state_gradient(block, d_out, d_state)
        d_heads = rule.chunks.gradients(heads, block, states, d_out, d_states)
        return d_first, jax.tree.map(lambda d, x: d.astype(x.dtype), d_heads, heads)

    _, d_blocks = lax.scan(step, d_state, (blocks, d_out, states), reverse=True)
    d_heads = TokenHeads(*(_tokens(d, x.shape) for d, x in zip(d_blocks[:-1], heads, strict=True)))
    return d_heads, None, None


_rule.defvjp(_rule_forward, _rule_backward)


# ---- blocks of chunks ------------------------------------------------------------------------------------------------


def _chunk_sizes(tokens: int) -> tuple[int, int, int]:
    """Numbers of blocks, of chunks in a block, and of tokens in a chunk; the last block may be padded."""
    chunk = min(CHUNK, 1 << (tokens - 1).bit_length())
    chunks = -(-tokens // chunk)
    in_block = min(BLOCK, chunks)
    return -(-chunks // in_block), in_block, chunk


def _blocks(heads: TokenHeads, starts_BT: Array) -> Heads:
    """The tokens in chunks, with a first dimension of blocks."""
    sizes = _chunk_sizes(heads.v.shape[1])
    groups = heads.k.shape[2]
    return Heads(
        q=jnp.moveaxis(_cut(heads.q, sizes), 4, 3),
        k=jnp.moveaxis(_cut(heads.k, sizes), 4, 3),
        v=_value_blocks(heads.v, sizes, groups),
        log_decay=_value_blocks(heads.log_decay, sizes, groups),
        strength=_value_blocks(heads.strength, sizes, groups),
        run=jnp.cumsum(_cut(starts_BT, sizes), axis=-1),
    )


def _cut(x_BT: Array, sizes: tuple[int, int, int]) -> Array:
    """``[blocks, N, B, C, …]``, with zeros behind the last token."""
    missing = sizes[0] * sizes[1] * sizes[2] - x_BT.shape[1]
    if missing:
        x_BT = jnp.pad(x_BT, [(0, missing * (dim == 1)) for dim in range(x_BT.ndim)])
    return jnp.moveaxis(x_BT.reshape(x_BT.shape[0], *sizes, *x_BT.shape[2:]), 0, 2)


def _value_blocks(x_BTH: Array, sizes: tuple[int, int, int], groups: int) -> Array:
    """``[blocks, N, B, G, R, C, …]``."""
    cut = _cut(x_BTH, sizes)
    cut = cut.reshape(*cut.shape[:4], groups, -1, *cut.shape[5:])
    return jnp.moveaxis(cut, 3, 5)


def _tokens(x: Array, shape: tuple[int, ...]) -> Array:
    """Blocks ``[blocks, N, B, heads, C, …]`` as tokens ``[B, T, …]`` of this shape; the inverse of ``_cut``."""
    width = len(shape) - 3  # dimensions behind heads
    chunk_dim = x.ndim - 1 - width
    x = jnp.moveaxis(x, (2, chunk_dim), (0, 3))  # [B, blocks, N, C, heads …, …]
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


# ---- context parallelism ---------------------------------------------------------------------------------------------


def _transfer(chunks: ChunkRule, blocks: Heads, state: Array) -> Array:
    """M and U of this rank's tokens side by side, ``[B, G, R, K, K + V]``."""
    K = state.shape[-2]
    identity = jnp.broadcast_to(jnp.eye(K, dtype=state.dtype), (*state.shape[:-1], K))
    start = jnp.concatenate(jax_compat.alike(identity, jnp.zeros_like(state)), axis=-1)

    def step(both: Array, heads: Heads) -> tuple[Array, None]:
        block = chunks.block(heads)
        nothing = jnp.zeros_like(block.erased)
        block = block._replace(written=jnp.concatenate([nothing, block.written], axis=-1))
        return chunks.states(block, both)[0], None

    return lax.scan(step, start, blocks)[0]


def _state_gradient(chunks: ChunkRule, blocks: Heads, d_out: Array, d_state: Array) -> Array:
    """The gradient of the state at this rank's start, of its own tokens alone."""

    def step(d_state: Array, xs: tuple[Heads, Array]) -> tuple[Array, None]:
        heads, d_out = xs
        return chunks.state_gradient(chunks.block(heads), d_out.astype(jnp.float32), d_state)[0], None

    return lax.scan(step, d_state, (blocks, d_out), reverse=True)[0]


def _state_of_rank(transfers: Array, state: Array, axes: tuple[str, ...]) -> Array:
    """The state at the start of this rank's tokens; the first rank's is ``state``."""
    K, rank, chosen = state.shape[-2], lax.axis_index(axes), state
    for before, transfer in enumerate(transfers[:-1]):
        state = _exact(transfer[..., :K], state) + transfer[..., K:]
        chosen = jnp.where(rank == before + 1, state, chosen)
    return chosen


def _gradient_of_rank(transfers: Array, d_starts: Array, axes: tuple[str, ...]) -> Array:
    """The gradient of the state behind this rank's tokens; the last rank's is 0."""
    K, rank = transfers.shape[-2], lax.axis_index(axes)
    d_state = chosen = jnp.zeros_like(d_starts[0])
    for behind in range(len(transfers) - 1, 0, -1):
        d_state = _exact(jnp.swapaxes(transfers[behind][..., :K], -1, -2), d_state) + d_starts[behind]
        chosen = jnp.where(rank == behind - 1, d_state, chosen)
    return chosen


def _exact(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
