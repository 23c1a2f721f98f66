"""`Record`, turns and media, which readers return. `parse_record` makes one from the usual layouts of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mmjax import json_files
from mmjax.data.sources.drawings import Drawings, makes_picture, with_generators, with_marks
from mmjax.data.sources.keys import TURN, require_plain, shown, unread, weight_of
from mmjax.data.sources.media import Media
from mmjax.data.sources.places import IMAGE, PLACES, RECORDING, VIDEO, Find, Places, in_text_order, is_empty
from mmjax.data.sources.storage import Unusable
from mmjax.data.turns import ASSISTANT, LITERAL, SYSTEM, USER, Turn, Turns, as_turns

__all__ = [
    "IMAGE",
    "RECORDING",
    "VIDEO",
    "Entry",
    "Find",
    "Media",
    "Reader",
    "Record",
    "Turn",
    "Unusable",
    "parse_record",
]
_ROLES = {
    **{name: USER for name in ("user", "human")},
    **{name: ASSISTANT for name in ("assistant", "gpt", "model")},
    **{name: name for name in (SYSTEM, "developer", "tool", "function", "ipython", "observation")},
}
"""Roles by their lower-case names in data. Only a folder's template takes roles other than the first three."""
_KEPT = f"[{LITERAL}{''.join(PLACES.values())}]"
_MOST_VALUES = 1 << 20
"""The most values in a record's JSON."""
_SORTS = {"image": ("image", "images"), "recording": ("audio", "audios"), "video": ("video", "videos")}
"""Keys of a record with its media, by the sort of media; the first is also a type of parts."""
_TYPES = tuple(single for single, _ in _SORTS.values())
_TARGETS = ("target", "targets")
"""Keys of a record with the pictures that a generator is to make."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dialogue about media.

    Attributes:
      turns: its turns in order; a pair of texts is a question and its answer. `<image>`, `<video>` and `<recording>` in
        them mark the places of the media.
      images: its images and videos, in the order of their marks; those without a mark come first, videos after images.
      recordings: its recordings, in the order of their marks.
      targets: the pictures that generators are to make, in the order of their marks, `<drawing>`, in answers.
      system: its system prompt; "" = the source's.
      tools: descriptions of the tools that the model may call.
      id: its id in the data, for messages; "" without one.
      unread: its keys that are not read.
    """

    turns: Turns
    images: tuple[Media, ...] = ()
    recordings: tuple[Media, ...] = ()
    targets: tuple[Media, ...] = ()
    system: str = ""
    tools: tuple[Any, ...] = ()
    id: str = ""
    unread: tuple[str, ...] = ()

    @property
    def dialogue(self) -> tuple[Turn, ...]:
        """Its turns, with a question and an answer in place of each pair."""
        return as_turns(self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A record that a scan found.

    Attributes:
      name: its name in messages.
      place: integers from which `Reader.read` finds it; the same number of integers for every record.
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
        """The record at the place of an `Entry`. Raises Unusable if it cannot be used."""
        ...


def parse_json(data: bytes, name: str = "") -> Any:
    """The value of UTF-8 JSON: a dict, list, string, number, bool or None.

    Raises Unusable for any other bytes, with a reason that starts with `name`.
    """
    try:
        return json_files.parse(data, _MOST_VALUES)
    except ValueError as error:
        raise Unusable(
            f"{name} is {error}" if name else f"is {error}" if "UTF-8" in str(error) else str(error)
        ) from None


def parse_record(
    value: object, find: Find, question: str = "", *, is_prompt: bool = False, draw: bool = False
) -> Record:
    """A record from a JSON object, or a row of a table.

    Turns are in `conversations` or `messages` (LLaVA's `from`, `value`; or `role`, `content`), in `question` and
    `answer`, or in `caption` or `text`, which is an answer to `question`. Images are in `image` or `images`, recordings
    in `audio` or `audios`, videos in `video` or `videos`: a value or a list of them. The content of a turn is a string,
    or, as in Hugging Face's data, a list of parts of type "text", "image", "audio" or "video". A part may have a
    medium; else it takes the record's next one.

    Pictures to be made are in `target` or `targets`, or are parts of answers with `"generate": true`. A caption, text
    or `instruction` beside them is the user's, behind `question`, and an answer to it may be left out.

    Args:
      value: the object, with the keys above.
      find: makes a `Media` from a value of a medium in the object, and "image", "recording" or "video":
        `lambda value, kind: Media(name=value, path=f"images/{value}")`.
      question: the question that a caption answers.
      is_prompt: whether the dialogue ends before an answer, which is to be generated.
      draw: whether the images of a caption are to be made of it.

    Returns:
      `turns`, in whose texts "<image>", "<video>", "<recording>" and "<drawing>" mark the places of media, and `images`
      (with videos), `recordings` and `targets`, the `Media` in the order of their marks; `id` is "" without one.

    Raises:
      Unusable: it is no record, or has something that mmjax cannot train on.
    """
    if not isinstance(value, Mapping):
        raise Unusable(f"must be an object, not {type(value).__name__}")
    label = value.get("id")
    name = str(label)[:80] if isinstance(label, (str, int)) else ""
    try:
        return replace(_parsed(_with_targets(value, draw=draw), find, question, is_prompt=is_prompt), id=name)
    except Unusable as error:
        error.record = name
        raise


def _with_targets(value: Mapping[str, Any], *, draw: bool) -> Mapping[str, Any]:
    """The record with its image under "images", if it is called `file_name`, and the images of a caption to be drawn
    under "targets".
    """
    if "file_name" in value and not any(key in value for key in _SORTS["image"]):
        value = {**value, "images": value["file_name"]}
    key = _caption_key(value)
    if not (draw and key) or _makes(value):
        return value
    images = _listed(value, *_SORTS["image"])
    if not images:
        raise Unusable(f"a {key} without the picture that is to be made of it (Source.draw)")
    return {**{key: item for key, item in value.items() if key not in _SORTS["image"]}, "targets": images}


def _parsed(value: Mapping[str, Any], find: Find, question: str, *, is_prompt: bool) -> Record:
    require_plain(value)
    places, drawings = tuple(Places(sort, find) for sort in _SORTS), Drawings(find)
    turns = _turns(value, question, (*places, drawings))
    system = _text(value, "system") if value.get("system") else ""
    if turns and turns[0].role == SYSTEM:
        if system not in ("", turns[0].text):
            raise Unusable("it has a system prompt in `system` and another one in its first turn")
        system, turns = turns[0].text, turns[1:]
    _require_answer(turns, is_prompt=is_prompt)
    texts = [turn.text for turn in turns]
    filled = [
        of_kind.fill(_listed(value, *keys), texts, is_named=any(key in value for key in keys))
        for of_kind, keys in zip(places, _SORTS.values(), strict=True)
    ]
    to_make = drawings.fill(_listed(value, *_TARGETS), texts, is_named=_makes(value))
    if is_prompt and to_make.media:
        raise Unusable("a prompt has a picture to be made: leave out targets and generate")
    if not any(of_kind.media for of_kind in (*filled, to_make)):
        _require_no_medium(value, question)
    written: list[Turn] = []
    for turn in with_marks(turns, to_make):
        text = turn.text
        for of_kind in filled:
            text = of_kind.text(text, is_question=not turn.is_answer)
        written.append(replace(turn, text=text))
    images, recordings, videos = (of_kind.media for of_kind in filled)
    return Record(
        turns=tuple(written),
        images=in_text_order([turn.text for turn in written], {IMAGE: images, VIDEO: videos}),
        recordings=recordings,
        targets=with_generators(to_make.media, value.get("generator")),
        system=system,
        tools=_tools(value),
        unread=unread(value),
    )


def _makes(value: Mapping[str, Any]) -> bool:
    """Whether a record names pictures to be made outside of its messages."""
    return bool(_listed(value, *_TARGETS))


def _require_answer(turns: Sequence[Turn], *, is_prompt: bool) -> None:
    if not is_prompt and not any(turn.is_answer for turn in turns):
        raise Unusable("the dialogue has no answer")
    if all(turn.is_answer for turn in turns):
        raise Unusable("the dialogue has no question")
    if turns[-1].is_answer == is_prompt:
        raise Unusable("the dialogue does not end with " + ("a question" if is_prompt else "an answer"))


def _require_no_medium(value: Mapping[str, Any], question: str) -> None:
    """Refuses a caption whose medium is missing: nothing to caption. Raises Unusable."""
    key = _caption_key(value)
    names = [name for keys in _SORTS.values() for name in keys if name in value]
    if key and (question or names or _makes(value)):
        lacks = f"{names[0]}={shown(value[names[0]])}" if names else "it has no image, no video and no recording"
        raise Unusable(f"a {key} without its medium: {lacks}")


def _caption_key(value: Mapping[str, Any]) -> str:
    """The key of a record's caption; "" for a record of another form."""
    forms = ("conversations", "messages", "question", "answer")
    if any(value.get(key) is not None for key in forms):
        return ""
    keys = ("caption", "text", *(("instruction",) if _makes(value) else ()))
    return next((key for key in keys if value.get(key) is not None), "")


def _tools(value: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tools of a record, which may also be JSON in a string. Raises Unusable."""
    tools = value.get("tools")
    tools = parse_json(tools.encode(), "tools") if isinstance(tools, str) and tools.strip() else tools or []
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unusable(f"tools={shown(tools)} must be a list of objects")
    return tuple(tools)


def _listed(value: Mapping[str, Any], single: str, several: str) -> list[Any]:
    """The media of a record. Raises Unusable if two keys name different media."""
    named = [_as_list(value[key]) for key in (several, single) if value.get(key) is not None]
    named = [values for values in named if not all(map(is_empty, values))]
    if len(named) > 1 and any(item not in named[0] for item in named[1]):
        raise Unusable(f"it has {single} and {several}: name all in {several}")
    return named[0] if named else []


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _turns(value: Mapping[str, Any], question: str, places: Sequence[Places]) -> list[Turn]:
    weight = weight_of(value)
    messages = value.get("conversations") if value.get("conversations") is not None else value.get("messages")
    if messages is not None:
        return _dialogue(messages, places, weight)
    if value.get("question") is not None or value.get("answer") is not None:
        questioned, has_answer = _text(value, "question"), value.get("answer") is not None or not _makes(value)
        texts = questioned, _text(value, "answer") if has_answer else ""
    elif key := _caption_key(value):
        caption = _text(value, key)
        if not caption.strip():
            raise Unusable(f"{key}={shown(caption)} says nothing")
        texts = (f"{question} {caption}" if question else caption, "") if _makes(value) else (question, caption)
    else:
        raise Unusable("has no conversations, messages, question and answer, caption or text")
    for of_kind in places:
        of_kind.add_text(texts[0], is_question=True)
        of_kind.add_text(texts[1], is_question=False)
    return [Turn(role=USER, text=texts[0]), Turn(role=ASSISTANT, text=texts[1], weight=weight)]


def _dialogue(messages: object, places: Sequence[Places], weight: float) -> list[Turn]:
    if not isinstance(messages, (list, tuple)):
        raise Unusable(f"conversations must be a list, not {type(messages).__name__}")
    turns: list[Turn] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise Unusable(f"turn {number} must be an object, not {type(message).__name__}")
        name = message.get("from") if message.get("from") is not None else message.get("role")
        role = _ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise Unusable(f"turn {number} is from {str(name)[:40]!r}: none of {', '.join(_ROLES)}")
        try:
            turns.append(_turn(message, role, () if role == SYSTEM and number == 1 else places, weight))
        except Unusable as error:
            raise Unusable(f"turn {number}: {error}", medium=error.medium) from None
    return turns


def _turn(message: Mapping[str, Any], role: str, places: Sequence[Places], weight: float) -> Turn:
    keys = {key: item for key, item in message.items() if key not in TURN and not _is_missing(item)}
    key = "value" if message.get("value") is not None else "content"
    turn = Turn(role=role, text="", weight=weight_of(message, weight) if role == ASSISTANT else 0.0, keys=keys)
    if message.get(key) is None and turn.meaningful:
        return replace(turn, keys={**keys, "content": None})
    return replace(turn, text=_content(message, key, places, is_question=role != ASSISTANT))


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, (list, Mapping)) and not value)


def _content(turn: Mapping[str, Any], key: str, places: Sequence[Places], *, is_question: bool) -> str:
    """The text of a turn, with a character for each medium. Adds the places of its media to `places`."""
    parts = turn.get(key)
    texts: list[str] = []
    for part in parts if isinstance(parts, (list, tuple)) else ({"type": "text", "text": _text(turn, key)},):
        if not isinstance(part, Mapping):
            raise Unusable(f"a part of {key} must be an object, not {type(part).__name__}")
        sort = str(part.get("type")).removesuffix("_url")
        if sort == "text":
            texts.append(_text(part, "text"))
            for of_kind in places:
                of_kind.add_text(texts[-1], is_question=is_question)
        elif sort in _TYPES and places:
            of_kind = places[-1 if makes_picture(part, sort) else _TYPES.index(sort)]
            texts.append(of_kind.add_part(part, is_question=is_question))
        else:
            legal = "text, image, audio and video" if places else "text"
            raise Unusable(f"a part of {key} is of type {str(part.get('type'))[:40]!r}: {legal} can be read")
    return "".join(texts)


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise Unusable(f"{key}={shown(text)} must be a string")
    if re.search("[\ud800-\udfff]", text):
        raise Unusable(f"{key} holds half of a surrogate pair")
    return re.sub(_KEPT, "\N{REPLACEMENT CHARACTER}", text)
