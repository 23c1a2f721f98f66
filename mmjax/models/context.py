"""What a module is given when one of its stages runs: where it runs, what stands in its rows, and how tokens attend.

A module never sees how a row lies on devices, or which kernel computes attention: both are bound here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float

from mmjax.attention import MaskKind, Tokens, attention
from mmjax.mesh.spread import Axes

Inputs = Mapping[str, Array]
"""Host inputs of one microbatch for one module, local rows."""
Attend = Callable[[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]], Float[Array, "B T H K"]]
"""Attention of queries to keys and values, under the mask of the tokens."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a stage.

    Attributes:
      axes: mesh axes by role.
      inputs: host inputs that the stage reads.
      tokens: what is known of every position.
      attend: ``attend(q, k, v)``, bound to the tokens and to the module's mask.
    """

    axes: Axes
    inputs: Inputs
    tokens: Tokens
    attend: Attend

    @classmethod
    def of(cls, axes: Axes, inputs: Inputs, mask: MaskKind) -> Context:
        """The context of a microbatch whose inputs hold its ``segments``, and maybe ``positions`` and ``order``."""
        tokens = Tokens.of(inputs)
        return cls(axes, inputs, tokens, partial(attention, tokens=tokens, kind=mask))
