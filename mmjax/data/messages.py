"""Prompts as lists of messages, in the format of transformers, and their conversion to a dataset.

A dialogue is a list of {"role", "content"}, where content is a string, or a list of {"type": "text", "text": …},
{"type": "image", "image": path} and {"type": "video", "video": path}. The last message is from the user or a tool; the
model answers it. Or it is from the assistant and asks for pictures or recordings, see `picture_prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax import json_files
from mmjax.configurable import ConfigError
from mmjax.data.picture_prompts import ends_with_picture
from mmjax.data.sources import storage
from mmjax.data.sources.record import Media, parse_record
from mmjax.data.sources.storage import Unusable

Dialogue = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Messages, or an object with `messages` and other keys of a record, such as `tools`."""
_EXAMPLE = (
    '[{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]}]'
)


def parse_messages(text: str, name: str) -> list[Dialogue]:
    """The dialogues of a JSON text: one dialogue, a list of lists of messages, or JSONL with one dialogue a line.

    A dialogue is a list of messages, such as [{"role": "user", "content": "hello"}], or an object that has this list
    under "messages" and may have other keys, such as "tools".

    Args:
      text: the JSON.
      name: the flag and its value, for errors, such as "--messages=prompts.json".

    Returns:
      The dialogues as they are in the JSON. Of a message, only the role of the last one has been checked.

    Raises:
      ConfigError: the text is neither, or is empty, or the last message of a dialogue is from the assistant and asks
        for no picture.
    """
    try:
        value = json_files.parse(text)
        dialogues = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    except ValueError:
        dialogues = [_line(line, number, name) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not dialogues:
        raise ConfigError(f"{name}: is empty; write a list such as {_EXAMPLE}")
    return [_dialogue(value, number if len(dialogues) > 1 else 0, name) for number, value in enumerate(dialogues, 1)]


def _line(line: str, number: int, name: str) -> Any:
    try:
        return json_files.parse(line)
    except ValueError as error:
        raise ConfigError(f"{name}: line {number} is {error}; write a list such as {_EXAMPLE}") from None


def _dialogue(value: Any, number: int, name: str) -> Dialogue:
    where = f"{name}: prompt {number}" if number else name
    messages = value["messages"] if isinstance(value, Mapping) and isinstance(value.get("messages"), list) else value
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else type(messages).__name__
        raise ConfigError(f"{where}: must be a list of messages, not {kind}; write {_EXAMPLE}")
    last = messages[-1].get("role") if isinstance(messages[-1], Mapping) else None
    if not isinstance(last, str) or (last == "assistant" and not ends_with_picture(messages)):
        fix = "end with one from 'user', which is answered, or with a picture or a recording to be made"
        raise ConfigError(f"{where}: the last message is from {last!r}; {fix}")
    return value


def write_messages(dialogues: Sequence[Dialogue], path: Path, media: str, name: str, *, is_prompt: bool = True) -> None:
    """Writes dialogues as JSONL that a source of kind "messages" reads: a line {"messages": […], …} for each.

    Args:
      dialogues: the dialogues, such as `parse_messages` returns.
      path: the file, which is overwritten.
      media: path or URL of the folder to which names of media are relative.
      name: the flag and its value, for errors, such as "--messages=prompts.json".
      is_prompt: whether dialogues end before an answer; else a source of kind "llava" reads them.

    Raises:
      ConfigError: a message is malformed, or a medium is missing.
    """

    def find(file_name: object, key: str) -> Media:
        if not isinstance(file_name, str):
            raise Unusable(f"{key} {str(file_name)[:60]!r} must be the name of a file")
        place = storage.beside(media, file_name)
        is_there = Path(place).exists() if key == "video" else Path(place).is_file()
        if not storage.is_url(place) and not is_there:
            raise Unusable(f"{key} {file_name!r} does not exist: put it at {place}")
        return Media(name=f"{key} {file_name!r}", path=place)

    lines = []
    for number, dialogue in enumerate(dialogues, 1):
        record = dict(dialogue) if isinstance(dialogue, Mapping) else {"messages": [*dialogue]}
        try:
            parse_record(record, find, is_prompt=is_prompt)
        except Unusable as error:
            where = f"{name}: prompt {number}" if len(dialogues) > 1 else name
            raise ConfigError(f"{where}: {error}") from None
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
