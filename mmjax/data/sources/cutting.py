"""Cuts the last turns off records whose dialogue is longer than a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmjax.data.sources.media import Media
from mmjax.data.sources.places import DRAWING, IMAGE, RECORDING, VIDEO
from mmjax.data.sources.record import Record
from mmjax.data.turns import SYSTEM, USER, Turn


def cut_points(turns: Sequence[Turn]) -> list[int]:
    """The numbers of turns to which a dialogue may be cut, ascending, without the number of all turns.

    [2] for two questions with their answers, 4 turns. A cut dialogue ends after the last answer to a question, and has
    a learned answer.

    turns: the turns, such as `record.dialogue`.
    """
    first = next((number for number, turn in enumerate(turns) if turn.learned), len(turns))
    ends = range(first + 1, len(turns))
    return [end for end in ends if turns[end - 1].is_answer and turns[end].role in (USER, SYSTEM)]


def cut(record: Record, count: int) -> Record:
    """A copy of the record with its first `count` turns and their media; media without a mark are kept.

    count: number of turns, one of `cut_points(record.dialogue)`.
    """
    turns = record.dialogue

    def media(values: tuple[Media, ...], *marks: str) -> tuple[Media, ...]:
        lost = sum(turn.text.count(mark) for turn in turns[count:] for mark in marks)
        return values[: len(values) - lost]

    return replace(
        record,
        turns=turns[:count],
        images=media(record.images, IMAGE, VIDEO),
        recordings=media(record.recordings, RECORDING),
        targets=media(record.targets, DRAWING),
    )
