"""Grouped products: rows that are sorted by expert, each group of rows times the weight of its expert.

``y[i] = x[i] · w[e(i)]``, the product of dropless mixture of experts (Gale et al., "MegaBlocks", §5.1). The number of
rows of a group is known on the device alone, and shapes are static, so a group is computed in blocks of rows, as many
as it has. Rows of the next group in a group's last block are computed again afterwards.

Shapes: M rows, D inputs, F outputs, E experts, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.handles import adapted_products, opened
from mmjax.models.recorded_work import record_product
from mmjax.models.taps import PRODUCT, Tapped, Value, record_uses, with_mark
from mmjax.models.weight_gradients import summed

BLOCKS = (256, 32)
"""Rows of a block. Large blocks come first, and small ones are for the rest of a group."""


def grouped_products(
    x_MD: Float[Array, "M D"], weights: Sequence[Any], sizes_E: Int[Array, " E"]
) -> list[Float[Array, "M F"]]:
    """``x[i] @ w[e(i)]`` for every weight, inside ``shard_map``; rows behind the last group are zeros.

    Args:
      x_MD: rows, sorted by expert from the first.
      weights: arrays ``[E, D, F]``, handles of them, tapped weights, or weights with an adapter.
      sizes_E: number of rows of each expert.
    """
    multiply = partial(_products, sizes_E=sizes_E)
    return adapted_products(x_MD, weights, multiply, multiply)


def _products(x_MD: Array, weights: Sequence[Any], sizes_E: Array) -> list[Array]:
    """``grouped_products`` of weights without adapters."""
    for weight in weights:
        record_product(x_MD, weight)
    marked = [with_mark(weight, PRODUCT) for weight in weights]
    with_taps = [w for w in marked if isinstance(w, Tapped) and w.dy is not None]
    of_taps = iter(_tapped_products(x_MD, with_taps, sizes_E) if with_taps else ())
    results = [
        next(of_taps)
        if isinstance(w, Tapped) and w.dy is not None
        else _opened_product(x_MD, w.weight if isinstance(w, Tapped) else w, sizes_E)
        for w in marked
    ]
    record_uses(x_MD, marked, results, sizes=Value(sizes_E.shape, jnp.float32, jax_compat.varying_axes(sizes_E)))
    return results


def _opened_product(x_MD: Array, weight: Any, sizes_E: Array) -> Array:
    """The product with one weight; an opened or broadcast weight is no residual, but recomputed in backward."""

    def product(x_MD: Array, weight: Any) -> Array:
        w_EDF = opened(weight)
        axes = sorted(jax_compat.varying_axes(x_MD) | jax_compat.varying_axes(w_EDF))
        return _product(jax_compat.to_varying(x_MD, axes), jax_compat.to_varying(w_EDF, axes), sizes_E)

    return checkpoint_name(jax.checkpoint(product)(x_MD, weight), RESIDUAL_NAME)


def _tapped_products(x_MD: Array, weights: Sequence[Tapped], sizes_E: Array) -> list[Array]:
    (leader,) = [w for w in weights if w.x is not None]
    taps = leader.x, leader.sizes, [w.dy for w in weights]
    return [checkpoint_name(y, RESIDUAL_NAME) for y in _tapped(x_MD, [w.weight for w in weights], sizes_E, taps)]


@jax.custom_vjp
def _tapped(x_MD: Array, weights: list[Any], sizes_E: Array, taps: Any) -> list[Array]:
    return [_by_blocks(x_MD, opened(w), sizes_E) for w in weights]


def _tapped_forward(x_MD: Array, weights: list[Any], sizes_E: Array, taps: Any) -> tuple[list[Array], Any]:
    return _tapped(x_MD, weights, sizes_E, taps), (x_MD, weights, sizes_E)


def _tapped_backward(residuals: Any, dys: list[Array]) -> tuple[Any, ...]:
    x_MD, weights, sizes_E = residuals
    dx_MD = sum(_by_blocks(dy, jnp.swapaxes(opened(w), 1, 2), sizes_E) for dy, w in zip(dys, weights, strict=True))
    dx_MD = summed(jnp.asarray(dx_MD, x_MD.dtype), jax_compat.varying_axes(x_MD))
    return dx_MD, None, None, (x_MD, sizes_E.astype(jnp.float32), dys)


_tapped.defvjp(_tapped_forward, _tapped_backward)


def grouped_weight_gradient(
    x: Float[Array, "*L M D"], dy: Float[Array, "*L M F"], sizes: Float[Array, "*L E"], like: Array
) -> Float[Array, "*L E D F"]:
    """``xᵀ · dy`` of each group, fp32, for the layers of a stack in turn.

    Args:
      x, dy: input and gradient of the output of a grouped product.
      sizes: number of rows of each expert.
      like: an array with the varying axes of the result, which is summed over all others.
    """

    def of_layer(arrays: tuple[Array, Array, Array]) -> Array:
        x_MD, dy_MF, sizes_E = arrays
        return _weight_gradients(x_MD, dy_MF, sizes_E.astype(jnp.int32))

    gradient = lax.map(of_layer, (x, dy, sizes)) if x.ndim == 3 else of_layer((x, dy, sizes))
    return summed(gradient, jax_compat.varying_axes(like))


@jax.custom_vjp
def _product(x_MD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    return _by_blocks(x_MD, w_EDF, sizes_E)


def _forward(x_MD: Array, w_EDF: Array, sizes_E: Array) -> tuple[Array, Any]:
    return _by_blocks(x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _backward(residuals: Any, dy_MF: Array) -> tuple[Array, Array, None]:
    x_MD, w_EDF, sizes_E = residuals
    dx_MD = _by_blocks(dy_MF, jnp.swapaxes(w_EDF, 1, 2), sizes_E).astype(x_MD.dtype)
    dw_EDF = _weight_gradients(x_MD, dy_MF, sizes_E).astype(w_EDF.dtype)
    return summed(dx_MD, jax_compat.varying_axes(x_MD)), summed(dw_EDF, jax_compat.varying_axes(w_EDF)), None


_product.defvjp(_forward, _backward)


def _by_blocks(x_MD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """The product of each group with its weight, in blocks of rows."""
    x_MD, w_EDF, ends_E = jax_compat.alike(_padded(x_MD), w_EDF, jnp.cumsum(sizes_E))
    y_MF = Value((x_MD.shape[0], w_EDF.shape[2]), x_MD.dtype, jax_compat.varying_axes(x_MD)).zeros()

    def expert(y_MF: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        w_DF, start, end = group

        def block(rows: int, at: Array, y_MF: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(y_MF, lax.dynamic_slice_in_dim(x_MD, at, rows) @ w_DF, at, 0)

        return _over_blocks(block, y_MF, start, end), None

    y_MF, _ = lax.scan(expert, y_MF, (w_EDF, ends_E - sizes_E, ends_E))
    rows_M = jnp.arange(y_MF.shape[0] - BLOCKS[0])
    return jnp.where((rows_M < ends_E[-1])[:, None], y_MF[: -BLOCKS[0]], 0)


def _weight_gradients(x_MD: Array, dy_MF: Array, sizes_E: Array) -> Float[Array, "E D F"]:
    """``xᵀ · dy`` of each group, fp32."""
    x_MD, dy_MF, ends_E = jax_compat.alike(_padded(x_MD), _padded(dy_MF), jnp.cumsum(sizes_E))
    shape, axes = (x_MD.shape[1], dy_MF.shape[1]), jax_compat.varying_axes(x_MD)

    def expert(_: None, group: tuple[Array, Array]) -> tuple[None, Array]:
        start, end = group

        def block(rows: int, at: Array, dw_DF: Array) -> Array:
            x_BD, dy_BF = (lax.dynamic_slice_in_dim(a, at, rows) for a in (x_MD, dy_MF))
            is_in_group = (at + jnp.arange(rows) < end)[:, None]
            x_BD, dy_BF = (jnp.where(is_in_group, a, 0) for a in (x_BD, dy_BF))
            return dw_DF + lax.dot_general(x_BD, dy_BF, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        return None, _over_blocks(block, Value(shape, jnp.float32, axes).zeros(), start, end)

    return lax.scan(expert, None, (ends_E - sizes_E, ends_E))[1]


def _over_blocks(block: Callable[[int, Array, Array], Array], carry: Array, start: Array, end: Array) -> Array:
    """Calls ``block(rows, first row, carry) -> carry`` for blocks that cover the rows from ``start`` to ``end``."""
    for rows in BLOCKS:
        is_last = rows == BLOCKS[-1]
        count = jnp.maximum(end - start + (rows - 1 if is_last else 0), 0) // rows
        first = start

        def turn(i: Array, carry: Array, rows: int = rows, first: Array = first) -> Array:
            return block(rows, first + i * rows, carry)

        carry = lax.fori_loop(jnp.zeros_like(count), count, turn, carry)
        start = start + count * rows
    return carry


def _padded(x_MD: Array) -> Array:
    """The rows, with zeros behind them for the last block."""
    return jnp.pad(x_MD, ((0, BLOCKS[0]), (0, 0)))
