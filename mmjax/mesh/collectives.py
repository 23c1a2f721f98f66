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


def broadcast_from_leader(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The local ``x`` of the first rank of the group spanned by the mesh axes ``axes``, such as ("cp", "tp"), on every
    rank of the group.

    Must be called inside ``shard_map``. A masked sum rather than an all-gather: the result needs no extra copies, and
    on GPU it is one ring.
    """
    first = lax.axis_index(axes) == 0
    return lax.psum(jnp.where(first, x, jnp.zeros_like(x)), axes)


def exchange(
    pieces: Sequence[jax.Array],
    routes: Sequence[Route],
    target_pieces: int,
    position: Mapping[int, int],
    axes: tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """Carries pieces along ``routes`` with ``ppermute``. Must be called inside ``shard_map``, by every rank.

    Args:
      pieces: pieces that this rank may send, all of one shape; their values do not matter on ranks that send nothing.
      routes: which rank sends which piece to which rank, such as (Route(0, 0, 1, 2),): piece 0 of rank 0 becomes piece
        2 of rank 1.
      target_pieces: number of pieces that one rank holds afterwards.
      position: by each rank of the group, its index along ``axes``, from 0.
      axes: mesh axes whose product numbers the ranks, such as ("dp", "tp").

    Returns:
      This rank's ``target_pieces`` pieces, by ``Route.target_piece``; zeros where none was received.
    """
    count, me = len(position), lax.axis_index(axes)
    result = [jnp.zeros_like(pieces[0])] * target_pieces
    for batch in rounds(routes):
        piece_to_send, piece_to_store = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        for route in batch:
            piece_to_send[position[route.source]] = route.source_piece
            piece_to_store[position[route.target]] = route.target_piece
        piece = lax.select_n(jnp.asarray(piece_to_send)[me], *pieces)
        piece = lax.ppermute(piece, axes, [(position[r.source], position[r.target]) for r in batch])
        for number in {route.target_piece for route in batch}:
            result[number] = jnp.where(jnp.asarray(piece_to_store)[me] == number, piece, result[number])
    return tuple(result)
