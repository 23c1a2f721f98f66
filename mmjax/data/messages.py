"""Messages that are to be answered, as transformers takes them, written as a dataset that any source can be like.

A dialogue is a list of {"role", "content"}, where content is a string, or a list of {"type": "text", "text": …} and
{"type": "image", "image": path}. The last one is the user's or a tool's, which the model answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax import json_files
from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.record import Media, parse_record
from mmjax.data.sources.storage import Unusable

Dialogue = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Messages, or an object with `messages` and other keys of a record, such as `tools`."""
_EXAMPLE = (
    '[{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]}]'
)


def parse_messages(text: str, name: str) -> list[Dialogue]:
    """The dialogues of a JSON list, or of JSONL with one list a line.

    Args:
      text: the JSON.
      name: of the flag and its value, for errors.

    Raises:
      ConfigError: it is something else.
    """
    try:
        whole = json_files.parse(text)
        found = whole if isinstance(whole, list) and whole and isinstance(whole[0], list) else [whole]
    except ValueError:
        found = [_line(line, number, name) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise ConfigError(f"{name}: is empty; write a list such as {_EXAMPLE}")
    return [_dialogue(value, number if len(found) > 1 else 0, name) for number, value in enumerate(found, 1)]


def _line(line: str, number: int, name: str) -> Any:
    try:
        return json_files.parse(line)
    except ValueError as error:
        raise ConfigError(f"{name}: line {number} is {error}; write a list such as {_EXAMPLE}") from None


def _dialogue(value: Any, number: int, name: str) -> Dialogue:
    where = f"{name}: prompt {number}" if number else name
    messages = value["messages"] if isinstance(value, Mapping) and isinstance(value.get("messages"), list) else value
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else type(messages).__name__
        raise ConfigError(f"{where}: must be a list of messages, not {what}; write {_EXAMPLE}")
    last = messages[-1].get("role") if isinstance(messages[-1], Mapping) else None
    if last == "assistant" or not isinstance(last, str):
        raise ConfigError(f"{where}: the last message is from {last!r}; end with one from 'user', which is answered")
    return value


def write_messages(dialogues: Sequence[Dialogue], path: Path, media: str, name: str) -> None:
    """Writes dialogues as JSONL that a source of kind "messages" reads.

    Args:
      dialogues: the dialogues.
      path: the file.
      media: the folder that names of media start from.
      name: of the flag and its value, for errors.

    Raises:
      ConfigError: a message is no message, or a medium is not there.
    """

    def find(named: object, what: str) -> Media:
        if not isinstance(named, str):
            raise Unusable(f"{what} {str(named)[:60]!r} must be the name of a file")
        place = storage.beside(media, named)
        if not storage.is_url(place) and not Path(place).is_file():
            raise Unusable(f"{what} {named!r} does not exist: put it at {place}")
        return Media(name=f"{what} {named!r}", path=place)

    lines = []
    for number, dialogue in enumerate(dialogues, 1):
        record = dict(dialogue) if isinstance(dialogue, Mapping) else {"messages": [*dialogue]}
        try:
            parse_record(record, find, is_prompt=True)
        except Unusable as error:
            where = f"{name}: prompt {number}" if len(dialogues) > 1 else name
            raise ConfigError(f"{where}: {error}") from None
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
