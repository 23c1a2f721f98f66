"""The kinds of generators. A new kind is one entry in ``GENERATORS``.

A generator makes a medium, a picture, from hidden states of the LLM. In the LLM's row a run of placeholders stands for
it. Their hidden states after the final norm are gathered, in the order of the patches, and the generator's *projector*
maps each to the features of the ``merge``² patches that it stands for: the reverse of what an encoder does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float

from mmjax.mesh.submesh import Axes
from mmjax.models import dit, flops
from mmjax.models.config import DiTConfig, Medium
from mmjax.models.dit import DiTLayer
from mmjax.models.encoders import Inputs, MediumKind, Projected
from mmjax.models.layers import Params
from mmjax.models.parameters import Part

HostInputs = Mapping[str, np.ndarray]
Say = Callable[[Sequence[HostInputs]], Sequence[np.ndarray]]


class GeneratorKind(MediumKind, Protocol):
    """Interface of a kind of generator. Its configuration has a ``loss_weight`` too."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Host inputs of every stage."""
        ...

    @property
    def first_inputs(self) -> tuple[str, ...]:
        """Further host inputs of the first stage; "index" says where in the LLM's rows each token's hidden state is."""
        ...

    @property
    def last_inputs(self) -> tuple[str, ...]:
        """Further host inputs of the last stage, which its loss reads."""
        ...

    def run(self, p: Params, c: Any, axes: Axes, inputs: Inputs, x: Array | None, condition: Array | None) -> Array:
        """The stage's part of the generator; ``x`` is ``None`` in the first stage, ``condition`` in the others."""
        ...

    def predict(self, p: Params, c: Any, inputs: Inputs, x: Array) -> Float[Array, "R T E"]:
        """The last stage's prediction for each patch."""
        ...

    def loss(self, p: Params, c: Any, inputs: Inputs, x: Array) -> Float[Array, ""]:
        """Sum of weighted losses."""
        ...

    def draw(self, c: Any, given: Sequence[HostInputs], say: Say) -> list[np.ndarray]:
        """Patches [R, T, E] of each microbatch, drawn from inputs with noise as patches; ``say`` predicts for those."""
        ...


class _DiffusionTransformer:
    medium: Medium = DiTConfig.medium
    inputs = ("segments", "positions", "times")
    first_inputs, last_inputs = ("patches", "index"), ("targets", "weights")

    def layer(self, c: DiTConfig) -> Callable[..., Any]:
        return partial(DiTLayer, c)

    def parts(self, c: DiTConfig, first: bool, last: bool) -> tuple[Part, ...]:
        return dit.parts(c, first, last)

    def run(
        self, p: Params, c: DiTConfig, axes: Axes, inputs: Inputs, x: Array | None, condition: Array | None
    ) -> Array:
        if x is None:
            assert condition is not None
            x = dit.embed_patches(p, inputs["patches"], condition)
        return dit.run_layers(p.get("layers"), c, axes, x, *(inputs[name] for name in self.inputs))

    def predict(self, p: Params, c: DiTConfig, inputs: Inputs, x: Array) -> Float[Array, "R T E"]:
        return dit.velocity(p, c, x, inputs["times"])

    def loss(self, p: Params, c: DiTConfig, inputs: Inputs, x: Array) -> Float[Array, ""]:
        return dit.flow_loss(self.predict(p, c, inputs, x), inputs["targets"], inputs["weights"])

    def draw(self, c: DiTConfig, given: Sequence[HostInputs], say: Say) -> list[np.ndarray]:
        return dit.euler(c, given, say)

    def parameters(self, c: DiTConfig) -> int:
        return flops.dit_parameters(c)

    def forward_flops(self, c: DiTConfig, patches: Iterable[int]) -> int:
        return flops.dit_forward_flops(c, patches)


GENERATORS: Mapping[str, GeneratorKind] = {"dit": _DiffusionTransformer()}


class Generator(Projected):
    """One generator with its projector; ``kind`` is a key of ``GENERATORS``."""

    @property
    def of_kind(self) -> GeneratorKind:
        """Its kind."""
        return GENERATORS[self.kind]
