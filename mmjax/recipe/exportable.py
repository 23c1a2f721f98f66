"""Tells, before a run trains, whether its modules can be exported as one folder of a whole model. Imports no JAX."""

from __future__ import annotations

from mmjax.configurable import ConfigError
from mmjax.models.composed import Composed, compose
from mmjax.models.config import projector_name
from mmjax.recipe.image_processor import image_processor
from mmjax.recipe.recipe import Recipe

_ANY_ROWS = 2**20
"""A placeholder for the rows of the embedding table: whether a folder can be made does not depend on them."""


def compose_run(recipe: Recipe, vocab: int, image_token: int) -> tuple[Composed | None, str]:
    """Composes the folder of a whole model from a run's modules.

    Args:
      recipe: the run's.
      vocab: rows of the language model's embedding table.
      image_token: id of the token that stands for an image, as ``image_token(recipe)`` gives it.

    Returns:
      The folder, for ``write_whole``, and ""; or None and the reason: "" if the modules come from one whole model's
      folder already.
    """
    if recipe.model.weights and all(recipe.model.folder(name) == recipe.model.weights for name in _modules(recipe)):
        return None, ""
    try:
        settings = {name: node.settings for name, node in recipe.model.nodes.items()}
        projectors = {name: projector.settings for name, projector in recipe.model.projectors.items()}
        return compose(recipe.model.config, settings, projectors, vocab, image_token), ""
    except ConfigError as error:
        return None, str(error)


def without_images(recipe: Recipe) -> str:
    """Why the folder of a whole model has no rules for images; "" where it has. ``recipe`` is the run's."""
    (tower,) = recipe.model.media_of("encoder")
    return image_processor(recipe, recipe.model.folder(tower), recipe.model[tower].settings.channels)[1]


def export_advice(recipe: Recipe) -> tuple[str, ...]:
    """(line,), which says why a run with modules from folders cannot be exported as one folder, with rules for images;
    () if it can.

    () also for a run without such modules. ``recipe`` is such as ``load_config(["digits_vlm"])`` gives it.
    """
    unwritten = [name for name in _modules(recipe) if not recipe.model.folder(name)]
    if len(unwritten) == len(_modules(recipe)):
        return ()
    composed, reason = compose_run(recipe, _ANY_ROWS, 0)
    if composed and recipe.data.sources and (images := without_images(recipe)):
        return (f"an export has no preprocessor_config.json, as transformers has no such images: {images}",)
    if not reason:
        return ()
    left_out = f"--format=safetensors leaves {', '.join(unwritten)} out"
    consequence = left_out if unwritten else "each module has its own folder"
    return (f"an export is not one folder of a whole model, and {consequence}: {reason}",)


def _modules(recipe: Recipe) -> list[str]:
    return [*recipe.model.nodes, *map(projector_name, recipe.model.projectors)]
