"""Products of tokens that ranks share: their inputs are brought together for a product, or its outputs summed and left
to the ranks whose tokens they are of (sequence parallelism; Korthikanti et al. 2022, "Reducing Activation Recomputation
in Large Transformer Models", §4.2.2).

In a *ring* every rank's tokens are a chunk of their own, which goes from rank to rank while the product with the chunk
before is computed (DistTrain, Appendix A.1). A chunk is a run of tokens, so that its product is written where it
belongs and nothing is put in another order afterwards.

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
class Exchange:
    """What ranks that share tokens do for a product.

    Attributes:
      gather: axes over which its input's tokens lie, which are brought together before it.
      scatter: axes over which its output is a sum of parts, of which every rank is left its tokens.
      ring: whether chunks go round while products are computed.
    """

    gather: tuple[str, ...] = ()
    scatter: tuple[str, ...] = ()
    ring: bool = False

    def __bool__(self) -> bool:
        return bool(self.gather or self.scatter)

    def forward(self, x: Float[Array, "B _ D"], weights: Sequence[Float[Array, "D _"]]) -> list[Array]:
        """``x @ w`` for every ``w``."""
        if self.gather:
            return _of_gathered(self.ring, self.gather, x, weights)[0]
        return [_to_scattered(self.ring, self.scatter, [x], [w]) for w in weights]

    def input_gradient(self, dys: Sequence[Array], weights: Sequence[Array]) -> Float[Array, "B _ D"]:
        """The gradient of the input from those of all outputs."""
        return self._input_gradient(dys, weights)[0]

    def weight_gradient(self, x: Array, dy: Array, product: Product) -> Array:
        """The gradient of a weight; ``product`` is that of all tokens' inputs and gradients of outputs."""
        return product(_whole(self.ring, self.gather, x), _whole(self.ring, self.scatter, dy))

    def gradients(
        self, x: Array, dys: Sequence[Array], weights: Sequence[Array], product: Product
    ) -> tuple[Array, list[Array]]:
        """The gradients of the input and of all weights; what comes round for the first serves the others."""
        dx, whole = self._input_gradient(dys, weights)
        x = _whole(self.ring, self.gather, x)
        return dx, [product(x, dy) for dy in whole]

    def _input_gradient(self, dys: Sequence[Array], weights: Sequence[Array]) -> tuple[Array, list[Array]]:
        """The gradient of the input, and those of outputs, of all tokens."""
        turned = [w.T for w in weights]
        if self.gather:
            return _to_scattered(self.ring, self.gather, dys, turned), list(dys)
        found = [_of_gathered(self.ring, self.scatter, dy, [w]) for dy, w in zip(dys, turned, strict=True)]
        return reduce(add, (one for (one,), _ in found)), [dy for _, dy in found]


NONE = Exchange()


def gathered(x: Float[Array, "*L B t D"], axes: tuple[str, ...]) -> Float[Array, "*L B T D"]:
    """The tokens of all ranks along some axes, in their order; ``x`` itself where there are none.

    Typed as varying, since what ranks make of it differs: its gradient is summed and scattered, in one step.
    """
    return lax.all_gather(x, axes, axis=x.ndim - 2, tiled=True) if axes else x


def scattered(x: Float[Array, "*L B T D"], axes: tuple[str, ...]) -> Float[Array, "*L B t D"]:
    """This rank's tokens of the sum over some axes: the transpose of ``gathered``."""
    return lax.psum_scatter(x, axes, scatter_dimension=x.ndim - 2, tiled=True) if axes else x


def _of_gathered(ring: bool, axes: tuple[str, ...], x: Array, weights: Sequence[Array]) -> tuple[list[Array], Array]:
    """Products of the tokens of all ranks, and these."""
    if not ring:
        x = gathered(x, axes)
        return [x @ w for w in weights], x
    size, made = lax.axis_size(axes), list[list[Array]]()
    for step in range(size):
        parts = [x @ w for w in weights]
        made.append([*parts, x])
        if step + 1 < size:
            # The next chunk comes beside these products and is used after them. Otherwise XLA would make one product of
            # several with the same weight, which waits for all chunks, or let all come first.
            x, *made[-1] = lax.optimization_barrier((_onward(axes, x), *made[-1]))
    *products, x = (_in_place(axes, parts) for parts in zip(*made, strict=True))
    return products, x


def _to_scattered(ring: bool, axes: tuple[str, ...], xs: Sequence[Array], weights: Sequence[Array]) -> Array:
    """This rank's tokens of the sum, over ranks and pairs, of ``x @ w``."""
    if not ring:
        return scattered(reduce(add, (x @ w for x, w in zip(xs, weights, strict=True))), axes)
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    length = xs[0].shape[-2] // size

    def product(step: int, *before: Array) -> tuple[Array, ...]:
        """That of the chunk whose sum this rank adds to in a step, once what was ``before`` is there."""
        rank = (me + 1 + step) % size
        own = [lax.dynamic_slice_in_dim(x, rank * length, length, x.ndim - 2) for x in xs]
        held = lax.optimization_barrier((*before, *own)) if before else own
        made = reduce(add, (x @ w for x, w in zip(held[len(before) :], weights, strict=True)))
        return *held[: len(before)], made

    (total,) = product(0)  # a rank's sum starts at the rank before it, and comes to it last
    for step in range(1, size):
        total, own = product(step, total)
        total = _onward(axes, total) + own
    return total


def _whole(ring: bool, axes: tuple[str, ...], x: Array) -> Array:
    """The tokens of all ranks."""
    if not (ring and axes):
        return gathered(x, axes)
    chunks = [x]
    for _ in range(lax.axis_size(axes) - 1):
        chunks.append(_onward(axes, chunks[-1]))
    return _in_place(axes, chunks)


def _in_place(axes: tuple[str, ...], parts: Sequence[Array]) -> Array:
    """Chunks as they came, this rank's first, in the order of tokens."""
    first, size, me = parts[0], lax.axis_size(axes), lax.axis_index(axes)
    length = first.shape[-2]
    whole = jnp.zeros_like(first, shape=(*first.shape[:-2], length * size, first.shape[-1]))
    for step, part in enumerate(parts):
        whole = lax.dynamic_update_slice_in_dim(whole, part, (me + step) % size * length, part.ndim - 2)
    return whole


def _onward(axes: tuple[str, ...], x: Array) -> Array:
    """What the rank behind this one has."""
    size = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(rank, (rank - 1) % size) for rank in range(size)])
