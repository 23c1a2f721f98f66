"""Grouped products: rows that are sorted by expert, each group of rows times the weight of its expert.

``y[i] = x[i] · w[e(i)]``, the product of dropless mixture of experts (Gale et al., "MegaBlocks", §5.1). The number of
rows of a group is known on the device alone, and shapes are static. NVIDIA GPUs have kernels for it
(``grouped_kernels``), other devices compute groups in blocks of rows (``grouped_blocks``).

Shapes: M rows, D inputs, F outputs, E experts, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.experts import grouped_blocks, grouped_kernels
from mmjax.models.experts.dispatch import Rows
from mmjax.models.handles import adapted_products, opened
from mmjax.models.recorded_work import record_product
from mmjax.models.taps import PRODUCT, Tapped, Value, record_uses, with_mark
from mmjax.models.weight_gradients import summed


def grouped_products(
    x_MD: Float[Array, "M D"], weights: Sequence[Any], sizes_E: Int[Array, " E"]
) -> list[Float[Array, "M F"]]:
    """``x[i] @ w[e(i)]`` for every weight, inside ``shard_map``; rows behind the last group are zeros.

    Args:
      x_MD: rows, sorted by expert from the first.
      weights: arrays ``[E, D, F]``, handles of them, tapped weights, or weights with an adapter.
      sizes_E: number of rows of each expert.
    """
    multiply = partial(_tapped_or_opened, sizes_E=sizes_E)
    return adapted_products(x_MD, weights, multiply, multiply)


def _tapped_or_opened(x_MD: Array, weights: Sequence[Any], sizes_E: Array) -> list[Array]:
    """``grouped_products`` of weights without adapters."""
    for weight in weights:
        record_product(x_MD, weight)
    marked = [with_mark(weight, PRODUCT) for weight in weights]
    with_taps = [w for w in marked if _has_tap(w)]
    without_taps = [w.weight if isinstance(w, Tapped) else w for w in marked if not _has_tap(w)]
    of_taps = iter(_tapped_products(x_MD, with_taps, sizes_E) if with_taps else ())
    of_others = iter(_opened_products(x_MD, without_taps, sizes_E) if without_taps else ())
    results = [next(of_taps if _has_tap(w) else of_others) for w in marked]
    record_uses(x_MD, marked, results, sizes=Value(sizes_E.shape, jnp.float32, jax_compat.varying_axes(sizes_E)))
    return results


def _has_tap(weight: Any) -> bool:
    """Whether the weight's gradient is left to a W op."""
    return isinstance(weight, Tapped) and weight.dy is not None


def _opened_products(x_MD: Array, weights: Sequence[Any], sizes_E: Array) -> list[Array]:
    """The products; an opened or broadcast weight is no residual, but recomputed in backward."""

    def products(x_MD: Array, weights: Sequence[Any]) -> list[Array]:
        x_MD, *arrays = jax_compat.alike(x_MD, *map(opened, weights))
        return _products(x_MD, arrays, sizes_E)

    return [checkpoint_name(y, RESIDUAL_NAME) for y in jax.checkpoint(products)(x_MD, weights)]


def ways() -> ModuleType:
    """The module that computes products and gradients on the devices that are traced."""
    return grouped_kernels if jax_compat.traced_devices()[0] == "gpu" else grouped_blocks


def _tapped_products(x_MD: Array, weights: Sequence[Tapped], sizes_E: Array) -> list[Array]:
    (leader,) = [w for w in weights if w.x is not None]
    taps = leader.x, leader.sizes, [w.dy for w in weights]
    return [checkpoint_name(y, RESIDUAL_NAME) for y in _tapped(x_MD, [w.weight for w in weights], sizes_E, taps)]


@jax.custom_vjp
def _tapped(x_MD: Array, weights: list[Any], sizes_E: Array, taps: Any) -> list[Array]:
    return ways().products(Rows(x_MD), [opened(w) for w in weights], sizes_E)


def _tapped_forward(x_MD: Array, weights: list[Any], sizes_E: Array, taps: Any) -> tuple[list[Array], Any]:
    return _tapped(x_MD, weights, sizes_E, taps), (x_MD, weights, sizes_E)


def _tapped_backward(residuals: Any, dys: list[Array]) -> tuple[Any, ...]:
    x_MD, weights, sizes_E = residuals
    dx_MD = ways().input_gradient([Rows(dy) for dy in dys], [opened(w) for w in weights], sizes_E)
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
        (gradient,) = ways().weight_gradients([(Rows(x_MD), [Rows(dy_MF)], sizes_E.astype(jnp.int32))])
        return gradient

    gradient = lax.map(of_layer, (x, dy, sizes)) if x.ndim == 3 else of_layer((x, dy, sizes))
    return summed(gradient, jax_compat.varying_axes(like))


@jax.custom_vjp
def _products(x_MD: Array, weights: list[Array], sizes_E: Array) -> list[Array]:
    return ways().products(Rows(x_MD), weights, sizes_E)


def _forward(x_MD: Array, weights: list[Array], sizes_E: Array) -> tuple[list[Array], Any]:
    return _products(x_MD, weights, sizes_E), (x_MD, weights, sizes_E)


def _backward(residuals: Any, dys: list[Array]) -> tuple[Array, list[Array], None]:
    x_MD, weights, sizes_E = residuals
    dx_MD = ways().input_gradient([Rows(dy) for dy in dys], weights, sizes_E).astype(x_MD.dtype)
    gradients = ways().weight_gradients([(Rows(x_MD), [Rows(dy) for dy in dys], sizes_E)])
    return (
        summed(dx_MD, jax_compat.varying_axes(x_MD)),
        [summed(dw.astype(w.dtype), jax_compat.varying_axes(w)) for dw, w in zip(gradients, weights, strict=True)],
        None,
    )


_products.defvjp(_forward, _backward)
