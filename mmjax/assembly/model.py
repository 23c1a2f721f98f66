"""Builds the module graph from a ``Recipe``, and the specs of encoders and generators for the data side."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from mmjax.assembly.latents import encoded_in_step, with_latents
from mmjax.configurable import require, suggest
from mmjax.data.buckets import per_cell
from mmjax.data.derived import with_media
from mmjax.data.packing import Packer
from mmjax.data.split import Split
from mmjax.data.tokenizer import Tokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import Layout, cell_count
from mmjax.models.callbacks import Callbacks
from mmjax.models.config import LLM
from mmjax.models.edges import EdgeSpec
from mmjax.models.graph import MultimodalModel, cp_tokens, edge_between
from mmjax.models.module import Module
from mmjax.models.nodes import Edge, Node, spec_of
from mmjax.models.projector.config import ProjectorConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.recipe import ModelSpec, ModuleSpec, Recipe
from mmjax.user_code import import_named


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> MultimodalModel:
    """The module graph; where the configuration leaves the vocabulary open (0), it is the tokenizer's.

    Layers are stacked and recompute nothing where the recipe leaves that to the devices.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      tokenizer: the tokenizer, such as ``plan(recipe).tokenizer``.
    """
    nodes = {name: _node(spec) for name, spec in recipe.model.nodes.items()}
    model = MultimodalModel(nodes, tuple(_edge(recipe.model, edge) for edge in recipe.model.flows))
    return replace(model.with_vocab(tokenizer.vocab_size), unroll=recipe.train.unroll is True)


def _node(spec: ModuleSpec) -> Node:
    """The node of the graph with these settings; imports the code of its callbacks."""
    names = spec.callbacks.names.items()
    return Node(
        spec.module(),
        projector=spec.projector and spec.projector.settings,
        projects="start" if spec.role == "generator" else "end",
        callbacks=Callbacks(**{place: import_named(f"{spec.name}/Callbacks.{place}", path) for place, path in names}),
        lora=spec.lora.settings,
    )


def _edge(model: ModelSpec, edge: EdgeSpec) -> Edge:
    """The edge of the graph. From an encoder to the LLM it has the layers of the projector, unless it names its own."""
    settings, projector = edge.settings, model[edge.source].projector
    of_graph = edge_between(edge.source, edge.target, projector.settings if projector else ProjectorConfig())
    if settings.inject:
        of_graph = replace(of_graph, inject=settings.inject, levels=settings.levels)
    latents = model[edge.source].makes_latents
    return replace(of_graph, index=settings.index or of_graph.index, latents=latents)


def build_modules(recipe: Recipe) -> dict[str, Any]:
    """The ``mmjax.models.module.Module`` of each encoder, the LLM and each generator, by name; none has parameters.

    {"vision": …, "llm": …}. ``recipe``: the run's configuration, as ``load_config(["run.gin"])`` gives it.
    """
    return {name: node.module() for name, node in recipe.model.nodes.items()}


def parameter_names(model: MultimodalModel) -> dict[str, list[str]]:
    """Names of the parameters by part, such as {"llm": ["embed", "layers/000/attn/q", …], "vision_projector": …}.

    They are the same under any layout. ``model``: the module graph, as ``build_model(recipe, tokenizer)`` makes it.
    """
    names: dict[str, list[str]] = {}
    for stage in model.stages(dict.fromkeys(model.nodes, Layout())):
        for leaf in (leaf for part in stage.slices for leaf in jax.tree.leaves(part.leaves())):
            names.setdefault(leaf.module, []).extend(name.partition("/")[2] for name in leaf.names)
    return names


def with_fitting_rates(recipe: Recipe) -> Recipe:
    """The recipe without patterns of ``Optimizer.rates`` that fit no parameter of their module.

    Such as "layers/007/*". There are such patterns where a recipe was shrunk to fewer layers.
    """
    if not any(optimizer.rates for optimizer in recipe.model.optimizers.values()):
        return recipe
    unfitting = _unfitting(build_model(recipe, make_tokenizer("", recipe.model.media)), recipe.model.optimizers)
    optimizers = {}
    for name, optimizer in recipe.model.optimizers.items():
        rates = {
            pattern: factor for pattern, factor in optimizer.rates.items() if pattern not in unfitting.get(name, ())
        }
        optimizers[name] = replace(optimizer, rates=rates)
    return replace(recipe, model=recipe.model.with_optimizers(optimizers))


def require_rates(model: MultimodalModel, optimizers: Mapping[str, OptimizerConfig]) -> None:
    """Requires that each pattern of ``Optimizer.rates`` fits a parameter of its part.

    Args:
      model: the module graph, as ``build_model(recipe, tokenizer)`` makes it.
      optimizers: the optimizer of each part, such as "llm" or "vision_projector": ``recipe.model.optimizers``.

    Raises:
      ConfigError: one fits none; the message lists the nearest names, or all.
    """
    for module, patterns in _unfitting(model, optimizers).items():
        names = {re.sub(r"^layers/\d+/", "layers/*/", name): None for name in parameter_names(model)[module]}
        fix = f"{patterns[0]!r} fits no parameter of {module}; {suggest(patterns[0], names)}"
        require(not patterns, f"{module}/Optimizer.rates", dict(optimizers[module].rates), fix)


def _unfitting(model: MultimodalModel, optimizers: Mapping[str, OptimizerConfig]) -> dict[str, list[str]]:
    """The patterns of ``rates`` that fit no parameter, by module."""
    if not any(optimizer.rates for optimizer in optimizers.values()):
        return {}
    names = parameter_names(model)
    unfitting = {
        module: [pattern for pattern in optimizer.rates if not fnmatch.filter(names.get(module, ()), pattern)]
        for module, optimizer in optimizers.items()
    }
    return {module: patterns for module, patterns in unfitting.items() if patterns}


def require_inputs(model: MultimodalModel, packer: Packer) -> None:
    """Requires that the data have the host inputs that callbacks read; returns nothing.

    Args:
      model: the module graph, as ``build_model(recipe, tokenizer)`` makes it.
      packer: packs the data, as ``build_packer(recipe, tokenizer)`` makes it; its ``inputs`` has the names by module.

    Raises:
      ConfigError: a callback reads an input that the data lack.
    """
    for module, node in model.nodes.items():
        for place in node.callbacks.by_place:
            for name in node.callbacks.inputs([place]):
                has = ", ".join(sorted(packer.inputs[module]))
                fix = f"the data of {module} have {has}; name one of these in @reads"
                require(name in packer.inputs[module], f"{module}/Callbacks.{place}: reads", name, fix)


def splits_of(recipe: Recipe) -> dict[str, Split]:
    """How the rows of each module are split over ranks, for the data side: {"llm": Split(ranks=2, …)}.

    Modules whose ranks have whole rows, without cp and tp that share tokens, are absent. ``recipe``: the run's
    configuration.
    """
    splits = {}
    for name, module in build_modules(recipe).items():
        layout = recipe.model[name].layout
        if layout.row_multiple > 1:
            splits[name] = split_of(module, layout)
    return splits


def split_of(module: Module, layout: Layout) -> Split:
    """How the rows of a module are split: over the ranks of cp, and each part by whole tokens over those of tp.

    Args:
      module: the module, such as ``build_modules(recipe)["llm"]``.
      layout: its layout, such as ``Layout(cp=2)``; without cp the result has ``ranks`` 1.
    """
    method, token = cp_tokens(module, layout), module.patches_per_token
    unit = token * layout.row_multiple // layout.cp
    front = module.medium.queries if module.medium else 0
    return Split(ranks=layout.cp, unit=unit, token=token, method=method, masks=module.masks, front=front)


def _abreast(module: Module, layout: Layout) -> int:
    """Media of a row of an encoder whose buckets are not configured: one for each rank of cp that takes whole ones."""
    return layout.cp if cp_tokens(module, layout) == "segments" else 1


def encoder_specs(recipe: Recipe) -> dict[str, EncoderSpec]:
    """The specs of the encoders and generators with media of their own by name, for those who read samples.

    {"vision": EncoderSpec(…)}. ``buckets`` are those that are configured by shape, of a cell. ``recipe``: the run's
    configuration, as ``load_config(["run.gin"])`` gives it.
    """
    return with_media(packed_specs(recipe))


def packed_specs(recipe: Recipe) -> dict[str, EncoderSpec]:
    """The specs of all encoders and generators by name, also of encoders that read other encoders, for packing rows.

    {"vision": EncoderSpec(…)}. ``buckets`` are those that are configured by shape, of a cell. ``recipe``: the run's
    configuration, as ``load_config(["run.gin"])`` gives it.
    """
    model, cells = recipe.model, cell_count(recipe.model.layouts.values())
    modules, projectors = build_modules(recipe), model.projectors
    names = dict.fromkeys((*model.media, *model.encoders, *model.talkers))
    media = {
        name: spec_of(modules[name].medium, projectors[name].settings) if name in projectors else modules[name].medium
        for name in names
    }
    indices = {(edge.source, edge.target): edge.settings.index for edge in model.flows}
    for name in model.latent_encoders:
        media |= encoded_in_step(media, name, *model.targets(name))
    return {
        name: replace(
            with_latents(spec, name, model[name].latents),
            buckets=per_cell(model[name].packing.given, cells),
            abreast=_abreast(modules[name], model[name].layout),
            reads=tuple((source, indices[source, name]) for source in model.sources(name)),
            text_index=indices.get((name, LLM)),
        )
        for name, spec in media.items()
    }
