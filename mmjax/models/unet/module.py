"""UNets as a module.

A row has one picture: ``UNet.queries`` places of the condition, then the places of a canvas in row-major order. At
places of the canvas the first of D features are the noisy picture's numbers, and behind the layer the prediction; at
places of the condition they are the condition. A layer is a complete network.

Shapes: R rows, N places of the condition, T of the canvas, D width, E channels of a picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.row_runs import ANY_RUNS
from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.denoiser import Denoiser
from mmjax.models.layers import Params
from mmjax.models.module import Block, LayerGroup
from mmjax.models.parameters import Part
from mmjax.models.unet import layers
from mmjax.models.unet.config import UNetConfig
from mmjax.models.unet.parameters import UNet


@dataclass(frozen=True)
class LatentUNet(Denoiser):
    """A generator of pictures from noise; tokens of other modules are the condition that its places attend to."""

    config: UNetConfig

    Config = UNetConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers, each a complete network."""
        c = self.config
        return (LayerGroup(c.layers, partial(UNet, c), partial(_block, c), checkpoints=True),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """(): all parameters are in layers."""
        del first, last
        return ()

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments" and "times"; "patches" on the first stage, "targets" and "weights" on the last."""
        ends = (("patches",) if first else ()) + (("targets", "weights") if last else ())
        return ("segments", "times", *ends)

    def embed(self, p: Params, context: Context) -> Float[Array, "R N+T D"]:
        """Features of the context's host input "patches", which are noisy; zeros at places of the condition.

        ``p`` has networks' parameters, {"layers": …}, of which the dtype is read.
        """
        c, network = self.config, next(iter(p.values()))
        patches_RTE = context.inputs["patches"].astype(network["conv_in"]["bias"].dtype)
        return jnp.pad(patches_RTE, [(0, 0), (c.queries, 0), (0, c.width - c.channels)])

    def predict(self, p: Params, context: Context, x: Float[Array, "R N+T D"]) -> Float[Array, "R T E"]:
        """The prediction at each place of the canvas in fp32.

        ``p`` and ``context`` are not read, and ``x`` is the result of ``end``.
        """
        del p, context
        return x[:, self.config.queries :, : self.config.channels].astype(jnp.float32)

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a picture into places, for the data side."""
        c = self.config
        canvases = {"canvases": c.canvases, "bounded_by": "UNet.canvases", "multiple": 2 ** (len(c.widths) - 1)}
        return replace(super().medium, **canvases)


def _block(c: UNetConfig, context: Context, x_RTD: Float[Array, "R N+T D"]) -> Block:
    """The function of the layer, (x [R, N + T, D], its parameters) -> [R, N + T, D]."""
    rows, columns = c.canvas(x_RTD.shape[1] - c.queries)
    in_use = context.inputs["segments"] > 0
    used_RN, inside_RHW = in_use[:, : c.queries], in_use[:, c.queries :].reshape(-1, rows, columns)
    # Of the level's rows it is known alone whether they are whole.
    runs = 1 if context.backend.max_runs == 1 else ANY_RUNS

    def layer(x_RTD: Array, p: Params) -> Array:
        condition_RND, places_RTE = x_RTD[:, : c.queries], x_RTD[:, c.queries :, : c.channels]
        prediction_RHWE = layers.unet(
            p,
            c,
            places_RTE.reshape(*inside_RHW.shape, c.channels),
            context.inputs["times"][:, 0] * c.timestep_scale,
            condition_RND,
            inside_BHW=inside_RHW,
            used_BN=used_RN,
            axes=context.axes,
            backend=replace(context.backend, max_runs=runs),
        )
        beyond = [(0, 0), (0, 0), (0, c.width - c.channels)]
        prediction_RTD = jnp.pad(prediction_RHWE.reshape(places_RTE.shape), beyond)
        return jnp.concatenate([condition_RND, prediction_RTD], axis=1)

    return layer
