"""Reads JSON files of other programs; damaged or too large ones raise errors of one line.

The number of values is limited because a small text may need much memory: a list in three bytes takes seventy, and each
bracket adds a level of recursion. This file imports only the standard library.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError

MOST_BYTES, MOST_VALUES = 1 << 28, 1 << 23
"""The largest file that is read, and the most values in it; tokenizers of 260,000 tokens have 3 million."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse(data: bytes | str, most: int = MOST_VALUES) -> Any:
    """Parses JSON of at most `most` values, as `json.loads` does. Raises ValueError, one line, for anything else."""
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if (commas := _commas(data)) > most and commas - sum(_commas(text[0]) for text in _STRING.finditer(data)) > most:
        raise ValueError(f"not JSON that can be read (more than {most} values)")
    try:
        return json.loads(data.removeprefix(_BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"not JSON ({error.msg} at {where})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None
    except ValueError:  # Python reads no integers of thousands of digits
        raise ValueError("not JSON that can be read (a number of more than 4300 digits)") from None


def _commas(data: bytes) -> int:
    """An upper bound of the number of values, minus one: each follows a comma or an opening bracket."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def is_there(file: Path, fix: str = "get it again") -> bool:
    """Whether a regular file is at this path; a link to one counts.

    Args:
      file: the path.
      fix: the end of an error's message: the user's next step.

    Raises:
      ConfigError: a folder, a broken link or something else is at this path, or it cannot be read.
    """
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if file.is_symlink():
            raise ConfigError(f"{file} is a link to a file that is not there; {fix}") from None
        return False
    except (OSError, ValueError) as error:  # such as a circle of links, or a NUL in the name
        raise ConfigError(f"{file} cannot be read ({_cause(error)}); {fix}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{file} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}; {fix}")
    return True


def read_bytes(file: Path, fix: str = "get it again", most: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Args:
      file: the path.
      fix: the end of an error's message: the user's next step.
      most: the most bytes of a file that is read.

    Raises:
      ConfigError: the file does not exist, cannot be read, or has more than `most` bytes.
    """
    if not is_there(file, fix):
        raise ConfigError(f"{file} does not exist; {fix}")
    try:
        with open(file, "rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({_cause(error)}); {fix}") from None
    if len(data) > most:
        raise ConfigError(f"{file} is larger than {most >> 20} MiB; {fix}")
    return data


def read_text(file: Path, fix: str = "get it again", most: int = MOST_BYTES) -> str:
    """The UTF-8 text of a file.

    Args:
      file: the path.
      fix: the end of an error's message: the user's next step.
      most: the most bytes of a file that is read.

    Raises:
      ConfigError: the file does not exist, cannot be read, is not UTF-8, or has more than `most` bytes.
    """
    try:
        return read_bytes(file, fix, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text ({error.reason} at byte {error.start}); {fix}") from None


def read_object(file: Path, fix: str = "get it again") -> dict[str, Any]:
    """The JSON object in a file as a dict. Raises ConfigError, which names the file and ends with `fix`, otherwise."""
    try:
        value = parse(read_bytes(file, fix))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: it is {error}; {fix}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds no JSON object; {fix}")
    return value


def _cause(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
