"""Gathers of sharded parameters, and gradients that are scattered: what a stage does layer by layer.

A sharded parameter is a handle whose function is a ``Gather``: its transpose is a reduce-scatter, so the gradient of a
shard is a shard. A whole parameter whose gradients are scattered is a ``Scattered`` pair, stored under a handle too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mmjax import jax_compat
from mmjax.models.handles import Open, gradient_of_stored


@dataclass(frozen=True)
class Gather:
    """The all-gather of a layer's parameter, from this rank's shard. Inside ``shard_map``; equal gathers are equal.

    Attributes:
      axes: the mesh axes over which it is sharded, such as ("dp", "cp").
      dimension: the sharded dimension of a layer's parameter.
      size: the size of this dimension without padding, on all ranks of tp.
      padded: whether there is padding.
      scatters: whether the parameter is trained, so that gradients are scattered.
      invariant: whether the result is typed as equal on all ranks of ``axes``; then it has no gradient.
    """

    axes: tuple[str, ...]
    dimension: int
    size: int
    padded: bool
    scatters: bool
    invariant: bool = False

    fetches: ClassVar[bool] = True

    def __call__(self, shard: jax.Array) -> jax.Array:
        """The parameter without padding, from this rank's shard."""
        if self.invariant:
            whole = jax_compat.all_gather_invariant(shard, self.axes, self.dimension)
        else:
            whole = lax.all_gather(shard, self.axes, axis=self.dimension, tiled=True)
        # The padded dimension is never split over tp, so its local size is the global one.
        return lax.slice_in_dim(whole, 0, self.size, axis=self.dimension) if self.padded else whole

    def zero_shard(self, whole: jax.Array) -> jax.Array:
        """Zeros with the shape of a shard of the parameter ``whole``, and with its varying axes."""
        ranks = math.prod(lax.axis_size(axis) for axis in self.axes)
        shape = list(whole.shape)
        shape[self.dimension] = -(-shape[self.dimension] // ranks)
        axes = jax_compat.varying_axes(whole) | set(self.axes)
        return jax_compat.to_varying(jnp.zeros(shape, whole.dtype), sorted(axes))

    @property
    def for_prediction(self) -> Gather:
        """The gather whose result is typed as equal on all ranks."""
        return replace(self, invariant=True, scatters=False)


@dataclass(frozen=True)
class Composed:
    """Functions one after another; equal functions make it equal, as programs need it."""

    functions: tuple[Open, ...]

    @property
    def fetches(self) -> bool:
        """Whether one of the functions gathers."""
        return any(getattr(function, "fetches", False) for function in self.functions)

    @property
    def scatters(self) -> bool:
        """Whether the gradient of one of the functions scatters."""
        return any(getattr(function, "scatters", False) for function in self.functions)

    def __call__(self, stored: jax.Array) -> jax.Array:
        """The result of the last function, from the stored array."""
        for function in self.functions:
            stored = function(stored)
        return stored


def composed(*functions: Open | None) -> Open | None:
    """The functions that are not ``None``, applied in order; ``None`` without any."""
    present = tuple(function for function in functions if function)
    return Composed(present) if len(present) > 1 else present[0] if present else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scattered:
    """A whole parameter whose gradient goes to ``shard`` alone.

    Attributes:
      whole: the parameter.
      shard: an array with the shape of its shard, whose value is never read. Its cotangent is the shard of the
        parameter's gradient, summed over the ranks that share it.
    """

    whole: jax.Array
    shard: jax.Array


@dataclass(frozen=True)
class OpenScattered:
    """The function of a handle from a ``Scattered`` parameter to the weight; ``gather`` is the gather of its shards."""

    gather: Gather

    scatters: ClassVar[bool] = True

    def __call__(self, stored: Scattered) -> jax.Array:
        """The whole parameter."""
        return _whole(self.gather, stored.whole, stored.shard)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(gather: Gather, whole: jax.Array, shard: jax.Array) -> jax.Array:
    return whole


def _whole_forward(gather: Gather, whole: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    return whole, shard


def _whole_backward(gather: Gather, shard: jax.Array, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, gradient_of_stored(gather, shard, gradient)


_whole.defvjp(_whole_forward, _whole_backward)
