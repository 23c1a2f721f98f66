"""The places of pictures and recordings that a generator is to make, in the answers of a record's dialogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmjax.data.sources.keys import shown
from mmjax.data.sources.media import Media
from mmjax.data.sources.places import DRAWING, Filled, Find, Place, Places
from mmjax.data.sources.storage import Unusable
from mmjax.data.turns import Turn, last_answer

_IN_ANSWERS = "media are made in the assistant's turns"


class Drawings(Places):
    """Collects the places of media to be made: parts of answers, or marks `<drawing>` in answers.

    Media without a part or a mark come at the end of the last answer.

    Args:
      find: makes a medium from its value.
    """

    def __init__(self, find: Find):
        super().__init__("drawing", find)
        self._generators: list[object] = []

    def add_part(self, part: Mapping[str, Any], *, is_question: bool) -> str:
        """See `Places.add_part`; "generator" names who makes it. Raises Unusable also for a part of a question."""
        if is_question:
            raise Unusable(
                f"{_IN_ANSWERS}: move the {'recording' if _is_sound(part) else 'picture'} there, or leave out generate"
            )
        self._generators.append(part.get("generator"))
        character = super().add_part(part, is_question=is_question)
        place = self._places[-1]
        if isinstance(place.medium, Media) and _is_sound(part):
            self._places[-1] = replace(place, medium=replace(place.medium, is_sound=True))
        return character

    def _key(self, part: Mapping[str, Any]) -> str:
        return "audio" if _is_sound(part) else "image"

    def generator(self, record: Mapping[str, Any]) -> str:
        """The generator that a record, or parts of its messages, name for its pictures; "" for none.

        Raises Unusable for something else than a name, or for several generators.

        record: the record as it is in the JSON, such as {"generator": "painter", …}.
        """
        names = list(dict.fromkeys(str(name) for name in (record.get("generator"), *self._generators) if name))
        if len(names) > 1:
            raise Unusable(f"its media are of {' and of '.join(map(repr, names))}: write a record for each generator")
        return names[0][:80] if names else ""

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


def _is_sound(part: Mapping[str, Any]) -> bool:
    return str(part.get("type")).removesuffix("_url") == "audio"


def is_made(part: Mapping[str, Any], sort: str) -> bool:
    """Whether a part of a message is to be made: `"generate": true`.

    Raises Unusable for another medium than an image or a recording, and for other values.

    Args:
      part: the part, such as {"type": "image", "image": "a.png", "generate": True}.
      sort: its type, "image", "audio" or "video".
    """
    value = part.get("generate")
    if value is not None and not isinstance(value, bool):
        raise Unusable(f"generate={shown(value)} must be true or false")
    if value and sort == "video":
        raise Unusable("a video is to be made (generate), and generators of pictures and recordings are all there are")
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
