"""The base of generators that make a medium of noise: their loss, drawing, guidance and medium.

Shapes: R rows, L places of a row, T of them places of patches, D width, E numbers in a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.guidance import Guidance
from mmjax.models.layers import Params
from mmjax.models.module import HostInputs, Loss, Module, Predict
from mmjax.models.samplers import is_drawn


class Denoiser(Module):
    """A generator that predicts its noise process's target for each patch; its settings are a ``Diffusion``.

    A family adds layers, parameters, ``embed`` and ``predict``.
    """

    @property
    def losses(self) -> Mapping[str, Loss]:
        """One loss, "loss", with the weight ``loss_weight`` of the settings."""
        return {"loss": Loss(weight=self.config.loss_weight)}

    def loss(self, p: Params, context: Context, x: Float[Array, "R L D"]) -> dict[str, Float[Array, ""]]:
        """{"loss": the sum of weighted squared errors of the prediction over the local patches}.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's inputs
        include "targets", "weights" and those that ``predict`` reads.
        """
        targets_RTE, weights = context.inputs["targets"], context.inputs["weights"]
        errors_RTE = jnp.square(self.predict(p, context, x) - targets_RTE)
        # A patch has a weight, or each of its frames, whose numbers are consecutive.
        errors = errors_RTE if weights.ndim == 2 else errors_RTE.reshape(*weights.shape, -1)
        return {"loss": jnp.sum(weights[..., None] * errors)}

    def draw(self, inputs: Sequence[HostInputs], predict: Predict) -> list[np.ndarray]:
        """The patches ``[R, T, E]`` of pictures of each microbatch, from noise by ``steps`` steps of ``sampler``.

        Args:
          inputs: the host inputs of each microbatch by name, with noise as "patches" ``[R, T, E]``; "times" are
            replaced.
          predict: computes the results of the method ``predict`` for such inputs.
        """
        return self.config.drawing.draw([*map(_without_latents, inputs)], predict)

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


def _without_latents(inputs: HostInputs) -> HostInputs:
    """Host inputs by which latents that are made in the step enter pictures that others are made from alone.

    What is drawn begins with noise.
    """
    if "latent_shares" not in inputs:
        return inputs
    shares = np.where(is_drawn(inputs)[..., None], np.float32(0), inputs["latent_shares"])
    return {**inputs, "latent_shares": shares}
