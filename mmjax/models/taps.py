"""Taps: products with weights whose gradient is deferred.

The gradient of the weight in ``y = x · w`` is ``xᵀ · dy``. A *tapped* weight returns ``x`` and ``dy`` instead. So one
program can compute the gradients that other stages wait for, and a later program the gradients of weights (Qi et al.,
"Zero Bubble Pipeline Parallelism", §2). A tap is an argument whose value is never read and whose cotangent is ``x`` or
``dy``. Being arguments, taps are stacked by ``scan`` and pass through ``jax.checkpoint`` as weights do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.handles import Adapted, Handle, LikeItsWeight, Open, opened
from mmjax.models.recorded_work import record_product
from mmjax.models.sequence_parallel import NO_SP, SequenceParallel

PRODUCT = "weight of a product"
"""The checkpoint name of weights that ``products`` reads inside ``marked``."""
_marking: ContextVar[bool] = ContextVar("marking", default=False)


@dataclass(frozen=True)
class Value:
    """Shape, dtype and varying axes of a local value."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]

    @classmethod
    def of(cls, x: jax.Array) -> Value:
        """Shape, dtype and varying axes of a traced value."""
        return cls(x.shape, x.dtype, jax_compat.varying_axes(x))

    def zeros(self) -> jax.Array:
        """A local array of zeros of this shape, dtype and varying axes, inside ``shard_map``."""
        return jax_compat.to_varying(jnp.zeros(self.shape, self.dtype), sorted(self.axes))


@dataclass(frozen=True, kw_only=True)
class Use:
    """A product with a weight.

    Attributes:
      x, dy: this rank's input and output.
      group: names of the weights that share the input.
      transposed: whether the weight is transposed.
      sp: see ``products``.
    """

    x: Value
    dy: Value
    group: tuple[str, ...]
    transposed: bool
    sp: SequenceParallel = NO_SP


_STATIC = {"static": True}
"""Metadata of a field that is part of the tree structure, not data."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tapped(LikeItsWeight):
    """A parameter that stands for a weight array with taps; only ``products`` can use it.

    Attributes:
      weight: the array, or a handle of it.
      x, dy: the taps, with the shapes of the product's input and output; only one of the weights with the same input
        has ``x``.
      name: the name of the weight in ``uses``.
      transposed: whether ``weight`` is the transpose of the array among the parameters.
      uses: records a ``Use`` for every product; ``None`` records nothing.
    """

    weight: jax.Array | Handle
    x: jax.Array | None = None
    dy: jax.Array | None = None
    name: str = field(default="", metadata=_STATIC)
    transposed: bool = field(default=False, metadata=_STATIC)
    uses: Uses | None = field(default=None, metadata=_STATIC)

    @property
    def T(self) -> Tapped:
        """The transpose, with the same taps."""
        return replace(self, weight=self.weight.T, transposed=not self.transposed)


class Uses:
    """A record of products, ``by_name`` of the weight. It equals only itself, so it may be part of a tree structure."""

    def __init__(self) -> None:
        self.by_name: dict[str, set[Use]] = {}


def handle(array: Any, open_weight: Open) -> Handle | Tapped:
    """A handle of ``open_weight(array)``, where the array is stored.

    ``open_weight`` is a linear function from the stored array to the weight, such as a cast. A tapped array stays
    tapped: a handle takes the place of its ``weight``.
    """
    if isinstance(array, Tapped):
        return replace(array, weight=handle(array.weight, open_weight))
    return Handle(stored=array, open=open_weight)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """A context in which ``products`` names its weights ``PRODUCT``, so that ``jaxprs.named_reads`` can count their
    reads; it gives nothing: ``with marked(): …``.
    """
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def products(x: jax.Array, weights: Sequence[Any], sp: SequenceParallel = NO_SP) -> list[jax.Array]:
    """``x @ w`` for every weight, in order.

    Args:
      x: the input, ``[B, T, D]``, for results ``[B, T, F]``; any leading dimensions without sequence parallelism.
      weights: arrays ``[D, F]``, handles, tapped weights, or weights with an adapter.
      sp: the collectives of sequence parallelism, such as ``SequenceParallel(gather=("tp",))``; by default none. The
        residual is this rank's tokens; backward gathers them again.
    """
    adapted = [w for w in weights if isinstance(w, Adapted)]
    plain = [w.weight if isinstance(w, Adapted) else w for w in weights]
    # Adapters and weights are multiplied together, so that all share one tap of the input.
    results = _products(x, [*plain, *(w.a for w in adapted)], sp)
    inner = iter(results[len(plain) :])
    return [
        y + _products(next(inner) * w.scale, [w.b], NO_SP)[0] if isinstance(w, Adapted) else y
        for w, y in zip(weights, results, strict=False)
    ]


def _products(x: jax.Array, weights: Sequence[Any], sp: SequenceParallel) -> list[jax.Array]:
    for weight in weights:
        record_product(x, weight)
    if _marking.get():
        weights = [checkpoint_name(w, PRODUCT) for w in weights]
    tapped_weights = [w for w in weights if isinstance(w, Tapped)]
    taps = [w for w in tapped_weights if w.dy is not None]
    tapped: Iterator[jax.Array] = iter(())
    if taps:
        (x_tap,) = [w.x for w in taps if w.x is not None]
        tapped = iter(_tapped(sp, x, [w.weight for w in taps], x_tap, [w.dy for w in taps]))
    untapped = iter(_untapped(x, [w for w in weights if not isinstance(w, Tapped) or w.dy is None], sp))
    result = [next(tapped if isinstance(w, Tapped) and w.dy is not None else untapped) for w in weights]
    for w, y in zip(weights, result, strict=True):
        if isinstance(w, Tapped) and w.uses is not None:
            group = tuple(sibling.name for sibling in tapped_weights)
            use = Use(x=Value.of(x), dy=Value.of(y), group=group, transposed=w.transposed, sp=sp)
            w.uses.by_name.setdefault(w.name, set()).add(use)
    return result


def _untapped(x: jax.Array, weights: Sequence[Any], sp: SequenceParallel) -> list[jax.Array]:
    if not sp:
        return [_product(x, w) for w in weights]
    arrays = [w.weight if isinstance(w, Tapped) else w for w in weights]
    if not any(isinstance(w, Handle) for w in arrays):
        return _sp_products(sp, x, arrays)
    return jax.checkpoint(lambda x, arrays: _sp_products(sp, x, [opened(w) for w in arrays]))(x, arrays)


def _product(x: jax.Array, weight: Any) -> jax.Array:
    """``x @ weight``; an opened or broadcast weight is no residual, but recomputed in backward."""
    if isinstance(weight, Tapped):
        return _product(x, weight.weight)
    if isinstance(weight, Handle) or jax_compat.varying_axes(x) - jax_compat.varying_axes(weight):
        return jax.checkpoint(lambda x, weight: x @ opened(weight))(x, weight)
    return x @ weight


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sp_products(sp: SequenceParallel, x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return sp.forward(x, weights)


def _sp_products_forward(sp: SequenceParallel, x: jax.Array, weights: list[jax.Array]) -> Any:
    # Checkpoint policies do not see products inside a custom_vjp, so the results have a name.
    return [checkpoint_name(y, RESIDUAL_NAME) for y in sp.forward(x, weights)], (x, weights)


def _sp_products_backward(sp: SequenceParallel, residuals: Any, dys: list[jax.Array]) -> Any:
    x, weights = residuals
    outer = partial(_sum_over_tokens, stacked=False, transposed=False)
    dx, dws = sp.gradients(x, dys, weights, outer)
    grads = [summed(dw, jax_compat.varying_axes(w)).astype(w.dtype) for dw, w in zip(dws, weights, strict=True)]
    return summed(dx.astype(x.dtype), jax_compat.varying_axes(x)), grads


_sp_products.defvjp(_sp_products_forward, _sp_products_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(sp: SequenceParallel, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> list[jax.Array]:
    return sp.forward(x, [opened(w) for w in weights])


def _tapped_forward(sp: SequenceParallel, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> Any:
    return sp.forward(x, [opened(w) for w in weights]), (x, weights)


def _tapped_backward(sp: SequenceParallel, residuals: Any, dys: list[jax.Array]) -> Any:
    x, weights = residuals[0], [opened(w) for w in residuals[1]]
    dx = sp.input_gradient(dys, weights)
    return summed(dx.astype(x.dtype), jax_compat.varying_axes(x)), None, x, dys


_tapped.defvjp(_tapped_forward, _tapped_backward)


def weight_gradient(
    x: jax.Array, dy: jax.Array, like: jax.Array, *, stacked: bool, transposed: bool, sp: SequenceParallel = NO_SP
) -> jax.Array:
    """``xᵀ · dy``, a product's contribution to its weight's gradient.

    Args:
      x, dy: input and gradient of the output, ``[..., D]`` and ``[..., F]``; the first dimension is layers if stacked.
      like: an array, such as the weight, with the varying axes of the result, which is summed over all others.
      stacked: whether there is one product for each of several layers.
      transposed: whether the weight was transposed before the product.
      sp: the collectives of sequence parallelism that the product had; by default none.

    Returns:
      The gradient ``[D, F]``, with a leading dimension of layers if stacked, and ``[..., F, D]`` if transposed.
    """
    outer = partial(_sum_over_tokens, stacked=stacked, transposed=transposed)
    return summed(sp.weight_gradient(x, dy, outer), jax_compat.varying_axes(like))


def _sum_over_tokens(x: jax.Array, dy: jax.Array, *, stacked: bool, transposed: bool) -> jax.Array:
    """``xᵀ · dy``, summed over all dimensions but the last and, if stacked, the first."""
    lead = x.shape[:1] if stacked else ()
    x, dy = (a.reshape(*lead, -1, a.shape[-1]) for a in (x, dy))
    a, b = (dy, x) if transposed else (x, dy)
    rows, batch = len(lead), tuple(range(len(lead)))
    return lax.dot_general(a, b, (((rows,), (rows,)), (batch, batch)))


def summed(x: jax.Array, allowed: frozenset[str]) -> jax.Array:
    """``x`` summed (``psum``) over the mesh axes that it varies over, except those ``allowed``.

    ``allowed`` is such as frozenset({"dp"}). To be called inside ``shard_map``.
    """
    extra = tuple(sorted(jax_compat.varying_axes(x) - allowed))
    return lax.psum(x, extra)
