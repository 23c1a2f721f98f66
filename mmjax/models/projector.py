"""Projector: encoder features to LLM tokens. It ends its encoder's last stage, and is a module of its own for training.

A generator's projector maps the LLM's hidden states to the generator's features, and begins its first stage.

Shapes: R rows, T features per row, m of which make a token, Dv encoder width, D LLM width, F hidden units local to this
rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.mesh.submesh import Axes
from mmjax.models.layers import Params, column_parallel, row_parallel


class Projector(nnx.Module):
    """Parameters: ``in_width`` (merged encoder features) to ``out_width`` (LLM), or from the LLM to a generator."""

    def __init__(self, in_width: int, hidden: int, out_width: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up, self.up_bias = nnx.Param(init(rngs.params(), (in_width, hidden))), nnx.Param(jnp.zeros(hidden))
        self.down, self.down_bias = nnx.Param(init(rngs.params(), (hidden, out_width))), nnx.Param(jnp.zeros(out_width))


def injected_name(layer: int) -> str:
    """Name, in the projector's module, of the parameters of the projector that injects into an LLM layer."""
    return f"inject{layer:03d}"


def project(p: Params, joined: int, axes: Axes, x_RTD: Float[Array, "R T Dv"]) -> Float[Array, "R T/m D"]:
    """Joins each run of ``joined`` features (patches come ordered so) and maps it to one LLM token."""
    R, T, D = x_RTD.shape
    x_RTD = x_RTD.reshape(R, T // joined, D * joined)
    (h_RTF,) = column_parallel(x_RTD, [(p["up"], p["up_bias"])], axes)
    return row_parallel(jax.nn.gelu(h_RTF), p["down"], axes, p["down_bias"])
