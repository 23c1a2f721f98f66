"""Whether the modules of a run become one folder of a whole model: known before it trains. Imports no JAX."""

from __future__ import annotations

from mmjax.config.schema import Config
from mmjax.configurable import ConfigError
from mmjax.models.composed import Composed, compose
from mmjax.models.config import projector_name

_ANY_ROWS = 2**20
"""Stands for the rows of a table of embeddings: why there is no folder does not depend on them."""


def compose_run(config: Config, vocab: int, image_token: int) -> tuple[Composed | None, str]:
    """A new folder of a whole model that has all modules, or why there is none; "" where a folder had them all.

    Args:
      config: the run's.
      vocab: rows of the language model's table of embeddings.
      image_token: id of the token that stands for an image's.
    """
    if config.model.weights and all(config.pretrained(name) == config.model.weights for name in _modules(config)):
        return None, ""
    try:
        return compose(config.model, config.modules, config.projectors, vocab, image_token), ""
    except ConfigError as error:
        return None, str(error)


def export_advice(config: Config) -> tuple[str, ...]:
    """A line for a run of modules from folders that will not be one folder again; none for other runs."""
    unwritten = [name for name in _modules(config) if not config.pretrained(name)]
    if len(unwritten) == len(_modules(config)):
        return ()
    _, why = compose_run(config, _ANY_ROWS, 0)
    if not why:
        return ()
    left = f"--format=safetensors leaves {', '.join(unwritten)} out" if unwritten else "each module has its own folder"
    return (f"an export is not one folder of a whole model, and {left}: {why}",)


def _modules(config: Config) -> list[str]:
    return [*config.modules, *map(projector_name, config.projectors)]
