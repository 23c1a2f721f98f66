"""The special tokens of a folder's tokenizer, from its JSON files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names of special tokens, in templates too."""
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
"""Keys of special tokens without names."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token beside the model's vocabulary, as ``tokenizer.json`` lists it.

    Attributes:
      id: its id.
      text: its text.
      flags: how it is matched in texts, such as {"lstrip": False, "special": True}.
    """

    id: int
    text: str
    flags: Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a folder's tokenizer.

    Attributes:
      texts: texts by the name in templates, such as "bos_token"; "" for a token that the folder sets to none.
      begin: whether texts begin with bos; None: as in ``tokenizer.json``.
      stops: ids of the tokens that end an answer.
      pad: id of the padding; None if the files name none.
      image, video: ids of the image token and of the video token; None without one.
      around_patch: ids of the tokens before and behind a video's temporal patch; None without them.
      around_image: ids of the tokens before and behind an image's, where the folder's processor writes them; ()
        elsewhere.
      begins_image: whether a template writes the first of them in an image's place, and not the image token.
      blank: where texts get a blank in front: "first" at their beginning, "always" after special tokens too; "" as in
        ``tokenizer.json``.
      added: tokens with ids that are listed in files other than ``tokenizer.json``.
      extra: texts of special tokens without a name or an id.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    begin: bool | None = None
    stops: tuple[int, ...] = ()
    pad: int | None = None
    image: int | None = None
    video: int | None = None
    around_patch: tuple[int | None, int | None] = (None, None)
    around_image: tuple[int, ...] = ()
    begins_image: bool = False
    blank: str = ""
    added: tuple[AddedToken, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def present(self) -> dict[str, str]:
        """`texts` by name, without tokens that the folder sets to none."""
        return {name: text for name, text in self.texts.items() if text}


def read_special_tokens(folder: str) -> SpecialTokens:
    """The special tokens of a folder. Raises ConfigError for a file that cannot be read.

    ``texts`` is such as {"bos_token": "<s>"}, and ``stops`` has the ids that end an answer. Without any of the files,
    all fields have their defaults.

    folder: the path of a checkpoint's folder, in the layout of Hugging Face: tokenizer_config.json,
    special_tokens_map.json, generation_config.json and config.json are read.
    """
    tokenizer, mapped = read_json(folder, "tokenizer_config.json"), read_json(folder, "special_tokens_map.json")
    generation, config = read_json(folder, "generation_config.json"), read_json(folder, "config.json")
    texts = {name: _text(file[name]) for name in NAMES for file in (mapped, tokenizer) if name in file}
    flags = [name for name in ("add_bos_token", "add_eos_token") if name in tokenizer]
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    order = (generation, config, text or {})
    image, video = (_number_of(config, f"{kind}_token_id", f"{kind}_token_index") for kind in ("image", "video"))
    begins_image = "boi_token_index" in config  # Gemma 3's; Gemma 4 has "boi_token_id"
    around_image = [_number_of(config, f"{name}_token_index", f"{name}_token_id") for name in ("boi", "eoi")]
    extra = _extra(mapped) + _extra(tokenizer)
    stops = next((ids for file in order if (ids := _ids(file.get("eos_token_id")))), ())
    return SpecialTokens(
        texts=texts,
        begin=bool(tokenizer.get("add_bos_token")) if flags else None,
        stops=stops,
        pad=next((ids[0] for file in order if (ids := _ids(file.get("pad_token_id")))), None),
        image=image,
        video=None if video in stops else video,  # an end token is no video's, whatever the file says
        around_patch=(_number_of(config, "vision_start_token_id"), _number_of(config, "vision_end_token_id")),
        around_image=tuple(n for n in around_image if n is not None) if all(around_image) else (),
        begins_image=begins_image,
        blank=_blank(tokenizer, config),
        added=_added(folder, tokenizer.get("added_tokens_decoder"), {*texts.values(), *extra}),
        extra=tuple(dict.fromkeys(extra)),
    )


def _added(folder: str, listed: Any, special: Collection[str]) -> tuple[AddedToken, ...]:
    """Tokens of ``tokenizer_config.json``, or of the older ``added_tokens.json``, in the order of their ids.

    Published folders list tokens there that their ``tokenizer.json`` lacks. The second file is read only if the first
    has no list.

    Args:
      folder: the folder.
      listed: the list of ``tokenizer_config.json``.
      special: texts of special tokens.
    """
    if isinstance(listed, Mapping):
        flags = [(number, token) for number, token in listed.items() if isinstance(token, Mapping)]
    else:
        texts = read_json(folder, "added_tokens.json")
        flags = [(number, {"content": text, "special": text in special}) for text, number in texts.items()]
    tokens = [
        AddedToken(id=_number(folder, number), text=_text(token), flags=_flags(token))
        for number, token in flags
        if _text(token)
    ]
    return tuple(sorted(tokens, key=lambda token: token.id))


def _number(folder: str, value: Any) -> int:
    """The id of an added token. Raises ConfigError if it is malformed."""
    text = str(value)
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{folder}: its files list an added token with the id {text[:40]!r}; get them again")
    return int(text)


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of an added token. By default, a token that is not special is matched in normalized text."""
    usual = {"normalized": not token.get("special", False)}
    return {name: bool(token.get(name, usual.get(name, False))) for name in _FLAGS}


def _extra(file: Mapping[str, Any]) -> tuple[str, ...]:
    several = [file[key] for key in _EXTRA if key in file]
    listed = [value.values() if isinstance(value, Mapping) else value for value in several]
    texts = [_text(value) for values in listed if isinstance(values, Iterable) for value in values]
    return tuple(text for text in texts if text)


def _blank(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The blanks of Llama's tokenizer, which transformers builds anew for this model type only."""
    kind, class_name = config.get("model_type"), str(tokenizer.get("tokenizer_class"))
    is_llama = kind == "llama" and class_name.removesuffix("Fast") == "LlamaTokenizer"
    if not is_llama or tokenizer.get("add_prefix_space") is False:
        return ""
    return "always" if tokenizer.get("legacy") else "first"


def _number_of(config: Mapping[str, Any], *names: str) -> int | None:
    """The first integer among these keys' values."""
    return next((number for number in map(config.get, names) if isinstance(number, int)), None)


def _text(value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _ids(value: Any) -> tuple[int, ...]:
    several: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(item for item in several if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
