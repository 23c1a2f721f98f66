"""Checks of a model's edges: which modules they join, and where tokens enter. Imports no JAX."""

from __future__ import annotations

from mmjax.configurable import require, setting_name
from mmjax.data.origin import task_class
from mmjax.data.tasks.registry import TASKS
from mmjax.models.config import LLM, family_setting
from mmjax.models.edges import EdgeSpec, check_edges
from mmjax.models.families import Role, family_of_tokens
from mmjax.models.projector.config import ProjectorConfig
from mmjax.recipe.model_spec import ModelSpec
from mmjax.recipe.specs import ModuleSpec


def check_graph(model: ModelSpec) -> None:
    """Requires that each edge joins two modules that go together, and that each encoder reads its kind of input.

    ``model`` is such as ``load_config(["digits_vlm"]).model``.

    Raises:
      ConfigError: one line that names the setting, its value and a legal one.
    """
    roles: dict[str, Role] = {name: node.role for name, node in model.nodes.items()}
    check_edges(model.flows, roles, LLM, model.latent_encoders)
    for name in model.encoders:
        _check_encoder(model, model[name])
    for name in model.latent_encoders:
        _check_latents(model, model[name])
    for edge in model.flows:
        _check_ends(model, edge)
        _check_layers(model, edge)
        _check_copies(model[edge.source], model[edge.target])
    for name in model.talkers:
        _check_talker(model[name])


def _check_encoder(model: ModelSpec, node: ModuleSpec) -> None:
    """An encoder reads media, or the tokens of another encoder, as its family does."""
    sources, field = model.sources(node.name), family_setting(node.name, "encoder")
    reads_tokens = node.settings.medium == "tokens"
    fix = f"it encodes {node.settings.medium}s, and reads no {' '.join(sources)}; use {family_of_tokens()!r}"
    require(reads_tokens or not sources, field, node.kind, fix)
    fix = f"it reads the tokens of another encoder; add an edge to {node.name!r} in Model.edges"
    require(bool(sources) or not reads_tokens, field, node.kind, fix)


def _check_latents(model: ModelSpec, node: ModuleSpec) -> None:
    """An encoder of latents is frozen, and encodes pictures of a generator of such latents, which has no others."""
    (name,), optimizer = model.targets(node.name), node.optimizer
    generator, settings = model[name], node.settings
    fix = f"{node.name!r} encodes what {name!r} learns to make, which may not change; set it to True"
    require(optimizer.frozen, f"{node.name}/Optimizer.frozen", optimizer.frozen, fix)
    fix = f"{node.name!r} is frozen as a whole; set it to 0"
    require(not node.lora.settings.rank, f"{node.name}/Lora.rank", node.lora.settings.rank, fix)
    fix = f"{node.name!r} has no projector; use {node.name}/Callbacks.after"
    require(not node.callbacks.projected, f"{node.name}/Callbacks.projected", node.callbacks.projected, fix)
    fix = f"{node.name!r} encodes in the step; leave it out, or leave {node.name!r} out"
    require(not generator.latents.path, f"{name}/Latents.path", generator.latents.path, fix)
    folder, decoder = node.weights.path, generator.latents.autoencoder
    fix = f"{node.name!r} encodes by {node.name}/Weights.path={folder!r}; name that folder, or leave the setting out"
    require(not folder or decoder in ("", folder), f"{name}/Latents.autoencoder", decoder, fix)
    fix = f"{name!r} makes no pictures, of which {node.name!r} could make latents; leave the edge out"
    require(generator.settings.medium == "image" and not generator.speaks, "Model.edges", f"{node.name} -> {name}", fix)
    channels = settings.latent_channels
    fix = f"{node.name!r} makes latents of {channels} channels; set it to {channels}"
    field = setting_name(name, generator.settings, "channels")
    require(generator.settings.channels == channels, field, generator.settings.channels, fix)


def _check_ends(model: ModelSpec, edge: EdgeSpec) -> None:
    """The target has places for the tokens, as the source's projector makes them."""
    source, target = model[edge.source], model[edge.target]
    if target.speaks:
        fix = f"{target.name!r} speaks and reads the LLM alone; leave the edge out"
        require(source.name == LLM, "Model.edges", edge.text, fix)
    elif source.role == "encoder" and target.role == "generator" and not source.makes_latents:
        fix = f"{source.name!r} encodes no images, which have places in a drawing; leave the edge out"
        require(source.settings.medium == "image", "Model.edges", edge.text, fix)
        fix = f"{target.name!r} makes {target.settings.medium}s, which have no places for an image; leave the edge out"
        require(target.settings.medium == "image", "Model.edges", edge.text, fix)
        queries, field = getattr(target.settings, "queries", 0), setting_name(target.name, target.settings, "queries")
        fix = f"its condition ({field}={queries}) has no places for an image; leave it out, or use 'dit' with queries=0"
        require(not queries, "Model.edges", edge.text, fix)
    if edge.target != LLM:
        projector = source.projector.settings if source.projector else ProjectorConfig()
        fix = f"belongs to an encoder that feeds the {LLM} alone; leave {edge.text!r} out"
        for name in ProjectorConfig.llm_only:
            require(not getattr(projector, name), f"{source.name}/Projector.{name}", getattr(projector, name), fix)


def _check_layers(model: ModelSpec, edge: EdgeSpec) -> None:
    """The layers that an edge's tokens enter again, and those whose outputs enter, exist."""
    settings, source, llm = edge.settings, model[edge.source], model.llm.settings
    into_llm = source.role == "encoder" and edge.target == LLM
    fix = f"{edge.text} enters no layers of the {LLM}; set it to ()"
    require(into_llm or not settings.inject, f"{edge.name}/Edge.inject", settings.inject, fix)
    ends = {"inject": (LLM, llm.layers - 1), "levels": (source.name, source.settings.layers - 1)}
    for name, (module, most) in ends.items():
        layers = getattr(settings, name)
        fix = f"{module} has layers 0 to {most}; use numbers of these"
        require(all(layer <= most for layer in layers), f"{edge.name}/Edge.{name}", layers, fix)


def _check_copies(source: ModuleSpec, target: ModuleSpec) -> None:
    """On one set of ranks the rows of copies stay where they are, so both modules have the same copies and dp."""
    first, second = source.layout, target.layout
    has_copies = max(first.copies, second.copies) > 1
    if target.name == LLM or not has_copies or set(first.ranks) != set(second.ranks):
        return
    for name in ("copies", "dp"):
        wanted, value = getattr(first, name), getattr(second, name)
        there = f"with copies={first.copies} and dp={first.dp}"
        fix = f"it reads {source.name!r} on the same ranks, {there}; set it to {wanted}"
        require(value == wanted, f"{target.name}/Layout.{name}", value, fix)


def _check_talker(node: ModuleSpec) -> None:
    """A generator of codes has settings for codes, and no parameters of a model of text."""
    codes, task = next((codes, task) for task in TASKS if (codes := task_class(task).codes))
    node.settings.check_codes(node.name, example=f"{codes} for Data.task={task!r}")
    folder = node.weights.path
    fix = f"is of a language model's text, not of codes; leave it out, or use {node.name}/Weights.init_from"
    require(not folder, f"{node.name}/Weights.path", folder, fix)
