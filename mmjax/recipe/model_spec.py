"""The settings of a whole model: its nodes, each with settings of its own. Imports no JAX."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mmjax.configurable import require
from mmjax.data.config import PackingConfig
from mmjax.mesh.layout import Layout, ModuleSizes
from mmjax.models.config import LLM, ModelConfig, lora_name, projector_name
from mmjax.models.edges import EdgeConfig, EdgeSpec, parse_edge, star
from mmjax.models.families import Role
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.config import OffloadConfig
from mmjax.recipe.datasets import Processor
from mmjax.recipe.specs import Change, LoraSpec, ModuleSpec, PartSpec, ProjectorSpec

ROLES: tuple[Role, ...] = ("encoder", "llm", "generator")
P = TypeVar("P", bound=PartSpec)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: encoders, one LLM and generators, and edges by which tokens go from one to another.

    ``model["vision"]`` is a node's settings.

    Attributes:
      nodes: the settings of each encoder, the LLM ("llm") and each generator by name, sources before users.
      edges: whose tokens go to whom; () lets every encoder feed the LLM, and the LLM every generator.
      weights: a folder of a whole model, from which parameters of the encoders, their projectors and the LLM are read;
        "" for none. ``ModuleSpec.weights`` names the folder of one module.
      processor: the tokenizer, the chat template and the rules for images that the folder brings.
    """

    nodes: Mapping[str, ModuleSpec]
    edges: tuple[EdgeSpec, ...] = ()
    weights: str = ""
    processor: Processor = field(default_factory=Processor, compare=False)

    def __post_init__(self) -> None:
        for name, node in self.nodes.items():
            if node.name != name:
                raise ValueError(f"node {name!r} has settings of {node.name!r}; give it the name {name!r}")

    @classmethod
    def of(cls, *nodes: ModuleSpec, edges: Iterable[EdgeSpec | str] = ()) -> ModelSpec:
        """A model of these nodes, sources before users: ``of(encoder(…), language_model(…), generator(…))``.

        Args:
          nodes: encoders, the LLM and generators.
          edges: such as "vision -> llm", or of ``edge`` with settings; none make a star.

        Raises:
          ConfigError: a text is no edge.
        """
        specs = tuple(parse_edge(edge) if isinstance(edge, str) else edge for edge in edges)
        return cls(nodes={node.name: node for node in nodes}, edges=specs)

    def __getitem__(self, name: str) -> ModuleSpec:
        return self.nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    @property
    def config(self) -> ModelConfig:
        """Names and families of the nodes by role, and ``weights``: the settings ``Model`` of gin."""
        families = {role: {n.name: n.kind for n in self.nodes.values() if n.role == role} for role in ROLES}
        return ModelConfig(
            encoders=families["encoder"],
            llm=self.llm.kind,
            generators=families["generator"],
            edges=tuple(edge.text for edge in self.edges),
            weights=self.weights,
        )

    @property
    def flows(self) -> tuple[EdgeSpec, ...]:
        """All edges: ``edges``, or those of the star that () stands for."""
        if self.edges:
            return self.edges
        roles: dict[str, Role] = {name: node.role for name, node in self.nodes.items()}
        return star(roles, LLM, self.latent_encoders)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names of the nodes whose tokens go to the node ``name``, in the order of the edges."""
        return tuple(edge.source for edge in self.flows if edge.target == name)

    def targets(self, name: str) -> tuple[str, ...]:
        """Names of the nodes that the tokens of the node ``name`` go to, in the order of the edges."""
        return tuple(edge.target for edge in self.flows if edge.source == name)

    # ---- nodes by role -----------------------------------------------------------------------------------------------

    @property
    def llm(self) -> ModuleSpec:
        """The node that reads text."""
        return self.nodes[LLM]

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoders."""
        return self._with_role("encoder")

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the generators."""
        return self._with_role("generator")

    @property
    def media(self) -> tuple[str, ...]:
        """Names of the nodes whose media have placeholders in the LLM's rows: encoders, then generators.

        An encoder that reads another has none of its own, and neither has an encoder of latents, or a generator of
        codes.
        """
        drawing = (name for name in self.generators if name not in self.talkers)
        apart = self.latent_encoders
        return (*(name for name in self.encoders if name not in apart and not self.sources(name)), *drawing)

    @property
    def latent_encoders(self) -> tuple[str, ...]:
        """Names of the encoders of latents."""
        return tuple(name for name in self.encoders if self.nodes[name].makes_latents)

    def encoder_of(self, generator: str) -> str:
        """The name of the encoder of a generator's latents; "" for none."""
        return next((name for name in self.sources(generator) if name in self.latent_encoders), "")

    @property
    def talkers(self) -> tuple[str, ...]:
        """Names of the generators of codes."""
        return tuple(name for name in self.generators if self.nodes[name].speaks)

    @property
    def projectors(self) -> dict[str, ProjectorSpec]:
        """The projectors, by the name of their node."""
        return {name: node.projector for name, node in self.nodes.items() if node.projector}

    def _with_role(self, role: Role) -> tuple[str, ...]:
        return tuple(name for name, node in self.nodes.items() if node.role == role)

    def media_of(self, role: Role) -> dict[str, str]:
        """The medium of each node with this role and with placeholders in the LLM's rows: {"vision": "image"}."""
        return {name: self[name].settings.medium for name in self.media if self[name].role == role}

    def sizes(self, name: str) -> ModuleSizes:
        """The sizes that a layout of the node ``name`` divides: the module's, and its projector's.

        The LLM's stages hold the parts of projectors that inject tokens into its layers.
        """
        sizes, by_tp = self[name].settings.sizes(name), dict[str, int]()
        for source, projector in self.projectors.items():
            if source == name or (name == LLM and projector.settings.inject):
                by_tp |= projector.settings.sizes_by_tp(source, self.llm.settings, llm_name=LLM)
        return replace(sizes, by_tp={**sizes.by_tp, **by_tp})

    def require_trained(self) -> None:
        """Raises ``ConfigError`` if every part is frozen."""
        fix = "every module is frozen; set it to False for one of them"
        require(len(self.frozen) < len(self.parts), f"{LLM}/Optimizer.frozen", value=True, fix=fix)

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, PartSpec]:
        """The parts with parameters of their own: each node, its adapters if it has any, and its projector.

        The keys are the first words of the names of parameters, and scopes in gin: "vision", "vision_projector",
        "llm_lora".
        """
        return {part: spec for name in self.nodes for part, spec in self.parts_of(name).items()}

    def parts_of(self, name: str) -> dict[str, PartSpec]:
        """The parts of the node ``name``, such as {"vision": …, "vision_projector": …}; ``KeyError`` for no node."""
        node = self.nodes[name]
        parts: dict[str, PartSpec] = {name: node}
        if node.lora.settings.rank:
            parts[lora_name(name)] = node.lora
        if node.projector:
            parts[projector_name(name)] = node.projector
        return parts

    def node_of(self, part: str) -> ModuleSpec:
        """The node that a part belongs to: the node "vision" for "vision", "vision_projector" and "vision_lora"."""
        return next(n for n in self.nodes.values() if part in (n.name, lora_name(n.name), projector_name(n.name)))

    @property
    def adapted(self) -> tuple[str, ...]:
        """Names of the nodes with low-rank adapters."""
        return tuple(name for name, node in self.nodes.items() if node.lora.settings.rank)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each node, by name."""
        return {name: node.layout for name, node in self.nodes.items()}

    @property
    def packing(self) -> dict[str, PackingConfig]:
        """The buckets of each node's rows, by name."""
        return {name: node.packing for name, node in self.nodes.items()}

    @property
    def offloads(self) -> dict[str, OffloadConfig]:
        """The state of each node that waits in host memory, by name."""
        return {name: node.offload for name, node in self.nodes.items()}

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """The optimizer of each part, by the names of ``parts``."""
        return {name: part.optimizer for name, part in self.parts.items()}

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parts that are not trained."""
        return frozenset(name for name, optimizer in self.optimizers.items() if optimizer.frozen)

    def folder(self, part: str) -> str:
        """The folder of safetensors that the parameters of a part, by its name, are read from; "" for none."""
        spec = self.parts[part]
        if isinstance(spec, LoraSpec):
            return "" if spec.weights.init_from else spec.settings.path
        return spec.weights.folder("" if self.node_of(part).role == "generator" else self.weights)

    # ---- modified copies ---------------------------------------------------------------------------------------------

    def replace(self, **nodes: ModuleSpec) -> ModelSpec:
        """A copy with other settings of some nodes: ``model.replace(vision=model["vision"].frozen())``.

        Raises:
          ValueError: the model has no node of that name.
        """
        self._require("module", nodes, self.nodes)
        return replace(self, nodes={**self.nodes, **nodes})

    def map(self, change: Change) -> ModelSpec:
        """A copy in which each node is replaced by ``change`` of it."""
        return replace(self, nodes={name: change(node) for name, node in self.nodes.items()})

    def with_layouts(self, layouts: Mapping[str, Layout]) -> ModelSpec:
        """A copy with other layouts of some nodes, by name. Raises ``ValueError`` for a name of no node."""
        self._require("module", layouts, self.nodes)
        return self.map(lambda node: node.at(layouts.get(node.name, node.layout)))

    def with_packing(self, packing: Mapping[str, PackingConfig]) -> ModelSpec:
        """A copy with other buckets of rows, by node's name. Raises ``ValueError`` for a name of no node."""
        self._require("module", packing, self.nodes)
        return self.map(lambda node: replace(node, packing=packing.get(node.name, node.packing)))

    def with_optimizers(self, optimizers: Mapping[str, OptimizerConfig]) -> ModelSpec:
        """A copy with other optimizers of some parts, by their names in ``parts``. Raises ``ValueError`` for others."""
        self._require("part", optimizers, self.parts)

        def changed(name: str, part: P) -> P:
            return replace(part, optimizer=optimizers.get(name, part.optimizer))

        def with_parts(node: ModuleSpec) -> ModuleSpec:
            projector = node.projector and changed(projector_name(node.name), node.projector)
            return replace(changed(node.name, node), projector=projector, lora=changed(lora_name(node.name), node.lora))

        return self.map(with_parts)

    def with_default_optimizer(self, optimizer: OptimizerConfig) -> ModelSpec:
        """A copy in which every part whose optimizer has only defaults has this one; frozen parts stay frozen."""
        optimizers = {}
        for name, part in self.parts.items():
            frozen = {"frozen": part.optimizer.frozen, "frozen_dtype": part.optimizer.frozen_dtype}
            if part.optimizer == OptimizerConfig(**frozen):
                optimizers[name] = replace(optimizer, **frozen)
        return self.with_optimizers(optimizers)

    @staticmethod
    def _require(kind: str, names: Iterable[str], legal: Collection[str]) -> None:
        """Raises ``ValueError`` for a name that is none of the legal ones."""
        if unknown := sorted(set(names) - set(legal)):
            raise ValueError(f"no {kind} {unknown[0]!r}; use one of {', '.join(legal)}")


def edge(source: str, target: str, **settings: Any) -> EdgeSpec:
    """An edge from the node ``source`` to the node ``target``; ``settings`` are fields of ``EdgeConfig``.

    They are ``index``, the name of the target's host input of places, and ``inject`` and ``levels``, tuples of layers:
    ``edge("vision", "llm", inject=(0, 1), levels=(5, 11))``.

    Raises:
      ConfigError: a value is illegal.
    """
    return EdgeSpec(source=source, target=target, settings=EdgeConfig(**settings))
