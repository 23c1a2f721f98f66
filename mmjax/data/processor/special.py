"""The special tokens of a folder's tokenizer, as its JSON files say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.data.processor.files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have names, in templates too."""


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
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    begin: bool | None = None
    stops: tuple[int, ...] = ()
    pad: int | None = None
    image: int | None = None
    blank: str = ""

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
    return SpecialTokens(
        texts=texts,
        begin=bool(own.get("add_bos_token")) if flags else None,
        stops=next((ids for ids in map(lambda one: _ids(one.get("eos_token_id")), order) if ids), ()),
        pad=next((ids[0] for ids in map(lambda one: _ids(one.get("pad_token_id")), order) if ids), None),
        image=next((one for one in images if isinstance(one, int)), None),
        blank=_blank(own, config),
    )


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
