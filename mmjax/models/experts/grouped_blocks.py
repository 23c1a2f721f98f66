"""Grouped products by blocks of rows, in loops whose numbers of turns only the device knows: for CPUs.

A group is whole blocks and a rest. The rest is one block too, of the smallest number of rows that holds it: its other
rows are computed again afterwards. Rows are taken once for all weights that share them, block by block, so no array has
all of them; and a weight is copied once.

Shapes: M rows, D inputs, F outputs, E experts, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.models.experts.dispatch import Rows
from mmjax.models.taps import Value

LARGEST, SMALLEST = 512, 16
"""Rows of blocks. Products of fewer rows read their weight for little work."""
STEPS = 16
"""Number of block sizes; the sizes between zero and the largest are equally far apart."""


def products(x: Rows, weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]) -> list[Array]:
    """``x[i] @ w[e(i)]`` for every weight, ``[M, F]``; rows behind the last group are zeros."""

    def of_block(blocks: list[Array], of_expert: list[Array]) -> list[Array]:
        return [blocks[0] @ w_DF for w_DF in of_expert]

    return _rows(of_block, [x], weights, sizes_E, [w.shape[2] for w in weights])


def input_gradient(
    dys: Sequence[Rows], weights: Sequence[Float[Array, "E D F"]], sizes_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """The sum over weights of ``dy[i] @ w[e(i)]ᵀ``; rows behind the last group are zeros."""

    def of_block(blocks: list[Array], of_expert: list[Array]) -> list[Array]:
        parts = (lax.dot_general(dy, w, (((1,), (1,)), ((), ()))) for dy, w in zip(blocks, of_expert, strict=True))
        return [sum(parts, start=jnp.zeros((), blocks[0].dtype))]

    return _rows(of_block, dys, weights, sizes_E, [weights[0].shape[1]])[0]


def weight_gradients(
    parts: Sequence[tuple[Rows, Sequence[Rows], Int[Array, " E"]]], totals: Sequence[Float[Array, "E D F"]] = ()
) -> list[Float[Array, "E D F"]]:
    """``xᵀ · dy`` of each group for every ``dy``, fp32, summed over parts and added to ``totals`` if there are any.

    For the arguments see ``grouped_kernels.weight_gradients``.
    """
    by_part = [_weight_gradients(x, dys, sizes_E) for x, dys, sizes_E in parts]
    return [reduce(add, terms) for terms in zip(*([totals] if totals else []), *by_part, strict=True)]


def _weight_gradients(x: Rows, dys: Sequence[Rows], sizes_E: Array) -> list[Array]:
    """``xᵀ · dy`` of each group for every ``dy``, fp32."""
    count = x.count
    blocks = _block_rows(count, sizes_E.size)
    (x, *dys), (ends_E,) = _alike([x, *dys], [jnp.cumsum(sizes_E)])
    shapes = [(x.values_SD.shape[1], dy.values_SD.shape[1]) for dy in dys]
    axes = jax_compat.varying_axes(ends_E)

    def of_block(rows: int, start: Array, end: Array) -> list[Array]:
        at, is_within = _placed(rows, start, end, count)
        x_BD, *dy_blocks = (a.block(at, rows) for a in (x, *dys))
        # Transposed once for all products, which are faster so.
        x_DB = lax.optimization_barrier(jnp.where(is_within, x_BD, 0).T)
        return [jnp.matmul(x_DB, dy, preferred_element_type=jnp.float32) for dy in dy_blocks]

    def expert(_: None, group: tuple[Array, Array]) -> tuple[None, list[Array]]:
        start, end = group

        def rest(rows: int, first: Array, sums: list[Array]) -> list[Array]:
            del sums  # are zeros
            return of_block(rows, first, start + (end - start) % blocks[-1])

        def whole(rows: int, first: Array, sums: list[Array]) -> list[Array]:
            return [total + part for total, part in zip(sums, of_block(rows, first, end), strict=True)]

        zeros = [Value(shape, jnp.float32, axes).zeros() for shape in shapes]
        return None, _over_blocks(rest, whole, zeros, start, end, blocks)

    return lax.scan(expert, None, (ends_E - sizes_E, ends_E))[1]


def _rows(
    of_block: Callable[[list[Array], list[Array]], list[Array]],
    inputs: Sequence[Rows],
    weights: Sequence[Array],
    sizes_E: Int[Array, " E"],
    widths: Sequence[int],
) -> list[Array]:
    """``of_block(blocks of inputs, weights of their expert)`` for all rows; zeros behind the last group.

    Args:
      of_block: gives arrays of as many rows as its inputs.
      inputs: rows, sorted by expert.
      weights: of all experts.
      sizes_E: number of rows of each expert.
      widths: columns of the results.
    """
    count = inputs[0].count
    blocks = _block_rows(count, sizes_E.size)
    inputs, (*weights, ends_E) = _alike(inputs, [*weights, jnp.cumsum(sizes_E)])
    axes, dtype = jax_compat.varying_axes(ends_E), inputs[0].values_SD.dtype
    results = [Value((count, width), dtype, axes).zeros() for width in widths]

    def expert(results: list[Array], group: tuple[list[Array], Array, Array]) -> tuple[list[Array], None]:
        of_expert, start, end = group

        def write(rows: int, first: Array, results: list[Array]) -> list[Array]:
            at, is_within = _placed(rows, first, ends_E[-1], count)
            values = of_block([x.block(at, rows) for x in inputs], of_expert)
            before = [lax.dynamic_slice_in_dim(y, at, rows) for y in results]
            values = [jnp.where(is_within, *pair) for pair in zip(values, before, strict=True)]
            return [lax.dynamic_update_slice_in_dim(y, value, at, 0) for y, value in zip(results, values, strict=True)]

        return _over_blocks(write, write, results, start, end, blocks), None

    return lax.scan(expert, results, (weights, ends_E - sizes_E, ends_E))[0]


def _alike(inputs: Sequence[Rows], arrays: Sequence[Array]) -> tuple[list[Rows], list[Array]]:
    """Both with the varying axes of all."""
    leaves, tree = jax.tree.flatten((list(inputs), list(arrays)))
    return jax.tree.unflatten(tree, jax_compat.alike(*leaves))


def _placed(rows: int, start: Array, end: Array, count: int) -> tuple[Array, Array]:
    """The first row of a block, and ``[B, 1]``, whether each of its rows is between ``start`` and ``end``.

    The block begins at ``start``, or ends with the last of ``count`` rows.
    """
    at = jnp.minimum(start, count - rows)
    rows_B = at + jnp.arange(rows)
    return at, ((rows_B >= start) & (rows_B < end))[:, None]


def _block_rows(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of blocks from small to large, the largest for twice as many rows as a group has on average."""
    smallest = min(SMALLEST, rows)
    largest = 1 << max(smallest, min(LARGEST, rows, 2 * rows // experts)).bit_length() - 1
    step = max(min(smallest, largest), largest // STEPS)
    return tuple(range(step, largest + 1, step))


_Block = Callable[[int, Array, list[Array]], list[Array]]


def _over_blocks(
    rest: _Block, whole: _Block, carry: list[Array], start: Array, end: Array, blocks: Sequence[int]
) -> list[Array]:
    """Covers the rows from ``start`` to ``end`` by at most one block for the rest, at the start, and whole blocks.

    Both functions are called as ``(rows, first row, carry) -> carry``, and ``rest`` before ``whole``.
    """
    largest = blocks[-1]
    rest_rows = (end - start) % largest
    smaller = 0
    for rows in blocks:
        is_taken = ((rest_rows > smaller) & (rest_rows <= rows)).astype(jnp.int32)

        def turn(i: Array, carry: list[Array], rows: int = rows) -> list[Array]:
            return rest(rows, start + i * rows, carry)  # XLA would compute it before the loop if it did not read ``i``

        # A loop of one turn or none: of a conditional, XLA would copy the carry.
        carry = lax.fori_loop(jnp.zeros_like(is_taken), is_taken, turn, carry)
        smaller = rows
    first = start + rest_rows
    count = (end - first) // largest
    return lax.fori_loop(
        jnp.zeros_like(count), count, lambda i, carry: whole(largest, first + i * largest, carry), carry
    )
