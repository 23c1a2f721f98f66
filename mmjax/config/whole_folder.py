"""A configuration made of a folder alone: of a whole model, or of a language model. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.config.schema import Config
from mmjax.configurable import ConfigError
from mmjax.models.config import LLM
from mmjax.models.pretrained import WHOLES, find_pretrained
from mmjax.weights.folder import read_config

TOKENIZER = "tokenizer.json"


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
    setting = f"--weights={path!r}"
    try:
        theirs = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None
    kind, file = str(theirs.get("model_type", "")), Path(path) / TOKENIZER
    bindings = ["Data.sources={'messages': 1.0}"] + [f"Data.tokenizer={str(file)!r}"] * file.is_file()
    if kind in WHOLES:
        return [*bindings, f"Model.weights={path!r}", *_preprocessing(kind, theirs)]
    return [*bindings, "Model.encoders={}", f"llm/Weights.path={path!r}"]


def _preprocessing(kind: str, theirs: Mapping[str, Any]) -> list[str]:
    """How a whole model's images and dialogues are made ready."""
    side = theirs["vision_config"].get("image_size", 336)
    return {"llava": ["messages/Source.preset='llava15'", f"messages/Source.size=({side}, {side})"]}[kind]
