"""Rotary embedding of pictures that are centred at the origin, and of a condition that lies on the diagonal.

It is Qwen-Image's multimodal scalable RoPE (Wu et al. 2025, "Qwen-Image Technical Report", §2.4).

Shapes: R rows, N places of the condition, T places of patches, S = N + T, A axes of a position, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.models.mmdit.config import MOST_REFERENCES

MOST_PICTURES = 1 + MOST_REFERENCES
"""The most pictures of a row: the one that is made, and pictures that it is made from, which lie behind it."""
_THETA = 10000.0


class Rotation(NamedTuple):
    """Cosines and sines of the angles of a head's pairs of numbers, fp32, for each place of a row."""

    cos: Float[Array, "R S 1 K/2"]
    sin: Float[Array, "R S 1 K/2"]

    @classmethod
    def of(cls, rope: Sequence[int], positions_RS3: Int[Array, "R S 3"]) -> Rotation:
        """The rotation by positions of three axes: pair i of an axis turns by theta^(-2i / width) radians a position.

        ``rope`` is the width, in numbers of a head, of each axis, such as (16, 56, 56).
        """
        frequency_K = np.concatenate([_THETA ** (-np.arange(0, width, 2) / width) for width in rope])
        axis_of_pair = np.repeat(np.arange(len(rope)), [width // 2 for width in rope])
        angle_RSK = positions_RS3[..., axis_of_pair].astype(jnp.float32) * frequency_K.astype(np.float32)
        return cls(jnp.cos(angle_RSK)[:, :, None], jnp.sin(angle_RSK)[:, :, None])

    def turn(self, x_RSHK: Float[Array, "R S H K"]) -> Float[Array, "R S H K"]:
        """Queries or keys, rotated; pairs are neighbours, numbers 2i and 2i + 1 of a head."""
        even, odd = (x_RSHK[..., first::2].astype(jnp.float32) for first in (0, 1))
        turned = jnp.stack([even * self.cos - odd * self.sin, even * self.sin + odd * self.cos], axis=-1)
        return turned.reshape(x_RSHK.shape).astype(x_RSHK.dtype)


def centred(
    positions_RSA: Int[Array, "R S A"], segments_RS: Int[Array, "R S"], queries: int, axes: tuple[str, ...] = ()
) -> Int[Array, "R S 3"]:
    """The positions by which queries and keys rotate: of patches (picture, row, column), and three equal numbers of a
    place of the condition.

    Rows of a picture of h rows are numbered from -(h - h // 2), columns likewise, so that the origin is its centre.
    Places of the condition go on where the largest picture ends: place n is at n + max(h // 2, w // 2).

    Args:
      positions_RSA: (row, column) of each patch from 0, or (picture, row, column) with pictures from 0 to
        ``MOST_PICTURES`` - 1; those of the condition are not read.
      segments_RS: 0 where a place is not in use.
      queries: N, the number of places of the condition, which are the first ones.
      axes: mesh axes over whose ranks rows are split, each with as many places of the condition; () for whole rows.
    """
    picture_RT3 = positions_RSA[:, queries:]
    if picture_RT3.shape[-1] == 2:
        picture_RT3 = jnp.pad(picture_RT3, ((0, 0), (0, 0), (1, 0)))
    is_used_RT = segments_RS[:, queries:] > 0
    shift_RT2, reach_R = jnp.zeros_like(picture_RT3[..., 1:]), jnp.zeros_like(segments_RS[:, 0])
    for number in range(MOST_PICTURES if positions_RSA.shape[-1] == 3 else 1):
        is_here_RT1 = (is_used_RT & (picture_RT3[..., 0] == number))[..., None]
        sides_R2 = jnp.max(jnp.where(is_here_RT1, picture_RT3[..., 1:] + 1, 0), axis=1)
        sides_R2 = lax.pmax(sides_R2, axes) if axes else sides_R2
        shift_RT2 = jnp.where(is_here_RT1, (sides_R2 - sides_R2 // 2)[:, None], shift_RT2)
        reach_R = jnp.maximum(reach_R, jnp.max(sides_R2 // 2, axis=-1))
    picture_RT3 = jnp.concatenate([picture_RT3[..., :1], picture_RT3[..., 1:] - shift_RT2], axis=-1)
    first = lax.axis_index(axes) * queries if axes else 0
    place_RN = reach_R[:, None] + first + jnp.arange(queries, dtype=reach_R.dtype)
    condition_RN3 = jnp.broadcast_to(place_RN[..., None], (*place_RN.shape, 3))
    return jnp.concatenate([condition_RN3, picture_RT3], axis=1)
