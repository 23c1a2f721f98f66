"""Gated delta networks as a layer's mixing of tokens (Yang et al., "Gated Delta Networks", 2025, §3.4).

Queries, keys and values are products of the features behind short causal convolutions; the delta rule mixes tokens in
the place of attention, and its output has a norm, and a gate of its own for each number. tp divides key heads, and with
them value heads.

Shapes: B rows, T tokens of all tp ranks, D width, G key heads and H value heads local to this rank, K and V widths of
keys and values, L taps of a convolution.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.attention.cache import State
from mmjax.models.context import Context
from mmjax.models.delta.config import DeltaSizes
from mmjax.models.delta.convolution import short_convolution
from mmjax.models.delta.rule import TokenHeads, delta_rule, starts_of
from mmjax.models.layers import Params, column_parallel, residual_init, split_heads
from mmjax.models.norms import repeated, rms_norm
from mmjax.models.recorded_work import record_work

_PRODUCTS = ("q", "k", "v", "gate", "decay", "strength")
_FILTERED = ("q", "k", "v")
FIRST_RATES = (0.01, 16.0)
"""Limits of a head's rate at the start; a token's decay is exp(-rate · softplus(decay + step_bias))."""
FIRST_STEPS = (0.001, 0.1)
"""Limits of softplus(step_bias) at the start, of which the logarithm is drawn."""


class GatedDelta(nnx.Module):
    """Parameters: products "q", "k" (``[D, G K]``), "v", "gate" (``[D, H V]``), "decay" and "strength" (``[D, H]``);
    filters "q_filter", "k_filter" and "v_filter" ``[channels, L]``; "log_rate" and "step_bias" ``[H]``; "norm" ``[V]``;
    and "o" ``[H V, D]``. Filters, "log_rate" and "step_bias" are fp32 in every dtype.
    """

    def __init__(self, c: DeltaSizes, rngs: nnx.Rngs):
        keys, values = c.heads * c.key_dim, c.value_heads * c.value_dim
        widths = {"q": keys, "k": keys, "v": values, "gate": values, "decay": c.value_heads, "strength": c.value_heads}
        for name, width in widths.items():
            value = nnx.initializers.lecun_normal()(rngs.params(), (c.width, width))
            setattr(self, name, nnx.Param(value, dims=("embed", "heads")))
        bound = c.taps**-0.5
        for name in _FILTERED:
            value = jax.random.uniform(rngs.params(), (widths[name], c.taps), minval=-bound, maxval=bound)
            setattr(self, f"{name}_filter", nnx.Param(value, dims=("heads", "taps"), in_fp32=True))
        rates = jax.random.uniform(rngs.params(), (c.value_heads,), minval=FIRST_RATES[0], maxval=FIRST_RATES[1])
        self.log_rate = nnx.Param(jnp.log(rates), dims=("heads",), in_fp32=True)
        low, high = map(math.log, FIRST_STEPS)
        steps = jnp.exp(jax.random.uniform(rngs.params(), (c.value_heads,), minval=low, maxval=high))
        self.step_bias = nnx.Param(jnp.log(jnp.expm1(steps)), dims=("heads",), in_fp32=True)
        self.norm = nnx.Param(jnp.ones(c.value_dim), dims=("head",))
        self.o = nnx.Param(residual_init(c.layers)(rngs.params(), (values, c.width)), dims=("heads", "embed"))


def mixed(c: DeltaSizes, context: Context, p: Params, h: Array) -> Float[Array, "B T H V"]:
    """The gated output of the delta rule, the input of the product "o", for the tokens of ``context.tokens``.

    To be called inside ``shard_map``.

    Args:
      c: the layer's sizes.
      context: the context of the layer; with ranks of cp their tokens are contiguous runs of rows.
      p: the parameters that ``GatedDelta`` names, arrays or handles.
      h: normed features, ``[B, T, D]`` of this rank's tokens under sequence parallelism, else ``[B·T, D]``.
    """
    a: Any = p
    segments_BT = context.tokens.segments_BT
    results = column_parallel(h, [(a[name], None) for name in _PRODUCTS], context.axes)
    x = {name: y.reshape(*segments_BT.shape, -1) for name, y in zip(_PRODUCTS, results, strict=True)}
    before = _before(context, c.taps - 1, [x[name] for name in _FILTERED])
    segments_BS = jnp.concatenate([before.segments, segments_BT], axis=1)
    behind = [jnp.concatenate([tail, x[name]], 1) for tail, name in zip(before.tails, _FILTERED, strict=True)]
    q, k, v = (
        short_convolution(y, a[f"{name}_filter"], segments_BS) for y, name in zip(behind, _FILTERED, strict=True)
    )
    heads = TokenHeads(
        split_heads(q, c.key_dim),
        split_heads(k, c.key_dim),
        split_heads(v, c.value_dim),
        log_decay=_log_decay(x["decay"], a["log_rate"], a["step_bias"]),
        strength=jax.nn.sigmoid(x["strength"].astype(jnp.float32)),
    )
    _record(c, heads, q.size + k.size + v.size)
    starts_BT = starts_of(segments_BT, before.segments[:, -1:])
    axes = context.axes.positions
    y_BTHV, state = delta_rule(heads, segments_BT, starts_BT, state=before.state, axes=axes)
    if context.cache:
        context.cache.store(_cached(c, state, behind, segments_BT))
    y_BTHV = rms_norm(y_BTHV, a["norm"], c.eps)
    return _gated(y_BTHV, split_heads(x["gate"], c.value_dim))


@jax.checkpoint  # the rates, which depend on parameters alone, would be a residual
def _log_decay(decay_BTH: Array, log_rate_H: Array, step_bias_H: Array) -> Float[Array, "B T H"]:
    """The logarithm of each token's decay, 0 or less, in fp32."""
    decay_BTH = decay_BTH.astype(jnp.float32)
    steps_BTH = jax.nn.softplus(decay_BTH + repeated(step_bias_H, decay_BTH).astype(jnp.float32))
    return -jnp.exp(repeated(log_rate_H, decay_BTH).astype(jnp.float32)) * steps_BTH


def _gated(y: Array, gate: Array) -> Array:
    """The output times silu of its gate, in fp32 until it is rounded."""
    return (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(y.dtype)


def _record(c: DeltaSizes, heads: TokenHeads, channels: int) -> None:
    """Records the FLOPs of the recurrence, one token after another, and of convolutions.

    A head's state is read for its key and for its query, and written: 6 · K · V. Chunks compute more.
    """
    record_work(6 * c.key_dim * heads.v.size + 2 * c.taps * channels)


# ---- tokens before the first -----------------------------------------------------------------------------------------


class _Before(NamedTuple):
    """The tokens before this rank's, as convolutions and states need them.

    Attributes:
      tails: the last ``L - 1`` of them, ``[B, L - 1, channels]`` for each convolution; zeros before a row's first.
      segments: their segments; 0 before a row's first.
      state: the state behind them, in generation; else ``None``.
    """

    tails: list[Array]
    segments: Int[Array, "B L-1"]
    state: Array | None = None


def _before(context: Context, count: int, xs: list[Array]) -> _Before:
    """The last ``count`` tokens before those of ``xs``, the inputs of convolutions."""
    segments_BT = context.tokens.segments_BT
    cached = context.cache.state() if context.cache else None
    if cached is not None:
        state_BKHV, *tails = cached
        # All tokens of a row are of one sample.
        segments = jnp.broadcast_to(segments_BT[:, :1], (len(segments_BT), count))
        return _Before([tail.reshape(*tail.shape[:2], -1) for tail in tails], segments, state_BKHV.swapaxes(1, 2))
    if axes := context.axes.positions:
        if segments_BT.shape[1] < count:
            raise ValueError(
                f"a rank of cp has {segments_BT.shape[1]} tokens of a row; a convolution reads {count} more"
            )
        widths = np.cumsum([x.shape[-1] for x in xs[:-1]])
        tails = jnp.split(_of_rank_before(jnp.concatenate([x[:, -count:] for x in xs], axis=-1), axes), widths, axis=-1)
        return _Before(tails, _of_rank_before(segments_BT[:, -count:], axes))
    tails = [jnp.zeros_like(x, shape=(len(x), count, x.shape[-1])) for x in xs]
    return _Before(tails, jnp.zeros_like(segments_BT, shape=(len(segments_BT), count)))


def _of_rank_before(x: Array, axes: tuple[str, ...]) -> Array:
    """The array of the rank before this one; zeros on the first."""
    return lax.ppermute(x, axes, [(rank, rank + 1) for rank in range(lax.axis_size(axes) - 1)])


def _cached(c: DeltaSizes, state: Array, behind: list[Array], segments_BT: Array) -> State:
    """The state and the last tokens of each convolution, with heads in the dimension that keys in a cache have."""
    T = segments_BT.shape[1]
    last_B1 = jnp.max(jnp.where(segments_BT != 0, jnp.arange(1, T + 1), 0), axis=1, keepdims=True)
    places_BL = last_B1 + jnp.arange(c.taps - 1)
    tails = [jnp.take_along_axis(x, places_BL[..., None], axis=1) for x in behind]
    widths = (c.key_dim, c.key_dim, c.value_dim)
    return State((state.swapaxes(1, 2), *(split_heads(x, width) for x, width in zip(tails, widths, strict=True))))
