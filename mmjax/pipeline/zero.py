"""ZeRO: sharding of fp32 masters, moments and gradients, and of parameters, over the ranks of dp·cp.

The ranks of dp and cp form one group for each optimizer instance. A group shards the state over its ranks, and all
groups have the same state. For each leaf, the first dimension whose local size divides by the group's size is sharded.
If there is none, the largest dimension is padded; small leaves are repeated. The stacking dimension of layers comes
last in this order, so that one layer's leaf keeps its shards in a checkpoint. Where layers are gathered or scattered
one by one (``Layout.scatters_gradients``) they are not stacked, and small vectors are repeated: the gather of a vector
takes as long as that of a small matrix, and saves little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spread import Axes, Spread, split_axes
from mmjax.mesh.submesh import Submesh
from mmjax.models.parameters import Leaf
from mmjax.pipeline.gathers import Gather

SMALL = 1 << 14
"""Leaves below this many elements are repeated rather than padded."""


@dataclass(frozen=True)
class Reduction:
    """The sum of a gradient over ranks, whole or this rank's shard of it. Inside ``shard_map``; reductions compare by
    value, as programs need it.

    Attributes:
      axes: mesh axes over which the gradient, or its shard, is summed whole.
      shards: mesh axes over which it is scattered before; () where it stays whole.
      dimension, padding: the dimension that is scattered, and the zeros added to it before.
    """

    axes: tuple[str, ...]
    shards: tuple[str, ...] = ()
    dimension: int = 0
    padding: int = 0

    def __call__(self, local: jax.Array) -> jax.Array:
        """This rank's part of the sum."""
        if self.shards:
            local = _padded(local, self.dimension, self.padding)
            local = lax.psum_scatter(local, self.shards, scatter_dimension=self.dimension, tiled=True)
        return lax.psum(local, self.axes)

    def zeros(self, like: jax.Array) -> jax.Array:
        """Zeros with the shape, dtype and varying axes of the result for a gradient ``like`` this one."""
        shape = list(like.shape)
        if self.shards:
            ranks = math.prod(lax.axis_size(axis) for axis in self.shards)
            shape[self.dimension] = (shape[self.dimension] + self.padding) // ranks
        axes = jax_compat.varying_axes(like) - {*self.axes, *self.shards} | {*self.shards}
        return jax_compat.to_varying(jnp.zeros(shape, like.dtype), sorted(axes))


@dataclass(frozen=True)
class ZeroLeaf:
    """Sharding of one stage array over the dp and cp ranks of a group.

    Attributes:
      leaf: the stage array.
      dimension: the sharded dimension, or ``None`` for a repeated leaf.
      shape: the master's global shape, padded along ``dimension``.
    """

    leaf: Leaf
    dimension: int | None
    shape: tuple[int, ...]

    @classmethod
    def plan(cls, leaf: Leaf, submesh: Submesh) -> ZeroLeaf:
        """Chooses the dimension of a stage array to shard on a submesh, and the padding."""
        spec, sizes = leaf.spec(submesh.axes), submesh.mesh.shape
        parts = [math.prod(sizes[axis] for axis in split_axes(PartitionSpec(dim))) for dim in spec]
        parts += [1] * (len(leaf.shape) - len(parts))
        split = [axes not in (None, ()) for axes in (*spec, *[None] * (len(leaf.shape) - len(spec)))]
        shards = math.prod(sizes[axis] for axis in shard_axes(leaf, submesh.axes))
        stacked = leaf.layers is not None
        order = [*range(int(stacked), len(leaf.shape)), *([0] if stacked else [])]
        is_small_vector = len(leaf.shape) == 1 and leaf.shape[0] < SMALL
        if shards == 1 or leaf.is_load or (submesh.layout.scatters_gradients and is_small_vector):
            return cls(leaf, None, leaf.shape)
        for dim in order:
            if leaf.shape[dim] // parts[dim] % shards == 0:
                return cls(leaf, dim, leaf.shape)
        unsplit = [dim for dim in order if not split[dim]]
        if not unsplit or math.prod(leaf.shape) < SMALL:
            return cls(leaf, None, leaf.shape)
        dim = max(unsplit, key=lambda d: leaf.shape[d])
        padded = -(-leaf.shape[dim] // shards) * shards
        return cls(leaf, dim, (*leaf.shape[:dim], padded, *leaf.shape[dim + 1 :]))

    @property
    def padding(self) -> int:
        """Number of entries added along ``dimension``; 0 for a repeated leaf."""
        return self.shape[self.dimension] - self.leaf.shape[self.dimension] if self.dimension is not None else 0

    def spec(self, axes: Axes) -> PartitionSpec:
        """Sharding of the master: over tp as the parameter, and over the group's ranks along ``dimension``."""
        dims = list(self.leaf.spec(axes))
        if self.dimension is not None:
            split = dims[self.dimension] or ()
            split = (split,) if isinstance(split, str) else split
            dims[self.dimension] = (*split, *shard_axes(self.leaf, axes))
        return PartitionSpec(*dims)

    def logical_spec(self, axes: Axes) -> PartitionSpec:
        """Sharding of a logical leaf in a checkpoint: the master's, without stacking, padding or a split vocabulary."""
        if self.padding or self.leaf.logical_shape != self.leaf.shape[self._skip :]:
            return PartitionSpec()
        return PartitionSpec(*tuple(self.spec(axes))[self._skip :])

    @property
    def _skip(self) -> int:
        return int(self.leaf.layers is not None)

    def layer_gather(self, axes: Axes, *, trained: bool) -> Gather | None:
        """The gather of the parameter from its shards, for each use; ``None`` for a repeated leaf."""
        if self.dimension is None:
            return None
        return Gather(
            axes=shard_axes(self.leaf, axes),
            dimension=self.dimension,
            size=self.leaf.shape[self.dimension],
            padded=self.padding > 0,
            scatters=trained,
        )

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def pad(self, x: jax.Array) -> jax.Array:
        """Adds zeros as padding, to a whole array or to a local one (the padded dimension is never split over tp)."""
        return _padded(x, self.dimension, self.padding)

    def unpad(self, x: jax.Array) -> jax.Array:
        """Removes the padding of a sharded leaf."""
        assert self.dimension is not None
        return lax.slice_in_dim(x, 0, x.shape[self.dimension] - self.padding, axis=self.dimension)

    def gather(self, shard: jax.Array, axes: Axes) -> jax.Array:
        """The parameter without padding, equal on all dp ranks, from this rank's shard. Inside ``shard_map``."""
        if self.dimension is None:
            return shard
        return self.unpad(jax_compat.all_gather_invariant(shard, shard_axes(self.leaf, axes), self.dimension))

    def reduce(self, local: jax.Array, axes: Axes) -> jax.Array:
        """This rank's shard of the gradient, summed over all tokens, from this rank's gradient. Inside ``shard_map``.

        A reduce-scatter in the rank's group, then a sum over groups; a repeated leaf is summed whole.
        """
        return self.reduction(axes)(local)

    def reduction(self, axes: Axes) -> Reduction:
        """``reduce`` as a function of the gradient alone."""
        shards, summed = shard_axes(self.leaf, axes), self._summed_axes(axes)
        if self.dimension is None:
            return Reduction(summed)
        between_shards = tuple(axis for axis in summed if axis not in shards)
        return Reduction(between_shards, shards, self.dimension, self.padding)

    def sum_shards(self, shard: jax.Array, axes: Axes) -> jax.Array:
        """This rank's shard of the gradient, summed over all tokens, from the shard that is summed over the rank's
        group. Inside ``shard_map``.
        """
        shards = shard_axes(self.leaf, axes)
        return lax.psum(shard, tuple(axis for axis in self._summed_axes(axes) if axis not in shards))

    def _summed_axes(self, axes: Axes) -> tuple[str, ...]:
        """Axes whose ranks have parts of the leaf's gradient."""
        return Spread.of(axes).gradient_axes(self.leaf.spec(axes))

    def squared_norm(self, grad: jax.Array, axes: Axes) -> jax.Array:
        """Sum of squares of a shard, a float32 scalar: 0 on replicas, so that a sum over all ranks counts each once.

        Inside ``shard_map``.
        """
        split = split_axes(self.spec(axes))
        counts = jnp.ones((), bool)
        for axis in (axis for axis in axes.all if axis not in split):
            counts &= lax.axis_index(axis) == 0
        return jnp.where(counts, jnp.sum(jnp.square(grad.astype(jnp.float32))), 0.0)


def shard_axes(leaf: Leaf, axes: Axes) -> tuple[str, ...]:
    """The axes of an optimizer instance over which a leaf's master is sharded: those whose ranks have the same part."""
    split = split_axes(leaf.spec(axes))
    return tuple(axis for axis in axes.shard if axis not in split)


def _padded(x: jax.Array, dimension: int | None, padding: int) -> jax.Array:
    """``x`` with so many zeros behind its entries along a dimension; ``None`` stands for none."""
    return jnp.pad(x, [(0, padding if dim == dimension else 0) for dim in range(x.ndim)])
