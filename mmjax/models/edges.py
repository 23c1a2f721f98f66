"""Settings of a model's edges: which module's tokens go to which other module. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mmjax.configurable import ConfigError, configurable, not_negative, require, suggest
from mmjax.models.families import Role

ARROW = "->"
_EDGE = re.compile(r"\s*([^\s>-]+)\s*->\s*([^\s>-]+)\s*")


@configurable("Edge")
@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """Settings of an edge: the places at which its tokens enter its target.

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


def parse_edge(text: str) -> EdgeSpec:
    """The edge that a text such as "vision -> painter" writes, without settings.

    Its ``source`` is "vision", its ``target`` "painter".

    Raises:
      ConfigError: the text is no edge.
    """
    match = _EDGE.fullmatch(text)
    require(bool(match), "Model.edges", text, "is no edge; write 'source -> target', such as 'vision -> llm'")
    assert match
    return EdgeSpec(source=match[1], target=match[2])


def star(roles: Mapping[str, Role], llm: str, latent_encoders: Collection[str] = ()) -> tuple[EdgeSpec, ...]:
    """The edges of a model whose encoders feed the LLM, which feeds its generators; first those into the LLM.

    ``roles`` are by module, such as {"vision": "encoder", "llm": "llm", "painter": "generator"}, and ``llm`` is the
    name of the LLM. The edges are in the order of ``roles``, without settings. ``latent_encoders`` are encoders of
    latents; each feeds the generator with its number.
    """
    generators = [name for name, role in roles.items() if role == "generator"]
    encoders = [name for name, role in roles.items() if role == "encoder" and name not in latent_encoders]
    into_llm = (EdgeSpec(source=name, target=llm) for name in encoders)
    behind = (EdgeSpec(source=llm, target=name) for name in generators)
    drawings = (EdgeSpec(source=name, target=to) for name, to in zip(latent_encoders, generators, strict=False))
    return (*into_llm, *behind, *drawings)


def check_edges(
    edges: Sequence[EdgeSpec], roles: Mapping[str, Role], llm: str, latent_encoders: Collection[str] = ()
) -> None:
    """Requires that the edges make a model that can be trained.

    Args:
      edges: all edges of the model.
      roles: the role of each node by name, sources before targets, such as {"vision": "encoder", "llm": "llm"}.
      llm: the name of the LLM, such as "llm".
      latent_encoders: names of the encoders of latents.

    Raises:
      ConfigError: a name is unknown, an edge is there twice or has a wrong direction, or a node is not connected.
    """
    seen: set[tuple[str, str]] = set()
    for edge in edges:
        _check_edge(edge, roles, llm)
        ends = edge.source, edge.target
        require(ends not in seen, "Model.edges", edge.text, "is there twice; leave one out")
        seen.add(ends)
    texts = [edge.text for edge in edges]
    for name, role in roles.items():
        sources = [edge.source for edge in edges if edge.target == name]
        targets = [edge.target for edge in edges if edge.source == name]
        if name in latent_encoders:
            fix = f"{name!r} encodes what one generator makes, and feeds {targets}; name one: '{name} {ARROW} painter'"
            is_to_one = not sources and len(targets) == 1 and roles[targets[0]] == "generator"
            require(is_to_one, "Model.edges", texts, fix)
        elif role == "encoder":
            require(bool(targets), "Model.edges", texts, f"nothing reads {name!r}; add '{name} {ARROW} {llm}'")
            fix = f"{name!r} reads the tokens of one encoder, not of {len(sources)}; leave one edge out"
            require(len(sources) <= 1, "Model.edges", texts, fix)
            readers = [target for target in targets if roles[target] != "generator"]
            fix = f"{' and '.join(map(repr, readers))} would read the same tokens of {name!r}; leave one edge out"
            require(len(readers) <= 1, "Model.edges", texts, fix)
        if role == "generator":
            fix = f"{name!r} needs the LLM's hidden states; add '{llm} {ARROW} {name}'"
            require(llm in sources, "Model.edges", texts, fix)
            both = [source for source in sources if source in latent_encoders]
            fix = f"{' and '.join(map(repr, both))} would encode the same pictures of {name!r}; leave one edge out"
            require(len(both) <= 1, "Model.edges", texts, fix)


def _check_edge(edge: EdgeSpec, roles: Mapping[str, Role], llm: str) -> None:
    """Requires that an edge leads from a node to a later one that may read it."""
    source, target, order = edge.source, edge.target, list(roles)
    for name in (source, target):
        if name not in roles:
            raise ConfigError(f"Model.edges={edge.text!r}: no module {name!r}; {suggest(name, order)}")
    require(source != target, "Model.edges", edge.text, "leads back to its own module; leave it out")
    fixes = {
        ("llm", "encoder"): "encoders come before the LLM; let the LLM feed a generator",
        ("generator", "llm"): "the LLM comes before its generators; turn the edge round",
        ("generator", "encoder"): "encoders come before generators; turn the edge round",
        ("generator", "generator"): f"the data have no places for it; let {llm} feed {target!r}",
    }
    fix = fixes.get((roles[source], roles[target]), "")
    require(not fix, "Model.edges", edge.text, fix)
    fix = f"name {source!r} before {target!r} in Model.encoders"
    require(order.index(source) < order.index(target), "Model.edges", edge.text, fix)
