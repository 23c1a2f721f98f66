"""Diffusion transformers as a module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float

from mmjax.models.context import Context
from mmjax.models.denoiser import Denoiser
from mmjax.models.dit import layers
from mmjax.models.dit.config import DiTConfig
from mmjax.models.layers import Params
from mmjax.models.module import LayerGroup
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class DiffusionTransformer(Denoiser):
    """A generator of pictures from noise; tokens of other modules are added to the features of noisy patches."""

    config: DiTConfig

    Config = DiTConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers."""
        c = self.config
        return (LayerGroup(c.layers, partial(layers.DiTLayer, c), partial(layers.block, c)),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The patch embedding of the first stage, and the velocity head of the last."""
        return layers.parts(self.config, first=first, last=last)

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments", "positions" and "times"; "patches" on the first stage, "targets" and "weights" on the last."""
        ends = (("patches",) if first else ()) + (("targets", "weights") if last else ())
        return ("segments", "positions", "times", *ends)

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        """Features of the context's host input "patches", which are noisy; ``p`` are the module's parameters on its
        first stage.
        """
        return layers.embed_patches(p, context.inputs["patches"], context.part_of(self.config.queries))

    def predict(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T E"]:
        """The prediction for each patch in fp32: its velocity, or another ``DiT.prediction``.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's inputs
        include "times".
        """
        queries = context.part_of(self.config.queries)
        return layers.velocity(p, self.config, x, context.inputs["times"], queries)
