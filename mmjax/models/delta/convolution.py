"""Short causal convolutions over packed rows, one filter a channel, that never reach over a sample's start.

Shapes: B rows, T tokens, F channels local to this rank, L taps of a filter, S = L - 1 + T tokens with those before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.models.handles import opened
from mmjax.models.weight_gradients import summed


def short_convolution(
    x_BSF: Float[Array, "B S F"], filter_FL: Any, segments_BS: Int[Array, "B S"]
) -> Float[Array, "B T F"]:
    """silu of each channel's filtered tokens, computed in fp32, in the dtype of ``x_BSF``.

    The last tap is of the token itself, the first of the L - 1st before. Tokens of another segment count as 0. The
    residuals are the arguments.

    Args:
      x_BSF: the tokens, behind L - 1 tokens before the row's, such as zeros.
      filter_FL: the filters, an array or a handle.
      segments_BS: the tokens' segments; 0 before the row's first.
    """
    x_BSF, segments_BS = jax_compat.alike(x_BSF, segments_BS)
    return _convolution(x_BSF, filter_FL, segments_BS)


@jax.custom_vjp
def _convolution(x_BSF: Array, filter_FL: Any, segments_BS: Array) -> Array:
    return jax.nn.silu(_filtered(x_BSF, opened(filter_FL), segments_BS)).astype(x_BSF.dtype)


def _convolution_forward(x_BSF: Array, filter_FL: Any, segments_BS: Array) -> tuple[Array, Any]:
    return _convolution(x_BSF, filter_FL, segments_BS), (x_BSF, filter_FL, segments_BS)


def _convolution_backward(residuals: Any, dy_BTF: Array) -> tuple[Array, Any, None]:
    x_BSF, handle_FL, segments_BS = residuals
    filter_FL, gradient_of_handle = jax.vjp(opened, handle_FL)
    _, gradient_of_silu = jax.vjp(jax.nn.silu, _filtered(x_BSF, filter_FL, segments_BS))
    (dy_BTF,) = gradient_of_silu(dy_BTF.astype(jnp.float32))
    T, L = dy_BTF.shape[1], filter_FL.shape[1]
    d_x_BSF, d_taps = jnp.zeros(x_BSF.shape, jnp.float32), list[Array]()
    for tap in range(L):
        is_same_BT1 = _is_same(segments_BS, tap, T)
        x_BTF = jnp.where(is_same_BT1, x_BSF[:, tap : tap + T].astype(jnp.float32), 0)
        d_taps.append(jnp.sum(x_BTF * dy_BTF, axis=(0, 1)))
        d_tap_BTF = jnp.where(is_same_BT1, dy_BTF * filter_FL[:, tap].astype(jnp.float32), 0)
        d_x_BSF += jnp.pad(d_tap_BTF, ((0, 0), (tap, L - 1 - tap), (0, 0)))
    d_filter_FL = summed(jnp.stack(d_taps, axis=1), jax_compat.varying_axes(filter_FL)).astype(filter_FL.dtype)
    d_x_BSF = summed(d_x_BSF.astype(x_BSF.dtype), jax_compat.varying_axes(x_BSF))
    return d_x_BSF, *gradient_of_handle(d_filter_FL), None


_convolution.defvjp(_convolution_forward, _convolution_backward)


def _filtered(x_BSF: Array, filter_FL: Array, segments_BS: Array) -> Float[Array, "B T F"]:
    """The sum over taps, in fp32."""
    L = filter_FL.shape[1]
    T = x_BSF.shape[1] - L + 1
    taps = (
        jnp.where(_is_same(segments_BS, tap, T), x_BSF[:, tap : tap + T].astype(jnp.float32), 0)
        * filter_FL[:, tap].astype(jnp.float32)
        for tap in range(L)
    )
    return sum(taps, start=jnp.zeros((), jnp.float32))


def _is_same(segments_BS: Array, tap: int, tokens: int) -> Array:
    """Whether the token under a tap is of the segment of the token that is computed, ``[B, T, 1]``."""
    return (segments_BS[:, tap : tap + tokens] == segments_BS[:, -tokens:])[..., None]
