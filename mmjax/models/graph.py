"""A model as a graph of modules, cut into pipeline stages.

A node is a module with its projector; an edge brings the tokens of one module to places among those of another. The
graph has no cycles, and a node may have any number of edges. Nothing here knows on which devices a stage runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from mmjax.data.send_lists import send_list
from mmjax.mesh.layout import Layout
from mmjax.models.callbacks import Callbacks
from mmjax.models.config import LLM, lora_name, projector_name, require_layers
from mmjax.models.families import module_of
from mmjax.models.handles import Open
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.layers import lora_slice, require_targets
from mmjax.models.module import Module, layer_runs
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import KV_HEADS, ModuleSlice, Part, own_head
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.projector.layers import Newline, Projector, injected_name
from mmjax.models.stage_model import Arriving, Piece, StageModel


@dataclass(frozen=True)
class MultimodalModel:
    """A graph of modules.

    Attributes:
      nodes: by name, sources before targets.
      edges: between them.
      unroll: whether stages hold every layer by itself and run them without a loop, or stack equal layers.
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
            if node.projector and not (self.into(name) if node.starts else self.out_of(name)):
                raise ValueError(f"{name}: a projector at its {node.projects} and no edge there; leave it out")
            if node.lora.rank:
                require_targets(name, node.module, node.lora)

    # ---- what is connected -------------------------------------------------------------------------------------------

    def into(self, name: str) -> tuple[Edge, ...]:
        """Edges that end at a module."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def out_of(self, name: str) -> tuple[Edge, ...]:
        """Edges that begin at a module."""
        return tuple(edge for edge in self.edges if edge.source == name)

    @cached_property
    def encoders(self) -> dict[str, Node]:
        """Modules that read a medium and nothing from others."""
        return {name: node for name, node in self.nodes.items() if node.module.medium and not self.into(name)}

    @cached_property
    def generators(self) -> dict[str, Node]:
        """Modules that make a medium from what others give."""
        return {name: node for name, node in self.nodes.items() if node.module.medium and self.into(name)}

    @property
    def llm(self) -> Any:
        """Settings of the language model."""
        return self.nodes[LLM].config

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all trainable modules: each node, followed by its adapters and its projector."""
        return tuple(own for name in self.nodes for own in self.parts_of(name))

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Names of the trainable modules that a node consists of."""
        node = self.nodes[name]
        adapters, projector = (lora_name(name),) * bool(node.lora.rank), (projector_name(name),) * bool(node.projector)
        return (name, *adapters, *projector)

    # ---- widths ------------------------------------------------------------------------------------------------------

    def token_width(self, name: str) -> int:
        """Width of the tokens that a module gives to others.

        Raises:
          ValueError: projectors at both ends of all of its edges leave the width open.
        """
        node = self.nodes[name]
        if not node.ends:
            return node.config.width
        targets = [self.nodes[edge.target] for edge in self.out_of(name)]
        widths = {target.config.width for target in targets if not target.starts}
        if len(widths) != 1:
            raise ValueError(f"{name}: its projector has to map to one width, not to {sorted(widths)}")
        return widths.pop()

    def projector_widths(self, name: str) -> tuple[int, int, int]:
        """Input, hidden and output width of a module's projector."""
        node = self.nodes[name]
        if node.ends:
            out = self.token_width(name)
            return node.module.merged_width, node.ends.hidden_of(out), out
        assert node.starts
        (taken,) = {self.token_width(edge.source) for edge in self.into(name)}
        return taken, node.starts.hidden_of(taken), node.module.merged_width

    def projector_norm(self, name: str) -> dict[str, Any]:
        """The norm of a module's projector, and how many features it joins."""
        node = self.nodes[name]
        assert node.projector
        return {"norm": node.projector.norm, "together": node.module.patches_per_token if node.ends else 1}

    def injected_widths(self, edge: Edge) -> tuple[int, int, int]:
        """Input, hidden and output width of the projectors through which an edge's tokens enter layers again."""
        width, node = self.token_width(edge.source), self.nodes[edge.source]
        taken = node.module.merged_width if edge.levels else width
        return taken, node.projector.hidden_of(width) if node.projector else width, width

    def levels(self, name: str) -> tuple[int, ...]:
        """The layers of a module whose outputs others take, rising."""
        return tuple(sorted({level for edge in self.out_of(name) for level in edge.levels}))

    @cached_property
    def _ahead(self) -> dict[str, frozenset[str]]:
        """By module, paths of the parameters before its layers: those of a first stage that is not the last."""
        return {
            name: frozenset(path for part in node.module.parts(True, False) for path in part.shapes)
            for name, node in self.nodes.items()
        }

    # ---- other models ------------------------------------------------------------------------------------------------

    def with_vocab(self, vocab: int) -> MultimodalModel:
        """The model with the tokenizer's vocabulary where the settings leave it open."""
        sized = {name: node.module.with_vocab(vocab) for name, node in self.nodes.items()}
        return replace(self, nodes={name: replace(node, module=sized[name]) for name, node in self.nodes.items()})

    def with_settings(self, name: str, **changes: Any) -> MultimodalModel:
        """The model with other settings of one module."""
        node = self.nodes[name]
        module = replace(node.module, config=replace(node.config, **changes))
        return replace(self, nodes={**self.nodes, name: replace(node, module=module)})

    def with_inject(self, name: str, *layers: int) -> MultimodalModel:
        """The model with a module's tokens entering these layers of its targets again."""
        own = lambda edge: replace(edge, inject=layers, levels=()) if edge.source == name else edge  # noqa: E731
        return replace(self, edges=tuple(map(own, self.edges)))

    # ---- stages ------------------------------------------------------------------------------------------------------

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """Cuts every module into its layout's stages, sources before users.

        Raises:
          ConfigError: see ``require_layers``.
        """
        tails = {name: f"{name}.{layouts[name].stages - 1}" for name in self.nodes}
        return tuple(stage for name in self.nodes for stage in self._stages(name, layouts[name], tails))

    def _stages(self, name: str, layout: Layout, tails: Mapping[str, str]) -> list[StageModel]:
        node = self.nodes[name]
        require_layers(name, node.config.layers, layout)
        result = []
        order = ("order",) if reads_order(node.module, layout) else ()
        for i, layers in enumerate(layout.runs(node.config.layers)):
            first, last = i == 0, i == layout.stages - 1
            arriving = {edge: self._arriving(edge, tails[edge.source], layers) for edge in self.into(name)}
            entering = {edge: own for edge, own in arriving.items() if first or own.injected}
            before = "" if first else f"{name}.{i - 1}"
            piece = Piece(
                name=name,
                node=node,
                last=last,
                before=before,
                layers=layers,
                unroll=self.unroll,
                entering=entering,
                levels=self.levels(name),
            )
            losses = node.module.losses if last else {}
            slices = self._slices(piece, first, layout.tp)
            result.append(
                StageModel(
                    name=f"{name}.{i}",
                    module=name,
                    index=i,
                    sources=(*([before] if before else []), *(own.stage for own in entering.values())),
                    slices=slices,
                    opens=_opens(slices, node.config),
                    inputs=tuple(
                        dict.fromkeys(
                            (
                                *node.inputs(first, last),
                                *(name for edge in entering for name in edge.inputs),
                                *order,
                            )
                        )
                    ),
                    forward=piece.forward,
                    loss=piece.loss if losses else None,
                    predict=piece.predict if losses else None,
                    decode=piece.decode,
                    logits=piece.logits if last else None,
                    following=node.inputs(first, last),
                    remembers=node.module.remembers,
                    losses=losses,
                    give=piece.give if last and (node.ends or piece.levels) else None,
                    before=before,
                    last=last,
                    send_list=self._send_list(name) if last else "",
                )
            )
        return result

    def _send_list(self, name: str) -> str:
        """The host input that lists a module's tokens for the ranks of the one module that reads them."""
        targets = [edge.target for edge in self.out_of(name)]
        return send_list(targets[0]) if len(targets) == 1 else ""

    def _slices(self, piece: Piece, first: bool, tp: int) -> tuple[ModuleSlice, ...]:
        name, node = piece.name, piece.node
        runs = tuple(run for run, _ in layer_runs(node.module, piece.layers, unroll=self.unroll))
        parts, depth = node.module.parts(first, piece.last), node.config.layers
        slices = [ModuleSlice(name, runs, parts, tp, node.module.axes_of(tp), depth, self._ahead[name])]
        if node.lora.rank and (adapters := lora_slice(name, node.module, runs, node.lora, tp)):
            slices.append(adapters)
        if (node.ends and piece.last) or (node.starts and first):
            part = Part(partial(Projector, *self.projector_widths(name), **self.projector_norm(name)))
            slices.append(ModuleSlice(projector_name(name), (), (part,)))
        for edge, arriving in piece.entering.items():
            projector = self.nodes[edge.source].projector or ProjectorConfig()
            create = partial(Projector, *self.injected_widths(edge), norm=projector.norm)
            parts = tuple(Part(create, injected_name(layer)) for layer in arriving.injected)
            if edge.newline and first:
                parts += (Part(partial(Newline, self.token_width(edge.source))),)
            slices += [ModuleSlice(projector_name(edge.source), (), parts)] if parts else []
        return tuple(slices)

    def _arriving(self, edge: Edge, stage: str, layers: range) -> Arriving:
        """The activation that an edge brings from a stage to one that holds these layers of its target."""
        tokens, each = self.token_width(edge.source), self.nodes[edge.source].module.merged_width
        starts = {level: tokens + each * number for number, level in enumerate(self.levels(edge.source))}
        levels = [slice(starts[level], starts[level] + each) for level in edge.levels]
        places = dict(zip(edge.inject, levels or [slice(0, tokens)] * len(edge.inject), strict=True))
        injected = {layer: own for layer, own in places.items() if layer in layers}
        projector = self.nodes[edge.source].projector or ProjectorConfig()
        return Arriving(stage, slice(0, tokens), injected, projector.activation)


def _opens(slices: Sequence[ModuleSlice], config: Any) -> dict[str, Open]:
    """By name of a parameter of which each rank of tp takes one head, how it does."""
    leaves = [leaf for part in slices for leaf in jax.tree.leaves(part.leaves()) if KV_HEADS in leaf.axes]
    return {
        f"{leaf.module}/{leaf.path}": partial(own_head, leaf.axes.index(KV_HEADS), config.kv_heads) for leaf in leaves
    }


def cp_tokens(module: Module, layout: Layout) -> str:
    """Which rank of cp has which of a module's tokens: as the layout says, unless they have to stay in their order."""
    return "contiguous" if module.in_order else layout.cp_tokens


def reads_order(module: Module, layout: Layout) -> bool:
    """Whether a module's stages read where tokens stood before they were given to ranks of cp."""
    ordered = any("order" in mask.reads for _, mask in module.masks)
    return layout.cp > 1 and ordered and cp_tokens(module, layout) != "contiguous"


def multimodal(
    encoders: Mapping[str, Any],
    llm: Any,
    generators: Mapping[str, Any] | None = None,
    projectors: Mapping[str, ProjectorConfig] | None = None,
    callbacks: Mapping[str, Callbacks] | None = None,
    loras: Mapping[str, LoraConfig] | None = None,
) -> MultimodalModel:
    """Encoders that feed one LLM, which feeds generators.

    Args:
      encoders: by name, settings such as ``ViTConfig`` or a ``Module``.
      llm: settings such as ``DecoderConfig``, or a ``Module``.
      generators: by name, settings such as ``DiTConfig``, or a ``Module``.
      projectors: by encoder and generator; the others have the default.
      callbacks: by encoder, "llm" and generator.
      loras: low-rank adapters, likewise.

    Raises:
      ValueError: there are callbacks or adapters of a module that the model does not have.
    """
    generators, projectors, callbacks, loras = generators or {}, projectors or {}, callbacks or {}, loras or {}
    as_module = lambda given: given if isinstance(given, Module) else module_of(given)  # noqa: E731
    own = {name: projectors.get(name, ProjectorConfig()) for name in (*encoders, *generators)}
    nodes = {name: Node(as_module(given), own[name]) for name, given in encoders.items()}
    nodes[LLM] = Node(as_module(llm))
    nodes |= {name: Node(as_module(given), own[name], "start") for name, given in generators.items()}
    for what, by_name in {"callbacks": callbacks, "loras": loras}.items():
        if unknown := sorted(by_name.keys() - nodes.keys()):
            raise ValueError(f"{what}: no module {unknown[0]!r}; use one of {list(nodes)}")
    nodes |= {name: replace(nodes[name], callbacks=given) for name, given in callbacks.items()}
    nodes |= {name: replace(nodes[name], lora=given) for name, given in loras.items()}
    before = (_edge(name, own[name]) for name in encoders)
    return MultimodalModel(nodes, (*before, *(Edge(LLM, name, "index") for name in generators)))


def _edge(encoder: str, projector: ProjectorConfig) -> Edge:
    """The edge from an encoder to the LLM."""
    return Edge(
        encoder,
        LLM,
        f"{encoder}_index",
        projector.inject,
        projector.levels,
        shares=f"{encoder}_shares" if projector.most_tiles else "",
        newline=projector.newline,
    )
