"""The special tokens of a folder's tokenizer, as its JSON files say them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have names, in templates too."""
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
"""Keys of special tokens without names."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token beside the model's vocabulary, as ``tokenizer.json`` lists it.

    Attributes:
      id: its id.
      text: its text.
      flags: how it is found in texts, such as {"lstrip": False, "special": True}.
    """

    id: int
    text: str
    flags: Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What a folder says of its tokenizer's special tokens.

    Attributes:
      texts: by the name that templates have for them, such as "bos_token"; one that the folder says is none is "".
      begin: whether texts begin with bos; None: as ``tokenizer.json`` has it.
      stops: ids of tokens at which an answer ends.
      pad: id of the padding; None if the files name none.
      image: id of the token that stands for an image; None without one.
      blank: where texts get a blank in front: "first" at their beginning, "always" behind special tokens too; "" as
        ``tokenizer.json`` has it.
      added: tokens with ids that other files than ``tokenizer.json`` list.
      extra: texts of special tokens that have neither a name nor an id.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    begin: bool | None = None
    stops: tuple[int, ...] = ()
    pad: int | None = None
    image: int | None = None
    blank: str = ""
    added: tuple[AddedToken, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, str]:
        """Those that there are."""
        return {name: text for name, text in self.texts.items() if text}


def read_special_tokens(folder: str) -> SpecialTokens:
    """The special tokens of a folder. Raises ConfigError for a file that cannot be read."""
    own, mapped = read_json(folder, "tokenizer_config.json"), read_json(folder, "special_tokens_map.json")
    generation, config = read_json(folder, "generation_config.json"), read_json(folder, "config.json")
    texts = {name: _text(files[name]) for name in NAMES for files in (mapped, own) if name in files}
    flags = [name for name in ("add_bos_token", "add_eos_token") if name in own]
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    order = (generation, config, text or {})
    images = (config.get(name) for name in ("image_token_id", "image_token_index"))
    extra = _extra(mapped) + _extra(own)
    return SpecialTokens(
        texts=texts,
        begin=bool(own.get("add_bos_token")) if flags else None,
        stops=next((ids for ids in map(lambda one: _ids(one.get("eos_token_id")), order) if ids), ()),
        pad=next((ids[0] for ids in map(lambda one: _ids(one.get("pad_token_id")), order) if ids), None),
        image=next((one for one in images if isinstance(one, int)), None),
        blank=_blank(own, config),
        added=_added(folder, own.get("added_tokens_decoder"), {*texts.values(), *extra}),
        extra=tuple(dict.fromkeys(extra)),
    )


def _added(folder: str, listed: Any, special: Collection[str]) -> tuple[AddedToken, ...]:
    """Tokens of ``tokenizer_config.json``, or of the older ``added_tokens.json``, in the order of their ids.

    Published folders list tokens there that their ``tokenizer.json`` lacks. The second file counts only where the first
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
    """The id of an added token. Raises ConfigError where it is none."""
    text = str(value)
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{folder}: its files list an added token with the id {text[:40]!r}; get them again")
    return int(text)


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of an added token; one that is not special is found in normalized text, where nothing is said."""
    usual = {"normalized": not token.get("special", False)}
    return {name: bool(token.get(name, usual.get(name, False))) for name in _FLAGS}


def _extra(file: Mapping[str, Any]) -> tuple[str, ...]:
    several = [file[key] for key in _EXTRA if key in file]
    listed = [value.values() if isinstance(value, Mapping) else value for value in several]
    texts = [_text(value) for values in listed if isinstance(values, Iterable) for value in values]
    return tuple(text for text in texts if text)


def _blank(own: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The blanks of Llama's tokenizer, which transformers builds anew for this model type alone."""
    kind, made = config.get("model_type"), str(own.get("tokenizer_class"))
    if kind != "llama" or made.removesuffix("Fast") != "LlamaTokenizer" or own.get("add_prefix_space") is False:
        return ""
    return "always" if own.get("legacy") else "first"


def _text(value: Any) -> str:
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else ""


def _ids(value: Any) -> tuple[int, ...]:
    several: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(one for one in several if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
