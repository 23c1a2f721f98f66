"""Dialogues as JSON (one list) or JSONL (one object a line), and a folder of images and recordings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from mmjax.data.sources import storage
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_json, parse_record

_BLANK = b" \t\r\n\xef\xbb\xbf"
_WHOLE_JSON = 1 << 34
"""The most bytes of a JSON list, which is read at once when it is indexed."""


class LlavaReader:
    """A `Reader` of JSON and JSONL. A place is (number of the file, first byte, number of bytes)."""

    def __init__(self, config: SourceConfig):
        self._paths = storage.expand(config.path)
        self._folder = storage.media_folder(config.path, config.media)
        self._limit, self._question, self._prompts = config.byte_limit, config.question, config.kind == PROMPTS
        self._draw = config.draw

    def files(self) -> Sequence[str]:
        """The JSON files; the index adds the media."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """An entry for every object of every file, in order; a malformed one, or a file, is an entry with a fault."""
        for number, path in enumerate(self._paths):
            try:
                with storage.File(path) as file:
                    first = file.read(1 << 16).lstrip(_BLANK)[:1]
                yield from self._list(number, path) if first == b"[" else self._lines(number, path)
            except Unusable as error:  # it is too large, or gone
                yield Entry(name=path, fault=str(error))

    def read(self, place: tuple[int, ...]) -> Record:
        """The record whose JSON is at a place. Raises Unusable if it cannot be used."""
        file, start, size = place
        value = parse_json(storage.read(self._paths[file], start, size, limit=self._limit))
        return parse_record(value, self._find, self._question, is_prompt=self._prompts, draw=self._draw)

    def _find(self, name: object, kind: str) -> Media:
        if not isinstance(name, str):
            raise Unusable(f"{kind} {str(name)[:60]!r} must be the name of a file")
        return Media(name=f"{kind} {name!r}", path=storage.beside(self._folder, name))

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
        """Every value of a list, and faults for errors between them: missing commas or end, and text after the end."""
        # One character per byte: places are offsets in bytes, and an object that is not UTF-8 spoils no other.
        text = storage.read(path, limit=_WHOLE_JSON).decode("latin-1")
        at, item = _passed(text, text.index("[") + 1), -1
        while text[at : at + 1] not in ("]", ""):
            item += 1
            name = f"{path}[{item}]"
            if text[at] == ",":
                yield Entry(name=name, fault="nothing between two commas, or before the first")
            else:
                try:
                    _, end = _EXTENT.raw_decode(text, at)
                except (json.JSONDecodeError, RecursionError) as error:
                    shown = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
                    yield Entry(name=name, fault=f"not JSON ({shown}); nothing after it can be read")
                    return
                yield Entry(name=name, place=(number, at, end - at))
                at = _passed(text, end)
            if text[at : at + 1] == ",":
                at = _passed(text, at + 1)
                if text[at : at + 1] == "]":
                    yield Entry(name=f"{path}: byte {at}", fault="the list ends with a comma")
            elif text[at : at + 1] not in ("]", ""):
                yield Entry(name=f"{path}: byte {at}", fault=f"no comma before {text[at : at + 20]!r}")
        if at == len(text):
            yield Entry(name=f"{path}: byte {at}", fault="the list does not end: the file is truncated")
        elif (end := _passed(text, at + 1)) < len(text):
            yield Entry(name=f"{path}: byte {end}", fault=f"the file goes on after the list: {text[end : end + 20]!r}")


_SPACE = re.compile(r"[ \t\r\n]*")
_EXTENT = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)
"""Finds the end of a value; numbers are not converted, since that fails for very long ones."""


def _passed(text: str, at: int) -> int:
    """`at`, or the end of the blanks that begin there."""
    blanks = _SPACE.match(text, at)
    assert blanks
    return blanks.end()
