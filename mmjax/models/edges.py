"""Settings of a model's edges: which module's tokens go to which other module. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmjax.configurable import ConfigError, configurable, not_negative, require, suggest
from mmjax.models.families import Role

ARROW = "->"
_EDGE = re.compile(r"\s*([^\s>-]+)\s*->\s*([^\s>-]+)\s*")


@configurable("Edge")
@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """Where the tokens of an edge enter its target.

    Attributes:
      index: the name of the target's host input with the places of these tokens; "" for "index" from the LLM and
        "<source>_index" from another module.
      inject: layers of the LLM that an encoder's tokens enter again (see ``Projector.inject``, whose place it takes).
      levels: layers of the encoder whose outputs enter them, one for each of ``inject``; () for its tokens.
    """

    index: str = field(default="", metadata={"example": "sights"})
    inject: tuple[int, ...] = field(default=(), metadata={"example": (0, 1)})
    levels: tuple[int, ...] = field(default=(), metadata={"example": (5, 11)})

    def __post_init__(self) -> None:
        fix = "must be an identifier, such as 'sights'"
        require(not self.index or self.index.isidentifier(), "Edge.index", self.index, fix)
        for layer in (*self.inject, *self.levels):
            not_negative("Edge.inject", layer)
        fix = f"must name one layer for each of Edge.inject={self.inject}, or ()"
        require(len(self.levels) in (0, len(self.inject)), "Edge.levels", self.levels, fix)


@dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """A flow of tokens from one node of a model to another.

    Attributes:
      source, target: names of the nodes.
      settings: where the tokens enter the target.
    """

    source: str
    target: str
    settings: EdgeConfig = field(default_factory=EdgeConfig)

    @property
    def name(self) -> str:
        """The scope of its settings in gin: "vision_to_painter"."""
        return f"{self.source}_to_{self.target}"

    @property
    def text(self) -> str:
        """The edge as ``Model.edges`` writes it: "vision -> painter"."""
        return f"{self.source} {ARROW} {self.target}"


def parse_edge(text: str) -> tuple[str, str]:
    """The source and the target of an edge such as "vision -> painter".

    Raises:
      ConfigError: the text is no edge.
    """
    match = _EDGE.fullmatch(text)
    require(bool(match), "Model.edges", text, "is no edge; write 'source -> target', such as 'vision -> llm'")
    assert match
    return match[1], match[2]


def star(roles: Mapping[str, Role], llm: str) -> tuple[tuple[str, str], ...]:
    """(source, target) of each edge of a model whose encoders feed the LLM, which feeds its generators."""
    into_llm = ((name, llm) for name, role in roles.items() if role == "encoder")
    return (*into_llm, *((llm, name) for name, role in roles.items() if role == "generator"))


def check_edges(edges: Sequence[tuple[str, str]], roles: Mapping[str, Role], llm: str) -> None:
    """Requires that the edges make a model that can be trained.

    Args:
      edges: (source, target) of each edge.
      roles: the role of each node by name, sources before targets.
      llm: the name of the LLM.

    Raises:
      ConfigError: a name is unknown, an edge is there twice or has a wrong direction, or a node is not connected.
    """
    order = list(roles)
    for number, (source, target) in enumerate(edges):
        edge = f"{source} {ARROW} {target}"
        for name in (source, target):
            if name not in roles:
                raise ConfigError(f"Model.edges={edge!r}: no module {name!r}; {suggest(name, order)}")
        require((source, target) not in edges[:number], "Model.edges", edge, "is there twice; leave one out")
        require(source != target, "Model.edges", edge, "leads back to its own module; leave it out")
        fixes = {
            ("llm", "encoder"): "encoders come before the LLM; let the LLM feed a generator",
            ("generator", "llm"): "the LLM comes before its generators; turn the edge round",
            ("generator", "encoder"): "encoders come before generators; turn the edge round",
            ("generator", "generator"): f"the data have no places for it; let {llm} feed {target!r}",
        }
        fix = fixes.get((roles[source], roles[target]), "")
        require(not fix, "Model.edges", edge, fix)
        fix = f"name {source!r} before {target!r} in Model.encoders"
        require(order.index(source) < order.index(target), "Model.edges", edge, fix)
    for name, role in roles.items():
        sources, targets = ([edge[i] for edge in edges if edge[1 - i] == name] for i in (0, 1))
        shown = [f"{source} {ARROW} {target}" for source, target in edges]
        if role == "encoder":
            require(bool(targets), "Model.edges", shown, f"nothing reads {name!r}; add '{name} {ARROW} {llm}'")
            fix = f"{name!r} reads the tokens of one encoder, not of {len(sources)}; leave one edge out"
            require(len(sources) <= 1, "Model.edges", shown, fix)
        if role == "generator":
            fix = f"{name!r} needs the LLM's hidden states; add '{llm} {ARROW} {name}'"
            require(llm in sources, "Model.edges", shown, fix)
    for name in (name for name, role in roles.items() if role == "encoder"):
        readers = [target for source, target in edges if source == name and roles[target] != "generator"]
        fix = f"{' and '.join(map(repr, readers))} would read the same tokens of {name!r}; leave one edge out"
        require(len(readers) <= 1, "Model.edges", [f"{source} {ARROW} {target}" for source, target in edges], fix)
