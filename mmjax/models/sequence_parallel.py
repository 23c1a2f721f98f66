"""Products under sequence parallelism: tokens are split over tp ranks, gathered before a product or scattered after it.

Scattering sums the outputs of all ranks and leaves each rank its tokens (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", §4.2.2).

With *ring* each rank's tokens are a chunk, and chunks go from rank to rank while the products of the previous chunk are
computed (DistTrain, Appendix A.1). A chunk is a contiguous run of tokens, so that its product is written in place and
never permuted.

Shapes: B rows, T tokens of all ranks, t of one, D inputs, F outputs; dimensions before them are layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Product = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class SequenceParallel:
    """The collectives of a product with split tokens.

    Attributes:
      gather: axes that the input's tokens are split over; they are gathered before the product.
      scatter: axes over which outputs are partial sums; they are summed and scattered over tokens.
      ring: whether chunks go round a ring while products are computed, instead of one collective.
      halves: whether forward may exchange the tokens in two halves; not where they are a half already.
    """

    gather: tuple[str, ...] = ()
    scatter: tuple[str, ...] = ()
    ring: bool = False
    halves: bool = True

    def __bool__(self) -> bool:
        return bool(self.gather or self.scatter)

    def forward(self, x: Float[Array, "B _ D"], weights: Sequence[Float[Array, "D _"]]) -> list[Array]:
        """``x @ w`` for each of ``weights``, inside ``shard_map``; weights are this rank's part.

        With ``gather``, x has this rank's tokens and the results those of all ranks; with ``scatter`` the reverse.
        """
        is_halved = bool(self) and not self.ring and self.halves
        if self.gather:
            if is_halved and (axis := _halved_axis(x, 1)) is not None:
                return _gather_halves_and_multiply(self.gather, x, weights, axis)
            return _gather_and_multiply(self.gather, x, weights, ring=self.ring)[0]
        if is_halved and (axis := _halved_axis(x, lax.axis_size(self.scatter))) is not None:
            return [_multiply_halves_and_scatter(self.scatter, x, w, axis) for w in weights]
        return [_multiply_and_scatter(self.scatter, [x], [w], ring=self.ring) for w in weights]

    def forward_parts(self, parts: Sequence[Array], weights: Sequence[Array]) -> list[list[Array]]:
        """``forward`` of each part of the tokens, at most two: a list by weight of lists by part."""
        if len(parts) == 1 or not self.scatter:
            return [list(results) for results in zip(*(self.forward(x, weights) for x in parts), strict=True)]
        return [_multiply_and_scatter_each(self.scatter, parts, w) for w in weights]

    def input_gradient(self, dys: Sequence[Array], weights: Sequence[Array]) -> Float[Array, "B _ D"]:
        """The gradient of the input, in its shape, from the gradients ``dys`` of the outputs of all ``weights``."""
        return self._input_gradient(dys, weights)[0]

    def weight_gradient(self, x: Array, dy: Array, product: Product) -> Array:
        """The gradient of a weight: ``product(x, dy)`` of the input and output gradient of all tokens.

        ``x`` and ``dy`` have the tokens of the input and of an output of ``forward``; ``product`` computes ``xᵀ · dy``.
        """
        all_x = _gather_chunks(self.gather, x, ring=self.ring)
        return product(all_x, _gather_chunks(self.scatter, dy, ring=self.ring))

    def gradients(
        self, x: Array, dys: Sequence[Array], weights: Sequence[Array]
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """The gradient of the input, and the factors of the gradients of all weights.

        Args:
          x: the input of ``forward``.
          dys: the gradients of its results.
          weights: its weights.

        Returns:
          The gradient of ``x``, and for each weight ``(x, dy)``, the input and output gradient of all tokens, of which
          ``xᵀ · dy`` is the weight's gradient. Both share the gathered output gradients.
        """
        dx, all_dys = self._input_gradient(dys, weights)
        x = _gather_chunks(self.gather, x, ring=self.ring)
        return dx, [(x, dy) for dy in all_dys]

    def _input_gradient(self, dys: Sequence[Array], weights: Sequence[Array]) -> tuple[Array, list[Array]]:
        """The gradient of the input, and the output gradients of all tokens."""
        transposed = [w.T for w in weights]
        if not self.scatter:
            return _multiply_and_scatter(self.gather, dys, transposed, ring=self.ring), list(dys)
        results = [
            _gather_and_multiply(self.scatter, dy, [w], ring=self.ring) for dy, w in zip(dys, transposed, strict=True)
        ]
        return reduce(add, (dx for (dx,), _ in results)), [dy for _, dy in results]


HALF_TOKENS = 256
"""The least number of a rank's tokens in a half: products of fewer take longer in halves than their collective."""
NO_SP = SequenceParallel()
"""Products whose tokens are not split."""


def sp_gather(x: Float[Array, "*L B t D"], axes: tuple[str, ...]) -> Float[Array, "*L B T D"]:
    """The tokens of all ranks along some axes, in their order; ``x`` itself for no axes.

    ``axes`` are such as ("tp",), with n ranks, so T is n · t; to be called inside ``shard_map``. The result is typed as
    varying, so its gradient is summed and scattered in one step.
    """
    return lax.all_gather(x, axes, axis=x.ndim - 2, tiled=True) if axes else x


def sp_scatter(x: Float[Array, "*L B T D"], axes: tuple[str, ...]) -> Float[Array, "*L B t D"]:
    """This rank's tokens of the sum over some axes: the transpose of ``sp_gather``; ``x`` itself for no axes.

    ``axes`` are such as ("tp",). T is n · t for n ranks along the axes, and each rank gets its run of t tokens; inside
    ``shard_map``.
    """
    return lax.psum_scatter(x, axes, scatter_dimension=x.ndim - 2, tiled=True) if axes else x


# ---- products --------------------------------------------------------------------------------------------------------

NARROW = 512
"""Columns of a 16-bit weight below which its input's gradient takes as long as the gradient's bytes."""


def _sum_of_products(xs: Sequence[Array], weights: Sequence[Array]) -> Array:
    """The sum of ``x @ w`` over pairs.

    A product is the first term of each addition: XLA makes a GPU begin it with the second term, and does not look for a
    product among second terms.
    """
    narrow = [place for place, w in enumerate(weights) if w.dtype.itemsize == 2 and w.shape[0] < NARROW]
    narrow = narrow if len(narrow) > 1 else []  # those are multiplied as one
    pairs = [(x, w) for place, (x, w) in enumerate(zip(xs, weights, strict=True)) if place not in narrow]
    if narrow:
        joined = jnp.concatenate([xs[place] for place in narrow], axis=-1)
        pairs.append((joined, jnp.concatenate([weights[place] for place in narrow])))
    return reduce(lambda total, product: product + total, (x @ w for x, w in pairs))


# ---- two parts of a layer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenParts:
    """The parts of tokens that a layer computes one after the other, so that exchanges of one lie beside the other.

    They are two halves, of rows or of each rank's tokens, or all tokens. What is computed of a token alone, such as an
    mlp, stays in parts: tokens that were gathered in halves need a copy to be in order.

    Attributes:
      axes: the axes over which tokens are split, such as ("tp",).
      dimension: the dimension that is halved, 0 (rows) or 1 (tokens); ``None`` for one part.
    """

    axes: tuple[str, ...]
    dimension: int | None

    @classmethod
    def of(cls, x: Array, axes: tuple[str, ...], *, divisible: bool) -> TokenParts:
        """The parts of ``x``, ``[B, t, D]`` with this rank's tokens where there are axes.

        One part where there are none, unless ``divisible``, and for few tokens.
        """
        return cls(axes, _halved_axis(x, 1) if axes and divisible else None)

    def split(self, x_BTD: Array) -> list[Array]:
        """The parts of this rank's tokens."""
        return [x_BTD] if self.dimension is None else jnp.split(x_BTD, 2, axis=self.dimension)

    def join(self, parts: Sequence[Array]) -> Float[Array, "B T D"]:
        """The inverse of ``split``."""
        return parts[0] if self.dimension is None else jnp.concatenate(parts, axis=self.dimension)

    def split_gathered(self, x_BTF: Array) -> list[Array]:
        """The parts of the tokens of all ranks."""
        if self.dimension is None:
            return self.split(x_BTF)
        return list(jnp.split(x_BTF, 2) if self.dimension == 0 else _token_halves(x_BTF, lax.axis_size(self.axes)))


# ---- two halves ------------------------------------------------------------------------------------------------------


def _halved_axis(x: Array, ranks: int) -> int | None:
    """The dimension along which ``x`` is cut into two halves: 0 (rows) if possible, else 1 (tokens).

    ``None`` where neither can be halved, and for few tokens; ``ranks`` is the number of ranks whose tokens ``x`` has.
    """
    rows, tokens = x.shape[0], x.shape[-2] // ranks
    if x.ndim != 3 or rows * tokens < 2 * HALF_TOKENS:
        return None
    if rows % 2 == 0:
        return 0
    return 1 if tokens % 2 == 0 else None


def _gather_halves_and_multiply(
    axes: tuple[str, ...], x: Float[Array, "B t D"], weights: Sequence[Array], axis: int
) -> list[Array]:
    """Products of the tokens of all ranks with each weight; the second half is gathered beside those of the first."""
    halves = [sp_gather(half, axes) for half in jnp.split(x, 2, axis=axis)]
    results = ([half @ w for half in halves] for w in weights)
    if axis == 0:
        return [jnp.concatenate(parts) for parts in results]
    return [_joined_halves(parts, lax.axis_size(axes)) for parts in results]


def _multiply_halves_and_scatter(
    axes: tuple[str, ...], x: Float[Array, "B T D"], weight: Array, axis: int
) -> Float[Array, "B t F"]:
    """This rank's tokens of the sum over ranks, in two halves."""
    halves = jnp.split(x, 2) if axis == 0 else _token_halves(x, lax.axis_size(axes))
    return jnp.concatenate(_multiply_and_scatter_each(axes, halves, weight), axis=axis)


def _multiply_and_scatter_each(axes: tuple[str, ...], halves: Sequence[Array], weight: Array) -> list[Array]:
    """This rank's tokens of each half; the first half is scattered beside the product of the second."""
    first, second = halves
    scattered, product = sp_scatter(first @ weight, axes), second @ weight
    # The second collective waits for the first one, else XLA would make one of both behind the products.
    scattered, product = lax.optimization_barrier((scattered, product))
    return [scattered, sp_scatter(product, axes)]


def _token_halves(x_BTD: Array, ranks: int) -> tuple[Array, Array]:
    """The first and the second half of each rank's tokens, rank by rank."""
    B, T, D = x_BTD.shape
    by_half = x_BTD.reshape(B, ranks, 2, T // ranks // 2, D)
    return by_half[:, :, 0].reshape(B, T // 2, D), by_half[:, :, 1].reshape(B, T // 2, D)


def _joined_halves(halves: Sequence[Array], ranks: int) -> Array:
    """The tokens ``[B, T, F]`` whose ``_token_halves`` these are."""
    B, half_tokens, F = halves[0].shape
    stacked = jnp.stack([half.reshape(B, ranks, -1, F) for half in halves], axis=2)
    return stacked.reshape(B, 2 * half_tokens, F)


# ---- whole exchanges and rings ---------------------------------------------------------------------------------------


def _gather_and_multiply(
    axes: tuple[str, ...], x: Array, weights: Sequence[Array], *, ring: bool
) -> tuple[list[Array], Array]:
    """Products of the tokens of all ranks with each weight, and these tokens."""
    if not ring:
        x = sp_gather(x, axes)
        return [x @ w for w in weights], x
    size, steps = lax.axis_size(axes), list[list[Array]]()
    for step in range(size):
        chunk_products = [x @ w for w in weights]
        steps.append([*chunk_products, x])
        if step + 1 < size:
            # The next chunk is received beside these products and used after them. Without the barrier XLA would merge
            # the products with one weight into one, which waits for all chunks, or receive all chunks first.
            x, *steps[-1] = lax.optimization_barrier((_ring_shift(axes, x), *steps[-1]))
    *products, x = (_in_token_order(axes, chunks) for chunks in zip(*steps, strict=True))
    return products, x


def _multiply_and_scatter(axes: tuple[str, ...], xs: Sequence[Array], weights: Sequence[Array], *, ring: bool) -> Array:
    """This rank's tokens of the sum, over ranks and pairs, of ``x @ w``."""
    if not ring:
        return sp_scatter(_sum_of_products(xs, weights), axes)
    size, this_rank = lax.axis_size(axes), lax.axis_index(axes)
    length = xs[0].shape[-2] // size

    def product(step: int, *previous: Array) -> tuple[Array, ...]:
        """``previous``, and the product of the chunk that this rank adds to in a step; it waits for ``previous``."""
        rank = (this_rank + 1 + step) % size
        chunks = [lax.dynamic_slice_in_dim(x, rank * length, length, x.ndim - 2) for x in xs]
        ready = lax.optimization_barrier((*previous, *chunks)) if previous else chunks
        chunk_product = _sum_of_products(ready[len(previous) :], weights)
        return *ready[: len(previous)], chunk_product

    (total,) = product(0)  # the sum of a rank's chunk starts at the rank before it, and arrives last
    for step in range(1, size):
        total, chunk_product = product(step, total)
        total = _ring_shift(axes, total) + chunk_product
    return total


def _gather_chunks(axes: tuple[str, ...], x: Array, *, ring: bool) -> Array:
    """The tokens of all ranks, by one collective or round a ring."""
    if not (ring and axes):
        return sp_gather(x, axes)
    chunks = [x]
    for _ in range(lax.axis_size(axes) - 1):
        chunks.append(_ring_shift(axes, chunks[-1]))
    return _in_token_order(axes, chunks)


def _in_token_order(axes: tuple[str, ...], chunks: Sequence[Array]) -> Array:
    """Concatenates chunks in the order of tokens; they are given in the order of a ring, this rank's chunk first."""
    first, size, this_rank = chunks[0], lax.axis_size(axes), lax.axis_index(axes)
    length = first.shape[-2]
    tokens = jnp.zeros_like(first, shape=(*first.shape[:-2], length * size, first.shape[-1]))
    for step, chunk in enumerate(chunks):
        tokens = lax.dynamic_update_slice_in_dim(tokens, chunk, (this_rank + step) % size * length, chunk.ndim - 2)
    return tokens


def _ring_shift(axes: tuple[str, ...], x: Array) -> Array:
    """The array of the next rank in a ring."""
    size = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(rank, (rank - 1) % size) for rank in range(size)])
