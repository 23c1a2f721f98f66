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
            return _of_gathered(self.ring, self.gather, x, weights)
        return [_to_scattered(self.ring, self.scatter, [x], [w]) for w in weights]

    def input_gradient(self, dys: Sequence[Array], weights: Sequence[Array]) -> Float[Array, "B _ D"]:
        """The gradient of the input from those of all outputs."""
        turned = [w.T for w in weights]
        if self.gather:
            return _to_scattered(self.ring, self.gather, dys, turned)
        parts = (_of_gathered(self.ring, self.scatter, dy, [w])[0] for dy, w in zip(dys, turned, strict=True))
        return reduce(add, parts)

    def weight_gradient(self, x: Array, dy: Array, product: Callable[[Array, Array], Array]) -> Array:
        """The gradient of a weight; ``product`` is that of one run of tokens' inputs and gradients of outputs."""
        if not self.ring:
            return product(gathered(x, self.gather), gathered(dy, self.scatter))
        axes, (own, whole) = (self.gather, (x, dy)) if self.gather else (self.scatter, (dy, x))
        total = jnp.float32(0)
        for rank, chunk in _chunks(axes, own):
            beside = _part(whole, rank, chunk.shape[-2])
            pair = (chunk, beside) if self.gather else (beside, chunk)
            total = total + product(*pair).astype(jnp.float32)
        return total.astype(x.dtype)


NONE = Exchange()


def gathered(x: Float[Array, "*L B t D"], axes: tuple[str, ...]) -> Float[Array, "*L B T D"]:
    """The tokens of all ranks along some axes, in their order; ``x`` itself where there are none.

    Typed as varying, since what ranks make of it differs: its gradient is summed and scattered, in one step.
    """
    return lax.all_gather(x, axes, axis=x.ndim - 2, tiled=True) if axes else x


def scattered(x: Float[Array, "*L B T D"], axes: tuple[str, ...]) -> Float[Array, "*L B t D"]:
    """This rank's tokens of the sum over some axes: the transpose of ``gathered``."""
    return lax.psum_scatter(x, axes, scatter_dimension=x.ndim - 2, tiled=True) if axes else x


def _of_gathered(ring: bool, axes: tuple[str, ...], x: Array, weights: Sequence[Array]) -> list[Array]:
    """Products of the tokens of all ranks."""
    if not ring:
        x = gathered(x, axes)
        return [x @ w for w in weights]
    found = [(rank, [chunk @ w for w in weights]) for rank, chunk in _chunks(axes, x)]
    return [_in_place(axes, [(rank, parts[i]) for rank, parts in found]) for i in range(len(weights))]


def _in_place(axes: tuple[str, ...], parts: Sequence[tuple[Array, Array]]) -> Array:
    """Chunks behind one another in the order of their ranks."""
    first, length = parts[0][1], parts[0][1].shape[-2]
    shape = (*first.shape[:-2], length * lax.axis_size(axes), first.shape[-1])
    whole = jnp.zeros_like(first, shape=shape)
    for rank, part in parts:
        whole = lax.dynamic_update_slice_in_dim(whole, part, rank * length, part.ndim - 2)
    return whole


def _to_scattered(ring: bool, axes: tuple[str, ...], xs: Sequence[Array], weights: Sequence[Array]) -> Array:
    """This rank's tokens of the sum, over ranks and pairs, of ``x @ w``."""
    pairs = list(zip(xs, weights, strict=True))
    if not ring:
        return scattered(reduce(add, (x @ w for x, w in pairs)), axes)
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    length = xs[0].shape[-2] // size
    total = None
    for step in range(size):  # a rank's sum starts at the rank before it, and comes to it last
        rank = (me + 1 + step) % size
        own = reduce(add, (_part(x, rank, length) @ w for x, w in pairs))
        total = own if total is None else _onward(axes, total) + own
    assert total is not None
    return total


def _chunks(axes: tuple[str, ...], x: Array) -> list[tuple[Array, Array]]:
    """The chunks of all ranks as they come by, with the rank that each is of; this rank's own is the first."""
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    chunks = [x]
    for _ in range(size - 1):
        chunks.append(_onward(axes, chunks[-1]))
    return [((me + step) % size, chunk) for step, chunk in enumerate(chunks)]


def _onward(axes: tuple[str, ...], x: Array) -> Array:
    """What the rank behind this one has."""
    size = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(rank, (rank - 1) % size) for rank in range(size)])


def _part(x: Array, rank: Array, length: int) -> Array:
    """One rank's tokens of those of all."""
    return lax.dynamic_slice_in_dim(x, rank * length, length, x.ndim - 2)
