"""Diffusion transformers as a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.denoiser import Denoiser
from mmjax.models.dit import layers
from mmjax.models.dit.config import DiTBlocks, DiTConfig, SoundDiTConfig
from mmjax.models.layers import Params
from mmjax.models.module import HostInputs, LayerGroup, Predict
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class DiffusionTransformer(Denoiser):
    """A generator of pictures from noise; tokens of other modules are added to the features of noisy patches."""

    config: DiTBlocks

    Config: ClassVar[type[DiTBlocks]] = DiTConfig

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


@dataclass(frozen=True)
class SoundTransformer(DiffusionTransformer):
    """A generator of recordings: the same transformer over patches of log-mel frames.

    Frames of a last patch that are behind the end of the recording are zeros, in training and in drawing, and have no
    weight in the loss.
    """

    config: SoundDiTConfig

    Config = SoundDiTConfig

    def draw(self, inputs: Sequence[HostInputs], predict: Predict) -> list[np.ndarray]:
        """The patches of recordings, as ``Denoiser.draw`` says; where noise is 0, which only padding is, 0."""
        is_noise = [of_one["patches"] != 0 for of_one in inputs]

        def predict_frames(inputs: Sequence[HostInputs]) -> list[np.ndarray]:
            return [np.where(mask, of_one, 0) for mask, of_one in zip(is_noise, predict(inputs), strict=True)]

        return super().draw(inputs, predict_frames)

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a recording into patches, for the data side."""
        return replace(super().medium, axes=1, log_mel=self.config.log_mel)
