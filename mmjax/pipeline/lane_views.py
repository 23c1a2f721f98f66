"""Views of lanes: the same shards, on the same devices, as arrays of one lane or of all lanes. Nothing is copied.

What runs once a step (``prepare``, ``reduce``, ``update``) spans all lanes of a stage, and what runs for a microbatch
has the arrays of its lane. A parameter is as large on a lane as on all; of gradient sums, whose first dimension is dp,
a lane has its part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from mmjax.mesh.spmd import by_device
from mmjax.pipeline.trees import Tree, by_name, nested


def on_lane(whole: Tree, avals: Tree) -> Tree:
    """The shards that lie on a lane's devices, as arrays of that lane.

    Args:
      whole: arrays over all lanes; some of those of ``avals``, or all.
      avals: avals on the lane.
    """
    own = by_name(avals)
    return nested({name: _array([by_device(x)], own[name]) for name, x in by_name(whole).items()})


def over_lanes(lanes: Iterable[Tree], avals: Tree) -> Tree:
    """The arrays of all lanes that this process has devices of, as arrays over all lanes."""
    named = [by_name(lane) for lane in lanes]
    return nested(
        {name: _array([by_device(lane[name]) for lane in named], aval) for name, aval in by_name(avals).items()}
    )


def _array(shards: list[dict[Any, jax.Array]], aval: Any) -> jax.Array:
    held = {device: shard for own in shards for device, shard in own.items()}
    parts = [held[device] for device in aval.sharding.mesh.devices.flat if device in held]
    return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, parts, dtype=aval.dtype)
