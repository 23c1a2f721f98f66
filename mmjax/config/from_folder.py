"""Makes a configuration from nothing but a folder of a whole model or a language model. Imports no JAX."""

from __future__ import annotations

from mmjax.config.schema import Config
from mmjax.configurable import ConfigError
from mmjax.models.config import LLM
from mmjax.models.pretrained import COMPOSITES, find_pretrained
from mmjax.weights.folder import read_config

TOKENIZER = "tokenizer.json"
_MEDIA = ("vision_config", "audio_config")
"""Parts of the ``config.json`` of a whole model."""


def positions_of(config: Config) -> int:
    """The number of positions that the language model's folder states; 0 if it states none."""
    try:
        folder_config = read_config(config.pretrained(LLM)) if config.pretrained(LLM) else {}
        family = dict(config.model.families)[LLM]
        settings = find_pretrained(family, folder_config).settings if folder_config else {}
    except ConfigError:  # a run that continues no longer needs its folder
        return 0
    return int(settings.get("max_position_embeddings") or 0)


def folder_bindings(path: str) -> list[str]:
    """Bindings for the model of a folder, with messages as data.

    Raises:
      ConfigError: the folder holds no such model; one line.
    """
    try:
        folder_config = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"--weights={path!r}: {error}") from None
    messages = "Data.sources={'messages': 1.0}"
    if folder_config.get("model_type") in COMPOSITES or any(part in folder_config for part in _MEDIA):
        return [messages, f"Model.weights={path!r}"]
    return [messages, "Model.encoders={}", f"llm/Weights.path={path!r}"]
