"""Prompts whose answers are pictures: the last message is the assistant's, and its parts are pictures to be made.

[{"role": "user", "content": "a red cat"},
 {"role": "assistant", "content": [{"type": "image", "generate": true, "height": 64, "width": 64}]}]
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.turns import ASSISTANT

Size = tuple[int, int]
"""Height and width."""
_PART: Mapping[str, Any] = {"type": "image", "generate": True}
MOST_SIDE = 16384
"""The most pixels of a side."""


def ends_with_picture(dialogue: Sequence[Any] | Mapping[str, Any]) -> bool:
    """Whether the last message of a dialogue is one of the assistant with a picture to be made."""
    messages = messages_of(dialogue)
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != ASSISTANT:
        return False
    return any(map(_is_made, _parts(last)))


def messages_of(dialogue: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """The messages of a dialogue, which may be an object with `messages`."""
    return dialogue["messages"] if isinstance(dialogue, Mapping) else dialogue


def with_picture(dialogue: Sequence[Any] | Mapping[str, Any], size: Size) -> Sequence[Any] | Mapping[str, Any]:
    """The dialogue with a picture of this height and width to be made behind its last message."""
    height, width = size
    answer = {"role": ASSISTANT, "content": [{**_PART, "height": height, "width": width}]}
    return _with_messages(dialogue, [*messages_of(dialogue), answer])


def sizes_of(dialogue: Sequence[Any] | Mapping[str, Any], default: Size | None, name: str) -> list[Size]:
    """Height and width of each picture that the dialogue's last message asks for.

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
    return [_size(part, default, name) for part in _parts(last) if _is_made(part)]


def with_blanks(dialogue: Sequence[Any] | Mapping[str, Any], sizes: Sequence[Size]) -> Mapping[str, Any]:
    """The dialogue as a record of data, in which blank pictures of these sizes stand for those to be made."""
    *earlier, last = messages_of(dialogue)
    remaining, parts = iter(sizes), list[Any]()
    for part in _parts(last):
        parts.append({**part, "image": _blank(next(remaining))} if _is_made(part) else part)
    record = _with_messages(dialogue, [*earlier, {**last, "content": parts}])
    return record if isinstance(record, Mapping) else {"messages": [*record]}


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _is_made(part: Any) -> bool:
    return isinstance(part, Mapping) and bool(part.get("generate"))


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


def _blank(size: Size) -> str:
    """A blank picture as a data URL."""
    file = io.BytesIO()
    from PIL import Image  # commands answer wrong flags before they load it

    Image.new("1", (size[1], size[0])).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
