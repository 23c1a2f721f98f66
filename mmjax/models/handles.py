"""Handles: weights that are stored in one form and used in another, such as a shard that is gathered or cast.

A module is given arrays or handles as parameters and does not tell them apart. Products, norms, biases and lookups open
a handle where they use it, inside what backward computes again. So the opened weight is never kept for backward, and
the weight of a product that a split backward taps stays tapped (see ``taps``).

A weight with an adapter is no handle: it is never opened, and only products can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from mmjax.configurable import ConfigError

Open = Callable[[jax.Array], jax.Array]
"""A linear function from the stored array to the weight."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Handle:
    """Takes the place of a weight array among the parameters.

    Attributes:
      stored: the array as it is stored.
      open: makes the weight of it.
    """

    stored: jax.Array
    open: Open = field(metadata={"static": True})

    @property
    def T(self) -> Handle:
        """The transpose."""
        return Handle(stored=self.stored, open=lambda stored: self.open(stored).T)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return jax.eval_shape(self.open, self.stored).shape

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return jax.eval_shape(self.open, self.stored).dtype


class LikeItsWeight:
    """A stand-in for its ``weight`` among the parameters, of the weight's shape and dtype."""

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
    """Takes the place of a weight array among the parameters: ``x`` gives ``x · weight + scale · (x · a) · b``.

    Attributes:
      weight: the weight, in any form that products read.
      a, b: the factors of its low-rank adapter ``[D, r]`` and ``[r, F]``, likewise.
      scale: factor of the adapter's product.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})

    @property
    def T(self) -> Adapted:
        """The transpose."""
        return Adapted(weight=self.weight.T, a=self.b.T, b=self.a.T, scale=self.scale)


def opened(weight: Any) -> jax.Array:
    """The weight of a handle, or the array itself.

    Raises:
      ConfigError: the weight has an adapter.
    """
    if isinstance(weight, Adapted):
        fix = "is used outside of a product, which no adapter can follow; take it out of Lora.targets"
        raise ConfigError(f"Lora.targets: a weight {list(weight.shape)} {fix}")
    return weight.open(weight.stored) if isinstance(weight, Handle) else weight


def gradient_of_stored(open_weight: Open, stored: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of an array like ``stored`` from that of its weight."""
    return jax.vjp(open_weight, stored)[1](gradient)[0]
