"""Handles: parameters that are stored in one form and used in another, such as a shard that is gathered or cast.

A module's parameters are arrays or handles, and its code treats them alike. Products, norms, biases and lookups open a
handle at its use, in code that backward recomputes. So an opened weight is never a residual, and the weight of a
product that a split backward taps stays tapped (see ``taps``).

A weight with an adapter is no handle: it is never opened, and only products can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mmjax import jax_compat
from mmjax.configurable import ConfigError

Open = Callable[[Any], jax.Array]
"""A linear function from the stored array to the weight. Equal functions make equal programs, so no lambda."""
Multiply = Callable[[jax.Array, Sequence[Any]], list[jax.Array]]
"""The products of an input with each of several weights, in order."""


@dataclass(frozen=True)
class Transposed:
    """The function of a handle with a transposed weight; equal ones are equal, as programs need it."""

    open: Open

    @property
    def fetches(self) -> bool:
        """See ``Handle``."""
        return getattr(self.open, "fetches", False)

    @property
    def scatters(self) -> bool:
        """See ``Handle``."""
        return getattr(self.open, "scatters", False)

    def __call__(self, stored: Any) -> jax.Array:
        """The transpose of the weight that ``open`` makes."""
        return self.open(stored).T


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Handle:
    """A parameter that stands for a weight array.

    Attributes:
      stored: the stored array, or a tree of arrays.
      open: the function from the stored array to the weight. It may have attributes: ``fetches``, whether the weight
        comes from other ranks, and ``scatters``, whether its gradient goes to them.
    """

    stored: Any
    open: Open = field(metadata={"static": True})

    @property
    def fetches(self) -> bool:
        """Whether the weight comes from other ranks."""
        return getattr(self.open, "fetches", False)

    @property
    def scatters(self) -> bool:
        """Whether the weight's gradient goes to other ranks."""
        return getattr(self.open, "scatters", False)

    @property
    def T(self) -> Handle:
        """A handle of the transposed weight, with the same stored array."""
        return Handle(stored=self.stored, open=Transposed(self.open))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return jax.eval_shape(self.open, self.stored).shape

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return jax.eval_shape(self.open, self.stored).dtype


reducing = jax.make_user_context(False)
"""Whether the backward that is traced is a step's last of its stage, and reduces gradients of weights over ranks."""


class LikeItsWeight:
    """Base class of parameters with the shape and dtype of their ``weight``."""

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adapted(LikeItsWeight):
    """A weight with a low-rank adapter: its product with ``x`` is ``x · weight + scale · (x · a) · b``.

    Attributes:
      weight: the weight, an array or a handle.
      a, b: the adapter's factors ``[D, r]`` and ``[r, F]``, arrays or handles; of experts ``[E, D, r]`` and
        ``[E, r, F]``.
      scale: the factor of the adapter's product.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})

    @property
    def T(self) -> Adapted:
        """The transposed weight with its adapter."""
        return Adapted(weight=self.weight.T, a=self.b.T, b=self.a.T, scale=self.scale)


def adapted_products(x: jax.Array, weights: Sequence[Any], multiply: Multiply, multiply_inner: Multiply) -> list[Any]:
    """Multiplies one input with weights, some of which have an adapter.

    Args:
      x: the input.
      weights: arrays, handles, tapped weights, or weights with an adapter.
      multiply: the product of the input with weights without adapters, and with the adapters' ``a``.
      multiply_inner: the product of that result with an adapter's ``b``.
    """
    adapted = [w for w in weights if isinstance(w, Adapted)]
    plain = [w.weight if isinstance(w, Adapted) else w for w in weights]
    # Adapters and weights are multiplied together, so that all share one tap of the input.
    results = multiply(x, [*plain, *(w.a for w in adapted)])
    inner = iter(results[len(plain) :])
    return [
        y + multiply_inner(next(inner) * w.scale, [w.b])[0] if isinstance(w, Adapted) else y
        for w, y in zip(weights, results, strict=False)
    ]


def opened(weight: Any) -> jax.Array:
    """The weight that a ``Handle`` stands for, in its dtype; an array is returned as it is.

    Raises:
      ConfigError: the weight has an adapter.
    """
    if isinstance(weight, Adapted):
        fix = "is used outside of a product, which no adapter can follow; take it out of Lora.targets"
        raise ConfigError(f"Lora.targets: a weight {list(weight.shape)} {fix}")
    return weight.open(weight.stored) if isinstance(weight, Handle) else weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The stored array of a handle, with an event: the weight is not opened before the event is computed."""

    stored: Any
    event: jax.Array


@dataclass(frozen=True)
class OpenAfter:
    """The function of a handle that stores a ``Waiting``; ``open`` is the handle's function without the wait."""

    open: Open

    fetches: ClassVar[bool] = True

    @property
    def scatters(self) -> bool:
        """See ``Handle``."""
        return getattr(self.open, "scatters", False)

    def __call__(self, waiting: Waiting) -> jax.Array:
        """The weight."""
        return self.open(_after(waiting.stored, waiting.event))


@jax.custom_vjp
def _after(value: Any, event: jax.Array) -> Any:
    """The arrays, not before ``event`` is computed: NaN if its first element is, and so really a function of it.

    XLA drops an event from an ``optimization_barrier`` if nothing else reads it there.
    """
    is_nan = jnp.isnan(lax.slice_in_dim(event.reshape(-1), 0, 1)[0])
    return jax.tree.map(lambda x: jnp.where(is_nan, jnp.asarray(jnp.nan, x.dtype), x), value)


_after.defvjp(lambda stored, event: (_after(stored, event), None), lambda _, gradient: (gradient, None))


def fetched_after(params: Any, event: jax.Array) -> Any:
    """Parameters that are not fetched from other ranks before ``event`` is computed.

    Without an event a compiler may fetch the weights of all layers at first. With the input of the layer before, it
    fetches a layer's weights beside the layer before.

    Args:
      params: a tree of arrays and handles. Those that fetch wait for the event alone, whatever they waited for before.
      event: an activation or a gradient.
    """

    def waiting(leaf: Any) -> Any:
        if not (isinstance(leaf, Handle) and leaf.fetches):
            return leaf
        stored, is_waiting = leaf.stored, isinstance(leaf.stored, Waiting)
        if is_waiting:
            stored = stored.stored
        # Else the weight, and so its gradient, would vary over further axes.
        if not jax_compat.varying_axes(event) <= jax_compat.varying_axes(stored):
            return leaf
        return Handle(
            stored=Waiting(stored=stored, event=event), open=leaf.open if is_waiting else OpenAfter(leaf.open)
        )

    return jax.tree.map(waiting, params, is_leaf=lambda node: isinstance(node, Handle))


def scattered_before(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """An activation and parameters of a later layer, unchanged; in backward the gradient of ``x`` is not there before
    the parameters' gradients are scattered.

    Without this a compiler may scatter the gradients of all layers at last. With the input of the layer before, it
    scatters a layer's gradients beside the layer before.

    Args:
      x: an activation.
      params: a tree of arrays and handles; those count whose functions scatter. So do weights with a ``reduced``
        array, in a backward that is ``reducing``.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda node: isinstance(node, Handle | LikeItsWeight))
    handles = {n: leaf.stored for n, leaf in enumerate(leaves) if isinstance(leaf, Handle) and leaf.scatters}
    if handles:
        x, arrays = _in_order(x, handles)
        for place, array in arrays.items():
            leaves[place] = replace(leaves[place], stored=array)
    reduced = {n: leaf.reduced for n, leaf in enumerate(leaves) if getattr(leaf, "reduced", None) is not None}
    if reduced:
        x, arrays = _reduced_in_order(x, reduced)
        for place, array in arrays.items():
            leaves[place] = replace(leaves[place], reduced=array)
    return x, jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def _in_order(x: jax.Array, stored: Any) -> tuple[jax.Array, Any]:
    return x, stored


def _in_order_backward(_: None, gradients: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    dx, d_stored = gradients
    axes = jax_compat.varying_axes(dx)
    numbers = [jnp.ravel(d)[:1].astype(jnp.float32) for d in jax.tree.leaves(d_stored)]
    # Numbers that vary over further axes are summed over these; a NaN stays one.
    events = [lax.psum(number, tuple(sorted(jax_compat.varying_axes(number) - axes))) for number in numbers]
    return _after(dx, sum(events[1:], start=events[0])), d_stored


_in_order.defvjp(lambda x, stored: ((x, stored), None), _in_order_backward)


@jax.custom_vjp
def _reduced_in_order(x: jax.Array, reduced: Any) -> tuple[jax.Array, Any]:
    return x, reduced


def _reduced_in_order_backward(_: None, gradients: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    return _in_order_backward(_, gradients) if reducing.value else gradients


_reduced_in_order.defvjp(lambda x, reduced: ((x, reduced), None), _reduced_in_order_backward)


def gradient_of_stored(open_weight: Open, stored: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of the stored array, from the gradient of its weight ``open_weight(stored)``.

    Args:
      open_weight: the linear function from the stored array to the weight.
      stored: the stored array; the result has its shape and dtype.
      gradient: the gradient of the weight, in the weight's shape and dtype.
    """
    return jax.vjp(open_weight, stored)[1](gradient)[0]
