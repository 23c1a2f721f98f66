"""Writes the folder of a whole model whose modules came from several folders, and the files that new tokens change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from mmjax.recipe.image_processor import IMAGES, image_processor
from mmjax.recipe.recipe import Recipe
from mmjax.weights.folder import CONFIG
from mmjax.weights.write import write

_TEXT_FILES = ("special_tokens_map.json", "generation_config.json", "tokenizer.model")
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_TOKENIZER, _PROCESSOR = "tokenizer.json", "processor_config.json"
_IMAGE = "<image>"
_WIDEST, _NARROW = "float32", ("bfloat16", "float16")


def write_whole(recipe: Recipe, model: Composed, read: Read, out: Path) -> int:
    """Writes the folder of a whole model: ``config.json``, weights, and files of tokenizer and image processor.

    Its tensors have the dtype of the modules' folders, or float32 if these differ. The tokenizer's files come from
    ``Data.tokenizer``, with a token for images; the image processor's has the rules of the run's datasets. Files that
    do not exist are left out.

    Args:
      recipe: the run's.
      model: the folder's content, as ``compose_run`` gives it.
      read: a function of names of the run's leaves, such as ["llm/embed"], that returns the whole leaves by name.
      out: the directory to make.

    Returns:
      The number of tensors written.
    """
    dtypes = {_dtype(recipe.model.folder(module)) for module in model.modules if recipe.model.folder(module)}
    dtype = dtypes.pop() if len(dtypes) == 1 else _WIDEST
    return write(model.config, model.entries, model.reader(read), out, dtype=dtype, files=small_files(recipe, model))


def _dtype(folder: str) -> str:
    """The dtype of tensors that a folder's config states; float32 for any but the narrow ones."""
    settings = read_json(folder, CONFIG)
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    return dtype if dtype in _NARROW else _WIDEST


def image_token(recipe: Recipe) -> int:
    """The id of the token that stands for an image in the folder of a whole model; 0 for a model without media.

    The tokenizer's "<image>", if it has that token and none under the run's own id; else the run's own id.
    """
    if not recipe.model.media:
        return 0
    number = _tokenizer(recipe).media_token(recipe.model.media[0])
    if not _text_folder(recipe):
        return number
    loaded = read_tokenizer(recipe.data.settings.tokenizer, recipe.data.settings.new_tokens)
    image_id = loaded.token_to_id(_IMAGE) if loaded.id_to_token(number) is None else None
    return number if image_id is None else image_id


def small_files(recipe: Recipe, model: Composed) -> dict[str, bytes]:
    """The content of the folder's files beside weights and ``config.json``, by file name: "tokenizer.json",
    "processor_config.json", "preprocessor_config.json" and others of the language model's folder.

    Args:
      recipe: the run's.
      model: the folder's content, as ``compose_run`` gives it.
    """
    text, tower = _text_folder(recipe), recipe.model.folder(model.modules[0])
    files = {name: (text / name).read_bytes() for name in _TEXT_FILES if text and (text / name).is_file()}
    if text:
        files[_TOKENIZER], image = _with_image(recipe, model.config["image_token_index"])
        vision = model.config["vision_config"]
        has_class_token = model.config["vision_feature_select_strategy"] == "default"
        processor = {
            "processor_class": "LlavaProcessor",
            "image_token": image,
            "patch_size": vision["patch_size"],
            "num_additional_image_tokens": int(has_class_token),
            "vision_feature_select_strategy": model.config["vision_feature_select_strategy"],
        }
        files[_PROCESSOR] = json.dumps(processor, indent=2).encode()
        files |= _text_files(recipe, text, image)
    images, _ = image_processor(recipe, tower, model.config["vision_config"]["num_channels"])
    return files | ({IMAGES: images} if images else {})


def grown_files(recipe: Recipe, folder_config: Mapping[str, Any]) -> dict[str, bytes]:
    """The new content of a language model's small files that new tokens change, by file name; {} without new tokens.

    The files are "config.json" with the new "vocab_size" and, if the tokenizer is a folder's, "tokenizer.json" and
    "tokenizer_config.json".

    Args:
      recipe: the run's.
      folder_config: the folder's ``config.json``.
    """
    if not recipe.data.settings.new_tokens:
        return {}
    rows = {"vocab_size": recipe.model[LLM].settings.vocab}
    changed = {**folder_config, **(rows if "vocab_size" in folder_config or "text_config" not in folder_config else {})}
    if "text_config" in folder_config:
        changed["text_config"] = {**folder_config["text_config"], **rows}
    files = {CONFIG: (json.dumps(changed, indent=2) + "\n").encode()}
    if folder := _text_folder(recipe):
        loaded = read_tokenizer(recipe.data.settings.tokenizer, recipe.data.settings.new_tokens)
        files |= {_TOKENIZER: loaded.to_str().encode(), **_tokenizer_config(folder, "added_tokens_decoder")}
    return files


def _tokenizer_config(folder: Path, *without: str) -> dict[str, bytes]:
    """The tokenizer's settings without some keys, such as the list of tokens, which is in ``tokenizer.json`` too."""
    settings = {key: value for key, value in read_json(str(folder), _TOKENIZER_CONFIG).items() if key not in without}
    return {_TOKENIZER_CONFIG: json.dumps(settings, indent=2).encode()} if settings else {}


def _text_files(recipe: Recipe, folder: Path, image: str) -> dict[str, bytes]:
    """The tokenizer's settings, and the chat template with places for images."""
    files = _tokenizer_config(folder, "added_tokens_decoder", "chat_template")
    templates = {json.dumps([source.template, dict(source.pieces)]): source for source in recipe.data.sources.values()}
    source, _ = find_chat_template(str(folder))
    if len(templates) == 1 and (only := next(iter(templates.values()))).template != FOLDER:
        chat = only.chat(recipe.data.settings.tokenizer)
        assert isinstance(chat, Template)
        files[_TEMPLATE] = with_inline_images(_jinja(chat, _tokenizer(recipe)), image, ()).encode()
    elif source:
        chat = read_template(str(folder))
        parts = [role for role in (USER, ASSISTANT, SYSTEM) if chat.takes_parts(role)]
        files[_TEMPLATE] = with_inline_images(source, image, parts).encode()
    return files


def _jinja(template: Template, tokenizer: Tokenizer) -> str:
    """One of mmjax's templates in Jinja; a dialogue ends with an end token, as in a run."""
    eos, bos = tokenizer.shown([tokenizer.eos]), "" if tokenizer.bos is None else tokenizer.shown([tokenizer.bos])
    ending = template.answer.split(TEXT)[1]
    stops = EOS in ending or set(tokenizer.encode(ending)) & set(tokenizer.stops)
    return jinja_of(template, bos, eos, "" if stops else eos)


def _text_folder(recipe: Recipe) -> Path | None:
    """The folder with the tokenizer; ``None`` without one."""
    path = Path(recipe.data.settings.tokenizer)
    folder = path if path.is_dir() else path.parent
    return folder if recipe.data.settings.tokenizer and (folder / _TOKENIZER).is_file() else None


def _with_image(recipe: Recipe, image_id: int) -> tuple[bytes, str]:
    """A ``tokenizer.json`` in which the token of this id stands for images, and that token's text.

    Special tokens that a run added behind the file's vocabulary, such as an end token, keep their ids.

    Raises:
      ConfigError: the file's ids have gaps, so that the next token would get another id.
    """
    from tokenizers import AddedToken

    settings = recipe.data.settings
    loaded, tokenizer = read_tokenizer(settings.tokenizer, settings.new_tokens), _tokenizer(recipe)
    size = 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
    names = (
        [str(loaded.id_to_token(image_id))]
        if image_id < size
        else [*(tokenizer.shown([i]) for i in range(size, image_id)), _IMAGE]
    )
    loaded.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    if loaded.token_to_id(names[-1]) != image_id:
        raise ConfigError(f"Data.tokenizer={settings.tokenizer!r} has gaps between its ids; save_pretrained it again")
    return loaded.to_str().encode(), names[-1]


def _tokenizer(recipe: Recipe) -> Tokenizer:
    data = recipe.data.settings
    return make_tokenizer(data.tokenizer, recipe.model.media, data.image_encoder, data.new_tokens)
