"""The positions that a language model was made for. Imports no JAX."""

from __future__ import annotations

from mmjax.configurable import ConfigError
from mmjax.models.pretrained import find_pretrained
from mmjax.recipe.recipe import Recipe
from mmjax.weights.folder import read_config


def positions_of(recipe: Recipe) -> int:
    """The number of positions that the language model's folder states; 0 if it states none, or there is no folder.

    It is "max_position_embeddings" of the ``config.json``. ``recipe`` is such as ``load_config(["digits_vlm"])``.
    """
    llm, folder = recipe.model.llm, recipe.model.folder(recipe.model.llm.name)
    try:
        folder_config = read_config(folder) if folder else {}
        settings = find_pretrained(llm.family, folder_config).settings if folder_config else {}
    except ConfigError:  # a run that continues no longer needs its folder
        return 0
    return int(settings.get("max_position_embeddings") or 0)
