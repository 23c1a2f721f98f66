"""Views of lanes: the same shards, on the same devices, as arrays of one lane or of all lanes. Nothing is copied.

Once-a-step ops (``prepare``, ``reduce``, ``update``) span all lanes of a stage; ops of a microbatch use the arrays of
one lane. A parameter has the same shape on a lane as on all lanes. Gradient sums, whose first dimension is dp, are
split over lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from mmjax.mesh.spmd import by_device
from mmjax.pipeline.trees import Tree, by_name, nested


def on_lane(arrays: Tree, avals: Tree) -> Tree:
    """The tree of ``arrays`` with their shards on a lane's devices, as arrays of that lane.

    Args:
      arrays: arrays over all lanes, a tree of nested dicts such as {"llm": {"embed": x}}, with some or all leaves of
        ``avals``.
      avals: ``ShapeDtypeStruct`` with shardings on the lane.
    """
    lane_avals = by_name(avals)
    return nested({name: array_of([by_device(x)], lane_avals[name]) for name, x in by_name(arrays).items()})


def over_lanes(lanes: Iterable[Tree], avals: Tree) -> Tree:
    """A tree of arrays over all lanes, from the arrays on each lane on this process's devices.

    Args:
      lanes: a tree like ``avals`` for each of these lanes, in any order; trees are nested dicts such as {"llm":
        {"embed": x}}.
      avals: ``ShapeDtypeStruct`` with shardings over all lanes.
    """
    named = [by_name(lane) for lane in lanes]
    return nested(
        {name: array_of([by_device(lane[name]) for lane in named], aval) for name, aval in by_name(avals).items()}
    )


def array_of(shards: list[dict[Any, jax.Array]], aval: Any) -> jax.Array:
    """The array with these shards, without a copy.

    Args:
      shards: shards by device of this process, in one or several dicts.
      aval: ``ShapeDtypeStruct`` of the array, with its sharding.
    """
    shard_by_device = {device: shard for lane_shards in shards for device, shard in lane_shards.items()}
    parts = [shard_by_device[device] for device in aval.sharding.mesh.devices.flat if device in shard_by_device]
    return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, parts, dtype=aval.dtype)
