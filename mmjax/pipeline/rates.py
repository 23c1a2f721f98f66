"""Learning rates of single parameters: factors on the module's learning rate, by name pattern and by layer.

AdamW's update, weight decay included, is proportional to the learning rate, so the factor is applied to the update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.mesh.spread import Axes
from mmjax.models.parameters import Leaf
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.zero import ZeroLeaf, shard_axes

Tree = Any


def factors_of(config: OptimizerConfig, leaf: Leaf) -> tuple[float, ...]:
    """The factor on the module's learning rate of each logical leaf of an array, in the order of ``Leaf.names``.

    ``config`` is the module's optimizer; ``leaf`` describes an array of its parameters, such as a stack of layers, as
    ``ZeroLeaf.leaf`` does.
    """
    names = (name.partition("/")[2] for name in leaf.names)
    return tuple(map(config.factor, names, leaf.from_end))


def scale_updates(config: OptimizerConfig, zeros: Tree, updates: Tree, axes: Axes) -> Tree:
    """A module's updates, each multiplied by the learning-rate factor of its logical leaf. Inside ``shard_map``.

    Args:
      config: the module's optimizer.
      zeros: its tree of ``ZeroLeaf``, such as ``state.owned["llm"]`` of a ``StageState``.
      updates: updates of this rank's shards, a tree like it.
      axes: of the stage's submesh, ``Submesh.axes``.
    """
    return jax.tree.map(lambda zero, update: _scaled(factors_of(config, zero.leaf), zero, update, axes), zeros, updates)


def _scaled(factors: tuple[float, ...], zero: ZeroLeaf, update: jax.Array, axes: Axes) -> jax.Array:
    if len(set(factors)) == 1:
        return update if factors[0] == 1 else update * factors[0]
    factors_L = jnp.asarray([*factors, *[1.0] * (zero.shape[0] - len(factors))], update.dtype)  # padding stays 0
    if zero.dimension == 0:  # the stack itself is sharded
        factors_L = lax.dynamic_slice_in_dim(
            factors_L, lax.axis_index(shard_axes(zero.leaf, axes)) * len(update), len(update)
        )
    return update * factors_L.reshape(-1, *[1] * (update.ndim - 1))
