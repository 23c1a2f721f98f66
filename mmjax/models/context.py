"""What a module is given when one of its stages runs: where it runs, what stands in its rows, and how tokens attend.

A module never sees how a row lies on devices, or which kernel computes attention: both are bound here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention.by_hand import Known
from mmjax.attention.cache import Cache
from mmjax.attention.exchange import gathered_tokens
from mmjax.attention.mask import Mask, MaskKind
from mmjax.attention.tokens import Tokens
from mmjax.attention.ways import ANY, Way
from mmjax.mesh.spread import Axes

Inputs = Mapping[str, Array]
"""Host inputs of one microbatch for one module, local rows."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a stage.

    Attributes:
      axes: mesh axes by role.
      inputs: host inputs that the stage reads, of the tokens whose features this rank has between a layer's products.
      tokens: what is known of every token that products and attention see, and its ``inputs``: the same tokens, unless
        ranks of tp share them (``Axes.sp``).
      mask: which tokens of a segment attend to which.
      way: how attention is computed; beside a cache it is always by blocks.
      cache: keys and values of the tokens before these in their rows, while text is generated; else ``None``.
      keys: what the mask reads of all tokens of the rows, in layers whose rows lie on several ranks.
      found: what the way of attention has found out about tokens under the mask.
    """

    axes: Axes
    inputs: Inputs
    tokens: Tokens
    mask: Mask
    way: Way = ANY
    cache: Cache | None = None
    keys: Tokens | None = None
    found: Known | None = None

    @classmethod
    def of(cls, axes: Axes, inputs: Inputs, kind: MaskKind, way: Way = ANY) -> Context:
        """The context of a microbatch whose inputs hold its ``segments``, and maybe ``positions`` and ``order``."""
        tokens = Tokens.of(inputs, axes.positions)
        return cls(axes, {name: _share(x, axes.sp) for name, x in inputs.items()}, tokens, Mask(kind), way)

    def under(self, mask: Mask) -> Context:
        """The context of layers with a mask of their own.

        What is known of all tokens is gathered here, once for all of these layers.
        """
        axes, way = self.axes.positions, self.axes.cp_way
        keys = gathered_tokens(self.tokens, mask, axes, way) if axes else None
        found = self.way.found(mask, self.tokens, keys, way) if self.cache is None else None
        return replace(self, mask=mask, keys=keys, found=found)

    def whole(self, x_BT: Array) -> Array:
        """What is known of all tokens of the rows, such as a host input, from what is known of this rank's."""
        return jax_compat.all_gather_invariant(x_BT, self.axes.stream, 1) if self.axes.stream else x_BT

    @property
    def unshared(self) -> Context:
        """The context of what ranks of tp all compute for all of their tokens."""
        return replace(self, axes=self.axes.unshared, inputs=self.tokens.inputs)

    def together(self, x_BTD: Array) -> Array:
        """Features of all tokens of tp's ranks, from this rank's."""
        return jax_compat.all_gather_invariant(x_BTD, self.axes.sp, 1) if self.axes.sp else x_BTD

    def share(self, x_BTD: Array) -> Array:
        """This rank's features of those that all of tp's ranks have."""
        return _share(x_BTD, self.axes.sp)

    def attend(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]
    ) -> Float[Array, "B T H K"]:
        """Attention of queries to keys and values, and to those before them, under the mask of the tokens."""
        if axes := self.axes.positions:
            cp_way = self.axes.cp_way
            keys = self.keys or gathered_tokens(self.tokens, self.mask, axes, cp_way)
            return self.way.among(axes, cp_way, q, k, v, self.tokens, self.mask, keys, self.found)
        if self.cache is None:
            return self.way.attend(q, k, v, self.tokens, self.mask, found=self.found)
        k, v, keys = self.cache.extended(k, v)
        return Way("blockwise").attend(q, k, v, self.tokens, self.mask, keys)


def _share(x_BT: Array, axes: tuple[str, ...]) -> Array:
    """This rank's tokens of those that all ranks along some axes have."""
    if not axes:
        return x_BT
    length = x_BT.shape[1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x_BT, lax.axis_index(axes) * length, length, 1)
