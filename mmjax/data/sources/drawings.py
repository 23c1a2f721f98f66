"""The places of pictures that a generator is to make, in the answers of a record's dialogue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmjax.data.sources.keys import shown
from mmjax.data.sources.media import Media
from mmjax.data.sources.places import DRAWING, IMAGE, VIDEO, Filled, Find, Place, Places
from mmjax.data.sources.storage import Unusable
from mmjax.data.turns import Turn, last_answer

_IN_ANSWERS = "pictures are made in the assistant's turns"


class Drawings(Places):
    """Collects the places of pictures to be made: parts of answers, or marks `<drawing>` in answers.

    Pictures without a part or a mark come at the end of the last answer.

    Args:
      find: makes a medium from its value.
    """

    def __init__(self, find: Find):
        super().__init__("drawing", find)

    def add_part(self, part: Mapping[str, Any], *, is_question: bool) -> str:
        """See `Places.add_part`; "generator" names who makes it. Raises Unusable also for a part of a question."""
        if is_question:
            raise Unusable(f"{_IN_ANSWERS}: move the picture there, or leave out generate")
        character = super().add_part(part, is_question=is_question)
        self._places[-1] = replace(self._places[-1], generator=_name(part.get("generator")))
        return character

    def _chosen(self, count: int, texts: Sequence[str], *, is_named: bool) -> list[Place]:
        """The places to fill; none for pictures at the end of the last answer."""
        parts = [place for place in self._places if place.is_part]
        in_answers = [place for place in self._places if not place.is_question]
        for places in (parts, in_answers):
            if sum(place.medium is None for place in places) == count and (parts or count):
                return places
        if parts or not count:  # too many or too few pictures for the parts; or mere text
            return parts
        if in_answers:
            marks = len(in_answers)
            raise Unusable(f"its answers have {marks} {DRAWING} marks for {count} pictures to be made: write {count}")
        if self._places:
            raise Unusable(f"a mark {DRAWING} stands in a question: {_IN_ANSWERS}; move it to the answer")
        return []


def with_generators(media: Sequence[Media], value: object) -> tuple[Media, ...]:
    """Pictures to be made with the generators that a record names: one for all whose parts name none, or one for each.

    Raises Unusable for something else than names, and for more or fewer names than pictures.

    Args:
      media: the pictures, in the order of their places.
      value: the record's value of "generator", such as "painter", ["painter", "printer"] or None.
    """
    if not media:
        return ()
    if not isinstance(value, (list, tuple)):
        return tuple(replace(medium, generator=medium.generator or _name(value)) for medium in media)
    if len(value) != len(media):
        fix = f"name one, or {len(media)}"
        raise Unusable(f"generator={shown(value)} names {len(value)} for {len(media)} pictures to be made: {fix}")
    if any(medium.generator for medium in media):
        raise Unusable(f"generator={shown(value)} and a part of its messages name generators: leave out one of them")
    return tuple(replace(medium, generator=_name(name)) for medium, name in zip(media, value, strict=True))


def _name(value: object) -> str:
    """The name of a generator; "" for none. Raises Unusable for something else."""
    if value is not None and not isinstance(value, str):
        raise Unusable(f"generator={shown(value)} must be the name of a generator")
    return (value or "")[:80]


def images_before(turns: Sequence[Turn], images: Sequence[Media]) -> list[list[int]]:
    """For each picture to be made, the numbers from 0 of the images before it in the text, without videos.

    Args:
      turns: the turns, in whose texts marks stand at places alone.
      images: the images and videos in the order of their marks; those without a mark come first.
    """
    marks = [mark for turn in turns for mark in re.findall(f"{IMAGE}|{VIDEO}|{DRAWING}", turn.text)]
    count, before = len(images) - sum(mark != DRAWING for mark in marks), list[list[int]]()
    for mark in marks:
        if mark == DRAWING:
            before.append([number for number in range(count) if not images[number].is_video])
        count += mark != DRAWING
    return before


def makes_picture(part: Mapping[str, Any], sort: str) -> bool:
    """Whether a part of a message is a picture to be made: `"generate": true`.

    Raises Unusable for another medium than an image, and for other values.

    Args:
      part: the part, such as {"type": "image", "image": "a.png", "generate": True}.
      sort: its type, "image", "audio" or "video".
    """
    value = part.get("generate")
    if value is not None and not isinstance(value, bool):
        raise Unusable(f"generate={shown(value)} must be true or false")
    if value and sort != "image":
        medium = {"audio": "a recording", "video": "a video"}.get(sort, sort)
        raise Unusable(f"{medium} is to be made (generate), and generators of pictures are all there are")
    return bool(value)


def with_marks(turns: Sequence[Turn], drawings: Filled) -> list[Turn]:
    """The turns with a mark `<drawing>` at the place of each picture, and nowhere else.

    Those without a place come at the end of the last answer. Raises Unusable for pictures in an answer of weight 0.

    Args:
      turns: the turns, with the characters of `PLACES` for parts.
      drawings: the pictures, as `Drawings.fill` gives them; without any, marks stay in the text.
    """
    if not drawings.media:
        return list(turns)
    written = [replace(turn, text=drawings.text(turn.text, is_question=not turn.is_answer)) for turn in turns]
    missing = len(drawings.media) - sum(turn.text.count(DRAWING) for turn in written)
    last = last_answer(turns)
    written[last] = replace(written[last], text=written[last].text + DRAWING * missing)
    if any(DRAWING in turn.text and not turn.learned for turn in written):
        raise Unusable("an answer of weight 0 has a picture to be made: leave out its weight, or generate")
    return written
