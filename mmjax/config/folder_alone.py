"""A configuration made of a folder alone: of a whole model, or of a language model. Imports no JAX."""

from __future__ import annotations

from mmjax.config.schema import Config
from mmjax.configurable import ConfigError
from mmjax.models.config import LLM
from mmjax.models.pretrained import WHOLES, find_pretrained
from mmjax.weights.folder import read_config

TOKENIZER = "tokenizer.json"
_MEDIA = ("vision_config", "audio_config")
"""Parts of the ``config.json`` of a whole model."""


def positions_of(config: Config) -> int:
    """The tokens for which the language model's folder says that it has positions; 0 where nothing says so."""
    try:
        theirs = read_config(config.pretrained(LLM)) if config.pretrained(LLM) else {}
        found = find_pretrained(dict(config.model.families)[LLM], theirs).settings if theirs else {}
    except ConfigError:  # a run that continues needs its folder no more
        return 0
    return int(found.get("max_position_embeddings") or 0)


def folder_bindings(path: str) -> list[str]:
    """Bindings that make a configuration of a folder alone: what its files say, and messages as data.

    Raises:
      ConfigError: it is no such folder; one line.
    """
    try:
        theirs = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"--weights={path!r}: {error}") from None
    messages = "Data.sources={'messages': 1.0}"
    if theirs.get("model_type") in WHOLES or any(part in theirs for part in _MEDIA):
        return [messages, f"Model.weights={path!r}"]
    return [messages, "Model.encoders={}", f"llm/Weights.path={path!r}"]
