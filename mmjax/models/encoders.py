"""The kinds of encoders. A new kind is one entry in ``ENCODERS``.

A *medium* is what an encoder encodes: an image, or a recording. It is cut into *patches* along its axes: squares of
pixels, or pairs of log-mel frames. An encoder makes one feature of each patch, and its projector joins a few of them
(``merge`` along each axis) into one LLM token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from jaxtyping import Array

from mmjax.mesh.submesh import Axes
from mmjax.models import audio, encoder_layers, flops, vit
from mmjax.models.config import Medium, ProjectorConfig, ViTConfig, WhisperConfig
from mmjax.models.encoder_layers import EncoderLayer
from mmjax.models.layers import Params, layer_norm
from mmjax.models.parameters import Part

Inputs = Mapping[str, Array]
"""Host inputs of one microbatch for one module, local rows."""
MEDIUM_AXES: Mapping[Medium, int] = {"image": 2, "recording": 1}
"""Axes along which a medium is cut into patches."""


class MediumKind(Protocol):
    """Interface of a kind of module that encodes or makes a medium. ``c`` is its configuration: ``layers``, ``width``,
    ``merge`` and fields of its own."""

    @property
    def medium(self) -> Medium:
        """The medium that it encodes or makes."""
        ...

    def layer(self, c: Any) -> Callable[..., Any]:
        """Creates one layer's parameters."""
        ...

    def parts(self, c: Any, first: bool, last: bool) -> tuple[Part, ...]:
        """Single parts of the first and the last stage."""
        ...

    def parameters(self, c: Any) -> int:
        """Number of its parameters."""
        ...

    def forward_flops(self, c: Any, patches: Iterable[int]) -> int:
        """FLOPs of a forward over media of so many patches each."""
        ...


class EncoderKind(MediumKind, Protocol):
    """Interface of a kind of encoder."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Host inputs of the first stage."""
        ...

    @property
    def later_inputs(self) -> tuple[str, ...]:
        """Host inputs of the other stages."""
        ...

    def patch(self, c: Any) -> int:
        """Side of a patch along each axis, in pixels or frames."""
        ...

    def channels(self, c: Any) -> int:
        """Numbers per pixel or frame."""
        ...

    @property
    def bounded_by(self) -> str:
        """Configuration field that bounds the patches along a side of a medium where positions are learned."""
        ...

    @property
    def boundless(self) -> str:
        """Value of ``positions`` without such a bound."""
        ...

    def run(self, p: Params, c: Any, axes: Axes, inputs: Inputs, x: Array | None, last: bool) -> Array:
        """The stage's part of the encoder; ``x`` is ``None`` in the first stage."""
        ...


class _VisionTransformer:
    medium: Medium = ViTConfig.medium
    bounded_by, boundless = "grid", "rope2d"
    inputs = ("patches", "segments", "positions")
    later_inputs = ("segments", "positions")

    def patch(self, c: ViTConfig) -> int:
        return c.patch

    def channels(self, c: ViTConfig) -> int:
        return c.channels

    def layer(self, c: ViTConfig) -> Callable[..., Any]:
        return partial(EncoderLayer, c)

    def parts(self, c: ViTConfig, first: bool, last: bool) -> tuple[Part, ...]:
        return vit.parts(c, first, last)

    def run(self, p: Params, c: ViTConfig, axes: Axes, inputs: Inputs, x: Array | None, last: bool) -> Array:
        x = vit.embed_patches(p, c, inputs["patches"], inputs["positions"]) if x is None else x
        x = vit.run_layers(p.get("layers"), c, axes, x, inputs["segments"], inputs["positions"])
        return layer_norm(x, p["norm"]) if last else x

    def parameters(self, c: ViTConfig) -> int:
        return flops.vit_parameters(c)

    def forward_flops(self, c: ViTConfig, patches: Iterable[int]) -> int:
        return flops.vit_forward_flops(c, patches)


class _Whisper:
    medium: Medium = WhisperConfig.medium
    bounded_by, boundless = "length", "sinusoidal"
    inputs = ("patches", "segments", "positions")
    later_inputs = ("segments",)

    def patch(self, c: WhisperConfig) -> int:
        return audio.STRIDE

    def channels(self, c: WhisperConfig) -> int:
        return c.mels

    def layer(self, c: WhisperConfig) -> Callable[..., Any]:
        return partial(EncoderLayer, c)

    def parts(self, c: WhisperConfig, first: bool, last: bool) -> tuple[Part, ...]:
        return audio.parts(c, first, last)

    def run(self, p: Params, c: WhisperConfig, axes: Axes, inputs: Inputs, x: Array | None, last: bool) -> Array:
        segments = inputs["segments"]
        if x is None:
            x = audio.embed_frames(p, c, inputs["patches"], segments, inputs["positions"][..., 0])
        x = encoder_layers.run_layers(p.get("layers"), c, axes, x, segments)
        return layer_norm(x, p["norm"]) if last else x

    def parameters(self, c: WhisperConfig) -> int:
        return flops.whisper_parameters(c)

    def forward_flops(self, c: WhisperConfig, patches: Iterable[int]) -> int:
        return flops.whisper_forward_flops(c, patches)


ENCODERS: Mapping[str, EncoderKind] = {"vit": _VisionTransformer(), "whisper": _Whisper()}


@dataclass(frozen=True)
class Projected(ABC):
    """A module with a projector between itself and the LLM.

    Attributes:
      kind: key of its kind in ``ENCODERS`` or ``GENERATORS``.
      config: the kind's configuration.
      projector: its projector.
    """

    kind: str
    config: Any
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)

    @property
    @abstractmethod
    def of_kind(self) -> MediumKind:
        """Its kind."""

    @property
    def patches_per_token(self) -> int:
        """Patches that one LLM token stands for."""
        return self.config.merge ** MEDIUM_AXES[self.of_kind.medium]

    @property
    def merged_width(self) -> int:
        """Width of these patches' features, side by side."""
        return self.config.width * self.patches_per_token


class Encoder(Projected):
    """One encoder with its projector; ``kind`` is a key of ``ENCODERS``."""

    @property
    def of_kind(self) -> EncoderKind:
        """Its kind."""
        return ENCODERS[self.kind]
