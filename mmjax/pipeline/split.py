"""Stages with a split backward: B computes the gradients that other stages wait for, W those of the stage's weights.

The weights of products and convolutions are *tapped* (see ``mmjax.models.taps``): B returns each product's input and
the gradient of its output instead of the weight's gradient, and W multiplies them. B adds the gradients of all other
trained parameters to the sums as usual: norms, biases, embeddings, a weight that is used twice, and the head of a
language model, for which W would need the gradient of all logits (see ``mmjax.models.head``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from mmjax import jax_compat
from mmjax.mesh.spmd import Spmd
from mmjax.models.experts.grouped import grouped_weight_gradient
from mmjax.models.handles import gradient_of_stored
from mmjax.models.parallel_convolution import kernel_gradient
from mmjax.models.taps import HEAD, Tapped, Use, Uses, Value
from mmjax.models.weight_gradients import weight_gradient
from mmjax.pipeline.gathers import composed
from mmjax.pipeline.residuals import Residual
from mmjax.pipeline.stage import Output, StageFunctions
from mmjax.pipeline.stage_params import add_gradients
from mmjax.pipeline.trees import Part, by_name, nested, with_leaves
from mmjax.pipeline.weight_uses import DEFERRABLE

Tree = Any


@dataclass(frozen=True, kw_only=True)
class _Tap:
    """A tapped weight.

    Attributes:
      use: the product of the weight.
      layers: ``(layers,)`` if the weights of several layers are stacked, else empty.
      leads: whether this weight taps the product's input, among the weights that share the input.
      x, dy: indices of the input and of the output's gradient among the deferred values.
      sizes: the index of the sizes of a grouped product; ``None`` for other products.
    """

    use: Use
    layers: tuple[int, ...]
    leads: bool
    x: int
    dy: int
    sizes: int | None = None

    def on(self, weight: jax.Array, stage_axes: tuple[str, ...]) -> Tapped:
        """The weight with its taps; outside of ``stage_axes`` the taps vary over the weight's axes."""
        other_axes = tuple(jax_compat.varying_axes(weight) - set(stage_axes))

        def tap(value: Value) -> jax.Array:
            value = replace(value, shape=(*self.layers, *value.shape))
            return jax_compat.to_varying(value.zeros(), other_axes)

        dy = tap(self.use.dy)
        if not self.leads:
            return Tapped(weight=weight, dy=dy)
        return Tapped(weight=weight, x=tap(self.use.x), dy=dy, sizes=tap(self.use.sizes) if self.use.sizes else None)


class SplitFunctions(StageFunctions):
    """Forward, backward and weight gradients of one stage for one set of input shapes."""

    # ---- planning ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        uses, params = Uses(), by_name(self._avals[0])
        candidates = [name for name in self._trained if self._single_uses.get(name) in DEFERRABLE]
        self._summed = [name for name in self._summable if self._single_uses.get(name) == HEAD]

        def record(params: Tree, inputs: Tree, carry: Tree) -> Output:
            named = by_name(params)
            tapped = {name: Tapped(weight=named[name], name=name, uses=uses) for name in candidates}
            return self._plain(with_leaves(params, tapped), inputs, carry)

        jax.eval_shape(self._spmd(record, self._outputs), *self._avals)
        self._taps: dict[str, _Tap] = {}
        self._deferred: list[Residual] = []
        leaders: dict[tuple[str, ...], tuple[int, int | None]] = {}
        for name in candidates:
            (use,) = uses.by_name[name]
            layers = params[name].shape[: -use.weight_dims]
            if leads := use.group not in leaders:
                x = self._defer(use.x, layers)
                leaders[use.group] = x, self._defer(use.sizes, layers) if use.sizes else None
            x, sizes = leaders[use.group]
            dy = self._defer(use.dy, layers)
            self._taps[name] = _Tap(use=use, layers=layers, leads=leads, x=x, dy=dy, sizes=sizes)

    def _defer(self, value: Value, layers: tuple[int, ...]) -> int:
        """Adds a value to the deferred values, kept from B to W; returns its index."""
        self._deferred.append(self._residual(replace(value, shape=(*layers, *value.shape))))
        return len(self._deferred) - 1

    @property
    def _scattered(self) -> frozenset[str]:
        return super()._scattered - self._taps.keys()

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def _vjp_params(self, params: Tree, sums: Tree | None = None) -> Tree:
        params = super()._vjp_params(params, sums)
        named = by_name(params)
        return with_leaves(
            params, {name: tap.on(named[name], self.submesh.axes.all) for name, tap in self._taps.items()}
        )

    def _backward(
        self, indices: list[int], params: Tree, sums: Tree, inputs: Tree, carry: Tree, residuals: Any, cotangent: Any
    ) -> Any:
        by_index = dict(zip(indices, residuals, strict=True))
        grads, carry_grads = self._transpose(params, sums, inputs, carry, by_index, cotangent)
        named, deferred = by_name(grads), {}
        for name, tap in self._taps.items():
            deferred[tap.dy] = named[name].dy[None]
            if tap.leads:
                deferred[tap.x] = named[name].x[None]
            if tap.leads and tap.sizes is not None:
                deferred[tap.sizes] = named[name].sizes[None]
        return add_gradients(sums, grads), carry_grads, [deferred[place] for place in range(len(deferred))]

    def _weights(self, sums: Tree, deferred: list[jax.Array]) -> Tree:
        """Adds the weight gradients of this microbatch's products to the sums."""
        named = by_name(sums)
        grads = {}
        for name, tap in self._taps.items():
            x, dy = deferred[tap.x].squeeze(0), deferred[tap.dy].squeeze(0)
            stacked = bool(tap.layers)
            open_stored = composed(self.state.gathers.get(name), self.model.opens.get(name))
            stored = named[name][0].astype(self.state.dtype)
            weight = _per_layer(open_stored, stacked=stacked)(stored) if open_stored else stored
            if tap.sizes is not None:
                grad = grouped_weight_gradient(x, dy, deferred[tap.sizes].squeeze(0), weight)
            elif tap.use.stride:
                grad = kernel_gradient(x, dy, weight, stride=tap.use.stride, stacked=stacked)
            else:
                grad = weight_gradient(x, dy, weight, stacked=stacked, transposed=tap.use.transposed, sp=tap.use.sp)
            if open_stored:
                gradient = partial(gradient_of_stored, open_stored)
                grad = _per_layer(gradient, stacked=stacked)(stored, grad.astype(self.state.dtype))
            grads[name] = grad
        return add_gradients(sums, nested(grads))

    # ---- the same over the submesh -----------------------------------------------------------------------------------

    def backward_part(self, sums: Tree) -> Tree:
        """The leaves of a tree like ``sums_avals`` that ``backward`` adds to: all but the tapped weights."""
        return self._untapped.select(sums)

    def with_backward_part(self, sums: Tree, part: Tree) -> Tree:
        """A tree like ``sums_avals`` with another ``backward_part``."""
        return self._untapped.put(sums, part)

    def weights_part(self, sums: Tree) -> Tree:
        """The leaves of a tree like ``sums_avals`` that ``weights`` adds to: the tapped weights."""
        return self._tapped.select(sums)

    def with_weights_part(self, sums: Tree, part: Tree) -> Tree:
        """A tree like ``sums_avals`` with another ``weights_part``."""
        return self._tapped.put(sums, part)

    @cached_property
    def _untapped(self) -> Part:
        return Part.of(self.state.sums_avals, lambda name: name not in self._taps)

    @cached_property
    def _tapped(self) -> Part:
        return Part.of(self.state.sums_avals, lambda name: name in self._taps)

    def _deferred_specs(self) -> tuple[Any, ...]:
        return ([residual.spec for residual in self._deferred],)

    @cached_property
    def weights(self) -> Spmd:
        """``(sums, deferred) -> sums``; the sums are ``weights_part``."""
        specs = self.weights_part(self.state.sums_specs)
        return Spmd(self._weights, self.submesh.mesh, (specs, *self._deferred_specs()), specs)

    @property
    def deferred_avals(self) -> list[Any]:
        """Avals of the values kept per microbatch from B to W: inputs of products and gradients of their outputs."""
        return [residual.aval for residual in self._deferred]


def _per_layer(function: Callable[..., Any], *, stacked: bool) -> Callable[..., Any]:
    """The function, mapped over the first dimension if arrays of several layers are stacked."""
    return jax.vmap(function) if stacked else function
