"""What a reader hands over: a `Record` of turns and media. `parse_record` makes one of the usual layouts of JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmjax.data.sources import storage
from mmjax.data.sources.storage import Unusable

IMAGE, RECORDING, AUDIO = "<image>", "<recording>", "<audio>"
_ASKS = {"human": True, "user": True, "gpt": False, "assistant": False, "model": False}


@dataclass(frozen=True, kw_only=True)
class Media:
    """An encoded image or recording: its bytes, or the file that has them. `name` is for messages."""

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

    turns: questions and answers in order. `<image>` and `<recording>` in them are where the media go, in order.
    system: a system prompt of its own, "" = the source's.
    """

    turns: tuple[tuple[str, str], ...]
    images: tuple[Media, ...] = ()
    recordings: tuple[Media, ...] = ()
    system: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A record that a scan found.

    place: integers by which it is read again, as many for every record. fault: why it cannot be.
    """

    name: str
    place: tuple[int, ...] = ()
    fault: str = ""


class Reader(Protocol):
    """A dataset. A reader of your own is made by `Factory(config: SourceConfig)`; it is sent to worker processes."""

    def files(self) -> Sequence[str]:
        """The files whose sizes and times say whether the dataset has changed."""
        ...

    def scan(self) -> Iterator[Entry]:
        """All records in order, quickly: names and places only."""
        ...

    def read(self, place: tuple[int, ...]) -> Record:
        """The record at a place. Raises Unusable."""
        ...


Find = Callable[[object, str], Media]
"""From what a record says of a medium (a file name, or bytes) and a name for messages to the medium."""


def parse_record(value: object, find: Find, question: str = "") -> Record:
    """A record from a JSON object, or a row of a table.

    Turns are in `conversations` or `messages` (LLaVA's `from`, `value`; or `role`, `content`), in `question` and
    `answer`, or in `caption` or `text`, which is an answer to `question`. Images are in `image` or `images`, recordings
    in `audio` or `audios`: a value or a list of them. Raises Unusable.
    """
    if not isinstance(value, Mapping):
        raise Unusable(f"must be an object, not {type(value).__name__}")
    images = tuple(find(one, "image") for one in _listed(value, "image", "images"))
    recordings = tuple(find(one, "recording") for one in _listed(value, "audio", "audios"))
    turns, system = _turns(value, question)
    if recordings:
        turns = [(asked.replace(AUDIO, RECORDING), said.replace(AUDIO, RECORDING)) for asked, said in turns]
    for mark, media, what in ((IMAGE, images, "images"), (RECORDING, recordings, "recordings")):
        marks = sum(text.count(mark) for turn in turns for text in turn)
        if marks > len(media) and (media or mark == IMAGE):  # "<recording>" without recordings is mere text
            raise Unusable(f"the dialogue has {marks} {mark} marks for {len(media)} {what}: name {marks}")
    return Record(turns=tuple(turns), images=images, recordings=recordings, system=system)


def _listed(value: Mapping[str, Any], one: str, many: str) -> list[Any]:
    found = value.get(many) if value.get(many) is not None else value.get(one)
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _turns(value: Mapping[str, Any], question: str) -> tuple[list[tuple[str, str]], str]:
    said = value.get("conversations") if value.get("conversations") is not None else value.get("messages")
    if said is not None:
        return _dialogue(said)
    if "question" in value or "answer" in value:
        return [(_text(value, "question"), _text(value, "answer"))], ""
    for key in ("caption", "text"):
        if value.get(key) is not None:
            return [(question, _text(value, key))], ""
    raise Unusable("has no conversations, messages, question and answer, caption or text")


def _dialogue(said: object) -> tuple[list[tuple[str, str]], str]:
    if not isinstance(said, (list, tuple)):
        raise Unusable(f"conversations must be a list, not {type(said).__name__}")
    system, turns, asked = "", [], None
    for number, one in enumerate(said):
        if not isinstance(one, Mapping):
            raise Unusable(f"turn {number + 1} must be an object, not {type(one).__name__}")
        role = one.get("from", one.get("role"))
        text = _text(one, "value" if "value" in one else "content")
        if role == "system" and number == 0:
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
