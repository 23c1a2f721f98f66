"""Building blocks of every module, on local shards inside ``shard_map(check_vma=True)``.

Shapes: B rows, T tokens, D width, F hidden units local to this rank, K head width, V vocabulary local to this rank.
Tensor parallelism is explicit: a column-parallel product gives a value that is split over tp ranks, from one that all
of them have; a row-parallel product takes it back with one ``psum``. Where these ranks share the tokens (``Axes.sp``),
the first brings their tokens together, and the second leaves every rank its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention.by_hand import KEPT
from mmjax.attention.cache import Cache
from mmjax.mesh.spread import Axes
from mmjax.models.handles import opened
from mmjax.models.shared import Exchange, scattered
from mmjax.models.taps import Value, products, summed

Params = Mapping[str, Any]
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
}
"""By their names in configurations, see ``choices.ACTIVATIONS``."""
PADDED = np.float32(-1e30)
"""Logit of an entry that pads the vocabulary: a finite minus infinity."""


def linear(
    x: Float[Array, "*B D"], w: Float[Array, "D F"], bias: Float[Array, " F"] | None = None
) -> Float[Array, "*B F"]:
    """``x @ w + bias``. Every product with a weight goes through here or ``column_parallel`` (see ``taps``)."""
    (y,) = products(x, [w])
    return y if bias is None else y + repeated(bias, y)


def column_parallel(x_BTD: Array, weights: list[tuple[Array, Array | None]], axes: Axes) -> list[Array]:
    """Products of one input with several weights split by columns over tp.

    The input is made tp-varying once, so that backward sums the products' input gradients before its one ``psum`` or
    ``psum_scatter``.
    """
    exchange = Exchange(gather=axes.sp, ring=axes.overlap)
    results = products(jax_compat.to_varying(x_BTD, axes.tp), [w for w, _ in weights], exchange)
    return [y if bias is None else y + repeated(bias, y) for y, (_, bias) in zip(results, weights, strict=True)]


def row_parallel(x_BTF: Array, w_FD: Array, axes: Axes, bias: Array | None = None) -> Array:
    """Product with a weight split by rows over tp; the bias is added once, after the sum."""
    if axes.sp:
        (y,) = products(x_BTF, [w_FD], Exchange(scatter=axes.sp, ring=axes.overlap))
    else:
        y = lax.psum(linear(x_BTF, w_FD), axes.tp)
    return y if bias is None else y + repeated(bias, y)


def repeated(p_D: Array, x_BTD: Array) -> Array:
    """A feature parameter repeated at every token of ``x``; its gradient, a sum over all tokens, is taken in fp32."""
    p_D = opened(p_D)
    return jnp.broadcast_to(p_D.astype(jnp.float32), x_BTD.shape).astype(p_D.dtype)


def rms_norm(x_BTD: Array, scale_D: Array, eps: float) -> Array:
    """RMSNorm; statistics in fp32, the scale as it is: a cast of it would be one more copy kept for backward."""
    x32 = x_BTD.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return scaled(y.astype(x_BTD.dtype), scale_D)


def layer_norm(x_BTD: Array, p: Params, eps: float = 1e-6) -> Array:
    """LayerNorm; statistics in fp32, scale and bias as they are."""
    y = scaled(normalised(x_BTD, eps), p["scale"])
    return y + repeated(p["bias"], y)


def any_norm(x_BTD: Array, p: Params, eps: float = 1e-6) -> Array:
    """LayerNorm, or RMSNorm where there is no bias."""
    return layer_norm(x_BTD, p, eps) if "bias" in p else rms_norm(x_BTD, p["scale"], eps)


def normalised(x_BTD: Array, eps: float = 1e-6) -> Array:
    """LayerNorm without scale and bias; statistics in fp32."""
    x32 = x_BTD.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)).astype(x_BTD.dtype)


@jax.checkpoint
def scaled(x_BTD: Array, scale_D: Array) -> Array:
    """Product with a scale. Checkpointed, or backward would keep a broadcast copy of the scale per microbatch."""
    return x_BTD * repeated(scale_D, x_BTD)


def rotate(x_BTHK: Array, positions_BT: Int[Array, "B T"], theta: float) -> Array:
    """Rotary embedding, half-split convention: component ``i`` is paired with ``i + K/2``."""
    return turned(x_BTHK, positions_BT, frequencies(x_BTHK.shape[-1], theta))


def frequencies(head_width: int, theta: float) -> Float[Array, " K/2"]:
    """Rotary frequencies of a head's pairs of components, in radians a position: from 1 down to almost 1 / theta."""
    half = head_width // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def turned(
    x_BTHK: Array,
    positions: Int[Array, "B T *A"],
    frequency_K: Float[Array, " K/2"],
    magnitude: float = 1.0,
    sections: Sequence[int] = (),
) -> Array:
    """Rotary embedding by given frequencies, times a magnitude.

    Args:
      x_BTHK: queries or keys.
      positions: a number for each token, or one along each of several axes.
      frequency_K: of each pair of components, in radians a position.
      magnitude: see above.
      sections: with several axes, how many pairs are turned by the first of them, by the second, and so on.
    """
    number_BTK = positions[..., np.repeat(np.arange(len(sections)), sections) if sections else None]
    angle_BTK = number_BTK.astype(jnp.float32) * frequency_K
    cos, sin = (magnitude * fn(angle_BTK)[:, :, None] for fn in (jnp.cos, jnp.sin))
    x1, x2 = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTHK.dtype)


def rotate_axial(x_RTHK: Array, positions_RT2: Int[Array, "R T 2"], theta: float) -> Array:
    """Turns the first half of a head's pairs by the patch's row, the second half, as fast, by its column."""
    half = x_RTHK.shape[-1] // 4
    frequency_K = jnp.tile(frequencies(2 * half, theta), 2)
    return turned(x_RTHK, positions_RT2, frequency_K, sections=(half, half))


def rotate_2d(x_RTHK: Array, positions_RT2: Int[Array, "R T 2"], theta: float = 100.0) -> Array:
    """Rotates the first half of each head by the patch's row, the second by its column."""
    by_row, by_column = jnp.split(x_RTHK, 2, axis=-1)
    return jnp.concatenate(
        [rotate(by_row, positions_RT2[..., 0], theta), rotate(by_column, positions_RT2[..., 1], theta)], axis=-1
    )


def split_heads(x_BTF: Array, head_width: int) -> Array:
    """``[B, T, H·K]`` to ``[B, T, H, K]``."""
    return x_BTF.reshape(*x_BTF.shape[:-1], -1, head_width)


def lookup(table_VD: Float[Array, "V D"], index: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """Rows of a table, zeros where the index is -1.

    The gradient of a row is a sum over all places that read it, thousands for a frequent token. It is taken in fp32: in
    bf16 a sum stops growing after some hundred terms. Only the index is kept for backward.
    """
    table_VD = opened(table_VD)
    like = Value.of(table_VD)

    @jax.custom_vjp
    def rows(table_VD: Array, index: Array) -> Array:
        found = jnp.take(table_VD, jnp.maximum(index, 0), axis=0)
        return jnp.where((index >= 0)[..., None], found, 0)

    def backward(index: Array, dy: Array) -> tuple[Array, None]:
        axes = jax_compat.varying_axes(dy) | jax_compat.varying_axes(index) | like.axes
        sums_VD = Value(like.shape, jnp.float32, axes).zeros()
        places = jnp.where(index >= 0, index, like.shape[0])
        sums_VD = sums_VD.at[places].add(dy.astype(jnp.float32), mode="drop")
        return summed(sums_VD.astype(like.dtype), like.axes), None

    rows.defvjp(lambda table, index: (rows(table, index), index), backward)
    return rows(table_VD, index)


def embed_tokens(tokens_BT: Int[Array, "B T"], table_VD: Array, axes: Axes) -> Float[Array, "B T D"]:
    """Rows of a table whose vocabulary is split over tp; of this rank's tokens where ranks of tp share them."""

    @jax.checkpoint  # else backward would keep the tokens' places in this rank's part of the table
    def found(tokens_BT: Array, table_VD: Array) -> Array:
        local = tokens_BT - lax.axis_index(axes.tp) * table_VD.shape[0]
        mine = (local >= 0) & (local < table_VD.shape[0])
        return lookup(table_VD, jnp.where(mine, local, -1))

    parts_BTD = found(tokens_BT, table_VD)
    return scattered(parts_BTD, axes.sp) if axes.sp else lax.psum(parts_BTD, axes.tp)


def vocabulary_logits(x_BTD: Array, head_DV: Array, axes: Axes, vocab: int) -> Float[Array, "B T V"]:
    """fp32 logits of this rank's part of the vocabulary; padded entries are ``PADDED``."""
    (logits,) = column_parallel(x_BTD, [(head_DV, None)], axes)
    index_V = lax.axis_index(axes.tp) * head_DV.shape[1] + jnp.arange(head_DV.shape[1])
    return jnp.where(index_V < vocab, logits.astype(jnp.float32), PADDED)


def log_sum_exp(logits_BTV: Array, axes: Axes) -> Float[Array, "B T"]:
    """Logarithm of the softmax's denominator with the vocabulary split over tp."""
    top_BT = lax.pmax(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), axes.tp)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits_BTV - top_BT[..., None]), axis=-1), axes.tp)) + top_BT


def cross_entropy(logits_BTV: Array, targets_BT: Int[Array, "B T"], axes: Axes) -> Float[Array, "B T"]:
    """Negative log likelihood with the vocabulary split over tp; no rank ever holds all logits."""
    log_sum_BT = log_sum_exp(logits_BTV, axes)
    local = targets_BT - lax.axis_index(axes.tp) * logits_BTV.shape[-1]
    mine = (local >= 0) & (local < logits_BTV.shape[-1])
    picked = jnp.take_along_axis(logits_BTV, jnp.clip(local, 0, logits_BTV.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    return log_sum_BT - lax.psum(jnp.where(mine, picked, 0.0), axes.tp)


def best_token(logits_BTV: Array, axes: Axes) -> Int[Array, "B T"]:
    """Index of the largest logit over the whole vocabulary; the lowest index among equals."""
    best = jnp.argmax(logits_BTV, axis=-1)
    value = jnp.take_along_axis(logits_BTV, best[..., None], axis=-1)[..., 0]
    top = lax.pmax(value, axes.tp)
    index = (best + lax.axis_index(axes.tp) * logits_BTV.shape[-1]).astype(jnp.int32)
    return lax.pmin(jnp.where(value == top, index, jnp.iinfo(jnp.int32).max), axes.tp)


def residual_init(layers: int) -> Initializer:
    """Initializer of products that end in the residual stream of ``layers`` blocks: the deeper, the smaller."""
    return nnx.initializers.variance_scaling(1.0 / (2 * layers), "fan_in", "truncated_normal")


def scan_layers(
    body: Callable[[Array, Params], Array],
    x: Array,
    layers: Params,
    remat: str,
    added: Mapping[int, Array] | None = None,
    keep: Sequence[int] = (),
) -> tuple[Array, dict[int, Array]]:
    """Runs stacked layers one after another.

    Args:
      body: one layer.
      x: input of the first.
      layers: their parameters, stacked.
      remat: a key of ``REMAT``: how much is kept for backward.
      added: what is added to the inputs of layers, of the shape of ``x``, by the layer's number in the stack.
      keep: numbers of layers in the stack whose outputs are given too.

    Returns:
      The last output, and those of ``keep``.
    """
    given: Any = layers
    if added:
        given, body = _with_added(body, layers, added)
    policy = REMAT[remat]
    if keep:
        return _scan_keeping(body if policy is None else jax.checkpoint(body, policy=policy), x, given, keep)
    step = lambda x, p: (body(x, p), None)  # noqa: E731
    return lax.scan(step if policy is None else jax.checkpoint(step, policy=policy), x, given)[0], {}


def _scan_keeping(
    body: Callable[[Array, Any], Array], x: Array, given: Any, keep: Sequence[int]
) -> tuple[Array, dict[int, Array]]:
    """Scans with the outputs of some layers in the carry, which is linear in them: backward keeps nothing more."""
    count = len(jax.tree.leaves(given)[0])
    slots = jnp.array([list(keep).index(layer) if layer in keep else -1 for layer in range(count)])
    like = Value.of(x)
    kept_NBTD = Value((len(keep), *like.shape), like.dtype, like.axes).zeros()

    def step(carry: tuple[Array, Array], given: tuple[Any, Array]) -> tuple[tuple[Array, Array], None]:
        x, kept_NBTD = carry
        x = body(x, given[0])
        here_N = jnp.arange(len(keep)) == given[1]
        return (x, jnp.where(here_N[:, None, None, None], x, kept_NBTD)), None

    (x, kept_NBTD), _ = lax.scan(step, (x, kept_NBTD), (given, slots))
    return x, dict(zip(keep, kept_NBTD, strict=True))


def run_layer(
    body: Callable[[Array, Params], Array],
    x: Array,
    layer: Params,
    remat: str,
    added: Mapping[int, Array] | None = None,
    keep: Sequence[int] = (),
) -> tuple[Array, dict[int, Array]]:
    """Runs one layer that is not in a stack; for arguments and results see ``scan_layers``."""
    for value in (added or {}).values():
        x = x + value
    policy = REMAT[remat]
    x = (body if policy is None else jax.checkpoint(body, policy=policy))(x, layer)
    return x, dict.fromkeys(keep, x)


def run_cached(
    cache: Cache,
    name: str,
    body: Callable[[Array, Params], Array],
    x: Array,
    layers: Params,
    added: Mapping[int, Array],
    *,
    stacked: bool,
) -> Array:
    """Runs layers whose attention reads a cache, and leaves keys and values of the new tokens in ``cache.new[name]``.

    Nothing is kept for a backward. For ``body``, ``x``, ``layers`` and ``added`` see ``scan_layers``.

    Args:
      cache: the cache of the stage.
      name: name of the layers in it.
      stacked: whether ``layers`` are a stack, or one layer.
    """
    given: Any = layers
    if stacked and added:
        given, body = _with_added(body, layers, added)
    elif added:
        x = x + sum(added.values())

    def step(x: Array, given: tuple[Any, Any]) -> tuple[Array, tuple[Any, ...]]:
        own, held = given
        with cache.layer(held) as new:
            x = body(x, own)
        return x, tuple(new)

    xs = given, cache.held(name)
    x, cache.new[name] = lax.scan(step, x, xs) if stacked else step(x, xs)
    return x


def _with_added(
    body: Callable[[Array, Params], Array], layers: Params, added: Mapping[int, Array]
) -> tuple[Params, Callable[[Array, Params], Array]]:
    """The scanned tree and the body of a scan that adds values to the inputs of layers.

    The layers stay one stack: slices of it would be transformed weights, which backward would have to keep.
    """
    values = jnp.stack(list(added.values()))
    count = len(jax.tree.leaves(layers)[0])
    slots = [list(added).index(layer) if layer in added else -1 for layer in range(count)]

    def with_added(x: Array, given: Params) -> Array:
        slot = given["slot"]
        return body(x + jnp.where(slot >= 0, values[jnp.maximum(slot, 0)], 0), given["layer"])

    return {"layer": layers, "slot": jnp.asarray(slots)}, with_added


REMAT: Mapping[str, Any] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(KEPT)
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Checkpoint policies: a layer keeps for its backward everything; products and what attention makes; its input only."""
