"""Grouped products by kernels for NVIDIA GPUs (Pallas, lowered to Triton).

Rows are multiplied in tiles, each of rows of one group, and rows behind the last group are tiles of zeros. Which tile
belongs to which group the device computes first; the number of tiles is its bound. No tile reads rows of another group
for nothing, nothing is padded or copied, and the host does not wait.

Weights' gradients are computed by one program for each block of a weight, which goes over the rows of the group.

Shapes: M rows, D inputs, F outputs, E experts, T tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from mmjax import jax_compat

_MOST_ELEMENTS = 2**31
"""Offsets inside an array are of 32 bits."""
_SMALLEST = 16
"""The tensor cores' products have at least so many rows and columns."""


@dataclass(frozen=True)
class Blocks:
    """The sizes of a kernel.

    Attributes:
      rows, columns: of the part of the result that a program computes.
      inner: how many of the summed products are loaded at a time.
      warps: of a program.
      stages: number of loads in flight.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def within(self, rows: int, columns: int, inner: int) -> Blocks:
        """The sizes for a product that has fewer rows, columns or summed products than a block."""
        return Blocks(
            min(self.rows, _power_of_two(rows)),
            min(self.columns, _power_of_two(columns)),
            min(self.inner, _power_of_two(inner)),
            self.warps,
            self.stages,
        )


BLOCKS = Blocks(rows=128, columns=128, inner=64, warps=4, stages=3)
FP32_BLOCKS = Blocks(rows=64, columns=64, inner=32, warps=4, stages=2)


def products(
    x_MD: Float[Array, "M D"], weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]
) -> list[Float[Array, "M F"]]:
    """``x[i] @ w[e(i)]`` for every weight; rows behind the last group are zeros."""
    return [_rows([x_MD], [w], sizes_E, transposed=False) for w in weights]


def input_gradient(
    dys: Sequence[Float[Array, "M F"]], weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """The sum over weights of ``dy[i] @ w[e(i)]ᵀ``; rows behind the last group are zeros."""
    return _rows(dys, weights, sizes_E, transposed=True)


def weight_gradients(
    x_MD: Float[Array, "M D"], dys: Sequence[Float[Array, "M F"]], sizes_E: Int[Array, " E"]
) -> list[Float[Array, "E D F"]]:
    """``xᵀ · dy`` of each group for every ``dy``, fp32."""
    return [_weight_gradient(x_MD, dy, sizes_E) for dy in dys]


def _rows(
    inputs: Sequence[Float[Array, "M _"]], weights: Sequence[Array], sizes_E: Int[Array, " E"], *, transposed: bool
) -> Array:
    """The sum over pairs of ``input[i] @ weight[e(i)]``, or ``@ weight[e(i)]ᵀ``."""
    arrays = jax_compat.alike(*inputs, *weights, sizes_E)
    inputs, weights, sizes_E = arrays[: len(inputs)], arrays[len(inputs) : -1], arrays[-1]
    rows, columns = inputs[0].shape[0], weights[0].shape[1 if transposed else 2]
    blocks = _blocks(inputs[0]).within(rows, columns, inputs[0].shape[1])
    tiles = _tiles(sizes_E, rows, blocks.rows)
    return _call(
        "grouped_product",
        partial(_multiply_tile, transposed=transposed, blocks=blocks),
        [*tiles, *inputs, *weights],
        shape=(rows, columns),
        dtype=inputs[0].dtype,
        grid=(pl.cdiv(columns, blocks.columns), tiles[0].size),
        blocks=blocks,
    )


def _tiles(sizes_E: Int[Array, " E"], rows: int, size: int) -> tuple[Array, Array, Array]:
    """The expert of each tile, its first row, and the end of its group, ``[T]`` each.

    The rows behind the last group are a group of expert E. A tile that is not used has no rows.
    """
    sizes_G = jnp.concatenate([sizes_E, (rows - jnp.sum(sizes_E))[None]])
    counts_G = -(-sizes_G // size)
    row_ends_G, tile_ends_G = jnp.cumsum(sizes_G), jnp.cumsum(counts_G)
    tiles_T = jnp.arange(rows // size + sizes_G.size)
    expert_T = jnp.sum(tiles_T[:, None] >= tile_ends_G, axis=1)  # E + 1 for a tile that is not used
    group_T = jnp.minimum(expert_T, sizes_G.size - 1)
    first_T = (row_ends_G - sizes_G)[group_T] + (tiles_T - (tile_ends_G - counts_G)[group_T]) * size
    return expert_T, first_T, row_ends_G[group_T]


def _multiply_tile(expert_T: Any, first_T: Any, end_T: Any, *refs: Any, transposed: bool, blocks: Blocks) -> None:
    """The kernel of ``_rows``: one tile of rows, one block of columns."""
    *operands, y_MF = refs
    inputs, weights = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    tile = pl.program_id(1)
    expert, first, end = expert_T[tile], first_T[tile], end_T[tile]
    experts, (count, columns) = weights[0].shape[0], y_MF.shape
    row_B = first + jnp.arange(blocks.rows)
    column_B = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    read_row_B, read_column_B = jnp.minimum(row_B, count - 1), _clamped(column_B, columns)
    weight = jnp.minimum(expert, experts - 1)
    y_BB = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    for x_MD, w_EDF in zip(inputs, weights, strict=True):
        width = x_MD.shape[1]

        def turn(i: Array, y_BB: Array, x_MD: Any = x_MD, w_EDF: Any = w_EDF, width: int = width) -> Array:
            inner_B = i * blocks.inner + jnp.arange(blocks.inner)
            is_within_B = inner_B < width if width % blocks.inner else None
            x_BB = _load(x_MD.at[read_row_B[:, None], inner_B[None, :]], is_within_B, axis=1)
            if transposed:
                w_BB = _load(w_EDF.at[weight, read_column_B[:, None], inner_B[None, :]], is_within_B, axis=1).T
            else:
                w_BB = _load(w_EDF.at[weight, inner_B[:, None], read_column_B[None, :]], is_within_B, axis=0)
            return y_BB + _dot(x_BB, w_BB)

        turns = (expert < experts).astype(jnp.int32) * pl.cdiv(width, blocks.inner)
        y_BB = lax.fori_loop(0, turns, turn, y_BB)
    is_written = (row_B < end)[:, None] & (column_B < columns)[None, :]
    triton.store(y_MF.at[row_B[:, None], column_B[None, :]], y_BB.astype(y_MF.dtype), mask=is_written)


def _weight_gradient(x_MD: Array, dy_MF: Array, sizes_E: Array) -> Float[Array, "E D F"]:
    """``xᵀ · dy`` of each group, fp32."""
    x_MD, dy_MF, sizes_E = jax_compat.alike(x_MD, dy_MF, sizes_E)
    ends_E = jnp.cumsum(sizes_E)
    inputs, outputs = x_MD.shape[1], dy_MF.shape[1]
    blocks = _blocks(x_MD).within(inputs, outputs, x_MD.shape[0])
    return _call(
        "grouped_weight_gradient",
        partial(_sum_group, blocks=blocks),
        [ends_E - sizes_E, ends_E, x_MD, dy_MF],
        shape=(sizes_E.size, inputs, outputs),
        dtype=jnp.float32,
        grid=(pl.cdiv(outputs, blocks.columns), pl.cdiv(inputs, blocks.rows), sizes_E.size),
        blocks=blocks,
    )


def _sum_group(first_E: Any, end_E: Any, x_MD: Any, dy_MF: Any, dw_EDF: Any, *, blocks: Blocks) -> None:
    """The kernel of ``_weight_gradient``: one expert, one block of its weight."""
    expert = pl.program_id(2)
    first, end = first_E[expert], end_E[expert]
    count, (_, inputs, outputs) = x_MD.shape[0], dw_EDF.shape
    input_B = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows)
    output_B = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    read_input_B, read_output_B = _clamped(input_B, inputs), _clamped(output_B, outputs)

    def turn(i: Array, dw_BB: Array, *, is_rest: bool = False) -> Array:
        row_B = first + i * blocks.inner + jnp.arange(blocks.inner)
        read_row_B, is_within_B = jnp.minimum(row_B, count - 1)[:, None], row_B < end if is_rest else None
        x_BB = _load(x_MD.at[read_row_B, read_input_B[None, :]], is_within_B, axis=0)
        dy_BB = _load(dy_MF.at[read_row_B, read_output_B[None, :]], is_within_B, axis=0)
        return dw_BB + _dot(x_BB.T, dy_BB)

    turns = (end - first) // blocks.inner
    dw_BB = lax.fori_loop(0, turns, turn, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    dw_BB = turn(turns, dw_BB, is_rest=True)
    is_written = (input_B < inputs)[:, None] & (output_B < outputs)[None, :]
    triton.store(dw_EDF.at[expert, input_B[:, None], output_B[None, :]], dw_BB, mask=is_written)


def _call(
    name: str,
    kernel: Any,
    operands: Sequence[Array],
    *,
    shape: tuple[int, ...],
    dtype: Any,
    grid: tuple[int, ...],
    blocks: Blocks,
) -> Array:
    """Runs a kernel, whose references are of complete arrays; on a CPU it is interpreted."""
    for size in (shape, *(x.shape for x in operands)):
        if math.prod(size) >= _MOST_ELEMENTS:
            raise ValueError(
                f"experts: an array of shape {size} on a device has {math.prod(size)} elements, and kernels take less "
                f"than {_MOST_ELEMENTS}; set Layout.ep or smaller microbatches"
            )
    return pl.pallas_call(
        kernel,
        out_shape=jax_compat.varying_struct(shape, dtype, jax_compat.varying_axes(operands[0])),
        grid=grid,
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=pl.no_block_spec,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=jax_compat.traced_devices()[0] == "cpu",
    )(*operands)


def _load(reference: Any, is_within_B: Array | None, *, axis: int) -> Array:
    """Loads an array ``[B, B]``, with zeros where indices along ``axis`` are not within; all are if it is ``None``."""
    if is_within_B is None:
        return triton.load(reference)
    return triton.load(reference, mask=jnp.expand_dims(is_within_B, 1 - axis), other=0)


def _clamped(index_B: Array, count: int) -> Array:
    """Indices of a block that are below ``count``; where blocks divide it they stay as they are, neighbouring."""
    return index_B if count % index_B.size == 0 else jnp.minimum(index_B, count - 1)


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _blocks(x: Array) -> Blocks:
    return FP32_BLOCKS if x.dtype == jnp.float32 else BLOCKS


def _power_of_two(size: int) -> int:
    """The smallest power of two that a block may have and that is not smaller."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
