"""Choices and derived sizes that the settings of several families share. No JAX."""

from __future__ import annotations

from typing import Literal

Medium = Literal["image", "recording", "tokens"]
"""What a module encodes or generates; "tokens" are those of another encoder."""
ACTIVATIONS = ("gelu", "gelu_exact", "quick_gelu", "silu")
"""Values of ``activation``: GELU by its tanh approximation, GELU by the error function, x · sigmoid(1.702 x), and
x · sigmoid(x)."""
ACTIVATION_OF = {
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
"""Values of ``activation`` by their names in ``transformers``."""
REMATS = ("none", "dots", "full")
"""Values of ``remat``: a layer's residuals are all intermediate results, results of products, or its input alone."""


class EqualHeads:
    """Settings of layers whose heads divide the width equally."""

    width: int
    heads: int
    norm_eps: float = 1e-6
    """The epsilon of norms; a settings class may override it by a field."""
    k_bias: bool = True
    """Whether keys have a bias; a settings class may override it by a field."""

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class SquarePatches:
    """Settings of a module that cuts images into square patches."""

    patch: int
    channels: int

    @property
    def patch_values(self) -> int:
        """The number of values in one patch: ``patch``² · ``channels``."""
        return self.patch * self.patch * self.channels
