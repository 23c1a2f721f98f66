"""Turns text into token ids and back: bytes by default, a `tokenizer.json` of the `tokenizers` library when given.

Besides text there are pad, bos, eos and, per encoder, one placeholder id that marks where its tokens go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from mmjax.configurable import ConfigError


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Text and special tokens that were encoded together: N tokens.

    Attributes:
      text: the text of all P pieces; a special token has one or more characters in it.
      starts: int [P + 1], the character at which each piece begins in `text`, then the length of `text`.
      ids: int [N], the tokens.
      spans: int [N, 2], the first character of each token, and the one after its last.
    """

    text: str
    starts: np.ndarray
    ids: np.ndarray
    spans: np.ndarray


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data side and decoding.

    `vocab_size` counts all ids, `table_size` those that need a row in a table of embeddings: padding and placeholders
    after all others need none.
    """

    vocab_size: int
    table_size: int
    pad: int
    bos: int
    eos: int

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        ...

    def encode_whole(self, pieces: Sequence[str | int]) -> Encoded:
        """Encodes consecutive texts, with special ids between them: `bos`, `eos` or those of `media_token`.

        A text's tokens depend on the text around it, so a dialogue is encoded as a whole.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are left out."""
        ...

    def token(self, text: str) -> int | None:
        """The id of a text that is always a token of its own, such as "<|im_end|>" in some vocabularies."""
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
        self.vocab_size, self.table_size = 259 + len(self._media), 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_whole(self, pieces: Sequence[str | int]) -> Encoded:
        texts = [piece if isinstance(piece, str) else "\0" for piece in pieces]
        text, starts = "".join(texts), np.cumsum([0, *map(len, texts)])
        ids = [i for piece in pieces for i in (self.encode(piece) if isinstance(piece, str) else (piece,))]
        lengths = 1 if text.isascii() else [len(character.encode()) for character in text]
        firsts = np.repeat(np.arange(len(text)), lengths)
        return Encoded(text=text, starts=starts, ids=np.asarray(ids, int), spans=np.stack([firsts, firsts + 1], 1))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def token(self, text: str) -> int | None:
        return None

    def media_token(self, encoder: str) -> int:
        return _media_token(self._media, encoder)


class FileTokenizer:
    """A `tokenizer.json`. Missing special tokens and the placeholders get ids after its own vocabulary.

    Its settings for truncation and padding are ignored.
    """

    _OPEN, _CLOSE = "\ufdd0", "\ufdd1"
    """Characters that no text has (Unicode keeps them free), around the name of a special token that is no text."""
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
        self.table_size = max(self._text_size, self.bos + 1, self.eos + 1)
        self._added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._marks, self._own_ids = self._mark([self.bos, self.eos, *self._media.values()])

    def _mark(self, ids: Sequence[int]) -> tuple[dict[int, str], dict[int, int]]:
        """The text of each special id, and our ids by the ids that the library gives to the texts made up here."""
        from tokenizers import AddedToken

        marks = {i: text for text, i in self._added.items() if i in ids}
        made = {i: f"{self._OPEN}{i}{self._CLOSE}" for i in ids if i not in marks}
        self._tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in made.values()])
        return marks | made, {self._tokenizer.token_to_id(text): i for i, text in made.items()}

    def encode(self, text: str) -> list[int]:
        return self.encode_whole([text]).ids.tolist()

    def encode_whole(self, pieces: Sequence[str | int]) -> Encoded:
        texts = [
            piece.replace(self._OPEN, "\N{REPLACEMENT CHARACTER}") if isinstance(piece, str) else self._marks[piece]
            for piece in pieces
        ]
        found = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        return Encoded(
            text="".join(texts),
            starts=np.cumsum([0, *map(len, texts)]),
            ids=np.asarray([self._own_ids.get(i, i) for i in found.ids], int),
            spans=np.asarray(found.offsets, int).reshape(-1, 2),
        )

    def decode(self, ids: Iterable[int]) -> str:
        special = {self.pad, self.bos, self.eos}
        text = [int(i) for i in ids if 0 <= i < self._text_size and int(i) not in special]
        return self._tokenizer.decode(text, skip_special_tokens=True)

    def token(self, text: str) -> int | None:
        return self._added.get(text)

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
        found = HfTokenizer.from_file(str(path))
        found.no_truncation()
        found.no_padding()
        return found
    except Exception as error:  # the library raises bare Exception on a malformed file
        raise ConfigError(f"Data.tokenizer={str(path)!r} is not a tokenizer.json: {error}") from None


def make_tokenizer(path: str, encoders: Sequence[str]) -> Tokenizer:
    """The tokenizer of `Data.tokenizer` (`path`, "" = bytes) with a placeholder for each of `encoders`."""
    return FileTokenizer(path, encoders) if path else ByteTokenizer(encoders)
