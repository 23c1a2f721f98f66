"""Writes the folder of a whole model whose modules came from several folders, and files for new tokens in a copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.config.schema import Config
from mmjax.configurable import ConfigError
from mmjax.data.chat import EOS, TEXT, Template
from mmjax.data.processor.files import find_chat_template, read_json
from mmjax.data.processor.inline_images import jinja_of, with_inline_images
from mmjax.data.processor.template import read_template
from mmjax.data.sources.config import FOLDER
from mmjax.data.tokenizer import Tokenizer, make_tokenizer, read_tokenizer
from mmjax.data.turns import ASSISTANT, SYSTEM, USER
from mmjax.models.composed import Composed, Read
from mmjax.models.config import LLM
from mmjax.weights.folder import CONFIG
from mmjax.weights.write import write

_OF_TEXT = ("special_tokens_map.json", "generation_config.json", "tokenizer.model")
_TEMPLATE, _ABOUT = "chat_template.jinja", "tokenizer_config.json"
_TOKENIZER, _IMAGES, _PROCESSOR = "tokenizer.json", "preprocessor_config.json", "processor_config.json"
_IMAGE = "<image>"
_WIDEST, _NARROW = "float32", ("bfloat16", "float16")


def write_whole(config: Config, whole: Composed, read: Read, out: Path) -> int:
    """Writes the folder.

    The dtype of its tensors is that of the modules' folders, float32 where these differ. Files of its tokenizer come
    from ``Data.tokenizer``, with a token for images; those of images from the tower's folder. What there is not is left
    out.

    Args:
      config: the run's.
      whole: the model.
      read: gives whole leaves by name, such as "llm/embed".
      out: the directory to make.

    Returns:
      How many tensors are written.
    """
    dtypes = {_dtype(config.pretrained(module)) for module in whole.modules if config.pretrained(module)}
    dtype = dtypes.pop() if len(dtypes) == 1 else _WIDEST
    return write(whole.config, whole.entries, whole.reader(read), out, dtype=dtype, files=small_files(config, whole))


def _dtype(folder: str) -> str:
    """The dtype that a folder says its tensors have."""
    own = read_json(folder, CONFIG)
    said = own.get("dtype", own.get("torch_dtype"))
    return said if said in _NARROW else _WIDEST


def image_token(config: Config) -> int:
    """The id of the token that stands for an image in the folder of a whole model; 0 for a model without media.

    It is the run's own, or that of a tokenizer which has "<image>" as a text.
    """
    if not config.model.media:
        return 0
    number = _tokenizer(config).media_token(config.model.media[0])
    if not _text_folder(config):
        return number
    loaded = read_tokenizer(config.data.tokenizer, config.data.new_tokens)
    known = loaded.token_to_id(_IMAGE) if loaded.id_to_token(number) is None else None
    return number if known is None else known


def small_files(config: Config, whole: Composed) -> dict[str, bytes]:
    """By name, the files of the folder that hold no weights: of its tokenizer, its template and its images."""
    text, tower = _text_folder(config), config.pretrained(whole.modules[0])
    found = {name: (text / name).read_bytes() for name in _OF_TEXT if text and (text / name).is_file()}
    if text:
        found[_TOKENIZER], image = _with_image(config, whole.config["image_token_index"])
        vision = whole.config["vision_config"]
        classed = whole.config["vision_feature_select_strategy"] == "default"
        about = {
            "processor_class": "LlavaProcessor",
            "image_token": image,
            "patch_size": vision["patch_size"],
            "num_additional_image_tokens": int(classed),
            "vision_feature_select_strategy": whole.config["vision_feature_select_strategy"],
        }
        found[_PROCESSOR] = json.dumps(about, indent=2).encode()
        found |= _about_text(config, text, image)
    if tower and (Path(tower) / _IMAGES).is_file():
        found[_IMAGES] = (Path(tower) / _IMAGES).read_bytes()
    return found


def grown_files(config: Config, theirs: Mapping[str, Any]) -> dict[str, bytes]:
    """By name, the small files of a language model's folder that new tokens change; {} without new tokens.

    Args:
      config: the run's.
      theirs: the folder's ``config.json``.
    """
    if not config.data.new_tokens:
        return {}
    rows = {"vocab_size": config.modules[LLM].vocab}
    changed = {**theirs, **(rows if "vocab_size" in theirs or "text_config" not in theirs else {})}
    if "text_config" in theirs:
        changed["text_config"] = {**theirs["text_config"], **rows}
    files = {CONFIG: (json.dumps(changed, indent=2) + "\n").encode()}
    if folder := _text_folder(config):
        loaded = read_tokenizer(config.data.tokenizer, config.data.new_tokens)
        files |= {_TOKENIZER: loaded.to_str().encode(), **_about(folder, "added_tokens_decoder")}
    return files


def _about(folder: Path, *without: str) -> dict[str, bytes]:
    """The tokenizer's settings without some keys, such as the list of tokens, which the tokenizer's file has too."""
    settings = {key: value for key, value in read_json(str(folder), _ABOUT).items() if key not in without}
    return {_ABOUT: json.dumps(settings, indent=2).encode()} if settings else {}


def _about_text(config: Config, folder: Path, image: str) -> dict[str, bytes]:
    """The tokenizer's settings, and the template with places for images."""
    files = _about(folder, "added_tokens_decoder", "chat_template")
    templates = {json.dumps([source.template, dict(source.pieces)]): source for source in config.sources.values()}
    source, _ = find_chat_template(str(folder))
    if len(templates) == 1 and (only := next(iter(templates.values()))).template != FOLDER:
        chat = only.chat(config.data.tokenizer)
        assert isinstance(chat, Template)
        files[_TEMPLATE] = with_inline_images(_jinja(chat, _tokenizer(config)), image, ()).encode()
    elif source:
        chat = read_template(str(folder))
        parts = [role for role in (USER, ASSISTANT, SYSTEM) if chat.takes_parts(role)]
        files[_TEMPLATE] = with_inline_images(source, image, parts).encode()
    return files


def _jinja(template: Template, tokenizer: Tokenizer) -> str:
    """A template of ours in Jinja; a dialogue ends with an end token, as a run lays it out."""
    eos, bos = tokenizer.shown([tokenizer.eos]), "" if tokenizer.bos is None else tokenizer.shown([tokenizer.bos])
    ending = template.answer.split(TEXT)[1]
    stops = EOS in ending or set(tokenizer.encode(ending)) & set(tokenizer.stops)
    return jinja_of(template, bos, eos, "" if stops else eos)


def _text_folder(config: Config) -> Path | None:
    """The folder with the tokenizer; ``None`` without one."""
    given = Path(config.data.tokenizer)
    folder = given if given.is_dir() else given.parent
    return folder if config.data.tokenizer and (folder / _TOKENIZER).is_file() else None


def _with_image(config: Config, number: int) -> tuple[bytes, str]:
    """A ``tokenizer.json`` with a token of this number for images, and the token's text.

    Special tokens that a run added behind the file's vocabulary, such as an end token, get their numbers too.

    Raises:
      ConfigError: the file numbers its tokens with gaps, so that the next one has another number.
    """
    from tokenizers import AddedToken

    loaded, ours = read_tokenizer(config.data.tokenizer, config.data.new_tokens), _tokenizer(config)
    size = 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
    names = (
        [str(loaded.id_to_token(number))]
        if number < size
        else [*(ours.shown([i]) for i in range(size, number)), _IMAGE]
    )
    loaded.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    if loaded.token_to_id(names[-1]) != number:
        raise ConfigError(
            f"Data.tokenizer={config.data.tokenizer!r} has gaps between its ids; save_pretrained it again"
        )
    return loaded.to_str().encode(), names[-1]


def _tokenizer(config: Config) -> Tokenizer:
    return make_tokenizer(config.data.tokenizer, config.model.media, config.data.image_encoder, config.data.new_tokens)
