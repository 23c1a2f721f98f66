"""How a stage's forward uses its weights: which have a single use, and which products may add to a gradient's sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mmjax import jaxprs
from mmjax.mesh.spmd import Spmd
from mmjax.models.taps import CONVOLUTION, GROUPED, HEAD, PRODUCT, marked
from mmjax.pipeline.trees import by_name

Tree = Any
DIMENSIONS: Mapping[str, int] = {PRODUCT: 2, GROUPED: 3, HEAD: 2}
"""Dimensions of weights that are no stacks of layers, by the mark of their use, which may add to a gradient's sum."""
DEFERRABLE = (PRODUCT, GROUPED, CONVOLUTION)
"""Marks of weights whose gradients a split backward computes later."""
MARKS = (*DIMENSIONS, CONVOLUTION)
"""All marks."""


def single_uses(forward: Spmd, avals: Sequence[Any], marks: Collection[str]) -> dict[str, str]:
    """The mark of the parameters with a single use, which is of a kind of ``marks``: {"llm/head": HEAD}.

    Args:
      forward: a function ``(params, inputs, carry) -> outputs`` of a stage, which is traced.
      avals: avals of its arguments; the first is a tree by module, such as {"llm": {"head": aval}}.
      marks: checkpoint names of uses, such as ``(PRODUCT, HEAD)`` of ``mmjax.models.taps``.
    """
    names = by_name(jax.tree.map(lambda aval: aval, avals[0]))  # in the order of the tree's leaves
    with marked():
        reads = jaxprs.named_reads(forward, avals, marks)
    return {name: mark for mark in marks for name, count in zip(names, reads[mark], strict=False) if count == (1, 0)}


def summable(params: Mapping[str, Any], opened: Collection[str], *, every_dtype: bool = False) -> list[str]:
    """The names of weights whose products may add gradients to the weights' sums (see ``mmjax.models.taps``), if the
    weights have a single use of a mark of as many ``DIMENSIONS``.

    Not stacks of layers: a scan would copy the sum of each layer. Not fp32 weights, but for ``every_dtype``: XLA
    computes their gradient and its sum in one kernel in any case.

    Args:
      params: avals by name, such as {"llm/head": aval}.
      opened: names of the parameters that are not stored as they are used.
      every_dtype: whether backward does more with the sum than to add to it.
    """
    ranks = DIMENSIONS.values()
    return [
        name
        for name, x in params.items()
        if x.ndim in ranks and (every_dtype or adds_to_sum(x.dtype)) and name not in opened
    ]


def adds_to_sum(dtype: Any) -> bool:
    """Whether products add the gradients of weights of this dtype to their sums: of a dtype narrower than fp32."""
    return jnp.dtype(dtype).itemsize < 4
