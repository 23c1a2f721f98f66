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
from mmjax.models.norms import any_norm, unscaled_rms_norm
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.transformer import Norm


class Projector(nnx.Module):
    """Parameters of a projector from ``in_width`` to ``out_width``: "up", "up_bias", "down" and "down_bias".

    With ``hidden`` 0 it has one layer, "kernel" and "bias", replicated over tp. ``norm`` is the norm of each of the
    ``together`` features that are concatenated to ``in_width``, a value of ``Projector.norm``. Without ``bias`` it has
    the products alone. ``stds`` are standard deviations of its layers' weights, as in ``Projector.stds``.
    """

    def __init__(
        self,
        in_width: int,
        hidden: int,
        out_width: int,
        rngs: nnx.Rngs,
        *,
        norm: str = "none",
        together: int = 1,
        bias: bool = True,
        stds: Sequence[float] = (),
    ):
        inits = [nnx.initializers.normal(std) for std in stds] or [nnx.initializers.lecun_normal()] * 2
        if norm not in ("none", "rms_plain"):
            self.norm = Norm(in_width // together, rms=norm != "layer", plus_one=norm == "rms_plus_one")
        if not hidden:
            self.kernel = nnx.Param(inits[0](rngs.params(), (in_width, out_width)), dims=("input", "output"))
        else:
            self.up = nnx.Param(inits[0](rngs.params(), (in_width, hidden)), dims=("embed", "mlp"))
            self.down = nnx.Param(inits[1](rngs.params(), (hidden, out_width)), dims=("mlp", "embed"))
        if bias and not hidden:
            self.bias = nnx.Param(jnp.zeros(out_width), dims=("output",))
        if bias and hidden:
            self.up_bias = nnx.Param(jnp.zeros(hidden), dims=("mlp",))
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


def pooled(x_RTD: Float[Array, "R T Dv"], together: int) -> Float[Array, "R T/m Dv"]:
    """The mean of each run of ``together`` neighbouring features of a row, summed in fp32; see ``merged``."""
    x_RNmD = merged(x_RTD, together).reshape(len(x_RTD), -1, together, x_RTD.shape[-1])
    return jnp.mean(x_RNmD.astype(jnp.float32), axis=2).astype(x_RTD.dtype)


def joined(parts: Sequence[Float[Array, "R T _"]]) -> Float[Array, "R T _"]:
    """Concatenates features of the same tokens along the last dimension; a single array is returned as it is."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def project(
    p: Params, together: int, axes: Axes, x_RTD: Float[Array, "R T Dv"], settings: ProjectorConfig
) -> Float[Array, "R T/m D"]:
    """Maps each run of ``together`` features to one LLM token; patches are ordered accordingly.

    Args:
      p: the parameters of a ``Projector`` on this tp rank: "up", "up_bias", "down" and "down_bias", or "kernel" and
        "bias" of one layer, and "norm" if it has one. Biases may be missing.
      together: m, the number of features of a token.
      axes: mesh axes by role, such as ``Axes()``.
      x_RTD: features of this rank's tokens.
      settings: its settings, of which norm, pooling and activation are read.

    Raises:
      ValueError: a rank's part of a row is no multiple of ``together``.
    """
    if settings.pool:
        x_RTD, together = pooled(x_RTD, together), 1
    if settings.norm == "rms_plain":
        x_RTD = unscaled_rms_norm(x_RTD, 1e-6)
    elif "norm" in p:
        x_RTD = any_norm(x_RTD, p["norm"], plus=float(settings.norm == "rms_plus_one"))
    x_RTD = merged(x_RTD, together)
    if "kernel" in p:
        return linear(x_RTD, p["kernel"], p.get("bias"))
    (h_RTF,) = column_parallel(x_RTD, [(p["up"], p.get("up_bias"))], axes)
    return row_parallel(ACTIVATIONS[settings.activation](h_RTF), p["down"], axes, p.get("down_bias"))


def projector_flops(in_width: int, hidden: int, out_width: int, tokens: int) -> int:
    """Forward FLOPs of a projector from ``in_width`` to ``out_width`` for ``tokens`` output tokens, without its norm.

    ``hidden`` is the number of hidden units; 0 for a projector of one layer.
    """
    return 2 * tokens * (hidden * (in_width + out_width) if hidden else in_width * out_width)
