"""Text to token ids and back: bytes by default, a `tokenizer.json` of the `tokenizers` library when given.

Besides text there are pad, bos, eos and, per encoder, one placeholder id that marks where its tokens go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mmjax.configurable import ConfigError


class Tokenizer(Protocol):
    """What the data side and decoding need of a tokenizer. `vocab_size` counts the special ids too."""

    vocab_size: int
    pad: int
    bos: int
    eos: int

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are left out."""
        ...

    def media_token(self, encoder: str) -> int:
        """The placeholder id of `encoder`; ConfigError if there is no such encoder."""
        ...


def _media_token(ids: dict[str, int], encoder: str) -> int:
    if encoder not in ids:
        raise ConfigError(f"Model.encoders={sorted(ids)} lack {encoder!r}, for which a placeholder is wanted")
    return ids[encoder]


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255, then pad, bos, eos and the placeholders in the order of `encoders`."""

    def __init__(self, encoders: Sequence[str]):
        self.pad, self.bos, self.eos = 256, 257, 258
        self._media = {name: 259 + i for i, name in enumerate(encoders)}
        self.vocab_size = 259 + len(self._media)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def media_token(self, encoder: str) -> int:
        return _media_token(self._media, encoder)


class FileTokenizer:
    """A `tokenizer.json`. Missing special tokens and the placeholders get ids after its own vocabulary."""

    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
        "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
        "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    }

    def __init__(self, path: str | Path, encoders: Sequence[str]):
        self._tokenizer = _load(Path(path))
        self._text_size = size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        special: dict[str, int] = {}
        for kind, names in self._NAMES.items():
            known = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
            special[kind] = known[0] if known else size
            size += not known
        self.pad, self.bos, self.eos = special["pad"], special["bos"], special["eos"]
        self._media = {name: size + i for i, name in enumerate(encoders)}
        self.vocab_size = size + len(self._media)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        special = {self.pad, self.bos, self.eos}
        text = [int(i) for i in ids if 0 <= i < self._text_size and int(i) not in special]
        return self._tokenizer.decode(text, skip_special_tokens=True)

    def media_token(self, encoder: str) -> int:
        return _media_token(self._media, encoder)


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        raise ConfigError(
            f"Data.tokenizer={str(path)!r} needs the tokenizers package: pip install 'mmjax[hf]', or set it to ''"
        ) from None
    if not path.is_file():
        raise ConfigError(f"Data.tokenizer={str(path)!r} does not exist: give the path of a tokenizer.json, or ''")
    try:
        return HfTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception on a malformed file
        raise ConfigError(f"Data.tokenizer={str(path)!r} is not a tokenizer.json: {error}") from None


def make_tokenizer(path: str, encoders: Sequence[str]) -> Tokenizer:
    """The tokenizer of `Data.tokenizer` (`path`, "" = bytes) with a placeholder for each of `encoders`."""
    return FileTokenizer(path, encoders) if path else ByteTokenizer(encoders)
