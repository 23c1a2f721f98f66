"""The small files of a folder about the input of its model. Nothing else of the folder is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.without_template import WITHOUT_TEMPLATE
from mmjax.json_files import is_there, read_bytes, read_object, read_text

TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"
_JINJA, _OLD_JINJA = "chat_template.jinja", "chat_template.json"
_MOST_TEMPLATE = 1 << 20
_NAMED = "default"
"""The name of the template that is used if ``tokenizer_config.json`` has several."""
_READ = (
    TOKENIZER,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    _JINJA,
    _OLD_JINJA,
)
"""The files on which tokens depend."""


def read_json(folder: str, name: str) -> dict[str, Any]:
    """The JSON object in file `name`, such as "config.json", of a folder; {} if there is no such file.

    Raises ConfigError for other contents. folder: the path of a checkpoint's folder, in the layout of Hugging Face.
    """
    file = Path(folder) / name
    return read_object(file) if is_there(file) else {}


def has_tokenizer(folder: str) -> bool:
    """Whether a folder has a tokenizer.json. Raises ConfigError if it has only a tokenizer.model, which is not read.

    folder: the path of a checkpoint's folder, in the layout of Hugging Face.
    """
    if is_there(Path(folder) / TOKENIZER):
        return True
    if is_there(Path(folder) / _SENTENCEPIECE):
        fix = f"save_pretrained its AutoTokenizer into it with transformers, which writes {TOKENIZER}"
        raise ConfigError(
            f"{folder} has {_SENTENCEPIECE} alone, which mmjax does not read; {fix}, or set Data.tokenizer"
        )
    return False


def is_processor(folder: str) -> bool:
    """Whether the folder's model takes images or recordings, so that a processor makes its input.

    folder: the path of a checkpoint's folder, in the layout of Hugging Face. Its config.json then has a "vision_config"
    or an "audio_config", or there is a processor_config.json.
    """
    config = read_json(folder, "config.json")
    return "vision_config" in config or "audio_config" in config or is_there(Path(folder) / "processor_config.json")


def find_chat_template(folder: str) -> tuple[str, str]:
    """(text, file name) of a folder's chat template; ("", "") without one. Raises ConfigError for malformed files.

    The text is Jinja's, the file "chat_template.jinja", "chat_template.json" or "tokenizer_config.json", the first that
    has one; "" for the template of a model whose processor writes the text.

    folder: the path of a checkpoint's folder, in the layout of Hugging Face.
    """
    if is_there(Path(folder) / _JINJA):
        return read_text(Path(folder) / _JINJA, most=_MOST_TEMPLATE), _JINJA
    for name in (_OLD_JINJA, "tokenizer_config.json"):
        template = read_json(folder, name).get("chat_template")
        if isinstance(template, list):
            template = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        if isinstance(template, Mapping):
            template = template.get(_NAMED)
        if isinstance(template, str) and template:
            return template, name
    return WITHOUT_TEMPLATE.get(str(read_json(folder, "config.json").get("model_type")), ""), ""


def tokenizer_digest(path: str) -> str:
    """A hash, 32 hex digits, of a tokenizer's file, or of a folder's files that tokens depend on; "" without files.

    path: a tokenizer.json, a folder with one, or "", the value of `Data.tokenizer`.
    """
    files = [Path(path) / name for name in _READ] if Path(path).is_dir() else [Path(path)] if path else []
    contents = [file.name.encode() + b"\0" + read_bytes(file) for file in files if is_there(file)]
    return hashlib.blake2b(b"\0".join(contents), digest_size=16).hexdigest() if contents else ""
