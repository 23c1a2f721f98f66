"""Projector: features of one module to tokens of another. A module of its own for training, without a stage of its own.

It ends its module's last stage, as an encoder's does, or begins the first, as a generator's does.

Shapes: R rows, T features per row, m of which make a token, Dv encoder width, D LLM width, F hidden units local to this
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.mesh.spread import Axes
from mmjax.models.layers import ACTIVATIONS, Params, any_norm, column_parallel, linear, row_parallel
from mmjax.models.transformer import Norm


class Projector(nnx.Module):
    """Parameters of a product from ``in_width`` to ``out_width``; if ``hidden`` is 0 of one layer, repeated over tp.

    ``norm`` is that of each of the ``together`` features that are joined to ``in_width``.
    """

    def __init__(
        self, in_width: int, hidden: int, out_width: int, rngs: nnx.Rngs, *, norm: str = "none", together: int = 1
    ):
        init = nnx.initializers.lecun_normal()
        if norm != "none":
            self.norm = Norm(in_width // together, rms=norm == "rms")
        if not hidden:
            self.kernel = nnx.Param(init(rngs.params(), (in_width, out_width)))
            self.bias = nnx.Param(jnp.zeros(out_width))
            return
        self.up, self.up_bias = nnx.Param(init(rngs.params(), (in_width, hidden))), nnx.Param(jnp.zeros(hidden))
        self.down, self.down_bias = nnx.Param(init(rngs.params(), (hidden, out_width))), nnx.Param(jnp.zeros(out_width))


class Newline(nnx.Module):
    """A learned token of the LLM's width behind each row of an image's tokens."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.newline = nnx.Param(nnx.initializers.normal(width**-0.5)(rngs.params(), (width,)))


def injected_name(layer: int) -> str:
    """Name, in the projector's module, of the parameters of the projector that injects into a layer."""
    return f"inject{layer:03d}"


def merged(x_RTD: Float[Array, "R T Dv"], together: int) -> Float[Array, "R T/m m*Dv"]:
    """Each run of ``together`` features side by side.

    Raises:
      ValueError: a rank's part of a row is no number of whole runs.
    """
    R, T, D = x_RTD.shape
    if T % together:
        fix = "pad rows, or set Layout.cp to 1 and Layout.sp to False"
        raise ValueError(f"a rank's {T} patches of a row do not make tokens of {together} each; {fix}")
    return x_RTD.reshape(R, T // together, D * together)


def joined(parts: Sequence[Float[Array, "R T _"]]) -> Float[Array, "R T _"]:
    """Features of the same tokens side by side."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def project(
    p: Params, together: int, axes: Axes, x_RTD: Float[Array, "R T Dv"], activation: str
) -> Float[Array, "R T/m D"]:
    """Joins each run of ``together`` features (patches come ordered so) and maps it to one LLM token."""
    x_RTD = merged(any_norm(x_RTD, p["norm"]) if "norm" in p else x_RTD, together)
    if "kernel" in p:
        return linear(x_RTD, p["kernel"], p["bias"])
    (h_RTF,) = column_parallel(x_RTD, [(p["up"], p["up_bias"])], axes)
    return row_parallel(ACTIVATIONS[activation](h_RTF), p["down"], axes, p["down_bias"])


def projector_parameters(in_width: int, hidden: int, out_width: int, *, norm: str = "none", together: int = 1) -> int:
    """Parameters of a projector; ``hidden`` is 0 for one of a single layer, ``norm`` as in ``Projector``."""
    norms = {"none": 0, "layer": 2, "rms": 1}[norm] * (in_width // together)
    if not hidden:
        return norms + in_width * out_width + out_width
    return norms + in_width * hidden + hidden + hidden * out_width + out_width


def projector_flops(in_width: int, hidden: int, out_width: int, tokens: int) -> int:
    """Forward FLOPs of a projector that gives so many tokens; ``hidden`` is 0 for one of a single layer."""
    return 2 * tokens * (hidden * (in_width + out_width) if hidden else in_width * out_width)
