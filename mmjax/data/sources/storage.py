"""Files by local path or fsspec URL: listing, sizes, and reading a bounded stretch of one.

A permanent problem of a file (it is missing, too large, a directory) makes its record `Unusable`. On a temporary one (a
network, a busy disk), reading is tried again and then raises `Unreachable`, which ends the run: a batch must not depend
on chance.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from mmjax.configurable import ConfigError

T = TypeVar("T")
PAUSES = (0.1, 0.5, 2.0)
"""Seconds between attempts to read a file that cannot be reached."""
_FOR_GOOD = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EINVAL, errno.ENXIO),
}
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Unusable(Exception):
    """A record, or a medium of it, cannot be used; the message is the reason, in one line.

    record: the record's id, if it has one. medium: the broken medium, by file or by number.
    """

    def __init__(self, reason: str, *, record: str = "", medium: str = ""):
        super().__init__(reason)
        self.record, self.medium = record, medium


class Unreachable(RuntimeError):
    """Storage did not answer, although it was tried several times."""


def is_url(path: str) -> bool:
    """Whether `path` is a URL, for fsspec, such as "s3://bucket/data.json": whether it has "://"."""
    return "://" in path


@functools.lru_cache(maxsize=16)
def _file_system(protocol: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"Source.path={protocol + '://...'!r}: {' '.join(str(error).split())}") from None


def _split(url: str) -> tuple[Any, str]:
    system = _file_system(url.partition("://")[0])
    return system, system._strip_protocol(url)


def expand(pattern: str) -> list[str]:
    """The files of a path, a glob (`*`, `?`) or a range (`{000..012}`), in order; those of a range need not exist.

    "shards/{000..001}.tar" gives ["shards/000.tar", "shards/001.tar"]. A glob that fits no file gives []; a path
    without these marks gives itself.
    """
    braces = _BRACES.search(pattern)
    if braces:
        first, last = braces[1], braces[2]
        numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        return [path for n in numbers for path in expand(pattern[: braces.start()] + n + pattern[braces.end() :])]
    if not is_url(pattern):
        return sorted(glob.glob(pattern)) if set("*?") & set(pattern) else [pattern]
    if not set("*?") & set(pattern):
        return [pattern]
    system, path = _split(pattern)
    return sorted(system.unstrip_protocol(match) for match in _patiently(lambda: system.glob(path), pattern))


def stamp(path: str) -> tuple[int, str]:
    """Size in bytes, and a mark that changes with the file: its time of modification, or an ETag.

    Raises Unusable if there is no such file, and Unreachable if storage did not answer.
    """
    if not is_url(path):
        status = _patiently(lambda: os.stat(path), path)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(f"{path} is no regular file")  # opening a pipe would wait for its writer
        return status.st_size, str(status.st_mtime_ns)
    system, inside = _split(path)
    info = _patiently(lambda: system.info(inside), path)
    if info.get("type") == "directory":
        raise Unusable(f"{path} is a directory")
    changed = next((info[k] for k in ("ETag", "etag", "mtime", "LastModified", "updated", "created") if k in info), "")
    return int(info.get("size") or 0), str(changed)


def read(path: str, start: int = 0, size: int | None = None, *, limit: int) -> bytes:
    """`size` bytes of a file from byte `start` on (None = to its end).

    path: a local path or a URL. limit: the most bytes that may be read.

    Raises:
      Unusable: the file is missing or shorter, or the stretch is longer than `limit`.
      Unreachable: storage did not answer.
    """
    file_size, _ = stamp(path)
    end = file_size if size is None else start + size
    if not 0 <= start <= end <= file_size:
        raise Unusable(f"{path} has {file_size} bytes, and not {start} to {end}")
    if end - start > limit:
        raise Unusable(f"{path}: {end - start} bytes are more than {limit}")
    data = _patiently(lambda: _read(path, start, end), path)
    if len(data) != end - start:
        raise Unusable(f"{path} is truncated")
    return data


def _read(path: str, start: int, end: int) -> bytes:
    if is_url(path):
        system, inside = _split(path)
        return system.cat_file(inside, start=start, end=end) if end > start else b""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


class File:
    """A file, read with repeated attempts and never beyond its end: lengths in file headers are not trusted."""

    def __init__(self, path: str):
        """Raises Unusable and Unreachable."""
        self.path, (self.size, _) = path, stamp(path)
        if is_url(path):
            system, inside = _split(path)
            self._file = _patiently(lambda: system.open(inside, "rb"), path)
        else:
            self._file = _patiently(lambda: open(path, "rb"), path)  # noqa: SIM115

    def read(self, count: int = -1) -> bytes:
        """At most `count` bytes, all for -1. Raises Unusable for other negative numbers, computed from damaged data."""
        if count < -1:
            raise Unusable(f"{self.path}: {count} bytes are to be read")
        return self._again(lambda most: self._file.read(most if count < 0 else min(count, most)))

    def readline(self, limit: int) -> bytes:
        """The next line with its end, or its first `limit` bytes; b"" at the end of the file."""
        return self._again(lambda most: self._file.readline(min(limit, most)))

    def seek(self, to: int, whence: int = 0) -> int:
        """Sets the place of the next read, in bytes, and returns it; `whence` as for files of Python."""
        return self._file.seek(to, whence)

    def tell(self) -> int:
        """The place of the next read, in bytes."""
        return self._file.tell()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _again(self, act: Callable[[int], bytes]) -> bytes:
        at = self._file.tell()

        def attempt() -> bytes:
            self._file.seek(at)
            return act(max(0, self.size - at))

        return _patiently(attempt, self.path)


def open_for_library(path: str) -> Any:
    """A file object of fsspec for a URL, for a library that reads files itself. Raises Unusable and Unreachable."""
    system, inside = _split(path)
    return _patiently(lambda: system.open(inside, "rb"), path)


def local_copy(path: str, cache: Path) -> str:
    """The path of a local file with the contents of `path`: `path` itself, or of a URL a copy in the folder `cache`.

    There is one copy for each version of a file. Raises Unusable and Unreachable.
    """
    if not is_url(path):
        return path
    import hashlib

    size, changed = stamp(path)
    name = hashlib.blake2b(f"{path}\0{size}\0{changed}".encode(), digest_size=12).hexdigest()
    target = cache / f"{name}-{path.rpartition('/')[2]}"
    if not target.is_file():
        system, inside = _split(path)
        part = cache / f"{target.name}.{os.getpid()}"
        cache.mkdir(parents=True, exist_ok=True)
        _patiently(lambda: system.get_file(inside, str(part)), path)
        part.replace(target)
    return str(target)


def media_folder(path: str, media: str) -> str:
    """The folder to which names of media are relative: `media`, or the folder of `path` if `media` is "".

    "data" for `path` "data/train.json". Both are local paths or URLs, the values of `Source.path` and `Source.media`.
    """
    return media or (path.rpartition("/")[0] if is_url(path) else os.path.dirname(path))


def beside(folder: str, name: str) -> str:
    """The path of file `name` in `folder`; `name` may also be an absolute path or URL of a file in it.

    "data/a.png" for "data" and "a.png". The file need not exist.

    Raises:
      Unusable: `name` leads out of the folder.
    """
    wanted = inside(folder, name)
    parts = wanted.replace("\\", "/").split("/")
    if not wanted or wanted.startswith(("/", "\\")) or ".." in parts or is_url(wanted) or "\0" in wanted:
        cause = "leads out of the folder of media"
        if is_url(wanted):
            cause = "is a URL; media are read from their folder alone"
        raise Unusable(f"{name!r} {cause}")
    return f"{folder.rstrip('/') or '/'}/{wanted}" if folder else wanted


def inside(folder: str, name: str) -> str:
    """The name, relative to `folder`, of an absolute path or URL in it; any other name unchanged.

    "a.png" for "/data" and "/data/a.png", or "file:///data/a.png".
    """
    if is_url(folder):
        return name.removeprefix(f"{folder.rstrip('/')}/")
    if name[:7].lower() == "file://":
        path = unquote(name[7:])
        path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    else:
        path = name
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        return name
    # One of folder and path may be named through a link.
    for resolve in (os.path.abspath, os.path.realpath):
        within = f"{resolve(folder or '.').rstrip('/')}/"
        resolved = resolve(path)
        if resolved.startswith(within) and resolved != within:
            return resolved.removeprefix(within)
    return name


def _patiently(attempt: Callable[[], T], path: str, pauses: Sequence[float] | None = None) -> T:
    error: Exception | None = None
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            return attempt()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
            raise Unusable(f"{path} does not exist or cannot be read") from None
        except ValueError as wrong:  # such as a NUL in a name
            raise Unusable(f"{path!r}: {wrong}") from None
        except OSError as wrong:
            if wrong.errno in _FOR_GOOD:
                raise Unusable(f"{path}: {wrong.strerror}") from None
            error = wrong
        if pause is not None:
            time.sleep(pause)
    raise Unreachable(f"{path} cannot be reached: {error}") from error
