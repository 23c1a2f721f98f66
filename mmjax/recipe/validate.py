"""Checks a `Recipe` before any device is touched. Imports no JAX.

Each dataclass checks its own fields in ``__post_init__``. Each feature also has
checks against other parts of a recipe, which are called here one after another.
"""

from __future__ import annotations

from mmjax.configurable import require
from mmjax.models.config import LLM
from mmjax.pipeline.single.lane_layout import check_one_program
from mmjax.recipe.best import check_best
from mmjax.recipe.graph import check_graph
from mmjax.recipe.ranks import check_ranks
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.schedules import check_inner, check_microbatches, check_schedule
from mmjax.user_code import check_code


def validate(recipe: Recipe, *, trained: bool = True) -> None:
    """Checks that the parts of `recipe` agree with one another, before any device is touched.

    Args:
      recipe: the configuration.
      trained: whether it will be trained, so that some module must not be frozen.

    Raises:
      ConfigError: one line that names the field, its value and a legal one.
    """
    model, train, world, layouts = recipe.model, recipe.train, recipe.world, recipe.model.layouts
    check_code(recipe.walk(), allowed=recipe.allow_code)
    check_graph(model)
    _check_data(recipe)
    for name in model:
        _check_module(recipe, name)
    if trained:
        model.require_trained()
    world.check_size(layouts)
    train.check_batch()
    for name, optimizer in model.optimizers.items():
        if not train.epochs:  # else the number of steps is not known yet
            optimizer.check_warmup(name, train.steps)
    check_best(recipe)
    check_schedule(train.schedule, layouts, model.encoders)
    check_inner(train, layouts, model.flows)
    check_microbatches(train, layouts, model.flows)
    check_ranks(layouts)
    for name, node in model.nodes.items():
        node.offload.check(name, node.role, node.layout, llm=model.llm.layout, schedule=train.schedule)
    if train.lowering == "single":
        check_one_program(layouts, model.offloads)
    world.check_devices(layouts, world.devices or recipe.devices)


def _check_data(recipe: Recipe) -> None:
    """Requires modules for the media of the data, and a tokenizer's folder for datasets with its template."""
    data, model = recipe.data, recipe.model
    for name in model.latent_encoders:
        fix = f"{name!r} encodes pictures of records; name some in Data.sources, or leave {name!r} out"
        require(bool(data.sources), "Data.task", data.settings.task, fix)
    data.check_modules(model.media_of("encoder"), model.media_of("generator"))
    for name, source in data.sources.items():
        source.check_template(name, data.settings.tokenizer)
        source.check_axes(name, model.llm.settings.grid_setting)


def _check_module(recipe: Recipe, name: str) -> None:
    """A module fits its parts, the LLM, its layout and the run."""
    model, node, llm = recipe.model, recipe.model[name], recipe.model.llm.settings
    if node.projector:
        node.projector.settings.check(name, node.settings, llm, llm_name=LLM, encodes=node.role == "encoder")
    if name in model.adapted:
        node.lora.check(name)
    if name == LLM:
        node.settings.check_media(name, model.media)
    node.callbacks.check(name)
    node.layout.check(name, model.sizes(name))
    node.settings.check(name, node.layout)
    node.settings.check_run(name, recipe.train.dtype, recipe.world.platform)
