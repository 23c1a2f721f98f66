"""Values of settings that several families share. No JAX."""

from __future__ import annotations

from typing import Literal

Medium = Literal["image", "recording", "tokens", "drawing"]
"""What a module encodes or generates; "tokens" are those of another encoder, a "drawing" what a generator learns to
make."""
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


def hf_activation(activation: str) -> str:
    """The first name in ``transformers`` of a value of ``activation``: "gelu" for "gelu_exact"."""
    return next(hf_name for hf_name, name in ACTIVATION_OF.items() if name == activation)


AUTO = "auto"
"""The value of settings that are left to the devices; ``recipe.device_defaults`` resolves them."""
REMATS = (AUTO, "none", "dots", "full")
"""Values of ``remat``: a layer's residuals are all intermediate results, results of products, or its input alone."""
