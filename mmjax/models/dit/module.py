"""Diffusion transformers as a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.dit import layers
from mmjax.models.dit.config import DiTConfig
from mmjax.models.guidance import Guidance
from mmjax.models.layers import Params
from mmjax.models.module import HostInputs, LayerGroup, Loss, Module, Predict
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class DiffusionTransformer(Module):
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
        return layers.embed_patches(p, context.inputs["patches"], self.config.queries)

    @property
    def losses(self) -> Mapping[str, Loss]:
        """One loss, "loss", with the weight ``DiT.loss_weight``."""
        return {"loss": Loss(weight=self.config.loss_weight)}

    def loss(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> dict[str, Float[Array, ""]]:
        """{"loss": the sum of weighted squared errors over the local patches}.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's inputs
        include "times", "targets" and "weights".
        """
        targets, weights = context.inputs["targets"], context.inputs["weights"]
        return {"loss": layers.squared_errors(self.predict(p, context, x), targets, weights)}

    def predict(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T E"]:
        """The prediction for each patch in fp32: its velocity, or another ``DiT.prediction``.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's inputs
        include "times".
        """
        return layers.velocity(p, self.config, x, context.inputs["times"])

    def draw(self, inputs: Sequence[HostInputs], predict: Predict) -> list[np.ndarray]:
        """The patches ``[R, T, E]`` of pictures of each microbatch, from noise by ``DiT.steps`` steps of
        ``DiT.sampler``.

        Args:
          inputs: the host inputs of each microbatch by name, with noise as "patches" ``[R, T, E]``; "times" are
            replaced.
          predict: computes the results of the method ``predict`` for such inputs.
        """
        return self.config.drawing.draw(inputs, predict)

    @property
    def guidance(self) -> Guidance:
        """The combination of predictions with and without the condition."""
        return self.config.guided

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a picture into patches, for the data side."""
        c = self.config
        return EncoderSpec(
            patch=c.patch,
            merge=c.merge,
            channels=c.channels,
            special=c.queries,
            queries=c.queries,
            drawn=True,
            process=c.noising,
        )
