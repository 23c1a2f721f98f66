"""Nodes and edges of a model's graph: modules with their projectors, and tokens on their way between them."""

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
    """A module in a model.

    Attributes:
      module: the module.
      projector: the projector between it and other modules; ``None`` where their widths are equal.
      projects: whether the projector ends the module, and maps what it gives, or starts it, and maps what it takes.
      callbacks: functions of a user's own between the parts of the node.
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
        """The module's settings."""
        return self.module.config

    @property
    def medium(self) -> EncoderSpec | None:
        """How its medium becomes tokens of the LLM, for the data side; ``None`` for rows of text."""
        own = self.module.medium
        return spec_of(own, self.projector) if own and self.projector else own

    @property
    def ends(self) -> ProjectorConfig | None:
        """The projector that ends it, if one does."""
        return self.projector if self.projects == "end" else None

    @property
    def starts(self) -> ProjectorConfig | None:
        """The projector that starts it, if one does."""
        return self.projector if self.projects == "start" else None

    def inputs(self, first: bool, last: bool) -> tuple[str, ...]:
        """Host inputs that a stage reads for the module and its callbacks."""
        projected = first if self.starts else last
        here: dict[CalledAt, bool] = {"before": first, "after": last, "projected": projected}
        own = self.callbacks.inputs(place for place, is_here in here.items() if is_here)
        return tuple(dict.fromkeys((*self.module.inputs(first, last), *own)))


def spec_of(medium: EncoderSpec, projector: ProjectorConfig) -> EncoderSpec:
    """How a module's medium becomes tokens of the LLM behind its projector."""
    return replace(medium, newline=projector.newline, most_tiles=projector.most_tiles)


@dataclass(frozen=True)
class Edge:
    """Tokens of one module at places among those of another.

    Where the target starts with a projector, tokens are gathered, projected, split into patches and added to the
    target's features. Where it does not, they take the place of what the target embeds there.

    Attributes:
      source, target: names of the modules.
      index: the target's host input that holds, for each of its tokens, the index of the source's token that belongs
        there among those of its cell, or -1.
      inject: layers of the target that the tokens enter again: each adds, at the tokens' places, the output of a
        projector of its own.
      levels: layers of the source whose outputs these projectors take, one for each of ``inject``; () for the tokens.
      shares: the target's host input that holds the weights of several tokens at a place; "" where it is one token.
      newline: whether places may hold the newline of the source's projector, which the target's first stage keeps.
    """

    source: str
    target: str
    index: str
    inject: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    shares: str = ""
    newline: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The host inputs that a stage reads where these tokens enter it."""
        return (self.index, self.shares) if self.shares else (self.index,)
