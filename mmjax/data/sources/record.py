"""`Record`, turns and media, which readers return. `parse_record` makes one from the usual layouts of JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mmjax import json_files
from mmjax.data.sources import storage
from mmjax.data.sources.storage import Unusable

IMAGE, RECORDING, AUDIO = "<image>", "<recording>", "<audio>"
_MOST_VALUES = 1 << 20
"""Of a record's JSON."""
_ASKS = {"human": True, "user": True, "gpt": False, "assistant": False, "model": False}


@dataclass(frozen=True, kw_only=True)
class Media:
    """An encoded image or recording: its bytes, or the path of their file. `name` is for messages."""

    name: str
    data: bytes | None = None
    path: str = ""

    def read(self, limit: int, head: int | None = None) -> bytes:
        """All bytes, or the first `head`. Raises Unusable when there are more than `limit`, or the file is missing."""
        if self.data is not None:
            if len(self.data) > limit:
                raise Unusable(f"{self.name}: {len(self.data)} bytes are more than {limit}")
            return self.data
        if not storage.is_url(self.path) and not os.path.exists(self.path):
            raise Unusable(f"{self.name} does not exist: put it at {self.path}")
        size, _ = storage.stamp(self.path)
        if size > limit:
            raise Unusable(f"{self.name}: {size} bytes are more than {limit}")
        return storage.read(self.path, 0, size if head is None else min(head, size), limit=limit)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dialogue about media.

    Attributes:
      turns: questions and answers in order; `<image>` and `<recording>` in them mark the places of the media.
      images: its images, in the order of their marks.
      recordings: its recordings, in the order of their marks.
      system: a system prompt of its own; "" = the source's.
      id: its id in the data, for messages; "" without one.
    """

    turns: tuple[tuple[str, str], ...]
    images: tuple[Media, ...] = ()
    recordings: tuple[Media, ...] = ()
    system: str = ""
    id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A record that a scan found.

    Attributes:
      name: its name in messages.
      place: integers with which `Reader.read` finds it; the same number of them for every record.
      fault: why it cannot be read; "" if it can.
    """

    name: str
    place: tuple[int, ...] = ()
    fault: str = ""


class Reader(Protocol):
    """A dataset. A reader of your own is made by `Factory(config: SourceConfig)`; it is sent to worker processes."""

    def files(self) -> Sequence[str]:
        """The files whose sizes and times show whether the dataset has changed."""
        ...

    def scan(self) -> Iterator[Entry]:
        """All records in order, quickly: names and places only."""
        ...

    def read(self, place: tuple[int, ...]) -> Record:
        """The record at a place. Raises Unusable."""
        ...


Find = Callable[[object, str], Media]
"""A function that makes a medium from its value in a record (a file name, or bytes) and a name for messages."""


def parse_json(data: bytes, what: str = "") -> Any:
    """The value of UTF-8 JSON. Raises Unusable for any other bytes; `what` then starts the reason."""
    try:
        return json_files.parse(data, _MOST_VALUES)
    except ValueError as error:
        raise Unusable(
            f"{what} is {error}" if what else f"is {error}" if "UTF-8" in str(error) else str(error)
        ) from None


def parse_record(value: object, find: Find, question: str = "") -> Record:
    """A record from a JSON object, or a row of a table.

    Turns are in `conversations` or `messages` (LLaVA's `from`, `value`; or `role`, `content`), in `question` and
    `answer`, or in `caption` or `text`, which is an answer to `question`. Images are in `image` or `images`, recordings
    in `audio` or `audios`: a value or a list of them. What is said in a turn is a string, or a list of parts of type
    "text", "image" or "audio", as Hugging Face has it; a medium of a part is its own, or the next of the record's.
    Raises Unusable.
    """
    if not isinstance(value, Mapping):
        raise Unusable(f"must be an object, not {type(value).__name__}")
    own = value.get("id")
    name = str(own)[:80] if isinstance(own, (str, int)) else ""
    try:
        return replace(_parsed(value, find, question), id=name)
    except Unusable as error:
        error.record = name
        raise


def _parsed(value: Mapping[str, Any], find: Find, question: str) -> Record:
    if _listed(value, "video", "videos"):
        raise Unusable("it has a video; mmjax reads images and recordings, such as frames in `images`")
    images, recordings = _Places("image", find), _Places("recording", find)
    turns, system = _turns(value, question, (images, recordings))
    record = Record(
        turns=tuple(turns),
        images=images.filled(_listed(value, "image", "images")),
        recordings=recordings.filled(_listed(value, "audio", "audios")),
        system=system,
    )
    if record.recordings:
        turns = [(asked.replace(AUDIO, RECORDING), said.replace(AUDIO, RECORDING)) for asked, said in turns]
    for mark, media, what in ((IMAGE, record.images, "images"), (RECORDING, record.recordings, "recordings")):
        marks = sum(text.count(mark) for turn in turns for text in turn)
        if marks > len(media) and (media or mark == IMAGE):  # "<recording>" without recordings is mere text
            raise Unusable(f"the dialogue has {marks} {mark} marks for {len(media)} {what}: name {marks}")
    return replace(record, turns=tuple(turns))


class _Places:
    """Collects the places of media of one sort in a dialogue, in order."""

    def __init__(self, what: str, find: Find):
        self.what, self._find, self._parts = what, find, False
        # For each place: a part's own medium, or the index of one of the record's, or None for its next one.
        self._own: list[Media | int | None] = []

    def add_marks(self, text: str) -> None:
        """Adds the places of the marks in a text; each takes the next of the record's media."""
        marks = (IMAGE,) if self.what == "image" else (RECORDING, AUDIO)
        self._own += [None] * sum(map(text.count, marks))

    def add_part(self, part: Mapping[str, Any]) -> str:
        """Adds the place of a part of a turn; returns its mark."""
        sort = "image" if self.what == "image" else "audio"
        named = next((part[key] for key in (sort, f"{sort}_url", "url", "path") if part.get(key) is not None), None)
        if isinstance(named, Mapping) and "url" in named:
            named = named["url"]
        index = part.get("index")
        self._own.append(self._found(named) if named is not None else index if _is_place(index) else None)
        self._parts = True
        return IMAGE if self.what == "image" else RECORDING

    def filled(self, beside: Sequence[object]) -> tuple[Media, ...]:
        """All media in the order of their places; those `beside` the dialogue fill the places that have none.

        Raises Unusable if there are more or fewer of them than such places.
        """
        listed = [self._found(one) for one in beside]
        if not self._parts:
            return tuple(listed)
        chosen = {own for own in self._own if isinstance(own, int)}
        rest = [one for at, one in enumerate(listed) if at not in chosen]
        if self._own.count(None) != len(rest) or any(at >= len(listed) for at in chosen):
            places = len(self._own) - sum(isinstance(own, Media) for own in self._own)
            raise Unusable(f"{len(listed)} {self.what}s beside the dialogue for {places} places in it")
        following = iter(rest)
        return tuple(
            own if isinstance(own, Media) else next(following) if own is None else listed[own] for own in self._own
        )

    def _found(self, named: object) -> Media:
        try:
            return self._find(named, self.what)
        except Unusable as error:
            error.medium = error.medium or (named[:200] if isinstance(named, str) else self.what)
            raise


def _is_place(index: object) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and index >= 0


def _listed(value: Mapping[str, Any], one: str, many: str) -> list[Any]:
    found = value.get(many) if value.get(many) is not None else value.get(one)
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _turns(
    value: Mapping[str, Any], question: str, places: tuple[_Places, _Places]
) -> tuple[list[tuple[str, str]], str]:
    said = value.get("conversations") if value.get("conversations") is not None else value.get("messages")
    if said is not None:
        return _dialogue(said, places)
    if "question" in value or "answer" in value:
        return [(_text(value, "question"), _text(value, "answer"))], ""
    for key in ("caption", "text"):
        if value.get(key) is not None:
            return [(question, _text(value, key))], ""
    raise Unusable("has no conversations, messages, question and answer, caption or text")


def _dialogue(said: object, places: tuple[_Places, _Places]) -> tuple[list[tuple[str, str]], str]:
    if not isinstance(said, (list, tuple)):
        raise Unusable(f"conversations must be a list, not {type(said).__name__}")
    system, turns, asked = "", [], None
    for number, one in enumerate(said):
        if not isinstance(one, Mapping):
            raise Unusable(f"turn {number + 1} must be an object, not {type(one).__name__}")
        role = one.get("from", one.get("role"))
        first = role == "system" and number == 0
        try:
            text = _content(one, "value" if "value" in one else "content", () if first else places)
        except Unusable as error:
            raise Unusable(f"turn {number + 1}: {error}", medium=error.medium) from None
        if first:
            system = text
        elif role not in _ASKS:
            raise Unusable(f"turn {number + 1} is from {str(role)[:40]!r}: human and gpt take turns")
        elif _ASKS[str(role)] == (asked is not None):
            raise Unusable(f"turn {number + 1} is from {role!r} again: human and gpt take turns")
        elif _ASKS[str(role)]:
            asked = text
        else:
            turns.append((asked, text))
            asked = None
    if not turns or asked is not None:
        raise Unusable("the dialogue does not end with an answer" if turns else "the dialogue has no answer")
    return turns, system


def _content(turn: Mapping[str, Any], key: str, places: Sequence[_Places]) -> str:
    """The text of a turn, with marks for its media, whose places are added to `places`."""
    parts = turn.get(key)
    texts: list[str] = []
    for part in parts if isinstance(parts, (list, tuple)) else ({"type": "text", "text": _text(turn, key)},):
        if not isinstance(part, Mapping):
            raise Unusable(f"a part of {key} must be an object, not {type(part).__name__}")
        sort = str(part.get("type")).removesuffix("_url")
        if sort == "text":
            texts.append(_text(part, "text"))
            for own in places:
                own.add_marks(texts[-1])
        elif sort in ("image", "audio") and places:
            texts.append(places[sort == "audio"].add_part(part))
        else:
            legal = "text, image and audio" if places else "text"
            raise Unusable(f"a part of {key} is of type {str(part.get('type'))[:40]!r}: {legal} can be read")
    return "".join(texts)


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise Unusable(f"{key}={_shown(text)} must be a string")
    if re.search("[\ud800-\udfff]", text):
        raise Unusable(f"{key} holds half of a surrogate pair")
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
