"""Places of patches in their images: learned embeddings, rows of a square table, which may be resized to each image, or
sums of a row of a table of columns and of one of rows.

Resizing is linear, so a patch's embedding is the product of the table with weights along rows and along columns. The
weights are those of ``torch.nn.functional.interpolate``, which ``transformers`` uses. With ``align_corners=False`` they
are Keys 1981, "Cubic Convolution Interpolation", eq. 4 with a = -3/4. With ``antialias=True`` they are the same with a
= -1/2, or a triangle, both as wide as patches of the image if these are wider than patches of the table. With
``align_corners=True`` the first and last patches are at the first and last places, and weights are linear between two
places.

Shapes: R rows, T patches per row of this rank, S of all ranks, G places along a side of the table, N rows of the table
(1 for a class token, and G² or 2 G), D width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.models.context import Context
from mmjax.models.layers import linear, lookup
from mmjax.models.vit.config import ViTConfig

SHARPNESS, SMOOTH = -0.75, -0.5
"""The free parameter a of cubic convolution, as in torch, without and with smoothing."""


def learned(
    table_ND: Float[Array, "N D"],
    c: ViTConfig,
    context: Context,
    like: Array,
) -> Float[Array, "R T D"]:
    """Position embeddings of patches, and of class tokens (coordinates -1); 0 for registers.

    Args:
      table_ND: the table of ``c.grid``² rows, row by row of the grid, or of ``c.grid`` columns and behind them as many
        rows; an array or a handle, with the class token's row first, if there is one.
      c: the settings.
      context: the context of the first stage, whose inputs include "positions" [R, T, 2] and "segments".
      like: an array with the dtype of the result of a resized table; otherwise the dtype is that of the table.
    """
    positions_RT2, segments_RT = context.inputs["positions"], context.inputs["segments"]
    first = int(c.class_token)
    is_patch_RT, is_class_RT = positions_RT2[..., 0] >= 0, positions_RT2[..., 0] == -1
    if c.has_axis_tables:
        places_RT2 = positions_RT2[..., ::-1] + jnp.array([first, first + c.grid])
        of_special = jnp.where((is_class_RT & c.class_token)[..., None], jnp.array([0, -1]), -1)  # -1 has zeros
        places_RT2 = jnp.where(is_patch_RT[..., None], places_RT2, of_special)
        return jnp.sum(lookup(table_ND, places_RT2), axis=2)
    if c.interpolate == "none":
        place_RT = first + positions_RT2[..., 0] * c.grid + positions_RT2[..., 1]
        x_RTD = lookup(table_ND, jnp.where(is_patch_RT, place_RT, 0))
        return jnp.where((is_patch_RT | (is_class_RT & c.class_token))[..., None], x_RTD, 0) if c.registers else x_RTD
    sides_RT2 = sides(segments_RT, context.gather_rows(positions_RT2), context.gather_rows(segments_RT))
    by_row, by_column = (weights(c, positions_RT2[..., axis], sides_RT2[..., axis]) for axis in (0, 1))
    weights_RTN = (by_row[..., :, None] * by_column[..., None, :]).reshape(*is_class_RT.shape, c.grid**2)
    if c.special:
        weights_RTN = jnp.where(is_patch_RT[..., None], weights_RTN, 0.0)
    if c.class_token:
        weights_RTN = jnp.concatenate([is_class_RT[..., None].astype(weights_RTN.dtype), weights_RTN], axis=-1)
    return linear(weights_RTN.astype(like.dtype), table_ND)


def centres(context: Context) -> Float[Array, "R T 2"]:
    """Places of patches' centres between the edges of their image, from -2π to 2π; 0 for class tokens and registers.

    ``context`` is that of a layer, whose inputs include "positions" [R, T, 2] and "segments"; T are its ``tokens``.
    """
    tokens, inputs = context.tokens, context.inputs
    all_positions, all_segments = (context.gather_rows(inputs[name]) for name in ("positions", "segments"))
    sides_RT2 = sides(tokens.segments_BT, all_positions, all_segments)
    place_RT2 = (2 * tokens.positions + 1).astype(jnp.float32) / sides_RT2.astype(jnp.float32) - 1
    return jnp.where(tokens.positions < 0, 0.0, 2 * jnp.pi * place_RT2)


def sides(
    segments_RT: Int[Array, "R T"], positions_RS2: Int[Array, "R S 2"], segments_RS: Int[Array, "R S"]
) -> Int[Array, "R T 2"]:
    """The numbers of rows and columns of each patch's image, at least 1, from all S patches of the rows.

    Args:
      segments_RT: the number of the image of each of this rank's patches.
      positions_RS2, segments_RS: row and column, from 0, and the number of the image, of all patches of the
        same rows.
    """
    same_RTS = segments_RT[:, :, None] == segments_RS[:, None, :]
    last_RT = [
        jnp.max(jnp.where(same_RTS, positions_RS2[:, None, :, axis], 0), axis=-1) for axis in range(2)
    ]  # fused, without an array of T · S elements
    return jnp.stack(last_RT, axis=-1) + 1


def weights(c: ViTConfig, place_RT: Int[Array, "R T"], side_RT: Int[Array, "R T"]) -> Float[Array, "R T G"]:
    """fp32 weights of the table's places along one axis, for a patch at ``place`` of ``side`` patches; they sum to 1.

    ``place`` counts from 0; G is ``c.grid``, the table's places along the axis; ``c.interpolate`` is any but
    "none".
    """
    places_G = jnp.arange(c.grid)
    if c.interpolate == "corners":
        at_RT = place_RT.astype(jnp.float32) * (c.grid - 1) / jnp.maximum(side_RT - 1, 1).astype(jnp.float32)
        return jnp.maximum(0.0, 1.0 - jnp.abs(places_G - at_RT[..., None]))
    scale_RT1 = (c.grid / side_RT.astype(jnp.float32))[..., None]
    centre_RT1 = (place_RT[..., None].astype(jnp.float32) + 0.5) * scale_RT1
    if c.interpolate in ("bilinear", "bicubic_smooth"):
        distance_RTG = jnp.abs(places_G + 0.5 - centre_RT1) / jnp.maximum(scale_RT1, 1.0)
        is_linear = c.interpolate == "bilinear"
        share_RTG = jnp.maximum(0.0, 1.0 - distance_RTG) if is_linear else _cubic(distance_RTG, SMOOTH)
        return share_RTG / jnp.maximum(jnp.sum(share_RTG, axis=-1, keepdims=True), 1e-6)
    before_RT1 = jnp.floor(centre_RT1 - 0.5)
    weights_RTG = jnp.zeros((*place_RT.shape, c.grid), jnp.float32)
    for tap in (-1, 0, 1, 2):  # the last place is repeated beyond the table
        at_RT1 = before_RT1 + tap
        share_RT1 = _cubic(jnp.abs(centre_RT1 - 0.5 - at_RT1), SHARPNESS)
        weights_RTG = weights_RTG + jnp.where(places_G == jnp.clip(at_RT1, 0, c.grid - 1), share_RT1, 0.0)
    return weights_RTG


def _cubic(x: Array, a: float) -> Array:
    """The cubic kernel with the parameter ``a`` at a distance of 0 places or more; 0 beyond 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0.0))
