"""Products with weights whose gradient is deferred, or added to a sum by the product itself.

The gradient of the weight in ``y = x · w`` is ``xᵀ · dy``. A *tapped* weight returns ``x`` and ``dy`` instead. So one
program can compute the gradients that other stages wait for, and a later program the gradients of weights (Qi et al.,
"Zero Bubble Pipeline Parallelism", §2). A tap is an argument whose value is never read and whose cotangent is ``x`` or
``dy``. Being arguments, taps are stacked by ``scan`` and pass through ``jax.checkpoint`` as weights do.

A *summed* weight has the fp32 sum of its gradients beside it. The cotangent of the sum is ``sum + xᵀ · dy``, which a
GPU computes in one kernel: a product that begins with an accumulator. Otherwise the gradient is written in the weight's
dtype, read again, and added in a pass over the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.handles import Adapted, Handle, LikeItsWeight, Open, adapted_products, fetched_after, opened, reducing
from mmjax.models.recorded_work import record_product
from mmjax.models.sequence_parallel import NO_SP, SequenceParallel
from mmjax.models.weight_gradients import computed_together, sum_over_tokens, summed

PRODUCT = "weight of a product"
"""The checkpoint name of weights that ``products`` reads inside ``marked``."""
GROUPED = "weight of experts"
"""The checkpoint name of weights ``[E, D, F]`` that ``experts.mlp`` reads once inside ``marked``."""
CONVOLUTION = "kernel of a convolution"
"""The checkpoint name of kernels ``[3, 3, C, F]`` inside ``marked``."""
HEAD = "weight of a head"
"""The checkpoint name of heads of language models inside ``marked``."""
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
      sizes: of a grouped product (see ``experts.grouped``) the number of rows of each expert, as fp32; else ``None``.
      stride: of a convolution (see ``parallel_convolution``) its stride; 0 for a product.
    """

    x: Value
    dy: Value
    group: tuple[str, ...]
    transposed: bool
    sp: SequenceParallel = NO_SP
    sizes: Value | None = None
    stride: int = 0

    @property
    def weight_dims(self) -> int:
        """The number of dimensions of the weight: 2, or 3 with experts, or 4 of a convolution."""
        return 4 if self.stride else 3 if self.sizes else 2


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
      sizes: the tap of a grouped product's ``Use.sizes``, beside ``x``.
      name: the name of the weight in ``uses``.
      transposed: whether ``weight`` is the transpose of the array among the parameters.
      uses: records a ``Use`` for every product; ``None`` records nothing.
    """

    weight: jax.Array | Handle
    x: jax.Array | None = None
    dy: jax.Array | None = None
    sizes: jax.Array | None = None
    name: str = field(default="", metadata=_STATIC)
    transposed: bool = field(default=False, metadata=_STATIC)
    uses: Uses | None = field(default=None, metadata=_STATIC)

    @property
    def T(self) -> Tapped:
        """The transpose, with the same taps."""
        return replace(self, weight=self.weight.T, transposed=not self.transposed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Summed(LikeItsWeight):
    """A parameter that stands for a weight array with the sum of its gradients; only ``products`` and heads can use it.

    Attributes:
      weight: the array.
      total: the sum of its gradients so far, fp32, in the shape of the array among the parameters. Its cotangent is
        the sum with this product's gradient.
      reduced: an array with the shape of the gradient that is summed over ranks, whose value is never read; ``None``
        where no backward sums it. Its cotangent is that gradient in a backward that is ``reducing``, else zeros.
      reduction: the sum over ranks, from ``total`` to ``reduced``. Equal functions make equal programs, so no lambda.
      transposed: whether ``weight`` is the transpose of the array among the parameters.
    """

    weight: jax.Array
    total: jax.Array
    reduced: jax.Array | None = None
    reduction: Reduction | None = field(default=None, metadata=_STATIC)
    transposed: bool = field(default=False, metadata=_STATIC)

    @property
    def T(self) -> Summed:
        """The transpose, with the same sum."""
        return replace(self, weight=self.weight.T, transposed=not self.transposed)


Reduction = Callable[[jax.Array], jax.Array]
"""The sum of a gradient over ranks, whole or a shard of it, inside ``shard_map``."""


@dataclass(frozen=True)
class Computed:
    """An input of products that is a function of arrays, as an activation is of the products before it.

    Where gradients are added to sums, the arrays are the residuals. Backward computes the input again beside the
    gradients of the arrays, which is one pass over memory.

    Attributes:
      function: the function; equal functions make equal programs, so no lambda.
      arrays: its arguments.
    """

    function: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]

    @property
    def value(self) -> jax.Array:
        """The input."""
        return self.function(*self.arrays)


def _identity(x: jax.Array) -> jax.Array:
    return x


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
    """A context in which ``products`` names its weights ``PRODUCT``, and a head is named ``HEAD``, so that
    ``jaxprs.named_reads`` can count their reads; it gives nothing: ``with marked(): …``.
    """
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def with_mark(weight: Any, name: str) -> Any:
    """The weight, an array, a handle or a tapped weight, under a checkpoint name inside ``marked``; else as it is."""
    return checkpoint_name(weight, name) if _marking.get() else weight


def products(x: jax.Array | Computed, weights: Sequence[Any], sp: SequenceParallel = NO_SP) -> list[jax.Array]:
    """``x @ w`` for every weight, in order.

    Args:
      x: the input, ``[B, T, D]``, for results ``[B, T, F]``; any leading dimensions without sequence parallelism. It
        may be a function of arrays.
      weights: arrays ``[D, F]``, handles, tapped or summed weights, or weights with an adapter.
      sp: the collectives of sequence parallelism, such as ``SequenceParallel(gather=("tp",))``; by default none. The
        residual is this rank's tokens; backward gathers them again.
    """
    if isinstance(x, Computed):
        if all(isinstance(w, Summed) for w in weights):
            return _summed_products(x, weights, sp)
        x = x.value
    return adapted_products(x, weights, partial(_products, sp=sp), partial(_products, sp=NO_SP))


def products_of_parts(
    parts: Sequence[jax.Array | Computed], weights: Sequence[Any], sp: SequenceParallel = NO_SP
) -> list[list[jax.Array]]:
    """``x @ w`` for every weight and every part ``x`` of the tokens: a list by weight of lists by part.

    It is one use of each weight. Several parts are for weights of which ``divisible`` is true.

    Args:
      parts, weights, sp: see ``products``; the parts have one function if they are ``Computed``.
    """
    if len(parts) == 1:
        return [[y] for y in products(parts[0], weights, sp)]
    if all(isinstance(w, Summed) for w in weights):
        return _summed_products_of_parts(parts, weights, sp)
    xs = [x.value if isinstance(x, Computed) else x for x in parts]
    for x in xs:
        for weight in weights:
            record_product(x, weight)
    weights = [with_mark(w, PRODUCT) for w in weights]
    by_part = [_plain_products(x, weights, sp) for x in xs]
    return [list(results) for results in zip(*by_part, strict=True)]


def divisible(params: Any) -> bool:
    """Whether all parameters in a tree are arrays or summed weights, whose products may be of parts of the tokens."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Handle | LikeItsWeight))
    return not any(isinstance(leaf, Handle | Tapped | Adapted) for leaf in leaves)


def _products(x: jax.Array, weights: Sequence[Any], sp: SequenceParallel) -> list[jax.Array]:
    for weight in weights:
        record_product(x, weight)
    weights = [with_mark(w, PRODUCT) for w in weights]
    groups = {function: [w for w in weights if _differentiation(w) is function] for function in _DIFFERENTIATIONS}
    results = {function: iter(function(x, group, sp)) for function, group in groups.items() if group}
    result = [next(results[_differentiation(w)]) for w in weights]
    record_uses(x, weights, result, sp=sp)
    return result


def record_uses(
    x: jax.Array,
    weights: Sequence[Any],
    results: Sequence[jax.Array],
    *,
    sp: SequenceParallel = NO_SP,
    sizes: Value | None = None,
    stride: int = 0,
) -> None:
    """Records a ``Use`` of each tapped weight that has a record; ``results`` are its products with ``x``.

    For ``sp``, ``sizes`` and ``stride`` see ``Use``.
    """
    group = tuple(w.name for w in weights if isinstance(w, Tapped))
    for w, y in zip(weights, results, strict=True):
        if isinstance(w, Tapped) and w.uses is not None:
            use = Use(
                x=Value.of(x), dy=Value.of(y), group=group, transposed=w.transposed, sp=sp, sizes=sizes, stride=stride
            )
            w.uses.by_name.setdefault(w.name, set()).add(use)


def _plain_products(x: jax.Array, weights: Sequence[Any], sp: SequenceParallel) -> list[jax.Array]:
    arrays = [w.weight if isinstance(w, Tapped) else w for w in weights]
    if any(isinstance(w, Handle) and w.scatters for w in arrays):
        if sp:
            return _scattering_products(sp, x, arrays)
        results: Any = _scattering_products(sp, x.reshape(1, -1, x.shape[-1]), arrays)
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in results]
    if not sp:
        # Of several dimensions of tokens, XLA for CPUs transposes the output's gradient, and what makes it, in memory.
        results = [_product(x.reshape(-1, x.shape[-1]), w) for w in weights]
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in results]
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


def _named(results: Sequence[jax.Array]) -> list[jax.Array]:
    """Results of products inside a custom_vjp with a name, since checkpoint policies do not see these products."""
    return [checkpoint_name(y, RESIDUAL_NAME) for y in results]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sp_products(sp: SequenceParallel, x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return sp.forward(x, weights)


def _sp_products_forward(sp: SequenceParallel, x: jax.Array, weights: list[jax.Array]) -> Any:
    return _named(sp.forward(x, weights)), (x, weights)


def _sp_products_backward(sp: SequenceParallel, residuals: Any, dys: list[jax.Array]) -> Any:
    x, weights = residuals
    dx, factors = sp.gradients(x, dys, weights)
    dws = [sum_over_tokens(*pair, stacked=False, transposed=False) for pair in factors]
    grads = [summed(dw, jax_compat.varying_axes(w)).astype(w.dtype) for dw, w in zip(dws, weights, strict=True)]
    return summed(dx.astype(x.dtype), jax_compat.varying_axes(x)), grads


_sp_products.defvjp(_sp_products_forward, _sp_products_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattering_products(sp: SequenceParallel, x: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """Products with handles whose gradients are scattered: backward computes them beside the input's gradient.

    Otherwise XLA computes the gradients of all layers' weights last, and keeps inputs and output gradients until then.
    """
    return sp.forward(x, [opened(w) for w in weights])


def _scattering_forward(sp: SequenceParallel, x: jax.Array, weights: list[Any]) -> Any:
    return _named(sp.forward(x, [opened(w) for w in weights])), (x, weights)


def _scattering_backward(sp: SequenceParallel, residuals: Any, dys: list[jax.Array]) -> Any:
    x, handles = residuals

    def fetched(handles: list[Any]) -> list[jax.Array]:
        # Not before the gradient is there: else XLA would gather the weights of all layers at first.
        return [opened(fetched_after(handle, dy)) for handle, dy in zip(handles, dys, strict=True)]

    weights, gradients_of_handles = jax.vjp(fetched, handles)
    dx, factors = sp.gradients(x, dys, weights)
    dws = [sum_over_tokens(*pair, stacked=False, transposed=False) for pair in factors]
    dws = [summed(dw, jax_compat.varying_axes(w)).astype(w.dtype) for dw, w in zip(dws, weights, strict=True)]
    dx, *dws = computed_together([summed(dx.astype(x.dtype), jax_compat.varying_axes(x)), *dws])
    return dx, *gradients_of_handles(dws)


_scattering_products.defvjp(_scattering_forward, _scattering_backward)


def _tapped_products(x: jax.Array, weights: Sequence[Tapped], sp: SequenceParallel) -> list[jax.Array]:
    (x_tap,) = [w.x for w in weights if w.x is not None]
    return _tapped(sp, x, [w.weight for w in weights], x_tap, [w.dy for w in weights])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(sp: SequenceParallel, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> list[jax.Array]:
    return sp.forward(x, [opened(w) for w in weights])


def _tapped_forward(sp: SequenceParallel, x: jax.Array, weights: list[Any], x_tap: Any, dy_taps: list[Any]) -> Any:
    return _named(sp.forward(x, [opened(w) for w in weights])), (x, weights)


def _tapped_backward(sp: SequenceParallel, residuals: Any, dys: list[jax.Array]) -> Any:
    x, weights = residuals[0], [opened(w) for w in residuals[1]]
    dx = sp.input_gradient(dys, weights)
    return summed(dx.astype(x.dtype), jax_compat.varying_axes(x)), None, x, dys


_tapped.defvjp(_tapped_forward, _tapped_backward)


def _summed_products(x: jax.Array | Computed, weights: Sequence[Summed], sp: SequenceParallel) -> list[jax.Array]:
    return [y for (y,) in _summed_products_of_parts([x], weights, sp)]


def _summed_products_of_parts(
    parts: Sequence[jax.Array | Computed], weights: Sequence[Summed], sp: SequenceParallel
) -> list[list[jax.Array]]:
    inputs = [x if isinstance(x, Computed) else Computed(_identity, (x,)) for x in parts]
    (function,) = {x.function for x in inputs}
    static = _Static(sp, tuple(w.transposed for w in weights), function, tuple(w.reduction for w in weights))
    arrays, totals = [x.arrays for x in inputs], [w.total for w in weights]
    return _adding(static, arrays, [w.weight for w in weights], totals, [w.reduced for w in weights])


class _Static(NamedTuple):
    """Settings of products with summed weights: ``transposed`` and ``reduction`` by weight, ``Computed.function``."""

    sp: SequenceParallel
    transposed: tuple[bool, ...]
    function: Callable[..., jax.Array]
    reductions: tuple[Reduction | None, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _adding(
    static: _Static,
    parts: list[tuple[jax.Array, ...]],
    weights: list[Any],
    totals: list[jax.Array],
    reduced: list[jax.Array | None],
) -> list[list[jax.Array]]:
    return static.sp.forward_parts([static.function(*arrays) for arrays in parts], weights)


def _adding_forward(
    static: _Static,
    parts: list[tuple[jax.Array, ...]],
    weights: list[Any],
    totals: list[jax.Array],
    reduced: list[jax.Array | None],
) -> Any:
    results: Any = _adding(static, parts, weights, totals, reduced)
    return [_named(by_part) for by_part in results], (parts, weights, totals)


def _adding_backward(static: _Static, residuals: Any, dys: list[list[jax.Array]]) -> Any:
    parts, weights, totals = residuals
    d_parts = list[tuple[jax.Array, ...]]()
    for arrays, *part_dys in zip(parts, *dys, strict=True):
        if d_parts and static.sp.gather:  # else XLA would make one reduce-scatter of those of both parts
            waited = computed_together([*part_dys, *totals])
            part_dys, totals = waited[: len(part_dys)], waited[len(part_dys) :]
        x, gradients_of_arrays = jax.vjp(static.function, *arrays)
        dx, factors = static.sp.gradients(x, part_dys, weights)
        totals = [
            _added(total, *pair, transposed=is_transposed)
            for total, pair, is_transposed in zip(totals, factors, static.transposed, strict=True)
        ]
        d_arrays = gradients_of_arrays(summed(dx.astype(x.dtype), jax_compat.varying_axes(x)))
        values = computed_together([*d_arrays, *totals])
        d_parts.append(tuple(values[: len(d_arrays)]))
        totals = values[len(d_arrays) :]
    return d_parts, None, totals, _reduced(static.reductions, totals)


def _reduced(reductions: Sequence[Reduction | None], totals: Sequence[jax.Array]) -> Any:
    """Cotangents of the weights' ``Summed.reduced``."""
    if not reducing.value:
        return None
    return [reduce(total) if reduce else None for reduce, total in zip(reductions, totals, strict=True)]


_adding.defvjp(_adding_forward, _adding_backward)


def _added(total: jax.Array, x: jax.Array, dy: jax.Array, *, transposed: bool) -> jax.Array:
    """The sum of a weight's gradients with ``xᵀ · dy`` added, which is never rounded to the dtype of ``x``."""
    gradient = sum_over_tokens(x, dy, stacked=False, transposed=transposed, dtype=total.dtype)
    return total + summed(gradient, jax_compat.varying_axes(total))


_DIFFERENTIATIONS = (_tapped_products, _summed_products, _plain_products)
"""Functions ``(x, weights, sp) -> products`` by kind of weight: with taps, with a sum, and all others."""


def _differentiation(weight: Any) -> Callable[..., list[jax.Array]]:
    """The one of ``_DIFFERENTIATIONS`` for a weight."""
    if isinstance(weight, Summed):
        return _summed_products
    return _tapped_products if isinstance(weight, Tapped) and weight.dy is not None else _plain_products
