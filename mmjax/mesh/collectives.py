"""Data movement inside one mesh with ``jax.lax`` collectives.

Bodies of ``shard_map(check_vma=False)``: no autodiff passes through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.mesh.routes import Route, rounds


def broadcast_from_leader(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Every rank of the group spanned by ``axes`` gets the value of the group's first rank.

    A masked sum rather than an all-gather: the result needs no extra copies, and on GPU it is one ring.
    """
    axes = tuple(axes)
    if not axes:
        return x
    first = lax.axis_index(axes) == 0
    return lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axes)


def exchange(
    x: jax.Array,
    routes: tuple[Route, ...],
    groups: Sequence[Sequence[int]],
    position: Mapping[int, int],
    source_units: int,
    target_units: int,
    axes: Sequence[str],
) -> jax.Array:
    """Carries units along ``routes`` with ``ppermute`` and repeats them within each target group.

    Args:
      x: local rows ``[source_units · u, ...]``; ranks that send nothing hold anything.
      routes: leader routes; units are numbered over the whole row dimension.
      groups: target ranks that hold the same rows; the first of each is its leader.
      position: index along ``axes`` of each rank.
      source_units, target_units: units that one rank holds before and after.
      axes: mesh axes whose product numbers the ranks.

    Returns:
      Local rows ``[target_units · u, ...]``; zeros on ranks that receive nothing.
    """
    axes, count = tuple(axes), len(position)
    unit_rows = x.shape[0] // source_units
    me = lax.axis_index(axes)
    result = jnp.zeros((target_units * unit_rows, *x.shape[1:]), x.dtype)
    for batch in rounds(routes):
        send, keep, receives = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
        for route in batch:
            send[position[route.source]] = route.start % source_units * unit_rows
            keep[position[route.target]] = route.start % target_units * unit_rows
            receives[position[route.target]] = True
        piece = lax.dynamic_slice_in_dim(x, jnp.asarray(send)[me], unit_rows)
        piece = lax.ppermute(piece, axes, [(position[r.source], position[r.target]) for r in batch])
        updated = lax.dynamic_update_slice_in_dim(result, piece, jnp.asarray(keep)[me], 0)
        result = jnp.where(jnp.asarray(receives)[me], updated, result)
    return _repeat_in_groups(result, groups, position, axes)


def _repeat_in_groups(
    x: jax.Array, groups: Sequence[Sequence[int]], position: Mapping[int, int], axes: tuple[str, ...]
) -> jax.Array:
    """Doubling tree from each group's leader; groups are disjoint and of one size."""
    me, have, width = lax.axis_index(axes), 1, len(groups[0])
    while have < width:
        pairs = [
            (position[group[i]], position[group[have + i]]) for group in groups for i in range(min(have, width - have))
        ]
        receives = np.zeros(len(position), bool)
        receives[[target for _, target in pairs]] = True
        x = jnp.where(jnp.asarray(receives)[me], lax.ppermute(x, axes, pairs), x)
        have *= 2
    return x
