"""Taps: products with weights whose gradient is left for later.

The weight's gradient in ``y = x · w`` is ``xᵀ · dy``. A *tapped* weight gives ``x`` and ``dy`` instead, so that one
program can compute the gradients that other stages wait for and another, at any later time, those of the weights (Qi et
al., "Zero Bubble Pipeline Parallelism", §2). A tap is an argument whose value nothing reads and whose cotangent is
``x`` or ``dy``; being arguments, taps are stacked by ``scan`` and pass through ``jax.checkpoint`` as weights do.
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
from mmjax.attention.by_hand import KEPT
from mmjax.models.handles import Adapted, Handle, LikeItsWeight, Open, opened
from mmjax.models.shared import NONE, Exchange

PRODUCT = "weight of a product"
"""The name under which ``products`` reads weights inside ``marked``."""
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
        """Zeros of this shape, dtype and varying axes."""
        return jax_compat.to_varying(jnp.zeros(self.shape, self.dtype), sorted(self.axes))


@dataclass(frozen=True, kw_only=True)
class Use:
    """A product with a weight.

    Attributes:
      x, dy: its input, as this rank has it, and its output.
      group: the weights that share the input.
      transposed: whether the weight is.
      exchange: see ``products``.
    """

    x: Value
    dy: Value
    group: tuple[str, ...]
    transposed: bool
    exchange: Exchange = NONE


_STATIC = {"static": True}
"""Metadata of a field that is structure to JAX, not data."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tapped(LikeItsWeight):
    """Takes the place of a weight array among the parameters; only ``products`` can read it.

    Attributes:
      weight: the array, or a handle of it.
      x, dy: the taps, of the shapes of the product's input and output; of weights with the
        same input only one has ``x``.
      name: name of the weight, where its ``uses`` are recorded.
      transposed: whether ``weight`` is the transpose of the array among the parameters.
      uses: where given, records a ``Use`` for every product.
    """

    weight: jax.Array | Handle
    x: jax.Array | None = None
    dy: jax.Array | None = None
    name: str = field(default="", metadata=_STATIC)
    transposed: bool = field(default=False, metadata=_STATIC)
    uses: Uses | None = field(default=None, metadata=_STATIC)

    @property
    def T(self) -> Tapped:
        """The transpose."""
        return replace(self, weight=self.weight.T, transposed=not self.transposed)


class Uses:
    """Records products ``by_name`` of the weight. Equal only to itself, so it may be in a tree's structure."""

    def __init__(self) -> None:
        self.by_name: dict[str, set[Use]] = {}


def handle(array: Any, open_weight: Open) -> Handle | Tapped:
    """A handle of a stored array; a tapped one stays tapped, and is opened on this side of its taps."""
    if isinstance(array, Tapped):
        return replace(array, weight=handle(array.weight, open_weight))
    return Handle(stored=array, open=open_weight)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Makes ``products`` read its weights under the name ``PRODUCT``, for ``jax_compat.named_reads``."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def products(x: jax.Array, weights: Sequence[Any], exchange: Exchange = NONE) -> list[jax.Array]:
    """``x @ w`` for every ``w``: an array, a handle, a tapped one, or one with an adapter.

    Args:
      x: ``[B, T, D]``, or any shape where ranks exchange nothing.
      weights: the weights.
      exchange: what ranks that share tokens do for the products. Backward keeps this rank's tokens and does it again.
    """
    adapted = [w for w in weights if isinstance(w, Adapted)]
    plain = [w.weight if isinstance(w, Adapted) else w for w in weights]
    # Adapters read the same input as weights, so that all share one tap of it.
    results = _products(x, [*plain, *(w.a for w in adapted)], exchange)
    inner = iter(results[len(plain) :])
    return [
        y + _products(next(inner) * w.scale, [w.b], NONE)[0] if isinstance(w, Adapted) else y
        for w, y in zip(weights, results, strict=False)
    ]


def _products(x: jax.Array, weights: Sequence[Any], exchange: Exchange) -> list[jax.Array]:
    if _marking.get():
        weights = [checkpoint_name(w, PRODUCT) for w in weights]
    own = [w for w in weights if isinstance(w, Tapped)]
    taps = [w for w in own if w.dy is not None]
    tapped: Iterator[jax.Array] = iter(())
    if taps:
        (x_tap,) = [w.x for w in taps if w.x is not None]
        tapped = iter(_tapped(exchange, x, [w.weight for w in taps], x_tap, [w.dy for w in taps]))
    others = iter(_untapped(x, [w for w in weights if not isinstance(w, Tapped) or w.dy is None], exchange))
    result = [next(tapped if isinstance(w, Tapped) and w.dy is not None else others) for w in weights]
    for w, y in zip(weights, result, strict=True):
        if isinstance(w, Tapped) and w.uses is not None:
            group = tuple(other.name for other in own)
            use = Use(x=Value.of(x), dy=Value.of(y), group=group, transposed=w.transposed, exchange=exchange)
            w.uses.by_name.setdefault(w.name, set()).add(use)
    return result


def _untapped(x: jax.Array, weights: Sequence[Any], exchange: Exchange) -> list[jax.Array]:
    if not exchange:
        return [_product(x, w) for w in weights]
    arrays = [w.weight if isinstance(w, Tapped) else w for w in weights]
    if not any(isinstance(w, Handle) for w in arrays):
        return _exchanged(exchange, x, arrays)
    return jax.checkpoint(lambda x, arrays: _exchanged(exchange, x, [opened(w) for w in arrays]))(x, arrays)


def _product(x: jax.Array, weight: Any) -> jax.Array:
    """``x @ weight``; what is opened or spread over axes for it is so again in backward, not kept."""
    if isinstance(weight, Tapped):
        return _product(x, weight.weight)
    if isinstance(weight, Handle) or jax_compat.varying_axes(x) - jax_compat.varying_axes(weight):
        return jax.checkpoint(lambda x, weight: x @ opened(weight))(x, weight)
    return x @ weight


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange: Exchange, x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return exchange.forward(x, weights)


def _exchanged_forward(exchange: Exchange, x: jax.Array, weights: list[jax.Array]) -> Any:
    # To checkpoint policies the inside of such a function is no product.
    return [checkpoint_name(y, KEPT) for y in exchange.forward(x, weights)], (x, weights)


def _exchanged_backward(exchange: Exchange, kept: Any, dys: list[jax.Array]) -> Any:
    x, weights = kept
    outer = partial(_outer, stacked=False, transposed=False)
    back, own = exchange.gradients(x, dys, weights, outer)
    grads = [summed(g, jax_compat.varying_axes(w)).astype(w.dtype) for g, w in zip(own, weights, strict=True)]
    return summed(back.astype(x.dtype), jax_compat.varying_axes(x)), grads


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(exchange: Exchange, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> list[jax.Array]:
    return exchange.forward(x, [opened(w) for w in weights])


def _tapped_forward(exchange: Exchange, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> Any:
    return exchange.forward(x, [opened(w) for w in weights]), (x, weights)


def _tapped_backward(exchange: Exchange, kept: Any, dys: list[jax.Array]) -> Any:
    x, weights = kept[0], [opened(w) for w in kept[1]]
    back = exchange.input_gradient(dys, weights)
    return summed(back.astype(x.dtype), jax_compat.varying_axes(x)), None, x, dys


_tapped.defvjp(_tapped_forward, _tapped_backward)


def weight_gradient(
    x: jax.Array, dy: jax.Array, like: jax.Array, *, stacked: bool, transposed: bool, exchange: Exchange = NONE
) -> jax.Array:
    """``xᵀ · dy``, the share of a product in its weight's gradient.

    Args:
      x, dy: input and gradient of the output, ``[..., D]`` and ``[..., F]``; the first dimension is layers if stacked.
      like: an array whose varying axes the result may have; it is summed over others.
      stacked: whether there is a product for each of several layers.
      transposed: whether the weight was transposed before the product.
      exchange: see ``products``.

    Returns:
      ``[D, F]``, stacked or transposed as asked.
    """
    outer = partial(_outer, stacked=stacked, transposed=transposed)
    return summed(exchange.weight_gradient(x, dy, outer), jax_compat.varying_axes(like))


def _outer(x: jax.Array, dy: jax.Array, *, stacked: bool, transposed: bool) -> jax.Array:
    """``xᵀ · dy`` of all tokens that they are of."""
    lead = x.shape[:1] if stacked else ()
    x, dy = (a.reshape(*lead, -1, a.shape[-1]) for a in (x, dy))
    a, b = (dy, x) if transposed else (x, dy)
    rows, batch = len(lead), tuple(range(len(lead)))
    return lax.dot_general(a, b, (((rows,), (rows,)), (batch, batch)))


def summed(x: jax.Array, allowed: frozenset[str]) -> jax.Array:
    """``x`` summed over every axis that it varies over and that is not ``allowed``."""
    extra = tuple(sorted(jax_compat.varying_axes(x) - allowed))
    return lax.psum(x, extra)
