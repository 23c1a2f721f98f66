"""What configurations of several families offer: their choices, and the sizes that follow from others. No JAX."""

from __future__ import annotations

from typing import Literal

Medium = Literal["image", "recording"]
ACTIVATIONS = ("gelu", "gelu_exact", "quick_gelu", "silu")
"""Values of ``activation``: GELU by its tanh approximation, GELU by the error function, x · sigmoid(1.702 x), and
x · sigmoid(x)."""
ACTIVATION_OF = {
    **{"gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"},
    **{"quick_gelu": "quick_gelu", "silu": "silu"},
}
"""Names of ``transformers``, and ours."""
REMATS = ("none", "dots", "full")
"""Values of ``remat``: a layer keeps everything for its backward, products only, or its input only."""


class EqualHeads:
    """Settings of layers whose heads share the width."""

    width: int
    heads: int
    norm_eps: float = 1e-6
    """What norms add to the variance; a configuration may have a field of this name."""
    k_bias: bool = True
    """Whether keys have a bias; likewise."""

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class SquarePatches:
    """Settings of a module that cuts images into squares."""

    patch: int
    channels: int

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels
