"""Prompts whose answers are pictures or recordings: the last message is the assistant's, and has parts to be made.

[{"role": "user", "content": "a red cat"},
 {"role": "assistant", "content": [{"type": "image", "generate": true, "height": 64, "width": 64}]}]

A recording is {"type": "audio", "generate": true, "seconds": 1.5}.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.turns import ASSISTANT

Size = tuple[int, int]
"""Height and width."""
Extent = Size | float
"""Height and width of a picture, or seconds of a recording."""
_PART: Mapping[str, Any] = {"type": "image", "generate": True}
MOST_SIDE = 16384
"""The most pixels of a side."""
MOST_SECONDS = 3600.0
_BLANK_RATE = 1000
"""Samples a second of blank recordings, of which each is a millisecond."""


def ends_with_picture(dialogue: Sequence[Any] | Mapping[str, Any]) -> bool:
    """Whether the last message of a dialogue is one of the assistant with a picture or a recording to be made."""
    messages = messages_of(dialogue)
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != ASSISTANT:
        return False
    return any(map(_is_made, _parts(last)))


def messages_of(dialogue: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """The messages of a dialogue, which may be an object with `messages`."""
    return dialogue["messages"] if isinstance(dialogue, Mapping) else dialogue


def with_recording(dialogue: Sequence[Any] | Mapping[str, Any], seconds: float) -> Sequence[Any] | Mapping[str, Any]:
    """The dialogue with a recording of so many seconds to be made behind its last message."""
    answer = {"role": ASSISTANT, "content": [{"type": "audio", "generate": True, "seconds": seconds}]}
    return _with_messages(dialogue, [*messages_of(dialogue), answer])


def with_picture(dialogue: Sequence[Any] | Mapping[str, Any], size: Size) -> Sequence[Any] | Mapping[str, Any]:
    """The dialogue with a picture of this height and width to be made behind its last message."""
    height, width = size
    answer = {"role": ASSISTANT, "content": [{**_PART, "height": height, "width": width}]}
    return _with_messages(dialogue, [*messages_of(dialogue), answer])


def sizes_of(dialogue: Sequence[Any] | Mapping[str, Any], default: Size | None, name: str) -> list[Extent]:
    """Height and width of each picture, or seconds of each recording, that the dialogue's last message asks for.

    Args:
      dialogue: the dialogue.
      default: of a picture that names neither; `None` for none.
      name: the dialogue, for errors, such as "--messages=prompts.json".

    Raises:
      ConfigError: a size is missing or illegal, or an earlier message has a picture to be made.
    """
    *earlier, last = messages_of(dialogue)
    if any(_is_made(part) for message in earlier if isinstance(message, Mapping) for part in _parts(message)):
        raise ConfigError(f"{name}: a picture is to be made before the last message; leave out its generate")
    made = [part for part in _parts(last) if _is_made(part)]
    return [_seconds(part, name) if _is_sound(part) else _size(part, default, name) for part in made]


def with_blanks(dialogue: Sequence[Any] | Mapping[str, Any], sizes: Sequence[Extent]) -> Mapping[str, Any]:
    """The dialogue as a record of data, in which blank media of these sizes stand for those to be made."""
    *earlier, last = messages_of(dialogue)
    remaining, parts = iter(sizes), list[Any]()
    for part in _parts(last):
        key = "audio" if _is_made(part) and _is_sound(part) else "image"
        parts.append({**part, key: _blank(next(remaining))} if _is_made(part) else part)
    record = _with_messages(dialogue, [*earlier, {**last, "content": parts}])
    return record if isinstance(record, Mapping) else {"messages": [*record]}


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _is_made(part: Any) -> bool:
    return isinstance(part, Mapping) and bool(part.get("generate"))


def _is_sound(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "audio"


def _with_messages(
    dialogue: Sequence[Any] | Mapping[str, Any], messages: Sequence[Any]
) -> Sequence[Any] | Mapping[str, Any]:
    return {**dialogue, "messages": messages} if isinstance(dialogue, Mapping) else messages


def _size(part: Mapping[str, Any], default: Size | None, name: str) -> Size:
    given = part.get("height"), part.get("width")
    if given == (None, None) and default:
        return default
    if not all(type(side) is int and 0 < side <= MOST_SIDE for side in given):
        shown = f"height={given[0]!r}, width={given[1]!r}"
        raise ConfigError(f'{name}: {shown}: write both of a picture to be made, such as "height": 64, "width": 64')
    return given  # pyright: ignore[reportReturnType]


def _seconds(part: Mapping[str, Any], name: str) -> float:
    seconds = part.get("seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f'{name}: seconds={seconds!r}: write those of a recording to be made, such as "seconds": 1.5')
    return float(seconds)


def _blank(size: Extent) -> str:
    """A blank picture, or silence, as a data URL."""
    file = io.BytesIO()
    if not isinstance(size, tuple):
        with wave.open(file, "wb") as recording:
            recording.setnchannels(1)
            recording.setsampwidth(1)
            recording.setframerate(_BLANK_RATE)
            recording.writeframes(b"\x80" * max(1, round(size * _BLANK_RATE)))
        return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
    from PIL import Image  # commands answer wrong flags before they load it

    Image.new("1", (size[1], size[0])).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
