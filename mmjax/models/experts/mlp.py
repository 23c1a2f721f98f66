"""The mlps of experts on the rows of tokens' choices: forward, and backward by hand.

Features and their gradients are read where tokens are, by index: no array of rows has the width of the model but the
results of the last product and the gradient of the first one's input, which are added by token. Hidden units are the
residuals. Gradients of weights are computed once for all parts of the tokens, and added to their sums in place.

Weights with adapters, and weights whose gradients are left to a W op, have rows that are copied, and backward is that
of ``grouped_products``.

Shapes: N tokens, k experts a token, M rows in the order of experts, D width, F hidden units local to this rank, E local
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention.custom_vjp import RESIDUAL_NAME
from mmjax.models.experts.dispatch import (
    Rows,
    TokenRows,
    add_rows,
    send_rows,
    sum_of_choices,
    values_of_choices,
)
from mmjax.models.experts.grouped import grouped_products, ways
from mmjax.models.handles import Adapted, Handle, fetched_after, opened
from mmjax.models.layers import ACTIVATIONS
from mmjax.models.recorded_work import record_product
from mmjax.models.taps import GROUPED, Summed, Tapped, with_mark
from mmjax.models.weight_gradients import summed


def expert_mlps(
    p: Mapping[str, Any], parts: Sequence[TokenRows], *, activation: str = "silu"
) -> list[Float[Array, "N D"]]:
    """The weighted sum of the results of each token's experts, for each part; with tp this rank's part of it.

    It is one use of each weight. Several parts are for weights of which ``reads_in_place`` is true.

    Args:
      p: arrays, handles, tapped or summed weights, or weights with an adapter, of the local experts: "gate", "up" and
        "down".
      parts: parts of the tokens.
      activation: a key of ``ACTIVATIONS``, of the gates.
    """
    weights = [p[name] for name in ("gate", "up", "down")]
    if not reads_in_place(p):
        return [_of_copied_rows(activation, weights, part) for part in parts]
    for part in parts:
        for weight in weights:
            record_product(jax.ShapeDtypeStruct((part.rows.count, weight.shape[1]), weight.dtype), weight)
    if all(isinstance(weight, Summed) for weight in weights):
        return _mlps(activation, list(parts), [w.weight for w in weights], [w.total for w in weights])
    return _mlps(activation, list(parts), [with_mark(w, GROUPED) for w in weights], None)


def reads_in_place(p: Mapping[str, Any]) -> bool:
    """Whether features are read where tokens are, which may come in parts: where weights have no adapters and no
    gradients that are left to W ops.
    """
    return not any(isinstance(p[name], Adapted | Tapped) for name in ("gate", "up", "down"))


def _of_copied_rows(activation: str, weights: Sequence[Any], part: TokenRows) -> Float[Array, "N D"]:
    dispatch = part.dispatch
    gate_MF, up_MF = grouped_products(send_rows(part.h_ND, dispatch), weights[:2], dispatch.sizes_E)
    (y_MD,) = grouped_products(_inner(activation, gate_MF, up_MF, part.weights_M), weights[2:], dispatch.sizes_E)
    return add_rows(y_MD, dispatch)


def _inner(activation: str, gate_MF: Array, up_MF: Array, weights_M: Array) -> Float[Array, "M F"]:
    """Hidden units times weights of rows, so that backward needs no results of the last product."""
    return ACTIVATIONS[activation](gate_MF) * up_MF * weights_M.astype(gate_MF.dtype)[:, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlps(activation: str, parts: list[TokenRows], weights: list[Any], totals: list[Array] | None) -> list[Array]:
    return _forward(activation, parts, weights, totals)[0]


def _results(
    activation: str, part: TokenRows, weights: Sequence[Array]
) -> tuple[Float[Array, "N D"], list[Float[Array, "M F"]]]:
    """The results of tokens, and the hidden units of rows before the activation."""
    gate_EDF, up_EDF, down_EFD = weights
    sizes_E = part.dispatch.sizes_E
    products = ways().products(part.rows, [gate_EDF, up_EDF], sizes_E)
    gate_MF, up_MF = (checkpoint_name(y_MF, RESIDUAL_NAME) for y_MF in products)
    (y_MD,) = ways().products(Rows(_inner(activation, gate_MF, up_MF, part.weights_M)), [down_EFD], sizes_E)
    return sum_of_choices(y_MD, part.dispatch), [gate_MF, up_MF]


def _forward(
    activation: str, parts: list[TokenRows], weights: list[Any], totals: list[Array] | None
) -> tuple[list[Array], Any]:
    arrays = [opened(weight) for weight in weights]
    results = [_results(activation, part, arrays) for part in parts]
    return [y_ND for y_ND, _ in results], (parts, weights, totals, [hidden for _, hidden in results])


def _backward(
    activation: str, residuals: Any, dys: list[Array]
) -> tuple[list[TokenRows], list[Any] | None, list[Array] | None]:
    parts, weights, totals, hidden = residuals

    def fetched(weights: list[Any]) -> list[Array]:
        # Not before the gradient is there: else XLA would gather the weights of all layers at first.
        return [opened(fetched_after(w, dys[0]) if isinstance(w, Handle) else w) for w in weights]

    arrays, gradients_of_weights = jax.vjp(fetched, weights)
    gate_EDF, up_EDF, down_EFD = arrays
    d_parts, inner_factors, outer_factors = list[TokenRows](), list[Any](), list[Any]()
    for part, hidden_units, dy_ND in zip(parts, hidden, dys, strict=True):
        sizes_E, dy = part.dispatch.sizes_E, Rows(dy_ND, part.dispatch.tokens_M)
        d_inner_MF = ways().input_gradient([dy], [down_EFD], sizes_E)
        inner_MF, gradients = jax.vjp(partial(_inner, activation), *jax_compat.alike(*hidden_units, part.weights_M))
        *d_hidden, d_weights_M = gradients(jnp.asarray(d_inner_MF, inner_MF.dtype))
        d_hidden = [Rows(d) for d in d_hidden]
        dx_MD = ways().input_gradient(d_hidden, [gate_EDF, up_EDF], sizes_E)
        inner_factors.append((part.rows, d_hidden, sizes_E))
        outer_factors.append((Rows(inner_MF), [dy], sizes_E))
        d_weights_Nk = values_of_choices(d_weights_M, part.dispatch.rows_Nk)
        d_parts.append(_gradient(part, sum_of_choices(dx_MD, part.dispatch), d_weights_Nk))
    if totals is not None:
        return d_parts, None, _added(totals[:2], inner_factors) + _added(totals[2:], outer_factors)
    gradients = ways().weight_gradients(inner_factors) + ways().weight_gradients(outer_factors)
    gradients = [
        summed(dw.astype(w.dtype), jax_compat.varying_axes(w)) for dw, w in zip(gradients, arrays, strict=True)
    ]
    return d_parts, *gradients_of_weights(gradients), None


def _gradient(part: TokenRows, dh_ND: Array, d_weights_Nk: Array) -> Any:
    """The gradient of a part, with the varying axes and dtypes of its arrays."""
    pairs = (part.h_ND, dh_ND), (part.weights_Nk, d_weights_Nk)
    dh_ND, d_weights_Nk = (summed(d.astype(x.dtype), jax_compat.varying_axes(x)) for x, d in pairs)
    dispatch: Any = None
    return TokenRows(dh_ND, d_weights_Nk, dispatch)


def _added(totals: list[Array], factors: list[Any]) -> list[Array]:
    """The sums of weights' gradients with those of the factors added, in place where no sum over ranks is between."""
    axes = jax_compat.varying_axes(totals[0])
    if all(jax_compat.varying_axes(leaf) <= axes for leaf in jax.tree.leaves(factors)):
        return ways().weight_gradients(factors, totals)
    return [total + summed(dw, axes) for total, dw in zip(totals, ways().weight_gradients(factors), strict=True)]


_mlps.defvjp(_forward, _backward)
