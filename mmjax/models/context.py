"""What a module is given when one of its stages runs: where it runs, what stands in its rows, and how tokens attend.

A module never sees how a row lies on devices, or which kernel computes attention: both are bound here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Array, Float

from mmjax.attention.cache import Cache
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
      inputs: host inputs that the stage reads.
      tokens: what is known of every position.
      mask: which tokens of a segment attend to which.
      way: how attention is computed; beside a cache it is always by blocks.
      cache: keys and values of the tokens before these in their rows, while text is generated; else ``None``.
    """

    axes: Axes
    inputs: Inputs
    tokens: Tokens
    mask: Mask
    way: Way = ANY
    cache: Cache | None = None

    @classmethod
    def of(cls, axes: Axes, inputs: Inputs, kind: MaskKind, way: Way = ANY) -> Context:
        """The context of a microbatch whose inputs hold its ``segments``, and maybe ``positions`` and ``order``."""
        return cls(axes, inputs, Tokens.of(inputs), Mask(kind), way)

    def within(self, window: int, grid_window: int = 0) -> Context:
        """The context of layers with such a window, or windows of a grid."""
        return replace(self, mask=Mask(self.mask.kind, window, grid_window))

    def attend(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]
    ) -> Float[Array, "B T H K"]:
        """Attention of queries to keys and values, and to those before them, under the mask of the tokens."""
        if self.cache is None:
            return self.way.attend(q, k, v, self.tokens, self.mask)
        k, v, keys = self.cache.extended(k, v)
        return Way("blockwise").attend(q, k, v, self.tokens, self.mask, keys)
