"""A model as a graph of modules, cut into pipeline stages.

A node is a module with its projector; an edge brings the tokens of one module to places among those of another. The
graph has no cycles, and a node may have any number of edges. Every stage is a pure function of its parameters, its host
inputs and the activations that reach it; nothing here knows on which devices it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Axes
from mmjax.models.config import LLM, projector_name, require_layers
from mmjax.models.context import Context, Inputs
from mmjax.models.families import module_of
from mmjax.models.layers import Params
from mmjax.models.module import Module, layer_runs, run_layers
from mmjax.models.parameters import ModuleSlice, Part
from mmjax.models.placeholders import merge_modality_tokens
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.projector.layers import Projector, injected_name, project

Carry = Mapping[str, Array]
"""Activations that reach a stage, by the name of the stage they come from."""


@dataclass(frozen=True)
class StageModel:
    """One pipeline stage of one module, without devices.

    Attributes:
      name: such as ``llm.1``.
      module: the module whose layout it runs under.
      index: pipeline index inside the module.
      sources: names of the stages whose activations it takes.
      slices: parameters it holds, one slice per module (an encoder's last stage holds the projector too, and an LLM
        stage the projectors' parameters for its layers).
      inputs: host inputs it reads.
      forward: ``(params, inputs, carry, axes, cells) -> activation``.
      loss: ``(params, inputs, activation, axes) -> sum of weighted losses []``; ``None`` where it gives no loss.
      predict: takes the place of ``loss`` in evaluation (see ``Module.predict``).
    """

    name: str
    module: str
    index: int
    sources: tuple[str, ...]
    slices: tuple[ModuleSlice, ...]
    inputs: tuple[str, ...]
    forward: Callable[[Params, Inputs, Carry, Axes, int], Array]
    loss: Callable[[Params, Inputs, Array, Axes], Array] | None = None
    predict: Callable[[Params, Inputs, Array, Axes], Any] | None = None


@dataclass(frozen=True)
class Node:
    """A module in a model.

    Attributes:
      module: the module.
      projector: the projector between it and other modules; ``None`` where their widths are equal.
      projects: whether the projector ends the module, and maps what it gives, or starts it, and maps what it takes.
    """

    module: Module
    projector: ProjectorConfig | None = None
    projects: Literal["end", "start"] = "end"

    @property
    def config(self) -> Any:
        """The module's settings."""
        return self.module.config

    @property
    def ends(self) -> ProjectorConfig | None:
        """The projector that ends it, if one does."""
        return self.projector if self.projects == "end" else None

    @property
    def starts(self) -> ProjectorConfig | None:
        """The projector that starts it, if one does."""
        return self.projector if self.projects == "start" else None


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
    """

    source: str
    target: str
    index: str
    inject: tuple[int, ...] = ()


@dataclass(frozen=True)
class MultimodalModel:
    """A graph of modules.

    Attributes:
      nodes: by name, sources before targets.
      edges: between them.
    """

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...] = ()

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
        """Names of all trainable modules: each node, followed by its projector."""
        return tuple(
            own for name, node in self.nodes.items() for own in (name, projector_name(name))[: 1 + bool(node.projector)]
        )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the losses in the sum that is optimised, by module that gives a loss."""
        weights = {name: node.module.loss_weight for name, node in self.nodes.items()}
        return {name: weight for name, weight in weights.items() if weight is not None}

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
            return node.module.merged_width, node.ends.hidden or out, out
        assert node.starts
        (taken,) = {self.token_width(edge.source) for edge in self.into(name)}
        return taken, node.starts.hidden or taken, node.module.merged_width

    def injected_widths(self, name: str) -> tuple[int, int, int]:
        """Input, hidden and output width of the projectors through which a module's tokens enter layers again."""
        width, node = self.token_width(name), self.nodes[name]
        return width, (node.projector.hidden if node.projector else 0) or width, width

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
        return replace(self, edges=tuple(replace(e, inject=layers) if e.source == name else e for e in self.edges))

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
        for i, layers in enumerate(layout.runs(node.config.layers)):
            first, last = i == 0, i == layout.stages - 1
            injected = {edge.source: tuple(at for at in edge.inject if at in layers) for edge in self.into(name)}
            entering = tuple(edge for edge in self.into(name) if first or injected[edge.source])
            before = "" if first else f"{name}.{i - 1}"
            piece = _Piece(
                name=name,
                node=node,
                last=last,
                before=before,
                layers=layers,
                entering={edge: tails[edge.source] for edge in entering},
                injected=injected,
            )
            judged = last and node.module.loss_weight is not None
            result.append(
                StageModel(
                    name=f"{name}.{i}",
                    module=name,
                    index=i,
                    sources=(*([before] if before else []), *piece.entering.values()),
                    slices=self._slices(piece, first, layout.tp),
                    inputs=(*node.module.inputs(first, last), *(edge.index for edge in entering)),
                    forward=piece.forward,
                    loss=piece.loss if judged else None,
                    predict=piece.predict if judged else None,
                )
            )
        return result

    def _slices(self, piece: _Piece, first: bool, tp: int) -> tuple[ModuleSlice, ...]:
        name, node = piece.name, piece.node
        runs = tuple(run for run, _ in layer_runs(node.module, piece.layers))
        slices = [ModuleSlice(name, runs, node.module.parts(first, piece.last), tp, node.module.axes)]
        if (node.ends and piece.last) or (node.starts and first):
            part = Part(partial(Projector, *self.projector_widths(name)))
            slices.append(ModuleSlice(projector_name(name), (), (part,)))
        for source, layers in piece.injected.items():
            create = partial(Projector, *self.injected_widths(source))
            parts = tuple(Part(create, injected_name(layer)) for layer in layers)
            slices += [ModuleSlice(projector_name(source), (), parts)] if parts else []
        return tuple(slices)


def multimodal(
    encoders: Mapping[str, Any],
    llm: Any,
    generators: Mapping[str, Any] | None = None,
    projectors: Mapping[str, ProjectorConfig] | None = None,
) -> MultimodalModel:
    """Encoders that feed one LLM, which feeds generators.

    Args:
      encoders: by name, settings such as ``ViTConfig`` or a ``Module``.
      llm: settings such as ``DecoderConfig``, or a ``Module``.
      generators: by name, settings such as ``DiTConfig``, or a ``Module``.
      projectors: by encoder and generator; the others have the default.
    """
    generators, projectors = generators or {}, projectors or {}
    as_module = lambda given: given if isinstance(given, Module) else module_of(given)  # noqa: E731
    own = {name: projectors.get(name, ProjectorConfig()) for name in (*encoders, *generators)}
    nodes = {name: Node(as_module(given), own[name]) for name, given in encoders.items()}
    nodes[LLM] = Node(as_module(llm))
    nodes |= {name: Node(as_module(given), own[name], "start") for name, given in generators.items()}
    before = (Edge(name, LLM, f"{name}_index", own[name].inject) for name in encoders)
    return MultimodalModel(nodes, (*before, *(Edge(LLM, name, "index") for name in generators)))


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """What one stage computes.

    Attributes:
      name, node: the module.
      last: whether the stage is its module's last.
      before: the stage before it; "" for the first.
      layers: its layers, numbered in the module.
      entering: edges that enter it, with the stage that each comes from.
      injected: by source, the stage's layers that its tokens enter again, numbered in the module.
    """

    name: str
    node: Node
    last: bool
    before: str
    layers: range
    entering: Mapping[Edge, str]
    injected: Mapping[str, tuple[int, ...]]

    def forward(self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int) -> Float[Array, "B T D"]:
        """The stage's activation: what its module gives to others, or to its next stage."""
        module, own, context = self.node.module, p[self.name], self._context(inputs, axes)
        x = carry[self.before] if self.before else self._begin(p, context, carry, cells)
        x = run_layers(module, own, context, x, self.layers, self._added(p, context, carry, cells, x))
        if not self.last:
            return x
        x = module.end(own, context, x)
        return project(p[projector_name(self.name)], module.patches_per_token, axes, x) if self.node.ends else x

    def loss(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, ""]:
        """Sum of weighted losses from the stage's activation."""
        return self.node.module.loss(p[self.name], self._context(inputs, axes), x)

    def predict(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Any:
        """Predictions from the stage's activation."""
        return self.node.module.predict(p[self.name], self._context(inputs, axes), x)

    def _context(self, inputs: Inputs, axes: Axes) -> Context:
        return Context.of(axes, inputs, self.node.module.mask)

    def _begin(self, p: Params, context: Context, carry: Carry, cells: int) -> Float[Array, "B T D"]:
        """Features of the first stage's host inputs, with the tokens of other modules."""
        x, given = self.node.module.embed(p[self.name], context), context.inputs
        if not self.node.starts:
            for edge, tail in self.entering.items():
                x = merge_modality_tokens(x, carry[tail], given[edge.index], cells)
            return x
        shape = (*given[next(iter(self.entering)).index].shape, next(iter(carry.values())).shape[-1])
        tokens = jnp.zeros(shape, x.dtype)
        for edge, tail in self.entering.items():
            tokens = merge_modality_tokens(tokens, carry[tail], given[edge.index], cells)
        merged = project(p[projector_name(self.name)], 1, context.axes, tokens)
        return x + merged.reshape(*x.shape[:2], -1)

    def _added(
        self, p: Params, context: Context, carry: Carry, cells: int, x: Float[Array, "B T D"]
    ) -> dict[int, Array]:
        """What is added to the inputs of layers, by the layer's number in the module."""
        added: dict[int, Array] = {}
        for edge, tail in self.entering.items():
            for layer in self.injected[edge.source]:
                own = p[projector_name(edge.source)][injected_name(layer)]
                tokens = project(own, 1, context.axes, carry[tail])
                placed = merge_modality_tokens(jnp.zeros_like(x), tokens, context.inputs[edge.index], cells)
                added[layer] = added[layer] + placed if layer in added else placed
        return added
