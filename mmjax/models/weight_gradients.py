"""Gradients of weights: products of inputs and output gradients, summed over tokens and ranks.

Shapes: D inputs, F outputs of a product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mmjax import jax_compat
from mmjax.models.sequence_parallel import NO_SP, SequenceParallel


def weight_gradient(
    x: jax.Array, dy: jax.Array, like: jax.Array, *, stacked: bool, transposed: bool, sp: SequenceParallel = NO_SP
) -> jax.Array:
    """``xᵀ · dy``, a product's contribution to its weight's gradient.

    Args:
      x, dy: input and gradient of the output, ``[..., D]`` and ``[..., F]``; the first dimension is layers if stacked.
      like: an array, such as the weight, with the varying axes of the result, which is summed over all others.
      stacked: whether there is one product for each of several layers.
      transposed: whether the weight was transposed before the product.
      sp: the collectives of sequence parallelism that the product had; by default none.

    Returns:
      The gradient ``[D, F]`` in fp32, with a leading dimension of layers if stacked, and ``[..., F, D]`` if transposed.
    """
    outer = partial(sum_over_tokens, stacked=stacked, transposed=transposed, dtype=jnp.float32)
    return summed(sp.weight_gradient(x, dy, outer), jax_compat.varying_axes(like))


def sum_over_tokens(x: jax.Array, dy: jax.Array, *, stacked: bool, transposed: bool, dtype: Any = None) -> jax.Array:
    """``xᵀ · dy`` in ``dtype``, summed over all dimensions but the last and, if stacked, the first."""
    lead = x.shape[:1] if stacked else ()
    x, dy = (a.reshape(*lead, -1, a.shape[-1]) for a in (x, dy))
    a, b = (dy, x) if transposed else (x, dy)
    rows, batch = len(lead), tuple(range(len(lead)))
    return lax.dot_general(a, b, (((rows,), (rows,)), (batch, batch)), preferred_element_type=dtype)


def summed(x: jax.Array, allowed: frozenset[str]) -> jax.Array:
    """``x`` summed (``psum``) over the mesh axes that it varies over, except those ``allowed``.

    ``allowed`` is such as frozenset({"dp"}). To be called inside ``shard_map``.
    """
    extra = tuple(sorted(jax_compat.varying_axes(x) - allowed))
    return lax.psum(x, extra)


def computed_together(values: list[jax.Array]) -> list[jax.Array]:
    """The values, gradients of inputs and sums; whoever reads one waits for all that vary over the mesh axes of the
    first.

    Otherwise XLA computes the sums of all layers last. They would lie beside no reduce-scatter of ``dx``, and the
    inputs and gradients of all products would be kept until then.
    """
    axes = jax_compat.varying_axes(values[0])
    places = [place for place, value in enumerate(values) if jax_compat.varying_axes(value) == axes]
    for place, value in zip(places, lax.optimization_barrier([values[place] for place in places]), strict=True):
        values[place] = value
    return values
