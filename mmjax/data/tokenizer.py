"""Turns text into token ids and back: as bytes by default, or with a `tokenizer.json` of the `tokenizers` library.

Besides text there are pad, bos, eos and, per encoder, a placeholder id for its tokens. In a folder of Hugging Face's,
the files beside `tokenizer.json` define these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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
      starts: int [P + 1], the first character of each piece in `text`, then the length of `text`.
      ids: int [N], the token ids.
      spans: int [N, 2], the first character of each token, and the character after its last.
    """

    text: str
    starts: np.ndarray
    ids: np.ndarray
    spans: np.ndarray


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data side and decoding.

    Attributes:
      vocab_size: number of all ids.
      table_size: number of rows of an embedding table: padding and placeholders after all other ids need none.
      pad: the id of padding.
      bos: the id at the beginning of every text; None for none.
      eos: the id at the end of a dialogue.
      stops: the ids that end an answer, `eos` among them.
    """

    vocab_size: int
    table_size: int
    pad: int
    bos: int | None
    eos: int
    stops: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without bos and eos."""
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
        """The id of a text that is always a single token, such as "<|im_end|>" in some vocabularies; else None."""
        ...

    def media_token(self, encoder: str) -> int:
        """The placeholder id of `encoder`; ConfigError if there is no such encoder."""
        ...

    def video_token(self, encoder: str) -> int:
        """The placeholder id of videos of `encoder`: the folder's video token, or `media_token`."""
        ...

    def shown(self, ids: Sequence[int]) -> str:
        """The text of `ids` for people to read, special ids by name, such as "<eos>" or "<259>"."""
        ...


def _media_token(ids: dict[str, int], encoder: str) -> int:
    if encoder not in ids:
        raise ConfigError(f"Model.encoders={sorted(ids)} lack {encoder!r}, for which a placeholder is wanted")
    return ids[encoder]


class ByteTokenizer:
    """A `Tokenizer`: UTF-8 bytes as ids 0–255, then pad, bos, eos and the placeholders in the order of `encoders`."""

    def __init__(self, encoders: Sequence[str]):
        self.bos: int | None = 257
        self.pad, self.eos, self.stops = 256, 258, (258,)
        self._media = {name: 259 + i for i, name in enumerate(encoders)}
        self.vocab_size, self.table_size = 259 + len(self._media), 259

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`, without bos and eos."""
        return list(text.encode("utf-8"))

    def encode_whole(self, pieces: Sequence[str | int]) -> Encoded:
        """Encodes consecutive texts and special ids; see `Tokenizer`. A special id is a NUL in the result's text."""
        texts = [piece if isinstance(piece, str) else "\0" for piece in pieces]
        text, starts = "".join(texts), np.cumsum([0, *map(len, texts)])
        ids = [i for piece in pieces for i in (self.encode(piece) if isinstance(piece, str) else (piece,))]
        lengths = 1 if text.isascii() else [len(character.encode()) for character in text]
        firsts = np.repeat(np.arange(len(text)), lengths)
        return Encoded(text=text, starts=starts, ids=np.asarray(ids, int), spans=np.stack([firsts, firsts + 1], 1))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the bytes in `ids`, U+FFFD for malformed UTF-8; special ids are left out."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def token(self, text: str) -> int | None:
        """None: no text is always a single token."""
        return None

    def media_token(self, encoder: str) -> int:
        """The placeholder id of `encoder`; ConfigError if there is no such encoder."""
        return _media_token(self._media, encoder)

    def video_token(self, encoder: str) -> int:
        """`media_token`: videos have no placeholder of their own."""
        return self.media_token(encoder)

    def shown(self, ids: Sequence[int]) -> str:
        """The text of `ids` for people to read, special ids by name: "<pad>", "<bos>", "<eos>" or "<259>"."""
        return _shown(self, ids, 256, self.decode)


class FileTokenizer:
    """The `Tokenizer` of a `tokenizer.json`.

    Missing special tokens and the placeholders get ids after its own vocabulary. Its settings for truncation and
    padding are ignored.

    Args:
      path: the file.
      encoders: names of the encoders that get placeholders.
      special: special tokens from the other files of the folder; without them, tokens are found by their usual names.
      image: the encoder whose placeholder is the folder's image token.
      new: texts that become single tokens, after all others.
    """

    _OPEN, _CLOSE = "\ufdd0", "\ufdd1"
    """Characters around the id of a special token without text. Unicode reserves them, so no text has them."""
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
        special: SpecialTokens | None = None,
        image: str = "",
        new: Sequence[str] = (),
    ):
        self._tokenizer = _load(Path(path), special.added if special else ())
        if special and special.blank:
            _put_blanks(self._tokenizer, special.blank)
        unlisted = _add_named(self._tokenizer, special) if special else set()
        _add_new(self._tokenizer, new)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._text_size = size = 1 + max(vocabulary.values(), default=-1)
        special_ids: dict[str, int | None] = {}
        for kind in self._NAMES:
            special_ids[kind] = self._special_id(kind, special)
            if special_ids[kind] is None and (special is None or kind != "bos"):
                special_ids[kind] = size
                size += 1
        self.bos = special_ids["bos"] if special is None or self._begins(special) else None
        pad, eos = special_ids["pad"], special_ids["eos"]
        assert pad is not None and eos is not None
        self.pad, self.eos = pad, eos
        self.stops = tuple(dict.fromkeys([eos, *(special.stops if special else ())]))
        image_id = special.image if special else None
        if image_id is not None and image in encoders and self._tokenizer.id_to_token(image_id) is None:
            fix = "get its tokenizer_config.json and added_tokens.json too, which may list the token"
            raise ConfigError(
                f"{path} has no token with the id {image_id}, which config.json gives an image's token; {fix}"
            )
        self._media = {image: image_id} if image_id is not None and image in encoders else {}
        video_id = special.video if special and self._media else None
        known = video_id is not None and self._tokenizer.id_to_token(video_id) is not None
        self._videos = {image: int(video_id)} if known and video_id is not None else {}
        without_id = [name for name in encoders if name not in self._media]
        self._media |= {name: size + i for i, name in enumerate(without_id)}
        self.vocab_size = max(size + len(without_id), (image_id or 0) + 1)
        rows = {*vocabulary.values()} - unlisted
        looked_up = {*rows, self.eos, self.eos if self.bos is None else self.bos} - {image_id}
        self.table_size = 1 + max(map(int, looked_up))
        self._added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        media = [*self._media.values(), *self._videos.values()]
        marked = [self.eos, *([] if self.bos is None else [self.bos]), *media]
        self._marks, self._ids_of_marks = self._mark(marked)

    def _special_id(self, kind: str, special: SpecialTokens | None) -> int | None:
        """The id of the special token "pad", "bos" or "eos"; None if there is none."""
        name = f"{kind}_token"
        if special and name in special.texts and kind != "pad":
            return self._tokenizer.token_to_id(special.texts[name]) if special.texts[name] else None
        if special and kind == "pad":
            named = self._tokenizer.token_to_id(special.texts[name]) if special.texts.get(name) else None
            return special.pad if named is None else named
        known = (self._tokenizer.token_to_id(text) for text in self._NAMES[kind])
        return next((i for i in known if i is not None), None)

    def _begins(self, special: SpecialTokens) -> bool:
        """Whether texts begin with bos, by the folder's setting or else by the file's post-processor."""
        if special.begin is not None:
            return special.begin
        plain, with_special = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        return with_special[: len(plain)] != plain and with_special[:1] == [self._special_id("bos", special)]

    def _mark(self, ids: Sequence[int]) -> tuple[dict[int, str], dict[int, int]]:
        """Gives each special id a text.

        Returns:
          The texts by id; for ids without a text in the vocabulary, the id by the library's id of the invented text.
        """
        from tokenizers import AddedToken

        marks = {i: text for text, i in self._added.items() if i in ids}
        invented = {i: f"{self._OPEN}{i}{self._CLOSE}" for i in ids if i not in marks}
        self._tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False, special=True) for text in invented.values()]
        )
        return marks | invented, {self._tokenizer.token_to_id(text): i for i, text in invented.items()}

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without bos and eos."""
        return self.encode_whole([text]).ids.tolist()

    def encode_whole(self, pieces: Sequence[str | int]) -> Encoded:
        """Encodes consecutive texts and special ids; see `Tokenizer`.

        Raises KeyError for an id other than `bos`, `eos` and placeholders.
        """
        texts = [
            piece.replace(self._OPEN, "\N{REPLACEMENT CHARACTER}") if isinstance(piece, str) else self._marks[piece]
            for piece in pieces
        ]
        encoding = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        return Encoded(
            text="".join(texts),
            starts=np.cumsum([0, *map(len, texts)]),
            ids=np.asarray([self._ids_of_marks.get(i, i) for i in encoding.ids], int),
            spans=np.asarray(encoding.offsets, int).reshape(-1, 2),
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are left out."""
        special = {self.pad, self.bos, *self.stops}
        text = [int(i) for i in ids if 0 <= i < self._text_size and int(i) not in special]
        return self._tokenizer.decode(text, skip_special_tokens=True)

    def token(self, text: str) -> int | None:
        """The id of an added token with this text, such as "<|im_end|>"; None if there is none."""
        return self._added.get(text)

    def media_token(self, encoder: str) -> int:
        """The placeholder id of `encoder`; ConfigError if there is no such encoder."""
        return _media_token(self._media, encoder)

    def video_token(self, encoder: str) -> int:
        """The folder's video token for the encoder of images, if its tokenizer has it; else `media_token`."""
        return self._videos.get(encoder, self.media_token(encoder))

    def shown(self, ids: Sequence[int]) -> str:
        """The text of `ids` for people to read, special tokens by their texts, ids without a text by name."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return _shown(self, ids, self._text_size, decode)


def _shown(tokenizer: Tokenizer, ids: Sequence[int], size: int, text_of: Callable[[list[int]], str]) -> str:
    """Text of the ids below `size`, and names of special ids without text."""
    names = {tokenizer.pad: "<pad>", tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}
    runs = groupby(map(int, ids), key=lambda i: -1 if i < size else i)
    return "".join(text_of([*run]) if i < 0 else names.get(i, f"<{i}>") * len([*run]) for i, run in runs)


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
    """Adds the special tokens that a folder names but does not list, after all others, as ``transformers`` does.

    Returns:
      Their ids.
    """
    from tokenizers import AddedToken as Added

    named = (special.texts.get(name, "") for name in NAMES)
    texts = [text for text in dict.fromkeys([*named, *special.extra]) if text and tokenizer.token_to_id(text) is None]
    tokenizer.add_special_tokens([Added(text, normalized=False, special=True) for text in texts])
    return {tokenizer.token_to_id(text) for text in texts}


def _put_blanks(tokenizer: Any, scheme: str) -> None:
    """Sets the `scheme` by which a tokenizer puts blanks in front of texts, if its normalizer does so at all."""
    from tokenizers import pre_tokenizers

    if "Prepend" in str(tokenizer.normalizer):
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)


def _add_new(tokenizer: Any, texts: Sequence[str]) -> None:
    """Adds texts as single tokens, which decoded text keeps."""
    from tokenizers import AddedToken as Added

    tokenizer.add_tokens([Added(text, normalized=False, special=False) for text in texts])


def read_tokenizer(path: str, new: Sequence[str] = ()) -> Any:
    """The tokenizer of a `tokenizer.json` or of a folder with one, as a `tokenizers.Tokenizer`.

    A folder's has all tokens that the folder's files name. The texts `new` become single tokens. Raises ConfigError if
    a file cannot be read.
    """
    if Path(path).is_dir():
        special = read_special_tokens(path)
        loaded = _load(Path(path) / TOKENIZER, special.added)
        _add_named(loaded, special)
    else:
        loaded = _load(Path(path))
    _add_new(loaded, new)
    return loaded


def make_tokenizer(path: str, encoders: Sequence[str], image: str = "", new: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of `Data.tokenizer` with a placeholder for each of `encoders`.

    Args:
      path: a tokenizer.json, a folder with one, or "" for UTF-8 bytes as tokens.
      encoders: names of encoders and generators, such as ["vision"].
      image: the encoder whose placeholder is the folder's image token, such as "vision", if `path` is a folder.
      new: texts that become single tokens, such as ("<tool>",).

    Raises:
      ConfigError: the tokenizer cannot be read, or `new` is set without a path.
    """
    fix = "bytes have no tokens of their own; name a tokenizer.json, or a folder with one, in Data.tokenizer"
    require(bool(path) or not new, "Data.new_tokens", tuple(new), fix)
    if not path:
        return ByteTokenizer(encoders)
    if not Path(path).is_dir():
        return FileTokenizer(path, encoders, new=new)
    if not has_tokenizer(path):
        raise ConfigError(f"Data.tokenizer={path!r} has no {TOKENIZER}: name a folder or a file that is one, or ''")
    return FileTokenizer(Path(path) / TOKENIZER, encoders, special=read_special_tokens(path), image=image, new=new)
