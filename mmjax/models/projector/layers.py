"""The projector from features of one module to tokens of another.

A projector is trained as a module of its own, but has no stage of its own: it is at the end of its module's last stage,
as for an encoder, or at the start of the first, as for a generator.

Shapes: R rows, T features per row, m features per token, Dv encoder width, D LLM width, F hidden units local to this
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.mesh.spread import Axes
from mmjax.models.layers import ACTIVATIONS, Params, column_parallel, linear, row_parallel
from mmjax.models.norms import any_norm
from mmjax.models.transformer import Norm


class Projector(nnx.Module):
    """Parameters of a projector from ``in_width`` to ``out_width``: "up", "up_bias", "down" and "down_bias".

    With ``hidden`` 0 it has one layer, "kernel" and "bias", replicated over tp. ``norm`` is the norm of each of the
    ``together`` features that are concatenated to ``in_width``: "none", "layer" or "rms".
    """

    def __init__(
        self, in_width: int, hidden: int, out_width: int, rngs: nnx.Rngs, *, norm: str = "none", together: int = 1
    ):
        init = nnx.initializers.lecun_normal()
        if norm != "none":
            self.norm = Norm(in_width // together, rms=norm == "rms")
        if not hidden:
            self.kernel = nnx.Param(init(rngs.params(), (in_width, out_width)), dims=("input", "output"))
            self.bias = nnx.Param(jnp.zeros(out_width), dims=("output",))
            return
        self.up = nnx.Param(init(rngs.params(), (in_width, hidden)), dims=("embed", "mlp"))
        self.up_bias = nnx.Param(jnp.zeros(hidden), dims=("mlp",))
        self.down = nnx.Param(init(rngs.params(), (hidden, out_width)), dims=("mlp", "embed"))
        self.down_bias = nnx.Param(jnp.zeros(out_width), dims=("embed",))


class Newline(nnx.Module):
    """A learned embedding of the LLM's width, which ends each row of an image's tokens."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(width**-0.5)
        self.newline = nnx.Param(init(rngs.params(), (width,)), dims=("embed",))


def merged(x_RTD: Float[Array, "R T Dv"], together: int) -> Float[Array, "R T/m m*Dv"]:
    """Concatenates each run of ``together`` neighbouring features of a row; ``together`` is m.

    Raises:
      ValueError: a rank's part of a row is no multiple of ``together``.
    """
    R, T, D = x_RTD.shape
    if T % together:
        fix = "pad rows, or set Layout.cp to 1 and Layout.sp to False"
        raise ValueError(f"a rank's {T} patches of a row do not make tokens of {together} each; {fix}")
    return x_RTD.reshape(R, T // together, D * together)


def joined(parts: Sequence[Float[Array, "R T _"]]) -> Float[Array, "R T _"]:
    """Concatenates features of the same tokens along the last dimension; a single array is returned as it is."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def project(
    p: Params, together: int, axes: Axes, x_RTD: Float[Array, "R T Dv"], activation: str
) -> Float[Array, "R T/m D"]:
    """Maps each run of ``together`` features to one LLM token; patches are ordered accordingly.

    Args:
      p: the parameters of a ``Projector`` on this tp rank: "up", "up_bias", "down" and "down_bias", or "kernel" and
        "bias" of one layer, and "norm" if it has one.
      together: m, the number of features of a token.
      axes: mesh axes by role, such as ``Axes()``.
      x_RTD: features of this rank's tokens.
      activation: a key of ``ACTIVATIONS``, such as "gelu"; not read by a projector of one layer.

    Raises:
      ValueError: a rank's part of a row is no multiple of ``together``.
    """
    x_RTD = merged(any_norm(x_RTD, p["norm"]) if "norm" in p else x_RTD, together)
    if "kernel" in p:
        return linear(x_RTD, p["kernel"], p["bias"])
    (h_RTF,) = column_parallel(x_RTD, [(p["up"], p["up_bias"])], axes)
    return row_parallel(ACTIVATIONS[activation](h_RTF), p["down"], axes, p["down_bias"])


def projector_flops(in_width: int, hidden: int, out_width: int, tokens: int) -> int:
    """Forward FLOPs of a projector from ``in_width`` to ``out_width`` for ``tokens`` output tokens, without its norm.

    ``hidden`` is the number of hidden units; 0 for a projector of one layer.
    """
    return 2 * tokens * (hidden * (in_width + out_width) if hidden else in_width * out_width)
