"""Settings that the processor of a folder decides: tokenizer, chat template, and rules for images and videos."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmjax.checkpoint.config import WeightsConfig
from mmjax.configurable import ConfigError, require
from mmjax.data.config import DataConfig
from mmjax.data.processor import image_rules, video_rules
from mmjax.data.processor.files import find_chat_template, has_tokenizer, read_json
from mmjax.data.processor.image_rules import image_settings
from mmjax.data.processor.video_rules import video_settings
from mmjax.data.sources.config import FOLDER, SourceConfig
from mmjax.data.tokenizer import make_tokenizer
from mmjax.models.config import LLM

DECIDED: Mapping[type[Any], tuple[str, ...]] = {
    DataConfig: ("tokenizer", "new_tokens"),
    SourceConfig: ("template", "resize", "video"),
}
"""The settings that a folder decides if they are left out."""
FREE = (*image_rules.FREE, *video_rules.FREE)
"""Settings that may differ from the folder's."""
_DEFAULT_TEMPLATES = {"llava": "vicuna"}
"""By model_type, the template for a folder without a chat template."""


def find_tokenizer(folders: Iterable[str]) -> str:
    """Returns the path of the first of these folders that has a tokenizer; "" if none has. A path may be "".

    Raises:
      ConfigError: a folder has a tokenizer that cannot be read.
    """
    return next((folder for folder in folders if folder and has_tokenizer(folder)), "")


def data_settings(
    values: Mapping[str, Any], llm: str, model: str, weights: Mapping[str, WeightsConfig]
) -> dict[str, Any]:
    """The fields of `Data` that the language model's folder and `Weights` decide: "tokenizer" and "new_tokens".

    "tokenizer" is a path, or "" if neither folder has a tokenizer; it is absent where it is set. "new_tokens" are texts
    such as ("<sep>",), and absent where no `Weights` has any.

    Args:
      values: fields of `Data` that are set, by name.
      llm: the folder that the language model starts from; "" for none.
      model: Model.weights; "" for none.
      weights: the start of each part by name, such as {"llm": WeightsConfig()}; "llm" is needed.

    Raises:
      ConfigError: two settings of new tokens contradict each other, or a folder's tokenizer cannot be read.
    """
    new_tokens = weights[LLM].new_tokens
    for name, start in weights.items():
        fix = f"is of the language model; write {LLM}/Weights.new_tokens"
        require(start.new_tokens in ((), new_tokens), f"{name}/Weights.new_tokens", start.new_tokens, fix)
    chosen = values.get("new_tokens", new_tokens)
    fix = f"{LLM}/Weights.new_tokens={new_tokens!r}; leave one out"
    require(not new_tokens or chosen == new_tokens, "Data.new_tokens", chosen, fix)
    decided: dict[str, Any] = {"new_tokens": new_tokens} if new_tokens else {}
    return decided if "tokenizer" in values else decided | {"tokenizer": find_tokenizer((llm, model))}


def grown_tables(settings: Mapping[str, Any], data: DataConfig) -> dict[str, int]:
    """``{"vocab": rows}``, the field of a language model with rows for new tokens too; {} without new tokens.

    Args:
      settings: fields that the language model's folder decides, by name, such as {"vocab": 32000}, which is needed.
      data: its ``tokenizer`` and ``new_tokens`` are read.
    """
    if not data.new_tokens:
        return {}
    tokenizer = make_tokenizer(data.tokenizer, (), data.image_encoder, data.new_tokens)
    return {"vocab": max(settings["vocab"], tokenizer.table_size)}


def source_settings(
    values: Mapping[str, Any], name: str, tokenizer: str, folder: str, *, has_times: bool
) -> dict[str, Any]:
    """The fields of a `Source` that folders decide, by name: "template", and rules for images such as "resize".

    "template" is the name of a chat template, such as "vicuna", or "folder" for the folder's own; "video" and others
    are rules for videos, if the folder's processor is one that mmjax has. The rules for images have the
    values of ``SourceConfig``'s fields, such as {"resize": "fixed", "size": (336, 336), "mean": (0.5, 0.5, 0.5)}. {} if
    no folder decides any.

    Args:
      values: fields that are set, by name. A `template` that is set stays, with a `resize` all rules for images, and
        with a `video` or a `resize` all rules for videos.
      name: the source's, for messages.
      tokenizer: Data.tokenizer.
      folder: the folder that the image encoder starts from; "" for none.
      has_times: whether the LLM's positions have an axis of time; else times of videos cannot be positions, and a
        folder that has them so decides nothing about videos.

    Raises:
      ConfigError: a folder has rules for images that mmjax does not have, or a file cannot be read.
    """
    decided: dict[str, Any] = {}
    if "template" not in values and tokenizer and Path(tokenizer).is_dir():
        model_type = str(read_json(tokenizer, "config.json").get("model_type", ""))
        template = FOLDER if find_chat_template(tokenizer)[0] else _DEFAULT_TEMPLATES.get(model_type, "")
        decided |= {"template": template} if template else {}
    if "resize" not in values and folder:
        try:
            decided |= image_settings(folder)
        except ConfigError as error:
            raise ConfigError(f"{name}/Source.resize is left to {folder}: {error}") from None
        if "video" not in values:
            try:
                of_videos = video_settings(folder, {**decided, **values})
            except ConfigError as error:
                raise ConfigError(f"{name}/Source.video is left to {folder}: {error}") from None
            decided |= of_videos if has_times or of_videos.get("video") != "positions" else {}
    return decided
