"""The places of media in a record's dialogue, and the assignment of media to them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from mmjax.data.sources.media import Media
from mmjax.data.sources.storage import Unusable
from mmjax.data.turns import as_text

IMAGE, RECORDING, AUDIO, VIDEO, DRAWING = "<image>", "<recording>", "<audio>", "<video>", "<drawing>"
PLACES = {"image": "\ufdd6", "recording": "\ufdd7", "video": "\ufdd8", "drawing": "\ufdd9"}
"""Characters for the places of parts while a dialogue is read. Unicode reserves them: no text has them."""
_MARKS = {"image": (IMAGE,), "recording": (RECORDING, AUDIO), "video": (VIDEO,), "drawing": (DRAWING,)}
"""The marks of each sort in texts; the first one stands in the text of a record."""
_SOUND = ("use_audio_in_video", "load_audio_from_video")
"""Keys of a video's part that say whether its sound track is heard."""
_OF_VIDEO = {
    **dict.fromkeys(("fps", "raw_fps", "sample_fps"), "set Source.fps, or Source.folder_fps for a folder of frames"),
    **dict.fromkeys(("nframes", "num_frames"), "set Source.frames"),
    **dict.fromkeys(("min_frames", "max_frames"), "set it for the Source"),
    **dict.fromkeys(("min_pixels", "max_pixels", "total_pixels"), "set Source.video_pixels"),
    **dict.fromkeys(("resized_height", "resized_width", "video_start", "video_end"), "write another file"),
}
"""Keys that other libraries read in a video's part, and what to do instead."""
_KEYS = {"recording": "audio", "drawing": "image"}
"""Types of parts with media of a sort, where the type is another word."""
_SEEN = ("image", "video")
"""Sorts whose marks, in records that name no medium, mean that media are missing."""
Find = Callable[[object, str], Media]
"""A function that makes a medium from its value in a record (a file name, or bytes) and a name for messages."""


def is_empty(value: object) -> bool:
    """Whether a value names no medium: null, an empty text, or a struct of these.

    Such as None, "", b"" and {"bytes": None, "path": ""}; an empty struct is none of these.
    """
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_empty, value.values()))
    return value is None or value in ("", b"")


@dataclass(frozen=True)
class Place:
    """The place of a medium in the dialogue.

    Attributes:
      is_part: whether it is a part of a turn; else it is a mark in a text.
      is_question: whether it is in a turn that is no answer.
      medium: the part's medium; or the number of a medium of the record; or None for the record's next medium.
      is_heard: whether it is a video whose sound track is heard.
      generator: the generator that the part names for a medium to be made; "" for none.
    """

    is_part: bool
    is_question: bool
    medium: Media | int | None = None
    is_heard: bool = False
    generator: str = ""


class Places:
    """Collects the places of media of one sort in a dialogue, in order.

    Add all texts and parts in the order of the dialogue, then call `fill`.

    Args:
      sort: "image", "recording" or "video"; "drawing" for pictures to be made, whose places `Targets` fills.
      find: makes a medium from its value.
    """

    def __init__(self, sort: str, find: Find):
        self.sort, self._find = sort, find
        self._marks = _MARKS[sort]
        self._places: list[Place] = []

    def add_text(self, text: str, *, is_question: bool) -> None:
        """Adds the places of the marks in a text; they may still turn out to be mere text."""
        count = sum(map(text.count, self._marks))
        self._places += [Place(is_part=False, is_question=is_question)] * count

    def add_part(self, part: Mapping[str, Any], *, is_question: bool) -> str:
        """Adds the place of a part of a turn, and returns the character of `PLACES` that stands for it in the text.

        part: such as {"type": "image", "image": "a.png"}; "index" names one of the record's media by number. Raises
        Unusable if its value names no medium.
        """
        for key in _OF_VIDEO if self.sort == "video" else ():
            if part.get(key):
                raise Unusable(f"a video has {key}={str(part[key])[:40]}, which is not read: {_OF_VIDEO[key]}")
        sort = _KEYS.get(self.sort, self.sort)
        values = [part[key] for key in (sort, f"{sort}_url", "url", "path") if not is_empty(part.get(key))]
        value = values[0] if values else None
        if isinstance(value, Mapping) and not is_empty(value.get("url")):
            value = value["url"]
        number = part.get("index")
        legal = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        medium = self._found(value) if values else number if legal else None
        is_heard = False
        for key in _SOUND if self.sort == "video" else ():
            if not isinstance(part.get(key) or False, bool):
                raise Unusable(f"a video has {key}={str(part[key])[:40]}: it must be true or false")
            is_heard = is_heard or bool(part.get(key))
        self._places.append(Place(is_part=True, is_question=is_question, medium=medium, is_heard=is_heard))
        return PLACES[self.sort]

    def fill(self, beside: Sequence[object], texts: Sequence[str], *, is_named: bool) -> Filled:
        """Decides which marks are places, and assigns a medium to each place.

        Args:
          beside: the values of the record's media, such as file names, which fill the places without a medium.
          texts: all texts of the dialogue.
          is_named: whether the record has a key for media of this sort.

        Raises:
          Unusable: there are more or fewer media than places.
        """
        listed = self._listed(beside)
        parts = [place for place in self._places if place.is_part]
        chosen = {place.medium for place in parts if isinstance(place.medium, int)}
        following = [medium for at, medium in enumerate(listed) if at not in chosen]
        places = self._chosen(len(following), texts, is_named=is_named)
        marks = (any(not place.is_part and place.is_question for place in places),)
        marks = (*marks, any(not place.is_part and not place.is_question for place in places))
        if not parts:
            return Filled(sort=self.sort, media=tuple(listed), marks=marks)
        count = sum(place.medium is None for place in places)
        if count != len(following) or any(at >= len(listed) for at in chosen):
            count = sum(not isinstance(place.medium, Media) for place in places)
            raise Unusable(f"{len(listed)} {self.sort}s beside the dialogue for {count} places in it")
        media = iter(following)
        assigned = [
            place.medium
            if isinstance(place.medium, Media)
            else next(media)
            if place.medium is None
            else listed[place.medium]
            for place in places
        ]
        pairs = zip(assigned, places, strict=True)
        media_of = (replace(of, is_heard=place.is_heard, generator=place.generator) for of, place in pairs)
        return Filled(sort=self.sort, media=tuple(media_of), marks=marks)

    def _chosen(self, count: int, texts: Sequence[str], *, is_named: bool) -> list[Place]:
        """The places to fill: marks beside parts, in answers or in records without media may be mere text.

        count: number of the record's media that no part has chosen by number.
        """
        parts = [place for place in self._places if place.is_part]
        in_questions = [place for place in self._places if place.is_part or place.is_question]
        options = [self._places, in_questions, parts] if not parts else [parts, in_questions, self._places]
        for places in options:
            if sum(place.medium is None for place in places) == count and (count or parts or not self._places):
                return places
        if parts or len(self._places) < count:  # media without a mark come first, or too many for the parts
            return parts or self._places
        has_places = any(has_place(text, self._marks[0]) for text in texts)
        if not count and (self.sort not in _SEEN or not (is_named or has_places)):
            return []
        marks = len(self._places)
        raise Unusable(f"the dialogue has {marks} {self._marks[0]} marks for {count} {self.sort}s: name {marks}")

    def _listed(self, beside: Sequence[object]) -> list[Media]:
        """The record's media; none if all of the values are empty."""
        return [] if all(map(is_empty, beside)) else [self._found(value) for value in beside]

    def _found(self, value: object) -> Media:
        if is_empty(value):
            raise Unusable(f"one of its {self.sort}s is empty", medium=self.sort)
        try:
            if isinstance(value, str) and value[:5].lower() == "data:":
                media = Media(name=self.sort, data=_decoded(value))
            else:
                media = self._find(value, self.sort)
            return replace(media, is_video=self.sort == "video")
        except Unusable as error:
            is_name = isinstance(value, str) and value[:5].lower() != "data:"
            error.medium = error.medium or (str(value)[:200] if is_name else self.sort)
            raise


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The media of one sort in the order of their places.

    Attributes:
      sort: "image", "recording", "video" or "drawing".
      media: the media.
      marks: whether marks in questions are places, and whether marks in answers are; else they are mere text.
    """

    sort: str
    media: tuple[Media, ...]
    marks: tuple[bool, bool]

    def text(self, text: str, *, is_question: bool) -> str:
        """A text of the dialogue, with a mark at each place and nowhere else.

        text: the text as `Places` received it, with the characters of `PLACES` for parts.
        """
        mark = _MARKS[self.sort][0]
        if self.sort == "recording" and self.media:
            text = text.replace(AUDIO, RECORDING)
        if not self.marks[0 if is_question else 1]:
            text = as_text(text, mark)
        return text.replace(PLACES[self.sort], mark)


def in_text_order(texts: Sequence[str], media: Mapping[str, Sequence[Media]]) -> tuple[Media, ...]:
    """The media of several marks in the order in which texts have the marks; those without a mark come first.

    Args:
      texts: all texts of the dialogue, with a mark at each place and nowhere else.
      media: the media by mark, such as {"<image>": (…), "<video>": (…)}; those of a mark are in their order.
    """
    marks = [mark for text in texts for mark in re.findall("|".join(map(re.escape, media)), text)]
    unmarked = [medium for mark, values in media.items() for medium in values[: len(values) - marks.count(mark)]]
    left = {mark: iter(values[len(values) - marks.count(mark) :]) for mark, values in media.items()}
    return (*unmarked, *(next(left[mark]) for mark in marks))


def has_place(text: str, mark: str = IMAGE) -> bool:
    """Whether a text has a mark where media usually are: at its start or end, or at the end of a line.

    mark: "<image>" by default, or such as "<recording>".
    """
    text = text.strip()
    return text.startswith(mark) or bool(re.search(rf"(^|\s){mark}$", text, re.MULTILINE))


def _decoded(url: str) -> bytes:
    """The bytes of a data: URL. Raises Unusable."""
    head, comma, body = url.partition(",")
    if not comma:
        raise Unusable("a data: URL without a comma holds nothing")
    data = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return data
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Unusable("a data: URL that is not base64") from None
