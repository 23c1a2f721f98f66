"""What the processor of a folder decides: the tokenizer, the chat template and the rules for images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmjax.checkpoint.config import WeightsConfig
from mmjax.configurable import ConfigError, require
from mmjax.data.config import DataConfig
from mmjax.data.processor.files import find_chat_template, has_tokenizer, read_json
from mmjax.data.processor.image_rules import image_settings
from mmjax.data.sources.config import FOLDER, SourceConfig
from mmjax.data.tokenizer import make_tokenizer
from mmjax.models.config import LLM

DECIDED: Mapping[type[Any], tuple[str, ...]] = {
    DataConfig: ("tokenizer", "new_tokens"),
    SourceConfig: ("template", "resize"),
}
"""The settings that a folder decides where they are left out."""
_WITHOUT = {"llava": "vicuna"}
"""By model_type, the template of a folder that has none of its own."""


def find_tokenizer(folders: Iterable[str]) -> str:
    """The first of these folders ("" for none) that has a tokenizer; "" if none has.

    Raises:
      ConfigError: one has a tokenizer that cannot be read.
    """
    return next((folder for folder in folders if folder and has_tokenizer(folder)), "")


def data_settings(
    values: Mapping[str, Any], llm: str, model: str, weights: Mapping[str, WeightsConfig]
) -> dict[str, Any]:
    """The fields of `Data` that the language model's start decides: the tokenizer and its new tokens.

    Args:
      values: fields that are set.
      llm: the folder that the language model starts from; "" for none.
      model: Model.weights.
      weights: where each module starts from.

    Raises:
      ConfigError: two settings of new tokens contradict each other, or a folder's tokenizer cannot be read.
    """
    new = weights[LLM].new_tokens
    for name, start in weights.items():
        fix = f"is of the language model; write {LLM}/Weights.new_tokens"
        require(start.new_tokens in ((), new), f"{name}/Weights.new_tokens", start.new_tokens, fix)
    chosen = values.get("new_tokens", new)
    require(not new or chosen == new, "Data.new_tokens", chosen, f"{LLM}/Weights.new_tokens={new!r}; leave one out")
    decided: dict[str, Any] = {"new_tokens": new} if new else {}
    return decided if "tokenizer" in values else decided | {"tokenizer": find_tokenizer((llm, model))}


def grown_tables(settings: Mapping[str, Any], data: DataConfig) -> dict[str, int]:
    """The vocabulary of a language model with room for new tokens, where its folder's ``settings`` have none."""
    if not data.new_tokens:
        return {}
    tokenizer = make_tokenizer(data.tokenizer, (), data.image_encoder, data.new_tokens)
    return {"vocab": max(settings["vocab"], tokenizer.table_size)}


def source_settings(values: Mapping[str, Any], name: str, tokenizer: str, folder: str) -> dict[str, Any]:
    """The fields of a `Source` that folders decide.

    Args:
      values: fields that are set; a template that is set stands, and under a `resize` that is set, so do all rules for
        images.
      name: the source's, for messages.
      tokenizer: Data.tokenizer.
      folder: the folder that the image encoder starts from; "" for none.

    Raises:
      ConfigError: a folder has rules for images that mmjax does not have, or a file that cannot be read.
    """
    given: dict[str, Any] = {}
    if "template" not in values and tokenizer and Path(tokenizer).is_dir():
        kind = str(read_json(tokenizer, "config.json").get("model_type", ""))
        template = FOLDER if find_chat_template(tokenizer)[0] else _WITHOUT.get(kind, "")
        given |= {"template": template} if template else {}
    if "resize" not in values and folder:
        try:
            given |= image_settings(folder)
        except ConfigError as error:
            raise ConfigError(f"{name}/Source.resize is left to {folder}: {error}") from None
    return given
