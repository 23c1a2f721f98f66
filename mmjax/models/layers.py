"""Building blocks of modules, on local shards inside ``shard_map(check_vma=True)``.

Shapes: B rows, T tokens, D width, F hidden units local to this rank, K head width, V vocabulary local to this rank.
Tensor parallelism is explicit: the input of a column-parallel product is equal on all tp ranks, and its output is split
over them; a row-parallel product has a split input and sums its output with one ``psum``. Under sequence parallelism
(``Axes.sp``) the first gathers the tokens of all tp ranks, and the second scatters them.
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
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int, Real

from mmjax import jax_compat
from mmjax.attention.cache import Cache
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.mesh.spread import Axes
from mmjax.models.handles import opened
from mmjax.models.norms import repeated
from mmjax.models.sequence_parallel import NO_SP, SequenceParallel, sp_scatter
from mmjax.models.taps import Computed, Value, products, products_of_parts
from mmjax.models.weight_gradients import summed

Params = Mapping[str, Any]
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
}
"""Activation functions by the values of ``activation``, see ``choices.ACTIVATIONS``."""


def linear(
    x: Float[Array, "*B D"], w: Float[Array, "D F"], bias: Float[Array, " F"] | None = None
) -> Float[Array, "*B F"]:
    """``x @ w + bias``. Every product with a weight is computed here or in ``column_parallel`` (see ``taps``).

    The weight may be a handle, a tapped weight, or a weight with an adapter; the bias may be a handle.
    """
    (y,) = products(x, [w])
    return y if bias is None else y + repeated(bias, y)


def column_parallel(x_BTD: Array, weights: list[tuple[Array, Array | None]], axes: Axes) -> list[Array]:
    """Products of one input with several weights that are split by columns over tp; ``[B, T, F]`` for each.

    The input is made tp-varying once, so that backward sums the input gradients of all products before its only
    ``psum`` or ``psum_scatter``.

    Args:
      x_BTD: the input, equal on all tp ranks; under sequence parallelism this rank's tokens, and the results have those
        of all tp ranks.
      weights: this rank's columns ``[D, F]`` of each weight, and of its bias ``[F]`` or ``None``.
      axes: mesh axes by role, such as ``Axes()``.
    """
    return [y for (y,) in column_parallel_of_parts([x_BTD], weights, axes)]


def column_parallel_of_parts(
    parts: Sequence[Array], weights: list[tuple[Array, Array | None]], axes: Axes
) -> list[list[Array]]:
    """``column_parallel`` of each of a layer's parts of tokens (see ``TokenParts``): by weight, then by part."""
    sp = SequenceParallel(gather=axes.sp, ring=axes.overlap, halves=len(parts) == 1)
    inputs = [jax_compat.to_varying(x, axes.tp) for x in parts]
    results = products_of_parts(inputs, [w for w, _ in weights], sp)
    return [
        [y if bias is None else y + repeated(bias, y) for y in by_part]
        for by_part, (_, bias) in zip(results, weights, strict=True)
    ]


def row_parallel(x_BTF: Array | Computed, w_FD: Array, axes: Axes, bias: Array | None = None) -> Array:
    """Product ``[B, T, D]`` with a weight that is split by rows over tp; the bias is added once, after the sum.

    Args:
      x_BTF: this rank's hidden units of all tokens, or a function of arrays that gives them.
      w_FD: this rank's rows.
      axes: mesh axes by role, such as ``Axes()``; under sequence parallelism the result has this rank's tokens, else it
        is equal on all tp ranks.
      bias: the complete bias ``[D]``.
    """
    return row_parallel_of_parts([x_BTF], w_FD, axes, bias)[0]


def row_parallel_of_parts(
    parts: Sequence[Array | Computed], w_FD: Array, axes: Axes, bias: Array | None = None
) -> list[Array]:
    """``row_parallel`` of each of a layer's parts of tokens (see ``TokenParts``)."""
    sp = SequenceParallel(scatter=axes.sp, ring=axes.overlap, halves=len(parts) == 1) if axes.sp else NO_SP
    (results,) = products_of_parts(parts, [w_FD], sp)
    if not axes.sp:
        results = [lax.psum(y, axes.tp) for y in results]
    return [y if bias is None else y + repeated(bias, y) for y in results]


def saved(x: Array) -> Array:
    """``x`` by a name that ``remat='dots'`` keeps: products that backward needs for nothing else are not kept then."""
    return checkpoint_name(x, RESIDUAL_NAME)


def rotate(x_BTHK: Array, positions_BT: Int[Array, "B T"], theta: float) -> Array:
    """Rotary embedding of queries or keys, half-split convention: component ``i`` is paired with ``i + K/2``.

    ``theta`` is the base of the frequencies, as in ``frequencies``, and K is even; the result has the dtype of
    ``x_BTHK``.
    """
    return apply_rotary(x_BTHK, positions_BT, frequencies(x_BTHK.shape[-1], theta))


def frequencies(head_width: int, theta: float) -> Float[Array, " K/2"]:
    """Rotary frequencies of a head's pairs of components, in radians a position, fp32: theta^(-2i / K) for pair i."""
    half = head_width // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def apply_rotary(
    x_BTHK: Array,
    positions: Real[Array, "B T *A"],
    frequency_K: Float[Array, " K/2"],
    magnitude: float = 1.0,
    axis_of_pair: Sequence[int] = (),
) -> Array:
    """Rotary embedding with these frequencies, times a magnitude, in the dtype of ``x_BTHK``.

    Args:
      x_BTHK: queries or keys.
      positions: the position of each token, one number ``[B, T]``, or one along each of A axes.
      frequency_K: the frequency of each pair of components ``i`` and ``i + K/2``, in radians a position.
      magnitude: a factor of the result.
      axis_of_pair: with several axes, the axis whose number rotates each of the K/2 pairs, such as (0, 0, 1, 2). () for
        one number.
    """
    number_BTK = positions[..., np.array(axis_of_pair) if axis_of_pair else None]
    angle_BTK = number_BTK.astype(jnp.float32) * frequency_K
    cos, sin = (magnitude * fn(angle_BTK)[:, :, None] for fn in (jnp.cos, jnp.sin))
    x1, x2 = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTHK.dtype)


def rotate_axial(x_RTHK: Array, positions_RT2: Real[Array, "R T 2"], theta: float) -> Array:
    """Rotates half of a head's pairs by the patch's row, the others with the same frequencies by its column.

    Component ``i`` is paired with ``i + K/2``. Pairs 0 to K/4 - 1 are of the row, with the frequencies theta^(-4i / K)
    for i from 0, and pairs K/4 to K/2 - 1 of the column. ``positions_RT2`` are (row, column), and K is a multiple of 4.
    The result has the shape and dtype of ``x_RTHK``.
    """
    half = x_RTHK.shape[-1] // 4
    frequency_K = jnp.tile(frequencies(2 * half, theta), 2)
    return apply_rotary(x_RTHK, positions_RT2, frequency_K, axis_of_pair=(*[0] * half, *[1] * half))


def rotate_2d(x_RTHK: Array, positions_RT2: Int[Array, "R T 2"], theta: float = 100.0) -> Array:
    """Rotates the first half of each head by the patch's row, the second by its column.

    Inside each half component ``i`` is paired with ``i + K/4``, with the frequency theta^(-4i / K). ``positions_RT2``
    are (row, column), and K is a multiple of 4. The result has the shape and dtype of ``x_RTHK``.
    """
    by_row, by_column = jnp.split(x_RTHK, 2, axis=-1)
    return jnp.concatenate(
        [rotate(by_row, positions_RT2[..., 0], theta), rotate(by_column, positions_RT2[..., 1], theta)], axis=-1
    )


def split_heads(x_BTF: Array, head_width: int) -> Array:
    """``[B, T, H·K]`` to ``[B, T, H, K]``."""
    return x_BTF.reshape(*x_BTF.shape[:-1], -1, head_width)


def lookup(table_VD: Float[Array, "V D"], index: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """Rows of a table, an array or a handle; zeros where the index is negative.

    The gradient of a row is a sum over all places that read it, thousands for a frequent token. It is summed in fp32:
    in bf16 a sum stops growing after some hundred terms. The only residual is the index.
    """
    table_VD = opened(table_VD)
    like = Value.of(table_VD)

    @jax.custom_vjp
    def rows_of(table_VD: Array, index: Array) -> Array:
        rows = jnp.take(table_VD, jnp.maximum(index, 0), axis=0)
        return jnp.where((index >= 0)[..., None], rows, 0)

    def backward(index: Array, dy: Array) -> tuple[Array, None]:
        axes = jax_compat.varying_axes(dy) | jax_compat.varying_axes(index) | like.axes
        sums_VD = Value(like.shape, jnp.float32, axes).zeros()
        places = jnp.where(index >= 0, index, like.shape[0])
        sums_VD = sums_VD.at[places].add(dy.astype(jnp.float32), mode="drop")
        return summed(sums_VD.astype(like.dtype), like.axes), None

    rows_of.defvjp(lambda table, index: (rows_of(table, index), index), backward)
    return rows_of(table_VD, index)


def embed_tokens(tokens_BT: Int[Array, "B T"], table_VD: Array, axes: Axes) -> Float[Array, "B T D"]:
    """Token embeddings; the table's vocabulary is split over tp. Under ``Axes.sp`` those of this rank's tokens.

    Args:
      tokens_BT: ids in the complete vocabulary, of the tokens of all tp ranks; other ids have zeros.
      table_VD: this rank's rows of the table, an array or a handle.
      axes: mesh axes by role, such as ``Axes()``.
    """

    @jax.checkpoint  # otherwise the local indices would be residuals
    def local_rows(tokens_BT: Array, table_VD: Array) -> Array:
        local = tokens_BT - lax.axis_index(axes.tp) * table_VD.shape[0]
        is_local = (local >= 0) & (local < table_VD.shape[0])
        return lookup(table_VD, jnp.where(is_local, local, -1))

    local_BTD = local_rows(tokens_BT, table_VD)
    return sp_scatter(local_BTD, axes.sp) if axes.sp else lax.psum(local_BTD, axes.tp)


def residual_init(layers: int) -> Initializer:
    """Initializer of products that write to the residual stream of a module with so many layers.

    It is called with a key and a shape ``[inputs, outputs]``; the variance is 1 / (2 · layers · inputs).
    """
    return nnx.initializers.variance_scaling(1.0 / (2 * layers), "fan_in", "truncated_normal")


LAYER_INPUT = "layer_input"
"""The name of the features ``[B, T, P]`` that a layer reads beside its input, among its parameters."""
Sums = Mapping[str, Array]
"""Sums of losses over tokens, fp32 scalars by name; of a layer whose keys later ones read, keys and values too."""
Body = Callable[[Array, Params], tuple[Array, Sums]]
"""One layer: its input and its parameters, to its output and the sums of its losses, {} without losses."""


def scan_layers(
    body: Body,
    x: Array,
    layers: Params,
    remat: str,
    added: Mapping[int, Array] | None = None,
    keep: Sequence[int] = (),
) -> tuple[Array, dict[int, Array], Sums]:
    """Runs stacked layers one after another.

    Args:
      body: ``(x, params) -> (x, sums)``, the function of one layer.
      x: the input of the first layer.
      layers: the stacked parameters of the layers: a tree of arrays whose first dimension is layers.
      remat: a key of ``REMAT``, the checkpoint policy: "none", "dots" or "full".
      added: values of the shape of ``x`` that are added to the inputs of layers, by the layer's index in the stack.
      keep: indices in the stack of the layers whose outputs are returned too.

    Returns:
      The last output, the outputs of ``keep`` by index, and the sums of all layers.
    """
    xs: Any = layers
    if added:
        xs, body = _with_added(body, layers, added)
    policy = REMAT[remat]
    if keep:
        return _scan_and_keep(body if policy is None else jax.checkpoint(body, policy=policy), x, xs, keep)
    x, sums = lax.scan(body if policy is None else jax.checkpoint(body, policy=policy), x, xs)
    return x, {}, _over_layers(sums)


def _over_layers(sums: Sums) -> Sums:
    return {name: jnp.sum(by_layer, axis=0) for name, by_layer in sums.items()}


def _scan_and_keep(body: Body, x: Array, xs: Any, keep: Sequence[int]) -> tuple[Array, dict[int, Array], Sums]:
    """Scans with the outputs of ``keep`` in the carry, which is linear in them and so needs no more residuals."""
    count = len(jax.tree.leaves(xs)[0])
    slots = jnp.array([list(keep).index(layer) if layer in keep else -1 for layer in range(count)])
    like = Value.of(x)
    kept_NBTD = Value((len(keep), *like.shape), like.dtype, like.axes).zeros()

    def step(carry: tuple[Array, Array], layer: tuple[Any, Array]) -> tuple[tuple[Array, Array], Sums]:
        x, kept_NBTD = carry
        layer_xs, slot = layer
        x, sums = body(x, layer_xs)
        is_slot_N = jnp.arange(len(keep)) == slot
        return (x, jnp.where(is_slot_N[:, None, None, None], x, kept_NBTD)), sums

    (x, kept_NBTD), sums = lax.scan(step, (x, kept_NBTD), (xs, slots))
    return x, dict(zip(keep, kept_NBTD, strict=True)), _over_layers(sums)


def run_layer(
    body: Body,
    x: Array,
    layer: Params,
    remat: str,
    added: Mapping[int, Array] | None = None,
    keep: Sequence[int] = (),
) -> tuple[Array, dict[int, Array], Sums]:
    """Runs one layer that is not in a stack.

    Args:
      body: ``(x, params) -> (x, sums)``, the function of the layer.
      x: its input.
      layer: its parameters.
      remat: a key of ``REMAT``, the checkpoint policy: "none", "dots" or "full".
      added: values of the shape of ``x`` that are added to the input; the keys are not read.
      keep: [0] if the output is returned as kept too, else [].

    Returns:
      The output, and {0: output} if it is kept.
    """
    for value in (added or {}).values():
        x = x + value
    policy = REMAT[remat]
    x, sums = (body if policy is None else jax.checkpoint(body, policy=policy))(x, layer)
    return x, dict.fromkeys(keep, x), sums


def run_cached(
    cache: Cache,
    name: str,
    body: Body,
    x: Array,
    layers: Params,
    added: Mapping[int, Array],
    *,
    stacked: bool,
) -> Array:
    """Runs layers with a cache, and stores keys and values of the new tokens in ``cache.new[name]``; returns the last
    output.

    There is no backward.

    Args:
      cache: the cache of the stage, such as ``Cache(tokens)`` at the beginning of rows.
      name: the name of the layers in the cache, such as "layers".
      body: ``(x, params) -> (x, sums)``, the function of one layer, whose sums are not used.
      x: the input of the first layer.
      layers: parameters of the layers, stacked along a first dimension, or of one layer.
      added: values of the shape of ``x`` that are added to the inputs of layers, by index in the stack; {} for none.
      stacked: whether ``layers`` are stacked, or one layer.
    """
    xs: Any = layers
    if stacked and added:
        xs, body = _with_added(body, layers, added)
    elif added:
        x = x + sum(added.values())

    def step(x: Array, layer: tuple[Any, Any]) -> tuple[Array, tuple[Any, ...]]:
        layer_params, cached = layer
        with cache.layer(cached) as new:
            x, _ = body(x, layer_params)
        return x, tuple(new)

    with_cache = xs, cache.cached(name)
    x, cache.new[name] = lax.scan(step, x, with_cache) if stacked else step(x, with_cache)
    return x


def _with_added(body: Body, layers: Params, added: Mapping[int, Array]) -> tuple[Params, Body]:
    """The scanned tree and the body of a scan that adds values to the inputs of layers.

    The layers are not split into several scans: slices of the stack would be transformed weights, hence residuals.
    """
    values = jnp.stack(list(added.values()))
    count = len(jax.tree.leaves(layers)[0])
    slots = [list(added).index(layer) if layer in added else -1 for layer in range(count)]

    def with_added(x: Array, xs: Params) -> tuple[Array, Sums]:
        slot = xs["slot"]
        return body(x + jnp.where(slot >= 0, values[jnp.maximum(slot, 0)], 0), xs["layer"])

    return {"layer": layers, "slot": jnp.asarray(slots)}, with_added


REMAT: Mapping[str, Any] = {
    "auto": None,  # of modules that are in no run; in a run a recipe resolves it
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Checkpoint policies: a layer's residuals are everything, products and results of attention, or its input alone."""
