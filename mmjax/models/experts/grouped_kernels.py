"""Grouped products by kernels for NVIDIA GPUs (Pallas, lowered to Triton).

Rows are multiplied in tiles, each of rows of one group, and rows behind the last group are tiles of zeros. Which tile
belongs to which group the device computes first; the number of tiles is its bound. No tile reads rows of another group
for nothing, nothing is padded or copied, and the host does not wait. Rows may be values of an index, which kernels read
from where they are.

Weights' gradients are computed by one program for each block of a weight, which goes over the rows of the group, and
adds them to a sum in place if there is one.

Shapes: M rows, S values of which rows are taken, D inputs, F outputs, E experts, T tiles, B a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.models.experts.dispatch import Rows

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


def products(x: Rows, weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]) -> list[Array]:
    """``x[i] @ w[e(i)]`` for every weight, ``[M, F]``; rows behind the last group are zeros."""
    return [_rows([x.values_SD], x.index_M, [w], sizes_E, transposed=False) for w in weights]


def input_gradient(
    dys: Sequence[Rows], weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """The sum over weights of ``dy[i] @ w[e(i)]ᵀ``; rows behind the last group are zeros. All have one index."""
    return _rows([dy.values_SD for dy in dys], dys[0].index_M, weights, sizes_E, transposed=True)


def weight_gradients(
    parts: Sequence[tuple[Rows, Sequence[Rows], Int[Array, " E"]]], totals: Sequence[Float[Array, "E D F"]] = ()
) -> list[Float[Array, "E D F"]]:
    """``xᵀ · dy`` of each group for every ``dy``, fp32, summed over parts and added to ``totals`` if there are any.

    Args:
      parts: of each the inputs, the gradients of each output, and the number of rows of each expert.
      totals: fp32 sums, varying over at least the mesh axes of the parts.
    """
    by_weight = [[(x, dys[place], sizes_E) for x, dys, sizes_E in parts] for place in range(len(parts[0][1]))]
    return [_weight_gradient(of_weight, totals[place] if totals else None) for place, of_weight in enumerate(by_weight)]


def _rows(
    inputs: Sequence[Float[Array, "S _"]],
    index_M: Int[Array, " M"] | None,
    weights: Sequence[Array],
    sizes_E: Int[Array, " E"],
    *,
    transposed: bool,
) -> Array:
    """The sum over pairs of ``input[i] @ weight[e(i)]``, or ``@ weight[e(i)]ᵀ``."""
    rows = Rows(inputs[0], index_M).count
    count, indices = len(inputs), [] if index_M is None else [index_M]
    sizes_E, *operands = jax_compat.alike(sizes_E, *indices, *inputs, *weights)
    columns = weights[0].shape[1 if transposed else 2]
    blocks = _blocks(inputs[0]).within(rows, columns, inputs[0].shape[1])
    tiles = _tiles(sizes_E, rows, blocks.rows)
    return _call(
        f"grouped_product_of_{rows}_rows",
        partial(_multiply_tile, pairs=count, rows=rows, transposed=transposed, blocks=blocks),
        [*tiles, *operands],
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


def _multiply_tile(
    expert_T: Any, first_T: Any, end_T: Any, *refs: Any, pairs: int, rows: int, transposed: bool, blocks: Blocks
) -> None:
    """The kernel of ``_rows``: one tile of rows, one block of columns."""
    *index, y_MF = refs[: -2 * pairs - 1] + refs[-1:]
    inputs, weights = refs[-2 * pairs - 1 : -pairs - 1], refs[-pairs - 1 : -1]
    tile = pl.program_id(1)
    expert, first, end = expert_T[tile], first_T[tile], end_T[tile]
    experts, columns = weights[0].shape[0], y_MF.shape[1]
    row_B = first + jnp.arange(blocks.rows)
    column_B = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    read_row_B, read_column_B = _read_rows(index, row_B, rows), _clamped(column_B, columns)
    weight = jnp.minimum(expert, experts - 1)
    y_BB = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    for x_SD, w_EDF in zip(inputs, weights, strict=True):
        width = x_SD.shape[1]

        def turn(i: Array, y_BB: Array, x_SD: Any = x_SD, w_EDF: Any = w_EDF, width: int = width) -> Array:
            inner_B = i * blocks.inner + jnp.arange(blocks.inner)
            is_within_B = inner_B < width if width % blocks.inner else None
            x_BB = _load(x_SD.at[read_row_B[:, None], inner_B[None, :]], is_within_B, axis=1)
            if transposed:
                w_BB = _load(w_EDF.at[weight, read_column_B[:, None], inner_B[None, :]], is_within_B, axis=1).T
            else:
                w_BB = _load(w_EDF.at[weight, inner_B[:, None], read_column_B[None, :]], is_within_B, axis=0)
            return y_BB + _dot(x_BB, w_BB)

        turns = (expert < experts).astype(jnp.int32) * pl.cdiv(width, blocks.inner)
        y_BB = lax.fori_loop(0, turns, turn, y_BB)
    is_written = (row_B < end)[:, None] & (column_B < columns)[None, :]
    triton.store(y_MF.at[row_B[:, None], column_B[None, :]], y_BB.astype(y_MF.dtype), mask=is_written)


def _weight_gradient(
    parts: Sequence[tuple[Rows, Rows, Int[Array, " E"]]], total_EDF: Float[Array, "E D F"] | None
) -> Float[Array, "E D F"]:
    """``xᵀ · dy`` of each group, fp32, summed over parts and added to the total."""
    operands = list[Array]()
    for x, dy, sizes_E in parts:
        ends_E = jnp.cumsum(sizes_E)
        indices = [rows.index_M for rows in (x, dy) if rows.index_M is not None]
        operands += [ends_E - sizes_E, ends_E, *indices, x.values_SD, dy.values_SD]
    totals = [] if total_EDF is None else [total_EDF]
    operands, rows = list(jax_compat.alike(*operands, *totals)), [x.count for x, _, _ in parts]
    x, dy, sizes_E = parts[0]
    inputs, outputs = x.values_SD.shape[1], dy.values_SD.shape[1]
    blocks = _blocks(x.values_SD).within(inputs, outputs, min(rows))
    has_indices = tuple((x.index_M is not None, dy.index_M is not None) for x, dy, _ in parts)
    return _call(
        f"grouped_weight_gradient_of_{sum(rows)}_rows",
        partial(_sum_group, rows=tuple(rows), has_indices=has_indices, has_total=bool(totals), blocks=blocks),
        operands,
        shape=(sizes_E.size, inputs, outputs),
        dtype=jnp.float32,
        grid=(pl.cdiv(outputs, blocks.columns), pl.cdiv(inputs, blocks.rows), sizes_E.size),
        blocks=blocks,
        aliases={len(operands) - 1: 0} if totals else {},
    )


def _sum_group(
    *refs: Any, rows: tuple[int, ...], has_indices: tuple[tuple[bool, bool], ...], has_total: bool, blocks: Blocks
) -> None:
    """The kernel of ``_weight_gradient``: one expert, one block of its weight."""
    *operands, dw_EDF = refs
    _, inputs, outputs = dw_EDF.shape
    expert, is_read = pl.program_id(2), iter(operands)
    input_B = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows)
    output_B = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    read_input_B, read_output_B = _clamped(input_B, inputs), _clamped(output_B, outputs)
    dw_BB = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    for count, has_index in zip(rows, has_indices, strict=True):
        first, end = next(is_read)[expert], next(is_read)[expert]
        x_index, dy_index = ([next(is_read)] if has else [] for has in has_index)
        x_SD, dy_SF = next(is_read), next(is_read)

        def turn(
            i: Array,
            dw_BB: Array,
            count: int = count,
            first: Any = first,
            end: Any = end,
            x: tuple[Any, Any] = (x_index, x_SD),
            dy: tuple[Any, Any] = (dy_index, dy_SF),
            *,
            is_rest: bool = False,
        ) -> Array:
            row_B = first + i * blocks.inner + jnp.arange(blocks.inner)
            is_within_B = row_B < end if is_rest else None
            x_row_B, dy_row_B = (_read_rows(index, row_B, count)[:, None] for index, _ in (x, dy))
            x_BB = _load(x[1].at[x_row_B, read_input_B[None, :]], is_within_B, axis=0)
            dy_BB = _load(dy[1].at[dy_row_B, read_output_B[None, :]], is_within_B, axis=0)
            return dw_BB + _dot(x_BB.T, dy_BB)

        turns = (end - first) // blocks.inner
        dw_BB = turn(turns, lax.fori_loop(0, turns, turn, dw_BB), is_rest=True)
    is_written = (input_B < inputs)[:, None] & (output_B < outputs)[None, :]
    place = (expert, input_B[:, None], output_B[None, :])
    if has_total:  # last, so that products are not rounded to the size of the total
        dw_BB += triton.load(next(is_read).at[place], mask=is_written, other=0)
    triton.store(dw_EDF.at[place], dw_BB, mask=is_written)


def _call(
    name: str,
    kernel: Any,
    operands: Sequence[Array],
    *,
    shape: tuple[int, ...],
    dtype: Any,
    grid: tuple[int, ...],
    blocks: Blocks,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> Array:
    """Runs a kernel, whose references are of complete arrays; on a CPU it is interpreted.

    Of ``aliases`` see ``pallas_call``.
    """
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
        input_output_aliases=dict(aliases),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=jax_compat.traced_devices()[0] == "cpu",
    )(*operands)


def _load(reference: Any, is_within_B: Array | None, *, axis: int) -> Array:
    """Loads an array ``[B, B]``, with zeros where indices along ``axis`` are not within; all are if it is ``None``."""
    if is_within_B is None:
        return triton.load(reference)
    return triton.load(reference, mask=jnp.expand_dims(is_within_B, 1 - axis), other=0)


def _read_rows(index: Sequence[Any], row_B: Array, count: int) -> Array:
    """The places of ``count`` rows among values: those that a reference says, if there is one."""
    read_row_B = jnp.minimum(row_B, count - 1)
    return triton.load(index[0].at[read_row_B]) if index else read_row_B


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
