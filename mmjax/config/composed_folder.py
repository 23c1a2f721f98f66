"""Writes the folder of a whole model whose modules came from several folders, with tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmjax.config.schema import Config
from mmjax.configurable import require
from mmjax.data.loader import tokenizer_of
from mmjax.models.composed import Composed, Read
from mmjax.weights.write import write

_OF_TEXT = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "tokenizer.model"),
)
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
    return write(whole.config, whole.entries, whole.reader(read), out, dtype=dtype, files=_files(config, whole))


def _dtype(folder: str) -> str:
    """The dtype that a folder says its tensors have."""
    own = _json(Path(folder) / "config.json")
    said = own.get("dtype", own.get("torch_dtype"))
    return said if said in _NARROW else _WIDEST


def _files(config: Config, whole: Composed) -> dict[str, bytes]:
    text, tower = _text_folder(config), config.pretrained(whole.modules[0])
    found = {name: (text / name).read_bytes() for name in _OF_TEXT if text and (text / name).is_file()}
    if text:
        found[_TOKENIZER], image = _with_image(text / _TOKENIZER, config, whole.config["image_token_index"])
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
    if tower and (Path(tower) / _IMAGES).is_file():
        found[_IMAGES] = (Path(tower) / _IMAGES).read_bytes()
    return found


def _text_folder(config: Config) -> Path | None:
    """The folder with the tokenizer; ``None`` without one."""
    given = Path(config.data.tokenizer)
    folder = given if given.is_dir() else given.parent
    return folder if config.data.tokenizer and (folder / _TOKENIZER).is_file() else None


def _with_image(file: Path, config: Config, number: int) -> tuple[bytes, str]:
    """A ``tokenizer.json`` with a token of this number for images, and the token's text.

    Special tokens that a run added behind the file's vocabulary, such as an end token, get their numbers too.

    Raises:
      ConfigError: the file has another token for images.
    """
    from tokenizers import AddedToken, Tokenizer

    found, ours = Tokenizer.from_file(str(file)), tokenizer_of(config.data, config.model.media)
    size = found.get_vocab_size(with_added_tokens=True)
    if number < size:
        return file.read_bytes(), str(found.id_to_token(number))
    names = [*(ours.shown([i]) for i in range(size, number)), _IMAGE]
    found.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    fix = f"it has {_IMAGE} as a text of its own; name the folder in Data.tokenizer, whose token that then is"
    require(found.token_to_id(_IMAGE) == number, "Data.tokenizer", str(file), fix)
    return found.to_str().encode(), _IMAGE


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
