"""A model as a directed acyclic graph of modules, and its partition into pipeline stages.

A node is a module with its projector; an edge is a flow of tokens from one module to places in the rows of another. A
node may have any number of edges. Stages are defined here without devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from mmjax.configurable import ConfigError
from mmjax.data.send_lists import send_list
from mmjax.data.split import places_of
from mmjax.mesh.layout import Layout
from mmjax.models.callbacks import Callbacks
from mmjax.models.config import LLM, lora_name, projector_name
from mmjax.models.families import Role, module_of
from mmjax.models.handles import Open
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.layers import lora_slice, require_targets
from mmjax.models.module import Module, layer_runs
from mmjax.models.module_stage import IncomingActivation, ModuleStage
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import KV_HEADS, ModuleSlice, Part, head_of_rank
from mmjax.models.projector.config import ProjectorConfig, injected_name
from mmjax.models.projector.layers import Newline, Projector
from mmjax.models.stage_model import StageModel


@dataclass(frozen=True)
class MultimodalModel:
    """A graph of modules.

    Attributes:
      nodes: modules by name, sources before targets.
      edges: flows of tokens between modules.
      unroll: whether layers have separate parameters and run without a loop; otherwise equal layers are stacked, but
        for modules whose layout gathers or scatters them one by one.
    """

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...] = ()
    unroll: bool = False

    def __post_init__(self) -> None:
        order = list(self.nodes)
        for edge in self.edges:
            for name in (edge.source, edge.target):
                if name not in order:
                    raise ValueError(f"edge {edge.source} → {edge.target}: no module {name!r}; use one of {order}")
            if order.index(edge.source) >= order.index(edge.target):
                raise ValueError(f"edge {edge.source} → {edge.target}: put {edge.source!r} before {edge.target!r}")
        for name, node in self.nodes.items():
            _refuse_tables_of_dimensions(name, node.module)
            if node.projector and not (self.into(name) if node.starts else self.out_of(name)):
                raise ValueError(f"{name}: a projector at its {node.projects} and no edge there; leave it out")
            if node.lora.rank:
                require_targets(name, node.module, node.lora)

    # ---- connections -------------------------------------------------------------------------------------------------

    def into(self, name: str) -> tuple[Edge, ...]:
        """Edges that end at a module of this name."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def out_of(self, name: str) -> tuple[Edge, ...]:
        """Edges that begin at a module of this name."""
        return tuple(edge for edge in self.edges if edge.source == name)

    @cached_property
    def encoders(self) -> dict[str, Node]:
        """Modules with a medium that read no others, or only such modules, by name: they encode the medium."""
        names: set[str] = set()
        for name, node in self.nodes.items():
            if node.module.medium and not node.drawn and {edge.source for edge in self.into(name)} <= names:
                names.add(name)
        return {name: node for name, node in self.nodes.items() if name in names}

    @cached_property
    def generators(self) -> dict[str, Node]:
        """Modules with a medium that read other modules than encoders, by name: they generate the medium."""
        return {name: node for name, node in self.nodes.items() if node.module.medium and name not in self.encoders}

    @property
    def llm(self) -> Any:
        """Settings of the module "llm", such as a ``DecoderConfig``."""
        return self.nodes[LLM].config

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all trainable modules: each node, followed by its adapters and its projector, such as ("vision",
        "vision_projector", "llm", "llm_lora").
        """
        return tuple(part for name in self.nodes for part in self.parts_of(name))

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Names of the trainable modules of the node ``name``: itself, then its adapters and projector, where set."""
        node = self.nodes[name]
        adapters, projector = (lora_name(name),) * bool(node.lora.rank), (projector_name(name),) * bool(node.projector)
        return (name, *adapters, *projector)

    # ---- widths ------------------------------------------------------------------------------------------------------

    def token_width(self, name: str) -> int:
        """The width of the tokens that the module ``name`` sends to others: its projector's output, or the module's
        width.

        Raises:
          ValueError: the widths of its targets differ.
        """
        node = self.nodes[name]
        if not node.ends:
            return node.config.width
        targets = [self.nodes[edge.target] for edge in self.out_of(name)]
        widths = {target.config.width for target in targets if not target.starts} or {node.config.width}
        if len(widths) != 1:
            raise ValueError(f"{name}: its projector has to map to one width, not to {sorted(widths)}")
        return widths.pop()

    def projector_widths(self, name: str) -> dict[str, tuple[int, int, int]]:
        """Input, hidden and output width of each projector of the node ``name``, by the name of its parameters.

        There is one at the module's end, "", or one at its start for each module that it reads: "" for the first of
        them, the LLM if it is one, and "vision" for "vision". hidden is 0 for a linear one.
        """
        node = self.nodes[name]
        if node.ends:
            out = self.token_width(name)
            width = node.config.width if node.ends.pool else node.module.merged_width
            return {"": (width, node.ends.hidden_of(out), out)}
        assert node.starts
        widths = {path: self.token_width(edge.source) for path, edge in self.start_edges(name).items()}
        out = node.module.merged_width
        return {path: (width, node.starts.hidden_of(width), out) for path, width in widths.items()}

    def start_edges(self, name: str) -> dict[str, Edge]:
        """The edges into the node ``name``, which starts with projectors, by the name of their projector's parameters.

        See ``projector_widths``.
        """
        edges = sorted((e for e in self.into(name) if not e.latents), key=lambda edge: edge.source != LLM)
        return {"" if number == 0 else edge.source: edge for number, edge in enumerate(edges)}

    def projector_norm(self, name: str) -> dict[str, Any]:
        """Keyword arguments of a ``Projector``: "norm", "bias", "stds", and "together", features that are concatenated.

        ``name`` is the node's; it has a projector.
        """
        node, projector = self.nodes[name], self.nodes[name].projector
        assert projector
        together = node.module.patches_per_token if node.ends and not projector.pool else 1
        return {**projector.layer_settings, "together": together}

    def injected_widths(self, edge: Edge) -> tuple[int, int, int]:
        """Input, hidden and output width of an edge's additional projectors (see ``Edge.inject``); hidden is 0 for a
        linear one.
        """
        width, node = self.token_width(edge.source), self.nodes[edge.source]
        source_width = node.module.merged_width if edge.levels else width
        return source_width, node.projector.hidden_of(width) if node.projector else width, width

    def levels(self, name: str) -> tuple[int, ...]:
        """The layers of the node ``name`` whose outputs other modules read, in ascending order, counted from 0."""
        return tuple(sorted({level for edge in self.out_of(name) for level in edge.levels}))

    @cached_property
    def _paths_before_layers(self) -> dict[str, frozenset[str]]:
        """Paths of the parameters before the layers of each module: those of a first stage that is not the last."""
        return {
            name: frozenset(path for part in node.module.parts(first=True, last=False) for path in part.declarations)
            for name, node in self.nodes.items()
        }

    # ---- modified copies ---------------------------------------------------------------------------------------------

    def with_vocab(self, vocab: int) -> MultimodalModel:
        """A copy with the tokenizer's vocabulary size in the settings of every module whose ``vocab`` is 0."""
        sized = {name: node.module.with_vocab(vocab) for name, node in self.nodes.items()}
        return replace(self, nodes={name: replace(node, module=sized[name]) for name, node in self.nodes.items()})

    def with_settings(self, name: str, **changes: Any) -> MultimodalModel:
        """A copy with changed settings of the node ``name``; ``changes`` are fields of its settings, such as
        ``layers=2``.
        """
        node = self.nodes[name]
        module = replace(node.module, config=replace(node.config, **changes))
        return replace(self, nodes={**self.nodes, name: replace(node, module=module)})

    def with_inject(self, name: str, *layers: int) -> MultimodalModel:
        """A copy in which the tokens of the node ``name`` enter these layers of its targets again; without layers,
        none.

        See ``Edge.inject``. The tokens are the node's last ones: ``Edge.levels`` is ().
        """
        edges = (replace(edge, inject=layers, levels=()) if edge.source == name else edge for edge in self.edges)
        return replace(self, edges=tuple(edges))

    # ---- stages ------------------------------------------------------------------------------------------------------

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """Cuts every module into its layout's stages, sources before users, the stages of a module in order.

        ``layouts`` has the layout of every node by name.

        Raises:
          ConfigError: a module has fewer layers than stages, or ``Layout.layers`` does not sum to its layers.
        """
        last_stages = {name: f"{name}.{layouts[name].stages - 1}" for name in self.nodes}
        return tuple(stage for name in self.nodes for stage in self._stages(name, layouts[name], last_stages))

    def _stages(self, name: str, layout: Layout, last_stages: Mapping[str, str]) -> list[StageModel]:
        """The stages of one module; ``last_stages`` has the name of every module's last stage."""
        node = self.nodes[name]
        layout.check_layers(name, node.config.layers)
        return [
            self._stage(name, index, layers, layout, last_stages)
            for index, layers in enumerate(layout.runs(node.config.layers))
        ]

    def _stage(
        self, name: str, index: int, layers: range, layout: Layout, last_stages: Mapping[str, str]
    ) -> StageModel:
        """The stage of a module with these layers."""
        node, first, last = self.nodes[name], index == 0, index == layout.stages - 1
        incoming = {edge: self._incoming(edge, last_stages[edge.source], layers) for edge in self.into(name)}
        entering = {
            edge: activation
            for edge, activation in incoming.items()
            if first or activation.injected or (last and edge.latents)
        }
        before = "" if first else f"{name}.{index - 1}"
        slices = self._slices(name, layers, entering, layout, first=first, last=last)
        node_inputs = node.inputs(first=first, last=last)
        edge_inputs = tuple(host_input for edge in entering for host_input in edge.inputs)
        order = ("order",) if reads_order(node.module, layout) else ()
        layer_losses = node.module.layer_losses
        return ModuleStage(
            name=f"{name}.{index}",
            module=name,
            index=index,
            sources=(*([before] if before else []), *(activation.stage for activation in entering.values())),
            slices=slices,
            opens=_kv_head_selectors(slices),
            inputs=tuple(dict.fromkeys((*node_inputs, *edge_inputs, *order))),
            following=node_inputs,
            remembers=node.module.remembers,
            losses={**node.module.losses, **layer_losses} if last or layer_losses else {},
            ends=last,
            before=before,
            last=last,
            send_list=self._send_list(name) if last else "",
            node=node,
            layers=layers,
            unroll=self._is_unrolled(layout),
            entering=entering,
            levels=self.levels(name),
            starts=self.start_edges(name) if node.starts and first else {},
        )

    def _is_unrolled(self, layout: Layout) -> bool:
        """Whether the layers of a module run without a loop.

        Where they are gathered or scattered one by one they always do. In a loop no gather could lie beside the layer
        before; and XLA for CPUs runs collectives outside of a loop beside those inside, in another order on each
        device (ADR 118).
        """
        return self.unroll or layout.scatters_gradients

    def _send_list(self, name: str) -> str:
        """The host input that lists which tokens each rank of the only target needs; "" for several targets."""
        targets = [edge.target for edge in self.out_of(name)]
        return send_list(targets[0]) if len(targets) == 1 else ""

    def _slices(
        self,
        name: str,
        layers: range,
        entering: Mapping[Edge, IncomingActivation],
        layout: Layout,
        *,
        first: bool,
        last: bool,
    ) -> tuple[ModuleSlice, ...]:
        """The parameters of a module's stage with these layers."""
        node, tp = self.nodes[name], layout.tp
        runs = tuple(run for run, _ in layer_runs(node.module, layers, unroll=self._is_unrolled(layout)))
        module_slice = ModuleSlice(
            name,
            runs=runs,
            parts=node.module.parts(first=first, last=last),
            tp=tp,
            depth=node.config.layers,
            before_layers=self._paths_before_layers[name],
        )
        slices = [module_slice]
        if node.lora.rank and (adapters := lora_slice(name, node.module, runs, node.lora, tp)):
            slices.append(adapters)
        if (node.ends and last) or (node.starts and first):
            norm, by_path = self.projector_norm(name), self.projector_widths(name)
            parts = tuple(Part(partial(Projector, *widths, **norm), path) for path, widths in by_path.items())
            slices.append(ModuleSlice(projector_name(name), parts=parts, tp=tp))
        for edge, incoming in entering.items():
            projector = self.nodes[edge.source].projector or ProjectorConfig()
            create = partial(Projector, *self.injected_widths(edge), **projector.layer_settings)
            parts = tuple(Part(create, injected_name(layer)) for layer in incoming.injected)
            if edge.newline and first:
                parts += (Part(partial(Newline, self.token_width(edge.source))),)
            slices += [ModuleSlice(projector_name(edge.source), parts=parts, tp=tp)] if parts else []
        return tuple(slices)

    def _incoming(self, edge: Edge, stage: str, layers: range) -> IncomingActivation:
        """The activation of an edge at its target's stage with ``layers``; ``stage`` is the stage that sends it."""
        source = self.nodes[edge.source]
        token_width, level_width = self.token_width(edge.source), source.module.merged_width
        starts = {level: token_width + level_width * i for i, level in enumerate(self.levels(edge.source))}
        tokens = slice(0, token_width)
        levels = [slice(starts[level], starts[level] + level_width) for level in edge.levels]
        slices = zip(edge.inject, levels or [tokens] * len(edge.inject), strict=True)
        injected = {layer: columns for layer, columns in slices if layer in layers}
        projector = source.projector or ProjectorConfig()
        return IncomingActivation(stage, tokens, injected, projector)


def _refuse_tables_of_dimensions(name: str, module: Module) -> None:
    """Raises `ConfigError` if a module has the table of dimensions that parameters once had, which nothing reads."""
    for table in ("axes", "axes_of"):
        if hasattr(module, table):
            fix = 'name dimensions where a parameter is created, as in nnx.Param(value, dims=("embed", "mlp"))'
            raise ConfigError(f"{name}: {type(module).__name__}.{table} is not read; remove it and {fix}")


def _kv_head_selectors(slices: Sequence[ModuleSlice]) -> dict[str, Open]:
    """Functions that select a tp rank's key/value head, by the name of each parameter with more ranks than heads."""
    leaves = [leaf for part in slices for leaf in jax.tree.leaves(part.leaves()) if KV_HEADS in leaf.dims]
    return {
        f"{leaf.module}/{leaf.path}": partial(head_of_rank, leaf.dims.index(KV_HEADS), leaf.kv_heads) for leaf in leaves
    }


def cp_tokens(module: Module, layout: Layout) -> str:
    """The distribution of a module's tokens over cp ranks: ``layout.cp_tokens``, such as "lpt".

    It is "contiguous" for modules with convolutions, and for rows of a condition and patches, of both of which each
    rank has a run; ``module`` is such as ``module_of(DecoderConfig())``.
    """
    return "contiguous" if module.in_order or _queries(module) else layout.cp_tokens


def _queries(module: Module) -> int:
    """The number of places of a condition in a module's rows."""
    return module.medium.queries if module.medium else 0


def reads_order(module: Module, layout: Layout) -> bool:
    """Whether a module's stages read "order": tokens are permuted over cp ranks, and a mask depends on their order.

    That is so with ``layout.cp`` above 1 unless ``cp_tokens`` is "contiguous", for a mask that is not "full";
    ``module`` is such as ``module_of(DecoderConfig())``.
    """
    ordered = any("order" in mask.input_names for _, mask in module.masks)
    return layout.cp > 1 and ordered and cp_tokens(module, layout) != "contiguous"


def multimodal(
    encoders: Mapping[str, Any],
    llm: Any,
    generators: Mapping[str, Any] | None = None,
    projectors: Mapping[str, ProjectorConfig] | None = None,
    callbacks: Mapping[str, Callbacks] | None = None,
    loras: Mapping[str, LoraConfig] | None = None,
) -> MultimodalModel:
    """A model of encoders that feed one LLM, "llm", which feeds generators.

    Args:
      encoders: settings such as ``ViTConfig``, or a ``Module``, by name, such as {"vision": ViTConfig()}.
      llm: settings such as ``DecoderConfig(vocab=64)``, or a ``Module``.
      generators: settings such as ``DiTConfig``, or a ``Module``, by name.
      projectors: settings of projectors by the name of their encoder or generator; a missing one has the defaults.
      callbacks: callbacks by the name of their module.
      loras: settings of low-rank adapters by the name of their module.

    Raises:
      ValueError: callbacks or adapters name a module that the model does not have.
      TypeError: settings belong to no family of mmjax.
      ConfigError: a target of adapters matches no weight.
    """
    generators, projectors, callbacks, loras = generators or {}, projectors or {}, callbacks or {}, loras or {}
    all_projectors = {name: projectors.get(name, ProjectorConfig()) for name in (*encoders, *generators)}
    nodes = {name: Node(_as_module(encoder), all_projectors[name]) for name, encoder in encoders.items()}
    nodes[LLM] = Node(_as_module(llm))
    as_generator = {name: _as_module(settings, "generator") for name, settings in generators.items()}
    nodes |= {name: Node(module, all_projectors[name], "start") for name, module in as_generator.items()}
    for argument, by_module in {"callbacks": callbacks, "loras": loras}.items():
        if unknown := sorted(by_module.keys() - nodes.keys()):
            raise ValueError(f"{argument}: no module {unknown[0]!r}; use one of {list(nodes)}")
    nodes |= {name: replace(nodes[name], callbacks=functions) for name, functions in callbacks.items()}
    nodes |= {name: replace(nodes[name], lora=config) for name, config in loras.items()}
    return MultimodalModel(nodes, star_edges(nodes))


def star_edges(nodes: Mapping[str, Node]) -> tuple[Edge, ...]:
    """The edges of a model whose encoders feed the LLM, which feeds its generators: first those into the LLM.

    Args:
      nodes: nodes by name in this order: the encoders, the LLM, "llm", and the generators.
    """
    places = list(nodes)
    before, behind = places[: places.index(LLM)], places[places.index(LLM) + 1 :]
    into_llm = (edge_between(name, LLM, nodes[name].projector or ProjectorConfig()) for name in before)
    return (*into_llm, *(edge_between(LLM, name) for name in behind))


def _as_module(settings: Any, role: Role | None = None) -> Module:
    return settings if isinstance(settings, Module) else module_of(settings, role)


def edge_between(source: str, target: str, projector: ProjectorConfig | None = None) -> Edge:
    """The edge from one module to another as the data side fills its places.

    Its ``index`` is "vision_index" from "vision" and "index" from "llm".

    Args:
      source, target: names of the modules.
      projector: the projector of an encoder, ``source``; its tokens enter layers of the LLM as its ``inject``
        and ``levels`` say. It is read for the target "llm" alone.
    """
    edge = Edge(source, target, places_of(source))
    if target != LLM or not projector:
        return edge
    shares = f"{source}_shares" if projector.most_tiles else ""
    return replace(edge, inject=projector.inject, levels=projector.levels, shares=shares, newline=projector.newline)
