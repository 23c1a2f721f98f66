"""A vision encoder of one's own, in a file of one's own: gated layers that see one patch, then layers with attention.

    cd examples/own_encoder
    python -m mmjax.check --gin_file=own_encoder.gin --allow_code
    python -m mmjax.train --gin_file=own_encoder.gin --allow_code

Shapes: R rows, T patches in a row, P numbers in a patch, D width, F hidden units local to this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import mmjax
from mmjax.configurable import configurable

Params = Mapping[str, Any]


@configurable("Gated")
@dataclass(frozen=True, kw_only=True)
class GatedConfig(mmjax.EqualHeads, mmjax.SquarePatches):
    """Settings: the first half of the ``layers`` see one patch; ``merge``² patches become one token of the LLM."""

    medium: ClassVar = "image"
    layers: int = 4
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 4
    channels: int = 1
    merge: int = 2
    activation: str = "gelu"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge"):
            mmjax.positive(f"Gated.{name}", getattr(self, name))
        mmjax.divides("Gated.heads", self.heads, self.width // 4, "a quarter of Gated.width, which is")


class GatedLayer(nnx.Module):
    """Parameters of a layer that sees one patch; ``gate``, ``up`` and ``down`` are split over tp along "mlp"."""

    def __init__(self, c: GatedConfig, rngs: nnx.Rngs):
        init, last = nnx.initializers.lecun_normal(), mmjax.residual_init(c.layers)
        self.before = nnx.Param(jnp.ones(c.width), dims=("embed",))
        self.gate = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
        self.up = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
        self.down = nnx.Param(last(rngs.params(), (c.mlp, c.width)), dims=("mlp", "embed"))


def gated_block(context: mmjax.Context, x: Array):
    """The function of a layer that sees one patch."""

    def layer(x_RTD: Float[Array, "R T D"], p: Params) -> Float[Array, "R T D"]:
        h_RTD = mmjax.rms_norm(x_RTD, p["before"], 1e-6)
        gate_RTF, up_RTF = mmjax.column_parallel(h_RTD, [(p["gate"], None), (p["up"], None)], context.axes)
        return x_RTD + mmjax.row_parallel(jax.nn.silu(gate_RTF) * up_RTF, p["down"], context.axes)

    return layer


def attending_block(c: GatedConfig, context: mmjax.Context, x: Array):
    """The function of a layer that sees its image."""
    return mmjax.encoder_block(c, context, lambda q: mmjax.rotate_2d(q, context.tokens.positions))


@dataclass(frozen=True)
class Gated(mmjax.Module):
    """The encoder: a linear stem and two groups of layers."""

    config: GatedConfig
    Config = GatedConfig

    @property
    def groups(self) -> tuple[mmjax.LayerGroup, ...]:
        c = self.config
        return (
            mmjax.LayerGroup(c.layers // 2, partial(GatedLayer, c), gated_block),
            mmjax.LayerGroup(c.layers - c.layers // 2, partial(mmjax.EncoderLayer, c), partial(attending_block, c)),
        )

    def parts(self, *, first: bool, last: bool) -> tuple[mmjax.Part, ...]:
        c = self.config
        return (mmjax.Part(partial(mmjax.Affine, c.patch_values, c.width), "patch"),) if first else ()

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        return (("patches",) if first else ()) + ("segments", "positions")

    def embed(self, p: Params, context: mmjax.Context) -> Float[Array, "R T D"]:
        kernel = p["patch"]["kernel"]
        return mmjax.linear(context.inputs["patches"].astype(kernel.dtype), kernel, p["patch"]["bias"])

    @property
    def medium(self) -> mmjax.EncoderSpec:
        return mmjax.EncoderSpec(patch=self.config.patch, merge=self.config.merge, channels=self.config.channels)
