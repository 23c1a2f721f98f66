"""Dialogues as JSON (one list) or JSONL (one object a line), and a folder of images and recordings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_record

_BLANK = b" \t\r\n\xef\xbb\xbf"
_WHOLE_JSON = 1 << 34
"""Bytes of a JSON list: it is read at once when it is indexed."""


class LlavaReader:
    """A place is (file, first byte, bytes)."""

    def __init__(self, config: SourceConfig):
        self._paths = storage.expand(config.path)
        self._folder = config.media or (os.path.dirname(config.path) if not storage.is_url(config.path) else "")
        if storage.is_url(config.path) and not config.media:
            self._folder = config.path.rpartition("/")[0]
        self._limit, self._question = config.byte_limit, config.question

    def files(self) -> Sequence[str]:
        """The JSON files; the index adds the media."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """Every object of every file."""
        for number, path in enumerate(self._paths):
            with storage.File(path) as file:
                first = file.read(1 << 16).lstrip(_BLANK)[:1]
            yield from self._list(number, path) if first == b"[" else self._lines(number, path)

    def read(self, place: tuple[int, ...]) -> Record:
        """The record whose JSON is there."""
        file, start, size = place
        try:
            value = json.loads(storage.read(self._paths[file], start, size, limit=self._limit).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise Unusable(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None
        except json.JSONDecodeError as error:
            raise Unusable(f"not JSON ({error.msg} at column {error.colno})") from None
        return parse_record(value, self._find, self._question)

    def _find(self, name: object, what: str) -> Media:
        if not isinstance(name, str):
            raise Unusable(f"{what} {str(name)[:60]!r} must be the name of a file")
        return Media(name=f"{what} {name!r}", path=storage.beside(self._folder, name))

    def _lines(self, number: int, path: str) -> Iterator[Entry]:
        with storage.File(path) as file:
            at, line = 0, 0
            while text := file.readline(self._limit + 1):
                line, start, at = line + 1, at, at + len(text)
                name = f"{path}:{line}"
                if len(text) > self._limit:
                    while text and not text.endswith(b"\n"):
                        text = file.readline(1 << 20)
                        at += len(text)
                    yield Entry(name=name, fault=f"the line is longer than {self._limit} bytes")
                elif text.strip(_BLANK):
                    yield Entry(name=name, place=(number, start, at - start))

    def _list(self, number: int, path: str) -> Iterator[Entry]:
        try:
            text = storage.read(path, limit=_WHOLE_JSON).decode("utf-8")
        except UnicodeDecodeError as error:
            yield Entry(name=path, fault=f"is not UTF-8 text ({error.reason} at byte {error.start})")
            return
        decoder, item, at, byte = json.JSONDecoder(), 0, text.index("[") + 1, 0
        done = 0  # characters before `byte`
        while True:
            at = _skipped(text, at, " \t\r\n" if item == 0 else " \t\r\n,")
            if text[at : at + 1] in ("]", ""):
                if at == len(text):
                    yield Entry(name=f"{path}:{item + 1}", fault="the list does not end: the file is truncated")
                return
            item += 1
            try:
                _, end = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                shown = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
                yield Entry(name=f"{path}:{item}", fault=f"not JSON ({shown}); nothing after it can be read")
                return
            byte += len(text[done:at].encode())
            size = len(text[at:end].encode())
            yield Entry(name=f"{path}:{item}", place=(number, byte, size))
            byte, done, at = byte + size, end, end


def _skipped(text: str, at: int, characters: str) -> int:
    while text[at : at + 1] and text[at] in characters:
        at += 1
    return at
