"""Measures bandwidth: of collectives over some ranks, and of moves between two devices as boundaries make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.boundary import Boundary
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.world import World
from mmjax.pipeline.link_trials import boundary_trial
from mmjax.pipeline.offload import HOST, moved
from mmjax.planner.profile_file import Samples
from mmjax.profile.trials import shortest

SIZES, QUICK = (1 << 14, 1 << 18, 1 << 22, 1 << 25), (1 << 16, 1 << 22)
"""Bytes of a transfer: all that are measured, and those of a quick profile."""
_RANKS = (2, 4, 8)
_COLUMNS = 1024
_ITEM = 4


def ranks_here(world: World) -> tuple[int, ...]:
    """The numbers of ranks over which collectives are measured: of 2, 4 and 8 those that the world has.

    world: the devices, as `world_for(recipe)` gives them. Of one device the result is ().
    """
    return tuple(ranks for ranks in _RANKS if ranks <= world.size)


def gathers(world: World, ranks: int, sizes: tuple[int, ...]) -> Samples:
    """Measures all-gathers over the first `ranks` ranks: (bytes of the result, seconds) for each of `sizes`.

    All processes call it. Seconds are 0 in a process that has none of these ranks.

    Args:
      world: the devices, as `world_for(recipe)` gives them.
      ranks: how many ranks, no more than the world has.
      sizes: bytes of the result on each rank, ascending, such as `SIZES`.
    """

    def gather(x: jax.Array) -> jax.Array:
        return jax_compat.all_gather_invariant(x, ("r",), 0)

    return tuple((float(size), _collective(world, ranks, gather, size, PartitionSpec())) for size in sizes)


def all_to_alls(world: World, ranks: int, sizes: tuple[int, ...]) -> Samples:
    """Measures all-to-alls over the first `ranks` ranks: (bytes on each rank, seconds) for each of `sizes`.

    All processes call it. Seconds are 0 in a process that has none of these ranks.

    Args:
      world: the devices, as `world_for(recipe)` gives them.
      ranks: how many ranks, no more than the world has.
      sizes: bytes of the array on each rank, ascending, such as `SIZES`.
    """

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "r", 0, 0, tiled=True)

    out = PartitionSpec("r")
    return tuple((float(size), _collective(world, ranks, exchange, size * ranks, out)) for size in sizes)


def reduces(world: World, ranks: int, sizes: tuple[int, ...]) -> Samples:
    """Measures all-reduces over the first `ranks` ranks: (bytes on each rank, seconds) for each of `sizes`.

    All processes call it. Seconds are 0 in a process that has none of these ranks.

    Args:
      world: the devices, as `world_for(recipe)` gives them.
      ranks: how many ranks, no more than the world has.
      sizes: bytes of the array on each rank, ascending, such as `SIZES`.
    """

    def reduce(x: jax.Array) -> jax.Array:
        return lax.psum(x, "r")

    # Stacked over the ranks, so that each has a block of `size`.
    return tuple((float(size), _collective(world, ranks, reduce, size * ranks, PartitionSpec())) for size in sizes)


def _collective(world: World, ranks: int, body: Callable[..., Any], size: int, out: PartitionSpec) -> float:
    if not world.local_ranks & set(range(ranks)):
        return 0.0
    mesh = Mesh(np.array(world.devices[:ranks]), ("r",))
    count = max(1, size // _ITEM // ranks**2) * ranks**2  # each rank has an equal part for each
    aval = jax.ShapeDtypeStruct((count,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("r")))
    program = Program.of("collective", Spmd(body, mesh, PartitionSpec("r"), out), [aval])
    payload = _ones(aval)
    return shortest(lambda: program(payload)).of(ranks)


def moves(world: World, sizes: tuple[int, ...]) -> Samples:
    """Measures moves from the first device to the second: (bytes, seconds) for each of `sizes`, with pack and unpack.

    The world has two devices or more, and all processes call it. The time is half of that of a move there and back:
    between two processes only a move back tells the first one that its own has arrived.

    Args:
      world: the devices, as `world_for(recipe)` gives them.
      sizes: bytes of the array, ascending, such as `SIZES`.
    """
    ends = [world.submesh(Layout(rank_offset=rank), 0) for rank in (0, 1)]
    samples = []
    for size in sizes:
        shape = (max(1, size // _ITEM // _COLUMNS), min(_COLUMNS, size // _ITEM))
        aval = jax.ShapeDtypeStruct(shape, np.float32, sharding=ends[0].sharding(PartitionSpec()))
        boundary = Boundary("trial", ends[0], ends[1], aval, world)
        there, back = (boundary_trial("move", way) for way in (boundary.forward, boundary.backward))
        payload = there.make()
        both = shortest(lambda there=there, back=back, payload=payload: back.send(there.send(payload)))
        samples.append((float(size), both.of(1) / 2))
    return tuple(samples)


def copies(world: World, sizes: tuple[int, ...]) -> Samples:
    """Measures copies from a device of this process to pinned host memory: (bytes, seconds) for each of `sizes`.

    The result is () where the device has no such memory.

    Args:
      world: the devices, as `world_for(recipe)` gives them.
      sizes: bytes of the array, ascending, such as `SIZES`.
    """
    device = world.devices[min(world.local_ranks)]
    if HOST not in [memory.kind for memory in device.addressable_memories()]:
        return ()
    samples = []
    for size in sizes:
        payload = jax.device_put(np.ones(max(1, size // _ITEM), np.float32), device)
        samples.append((float(size), shortest(lambda payload=payload: moved(payload, HOST)).of(1)))
    return tuple(samples)


def _ones(aval: jax.ShapeDtypeStruct) -> jax.Array:
    shape = aval.sharding.shard_shape(aval.shape)  # type: ignore[union-attr]
    return jax.make_array_from_callback(aval.shape, aval.sharding, lambda _: np.ones(shape, aval.dtype))
