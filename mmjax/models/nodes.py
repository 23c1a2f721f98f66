"""Nodes and edges of a model's graph: modules with their projectors, and the flow of tokens between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mmjax.data.types import EncoderSpec
from mmjax.models.callbacks import NO_CALLBACKS, Callbacks, CalledAt
from mmjax.models.lora.config import NO_LORA, LoraConfig
from mmjax.models.module import Module
from mmjax.models.projector.config import ProjectorConfig


@dataclass(frozen=True)
class Node:
    """A module in a model, with its projector, callbacks and adapters.

    Attributes:
      module: the module.
      projector: the projector between this and other modules; ``None`` where their widths are equal.
      projects: where the projector is: at the module's "end" it maps its outputs, at its "start" its inputs.
      callbacks: a user's functions between the parts of the node.
      lora: low-rank adapters of the module.
    """

    module: Module
    projector: ProjectorConfig | None = None
    projects: Literal["end", "start"] = "end"
    callbacks: Callbacks = NO_CALLBACKS
    lora: LoraConfig = NO_LORA

    def __post_init__(self) -> None:
        if self.callbacks.projected and not self.projector:
            raise ValueError("Callbacks.projected: the node has no projector; use Callbacks.after")

    @property
    def config(self) -> Any:
        """The module's settings, such as a ``DecoderConfig``."""
        return self.module.config

    @property
    def medium(self) -> EncoderSpec | None:
        """The conversion of its medium to tokens of the LLM, for the data side; ``None`` for rows of text."""
        medium = self.module.medium
        return spec_of(medium, self.projector) if medium and self.projector else medium

    @property
    def drawn(self) -> bool:
        """Whether the module generates its medium."""
        return bool(self.module.medium and self.module.medium.drawn)

    @property
    def ends(self) -> ProjectorConfig | None:
        """The projector at the module's end; ``None`` if it has none there."""
        return self.projector if self.projects == "end" else None

    @property
    def starts(self) -> ProjectorConfig | None:
        """The projector at the module's start; ``None`` if it has none there."""
        return self.projector if self.projects == "start" else None

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """Names of the host inputs that a stage reads for the module and its callbacks, each once.

        ``first`` and ``last`` are whether the stage is the module's first and its last.
        """
        projected = first if self.starts else last
        called_here: dict[CalledAt, bool] = {"before": first, "after": last, "projected": projected}
        callback_inputs = self.callbacks.inputs(place for place, is_called in called_here.items() if is_called)
        return tuple(dict.fromkeys((*self.module.inputs(first=first, last=last), *callback_inputs)))


def spec_of(medium: EncoderSpec, projector: ProjectorConfig) -> EncoderSpec:
    """A copy of ``medium`` with the fields ``newline`` and ``most_tiles`` of the projector.

    ``medium`` is the conversion of a module's medium to tokens of the LLM, such as ``module_of(ViTConfig()).medium``.
    """
    return replace(medium, newline=projector.newline, most_tiles=projector.most_tiles)


@dataclass(frozen=True)
class Edge:
    """A flow of tokens from one module to places in the rows of another.

    If the target starts with projectors, tokens are gathered, projected by the projector of their edge, split into
    patches and added to the target's features. Otherwise they replace the target's embeddings at their places.

    Attributes:
      source, target: names of the modules.
      index: the name of the target's host input of places: for each of its tokens the index of the source's token that
        belongs there, within its cell, or -1.
      inject: layers of the target that the tokens enter again: to the input of each layer the output of an additional
        projector is added at the tokens' places.
      levels: layers of the source whose outputs these projectors read, one for each of ``inject``; () for the source's
        tokens.
      shares: the name of the target's host input of weights, where a place has several tokens; "" for one token.
      newline: whether places may have the newline embedding of the source's projector, a parameter of the target's
        first stage.
      latents: whether the tokens are distributions of latents that the target learns to make: of each number a mean
        and, behind the means, a deviation. They enter its first stage and its last.
    """

    source: str
    target: str
    index: str
    inject: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    shares: str = ""
    newline: bool = False
    latents: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the host inputs that a stage reads if these tokens enter it: ``index``, and ``shares`` where they
        are set; of latents the noise and shares with which they enter patches and targets too.
        """
        if self.latents:
            return (self.index, "latent_noise", "latent_shares")
        return (self.index, self.shares) if self.shares else (self.index,)
