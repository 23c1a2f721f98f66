"""The gated delta rule in chunks of tokens, forward and backward, on arrays of one rank.

A head has a state S, a matrix that maps a key to a value. A token decays it by a = exp(g), writes its value v under its
key k with strength b, and reads it with its query q (Yang et al., "Gated Delta Networks", equation 10):

    S ← a S + b k (v - a Sᵀ k)ᵀ,   o = Sᵀ q

Inside of a chunk with the state S at its start all tokens are computed at once (§3.3): with the lower triangle
D[i, j] = a[j+1] ⋯ a[i], and e[i] = a[first] ⋯ a[i],

    A = (I + strictly lower part of b k kᵀ D)⁻¹,   x = A b (v - e S ᵀk),   o = e Sᵀq + (q kᵀ D) x

and the state behind the chunk is e[last] S + Σ_i D[last, i] k[i] x[i]ᵀ. At the first token of a sample a is 0: products
of decays across it are exactly 0, so that nothing of other samples enters a sum.

A *block* is several chunks. Only the states at the starts of blocks are kept for backward; all that lies in a block is
computed again.

Shapes: B rows, N chunks of a block, C and D tokens of a chunk, G key heads, R value heads of a key head, K width of
keys, V width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK = 64
"""Tokens of a chunk."""
BLOCK = 16
"""Chunks of a block."""
UNIT_EPS = 1e-6
"""Added to the squared length by which queries and keys are divided."""
_GONE, _STEPS = 128.0, 1024
"""exp(-128) is 0 in fp32; and 64 · 128 · 1024 numbers are counted exactly."""
_BASE = 8
"""Rows of a triangular matrix that is inverted row by row."""


class Heads(NamedTuple):
    """Inputs of the rule, in chunks of tokens.

    Attributes:
      q, k: queries and keys, of any length, ``[N, B, G, C, K]``.
      v: values ``[N, B, G, R, C, V]``.
      log_decay: the logarithm of a, 0 or less, ``[N, B, G, R, C]``.
      strength: b, from 0 to 1, ``[N, B, G, R, C]``.
      run: the number of samples that begin in the chunk up to a token, ``[N, B, C]``.
    """

    q: Float[Array, "N B G C K"]
    k: Float[Array, "N B G C K"]
    v: Float[Array, "N B G R C V"]
    log_decay: Float[Array, "N B G R C"]
    strength: Float[Array, "N B G R C"]
    run: Int[Array, "N B C"]


class Block(NamedTuple):
    """Quantities of a block's chunks that do not depend on the state, in fp32.

    Attributes:
      q, k: queries, times K^-0.5, and keys, of length 1.
      enter: e, the decay from the start of the chunk up to a token; 0 behind the start of a sample.
      leave: the decay from a token to the end of the chunk; 0 before the start of a sample.
      keep: the decay of the whole chunk.
      decay: D, 0 above the diagonal.
      scores: q kᵀ, and ``overlaps`` k kᵀ.
      solve: A.
      written: A b v.
      erased: A b e k.
    """

    q: Float[Array, "N B G C K"]
    k: Float[Array, "N B G C K"]
    enter: Float[Array, "N B G R C"]
    leave: Float[Array, "N B G R C"]
    keep: Float[Array, "N B G R"]
    decay: Float[Array, "N B G R C D"]
    scores: Float[Array, "N B G C D"]
    overlaps: Float[Array, "N B G C D"]
    solve: Float[Array, "N B G R C D"]
    written: Float[Array, "N B G R C V"]
    erased: Float[Array, "N B G R C K"]


@dataclass(frozen=True)
class ChunkRule:
    """The rule with the precision of its products.

    Attributes:
      precision: of products with fp32 numbers, on devices that have several.
    """

    precision: lax.Precision = lax.Precision.HIGHEST

    def block(self, heads: Heads) -> Block:
        """The quantities that do not depend on the state."""
        mul = self._mul
        q = unit(heads.q) * heads.q.shape[-1] ** -0.5
        k = unit(heads.k)
        same = _same_run(heads.run)
        coarse, fine = (_sums(same, part) for part in _parts(heads.log_decay))
        between = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
        decay = same[:, :, None, None] * jnp.exp(jnp.minimum(between, 0))
        enter = jnp.where((heads.run == 0)[:, :, None, None], jnp.exp(coarse + fine), 0)
        overlaps = mul("nbgck,nbgdk->nbgcd", k, k)
        strength = heads.strength
        solve = unit_lower_inverse(jnp.tril(strength[..., None] * overlaps[:, :, :, None] * decay, -1))
        return Block(
            q=q,
            k=k,
            enter=enter,
            leave=decay[..., -1, :],
            keep=enter[..., -1],
            decay=decay,
            scores=mul("nbgck,nbgdk->nbgcd", q, k),
            overlaps=overlaps,
            solve=solve,
            written=mul("nbgrcd,nbgrdv->nbgrcv", solve, strength[..., None] * heads.v.astype(jnp.float32)),
            erased=mul("nbgrcd,nbgrdk->nbgrck", solve, (strength * enter)[..., None] * k[:, :, :, None]),
        )

    def states(self, block: Block, state: Float[Array, "B G R K V"]) -> tuple[Array, Float[Array, "N B G R K V"]]:
        """The state behind the block and the states at the starts of its chunks, from the first of these."""
        mul = self._mul

        def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            k, leave, keep, written, erased = chunk
            x = written - mul("bgrck,bgrkv->bgrcv", erased, state)
            added = mul("bgck,bgrcv->bgrkv", k, leave[..., None] * x)
            return _kept(keep, state) + added, state

        return lax.scan(step, state, (block.k, block.leave, block.keep, block.written, block.erased))

    def outputs(self, block: Block, states: Array) -> Float[Array, "N B G R C V"]:
        """The values that tokens read, from the states at the starts of chunks."""
        mul, x = self._mul, self._writes(block, states)
        before = block.enter[..., None] * mul("nbgck,nbgrkv->nbgrcv", block.q, states)
        return before + mul("nbgrcd,nbgrdv->nbgrcv", block.scores[:, :, :, None] * block.decay, x)

    def state_gradient(self, block: Block, d_out: Array, d_state: Array) -> tuple[Array, Array]:
        """The gradient of the state at the block's start, and the gradients of the states behind its chunks.

        Args:
          block: the block.
          d_out: the gradient of ``outputs``.
          d_state: the gradient of the state behind the block.
        """
        mul = self._mul
        d_x = mul("nbgrcd,nbgrcv->nbgrdv", block.scores[:, :, :, None] * block.decay, d_out)
        read = mul("nbgck,nbgrcv->nbgrkv", block.q, block.enter[..., None] * d_out)

        def step(d_state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            k, leave, keep, erased, d_x, read = chunk
            d_x = d_x + leave[..., None] * mul("bgck,bgrkv->bgrcv", k, d_state)
            return _kept(keep, d_state) + read - mul("bgrck,bgrcv->bgrkv", erased, d_x), d_state

        chunks = (block.k, block.leave, block.keep, block.erased, d_x, read)
        return lax.scan(step, d_state, chunks, reverse=True)

    def gradients(self, heads: Heads, block: Block, states: Array, d_out: Array, d_states: Array) -> Heads:
        """Gradients of ``heads``, whose ``run`` has none (its numbers are returned).

        Args:
          heads, block: the tokens, and the result of ``block``.
          states: the states at the starts of chunks.
          d_out: the gradient of ``outputs``.
          d_states: the gradients of the states behind chunks.
        """
        mul, strength, enter = self._mul, heads.strength, block.enter
        x, decay = self._writes(block, states), block.decay
        scores, overlaps = block.scores[:, :, :, None], block.overlaps[:, :, :, None]
        d_x = mul("nbgrcd,nbgrcv->nbgrdv", scores * decay, d_out)
        d_x = d_x + block.leave[..., None] * mul("nbgck,nbgrkv->nbgrcv", block.k, d_states)
        # x = A r with r = b (v - e Sᵀk), and A the inverse of a matrix: d_r = Aᵀ d_x, and its own gradient is -d_r xᵀ.
        d_r = mul("nbgrcd,nbgrcv->nbgrdv", block.solve, d_x)
        d_decay = mul("nbgrcv,nbgrdv->nbgrcd", d_out, x) * decay
        d_lower = jnp.tril(-mul("nbgrcv,nbgrdv->nbgrcd", d_r, x), -1) * decay
        of_scores, of_overlaps = jnp.sum(d_decay, axis=3), jnp.sum(d_lower * strength[..., None], axis=3)
        read_q, read_k = (mul("nbgck,nbgrkv->nbgrcv", y, states) for y in (block.q, block.k))
        values = heads.v.astype(jnp.float32)
        d_strength = jnp.sum(d_r * (values - enter[..., None] * read_k), axis=-1) + jnp.sum(d_lower * overlaps, axis=-1)
        d_enter = jnp.sum(d_out * read_q, axis=-1) - strength * jnp.sum(d_r * read_k, axis=-1)
        of_states = mul("nbgrcv,nbgrkv->nbgrck", x, d_states)
        d_leave = jnp.sum(of_states * block.k[:, :, :, None], axis=-1)
        d_keep = jnp.sum(d_states * states, axis=(-1, -2))
        read_d = mul("nbgrcv,nbgrkv->nbgrck", d_r, states)
        d_q = mul("nbgcd,nbgdk->nbgck", of_scores, block.k)
        d_q += mul("nbgrc,nbgrcv,nbgrkv->nbgck", enter, d_out, states)
        d_k = mul("nbgcd,nbgck->nbgdk", of_scores, block.q)
        d_k += mul("nbgcd,nbgdk->nbgck", of_overlaps, block.k) + mul("nbgcd,nbgck->nbgdk", of_overlaps, block.k)
        d_k += jnp.sum(block.leave[..., None] * of_states - (strength * enter)[..., None] * read_d, axis=3)
        # Of sums of logarithms: e is exp of a sum, D of a difference of two.
        by_pair = d_decay * scores + d_lower * strength[..., None] * overlaps
        by_pair = by_pair.at[..., -1, :].add(d_leave * block.leave)
        d_sums = jnp.sum(by_pair, axis=-1) - jnp.sum(by_pair, axis=-2) + d_enter * enter
        d_sums = d_sums.at[..., -1].add(d_keep * block.keep)
        return Heads(
            q=unit_gradient(heads.q, d_q * heads.q.shape[-1] ** -0.5),
            k=unit_gradient(heads.k, d_k),
            v=strength[..., None] * d_r,
            log_decay=_sums(jnp.swapaxes(_same_run(heads.run), -1, -2), d_sums),
            strength=d_strength,
            run=heads.run,
        )

    def _writes(self, block: Block, states: Array) -> Float[Array, "N B G R C V"]:
        """The values that tokens write under their keys, x."""
        return block.written - self._mul("nbgrck,nbgrkv->nbgrcv", block.erased, states)

    def _mul(self, subscripts: str, *arrays: Array) -> Array:
        return jnp.einsum(subscripts, *arrays, precision=self.precision)


def unit(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """The vectors divided by their length, in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)


def unit_gradient(x: Float[Array, "*B K"], dy: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """The gradient of ``x``, from the gradient of ``unit(x)``."""
    x = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
    return inverse * dy - x * (inverse**3 * jnp.sum(x * dy, axis=-1, keepdims=True))


def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """The inverse of I + ``lower``, whose entries are 0 on and above the diagonal; C is a power of two.

    By halves: [[P, 0], [Q, R]]⁻¹ = [[P⁻¹, 0], [-R⁻¹ Q P⁻¹, R⁻¹]]. A series of powers of ``lower`` would take products
    alone too, and cancels for keys that are alike. Products are exact in fp32, since their errors grow in an inverse.
    """
    size = lower.shape[-1]
    if size <= _BASE:
        return _inverse_by_rows(lower)
    half = size // 2
    corners = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = unit_lower_inverse(corners)
    mul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    below = -mul(mul(second, lower[..., half:, :half]), first)
    upper = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _inverse_by_rows(lower: Array) -> Array:
    size = lower.shape[-1]
    rows: list[Array] = []
    for i in range(size):
        row = jnp.zeros_like(lower[..., i, :]).at[..., i].set(1)
        rows.append(row - sum(lower[..., i, j, None] * rows[j] for j in range(i)))
    return jnp.stack(rows, axis=-2)


def _same_run(run: Int[Array, "N B C"]) -> Float[Array, "N B C D"]:
    """1 where a token is of the same run as one that is not behind it, else 0."""
    return jnp.tril(run[..., :, None] == run[..., None, :]).astype(jnp.float32)


def _parts(log_decay: Float[Array, "*B"]) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Multiples of a small number, whose sums over a chunk are exact, and the rest.

    A decay between two tokens is a difference of sums, which may be large where the difference is small.
    """
    log_decay = jnp.maximum(log_decay, -_GONE)
    coarse = jnp.round(log_decay * _STEPS) / _STEPS
    return coarse, log_decay - coarse


def _sums(same: Float[Array, "N B C D"], x: Float[Array, "N B G R D"]) -> Float[Array, "N B G R C"]:
    return jnp.einsum("nbcd,nbgrd->nbgrc", same, x, precision=lax.Precision.HIGHEST)


def _kept(keep: Float[Array, "B G R"], state: Float[Array, "B G R K V"]) -> Array:
    """The decayed state; exactly 0 where a sample has begun."""
    return keep[..., None, None] * state
