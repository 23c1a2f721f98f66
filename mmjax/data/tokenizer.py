"""Turns text into token ids and back: bytes by default, a `tokenizer.json` of the `tokenizers` library when given.

Besides text there are pad, bos, eos and, per encoder, one placeholder id that marks where its tokens go. In a folder of
Hugging Face's the files beside `tokenizer.json` say which tokens these are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from mmjax.configurable import ConfigError, require
from mmjax.data.processor.files import TOKENIZER, has_tokenizer
from mmjax.data.processor.special import NAMES, AddedToken, SpecialTokens, read_special_tokens
from mmjax.json_files import read_object


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
    after all others need none. `bos` is what every text begins with, None for nothing. `eos` is what ends a dialogue;
    an answer ends at any of `stops`, which has it too.
    """

    vocab_size: int
    table_size: int
    pad: int
    bos: int | None
    eos: int
    stops: tuple[int, ...]

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

    def shown(self, ids: Sequence[int]) -> str:
        """The text of `ids` for people to read, special ids by name."""
        ...


def _media_token(ids: dict[str, int], encoder: str) -> int:
    if encoder not in ids:
        raise ConfigError(f"Model.encoders={sorted(ids)} lack {encoder!r}, for which a placeholder is wanted")
    return ids[encoder]


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255, then pad, bos, eos and the placeholders in the order of `encoders`."""

    def __init__(self, encoders: Sequence[str]):
        self.bos: int | None = 257
        self.pad, self.eos, self.stops = 256, 258, (258,)
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

    def shown(self, ids: Sequence[int]) -> str:
        return _shown(self, ids, 256, self.decode)


class FileTokenizer:
    """A `tokenizer.json`. Missing special tokens and the placeholders get ids after its own vocabulary.

    Its settings for truncation and padding are ignored.

    Args:
      path: the file.
      encoders: names of the encoders that placeholders are wanted for.
      said: what the folder of the file says of special tokens; they are guessed by their usual names where it says
        nothing.
      image: the encoder whose placeholder is the folder's image token.
      new: texts that become tokens of their own, behind all others.
    """

    _OPEN, _CLOSE = "\ufdd0", "\ufdd1"
    """Characters that no text has (Unicode keeps them free), around the name of a special token that is no text."""
    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
        "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
        "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    }

    def __init__(
        self,
        path: str | Path,
        encoders: Sequence[str],
        *,
        said: SpecialTokens | None = None,
        image: str = "",
        new: Sequence[str] = (),
    ):
        self._tokenizer = _load(Path(path), said.added if said else ())
        if said and said.blank:
            _put_blanks(self._tokenizer, said.blank)
        nameless = _add_named(self._tokenizer, said) if said else set()
        _add_new(self._tokenizer, new)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._text_size = size = 1 + max(vocabulary.values(), default=-1)
        special: dict[str, int | None] = {}
        for kind in self._NAMES:
            special[kind] = found = self._found(kind, said)
            if found is None and (said is None or kind != "bos"):
                special[kind] = size
                size += 1
        self.bos = special["bos"] if said is None or self._begins(said) else None
        pad, eos = special["pad"], special["eos"]
        assert pad is not None and eos is not None
        self.pad, self.eos = pad, eos
        self.stops = tuple(dict.fromkeys([eos, *(said.stops if said else ())]))
        own = said.image if said else None
        if own is not None and image in encoders and self._tokenizer.id_to_token(own) is None:
            fix = "get its tokenizer_config.json and added_tokens.json too, which may list the token"
            raise ConfigError(f"{path} has no token with the id {own}, which config.json gives an image's token; {fix}")
        self._media = {image: own} if own is not None and image in encoders else {}
        new = [name for name in encoders if name not in self._media]
        self._media |= {name: size + i for i, name in enumerate(new)}
        self.vocab_size = max(size + len(new), (own or 0) + 1)
        rows = {*vocabulary.values()} - nameless
        looked_up = {*rows, self.eos, self.eos if self.bos is None else self.bos} - {own}
        self.table_size = 1 + max(map(int, looked_up))
        self._added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        specials = [self.eos, *([] if self.bos is None else [self.bos]), *self._media.values()]
        self._marks, self._own_ids = self._mark(specials)

    def _found(self, kind: str, said: SpecialTokens | None) -> int | None:
        """The id of the special token "pad", "bos" or "eos"; None if there is none."""
        name = f"{kind}_token"
        if said and name in said.texts and kind != "pad":
            return self._tokenizer.token_to_id(said.texts[name]) if said.texts[name] else None
        if said and kind == "pad":
            named = self._tokenizer.token_to_id(said.texts[name]) if said.texts.get(name) else None
            return said.pad if named is None else named
        known = (self._tokenizer.token_to_id(text) for text in self._NAMES[kind])
        return next((i for i in known if i is not None), None)

    def _begins(self, said: SpecialTokens) -> bool:
        """Whether texts begin with bos: as the folder says, else as the file's own post-processor does it."""
        if said.begin is not None:
            return said.begin
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        return whole[: len(plain)] != plain and whole[:1] == [self._found("bos", said)]

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
        special = {self.pad, self.bos, *self.stops}
        text = [int(i) for i in ids if 0 <= i < self._text_size and int(i) not in special]
        return self._tokenizer.decode(text, skip_special_tokens=True)

    def token(self, text: str) -> int | None:
        return self._added.get(text)

    def media_token(self, encoder: str) -> int:
        return _media_token(self._media, encoder)

    def shown(self, ids: Sequence[int]) -> str:
        return _shown(self, ids, self._text_size, lambda own: self._tokenizer.decode(own, skip_special_tokens=False))


def _shown(tokenizer: Tokenizer, ids: Sequence[int], size: int, text_of: Callable[[list[int]], str]) -> str:
    """Text of the ids below `size`, and names of special ids that have no text."""
    names = {tokenizer.pad: "<pad>", tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    parts = groupby(map(int, ids), key=lambda i: -1 if i < size else i)
    return "".join(text_of([*own]) if i < 0 else names.get(i, f"<{i}>") * len([*own]) for i, own in parts)


def _load(path: Path, added: Sequence[AddedToken] = ()) -> Any:
    """The tokenizer of a file, with tokens that other files of its folder list."""
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        raise ConfigError(
            f"Data.tokenizer={str(path)!r} needs the tokenizers package: pip install tokenizers, or set it to ''"
        ) from None
    if not path.is_file():
        raise ConfigError(f"Data.tokenizer={str(path)!r} does not exist: give the path of a tokenizer.json, or ''")
    try:
        loaded = HfTokenizer.from_file(str(path))
        known = {token.content for token in loaded.get_added_tokens_decoder().values()}
        if any(token.text not in known for token in added):
            loaded = HfTokenizer.from_str(_with_added(path, added))
        loaded.no_truncation()
        loaded.no_padding()
    except Exception as error:  # the library raises bare Exception on a malformed file
        raise ConfigError(f"Data.tokenizer={str(path)!r} is not a tokenizer.json: {error}") from None
    for token in added:
        if (number := loaded.token_to_id(token.text)) != token.id:
            fix = "save_pretrained its AutoTokenizer into it with transformers, and look at the ids"
            raise ConfigError(
                f"{path} gives {token.text!r} the id {number}, other files of the folder {token.id}; {fix}"
            )
    return loaded


def _with_added(path: Path, added: Sequence[AddedToken]) -> str:
    """The text of a tokenizer.json with more added tokens; the library numbers them in the order of the file."""
    file = read_object(path)
    listed = {int(token["id"]): token for token in file.get("added_tokens") or ()}
    texts = {token["content"] for token in listed.values()}
    for token in added:
        if token.text not in texts:
            listed.setdefault(token.id, {"id": token.id, "content": token.text, **token.flags})
    return json.dumps({**file, "added_tokens": [listed[number] for number in sorted(listed)]})


def _add_named(tokenizer: Any, special: SpecialTokens) -> set[int]:
    """Adds special tokens that a folder names and lists nowhere behind all others, as ``transformers`` does.

    Returns:
      Their ids.
    """
    from tokenizers import AddedToken as Added

    named = (special.texts.get(name, "") for name in NAMES)
    texts = [text for text in dict.fromkeys([*named, *special.extra]) if text and tokenizer.token_to_id(text) is None]
    tokenizer.add_special_tokens([Added(text, normalized=False, special=True) for text in texts])
    return {tokenizer.token_to_id(text) for text in texts}


def _put_blanks(tokenizer: Any, scheme: str) -> None:
    """Makes a tokenizer whose normalizer puts blanks in front of texts do so by `scheme`; others stay as they are."""
    from tokenizers import pre_tokenizers

    if "Prepend" in str(tokenizer.normalizer):
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)


def _add_new(tokenizer: Any, texts: Sequence[str]) -> None:
    """Makes texts tokens of their own; decoded text keeps them."""
    from tokenizers import AddedToken as Added

    tokenizer.add_tokens([Added(text, normalized=False, special=False) for text in texts])


def read_tokenizer(path: str, new: Sequence[str] = ()) -> Any:
    """A tokenizer as the library has it; a folder's has all tokens that its files list or name."""
    if Path(path).is_dir():
        special = read_special_tokens(path)
        loaded = _load(Path(path) / TOKENIZER, special.added)
        _add_named(loaded, special)
    else:
        loaded = _load(Path(path))
    _add_new(loaded, new)
    return loaded


def make_tokenizer(path: str, encoders: Sequence[str], image: str = "", new: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of `Data.tokenizer` (`path`, "" = bytes) with a placeholder for each of `encoders`.

    Where `path` is a folder, the folder's own image token is the placeholder of the encoder `image`. Texts that are
    `new` are tokens of their own.
    """
    fix = "bytes have no tokens of their own; name a tokenizer.json, or a folder with one, in Data.tokenizer"
    require(bool(path) or not new, "Data.new_tokens", tuple(new), fix)
    if not path:
        return ByteTokenizer(encoders)
    if not Path(path).is_dir():
        return FileTokenizer(path, encoders, new=new)
    if not has_tokenizer(path):
        raise ConfigError(f"Data.tokenizer={path!r} has no {TOKENIZER}: name a folder or a file that is one, or ''")
    return FileTokenizer(Path(path) / TOKENIZER, encoders, said=read_special_tokens(path), image=image, new=new)
