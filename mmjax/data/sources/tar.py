"""Samples in tar files: WebDataset shards, and records that are small tars themselves.

A sample is a run of members with one key: the name up to the first dot of its last part. LAION's layout is `key.jpg`
with `key.txt` (a caption) and `key.json`; several media are `key.0.jpg`, `key.1.jpg`. JSON with turns takes precedence
over a caption. Nothing is unpacked to disk; still, members whose names lead out of a folder are refused.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.media import RECORDINGS
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_json, parse_record

IMAGES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "dib", "tif", "tiff", "avif", "image", "img")
"""Endings of members that are images; the format is recognised by the bytes."""
_TEXTS = ("json", "txt")
_TURNS = ("conversations", "messages", "question", "answer")
_NAMES = ("image", "images", "audio", "audios", "file_name")
"""Keys of a sample's JSON that name its media in other layouts; they are ignored."""
_TARGETS = ("target", "targets")
"""Keys of a sample's JSON that name the members that are to be made."""
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A member of a tar.

    start: its first byte, header included. data: the first byte of its contents. size: bytes of its contents. end: the
    byte after its last. fault: why it is refused; "" if it is not.
    """

    name: str
    start: int
    data: int
    size: int
    end: int
    fault: str = ""

    @property
    def key(self) -> str:
        folder, _, last = self.name.rpartition("/")
        return f"{folder}/{last.split('.')[0]}"

    @property
    def suffix(self) -> str:
        return self.name.rpartition("/")[2].partition(".")[2].lower()


def members(file: Any, size: int) -> Iterator[_Member]:
    """The members of a tar of `size` bytes, in order, without folders: names, places and sizes, no contents.

    Each has `name`; `start`, the first byte of its header; `data` and `size`, the first byte and number of bytes of its
    contents; `end`, the byte after its last block; and `fault`, why it is refused, "" if it is not.

    file: the tar as a seekable binary file. Raises Unusable if it is no tar, or ends too early.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            last = -1
            while (info := tar.next()) is not None:
                # Sizes are signed in the format: a negative one would lead back to an earlier member.
                if info.size < 0 or tar.offset <= last:  # type: ignore[attr-defined]
                    raise Unusable(f"member {info.name[:80]!r} has no legal size")
                last = tar.offset  # type: ignore[attr-defined]
                tar.members.clear()  # type: ignore[attr-defined]
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                if info.isreg() and info.offset_data + info.size > size:
                    raise Unusable(f"member {info.name[:80]!r} is truncated")
                if not info.isdir():
                    yield _Member(
                        name=info.name,
                        start=info.offset,
                        data=info.offset_data,
                        size=info.size,
                        end=end,
                        fault=_fault(info),
                    )
            # Blocks of zeros end a tar; the library takes a damaged header for the end too.
            file.seek(max(0, last))
            if file.read(_BLOCK).strip(b"\0"):
                raise Unusable(f"the header at byte {max(0, last)} is damaged")
    except (Unusable, storage.Unreachable):
        raise
    except tarfile.TarError as error:
        raise Unusable(f"no tar that can be read by parts ({error}); compressed ones are to be unpacked") from None
    except (ValueError, OverflowError, RecursionError, LookupError, MemoryError, OSError) as error:
        raise Unusable(f"a damaged header ({type(error).__name__})") from None


def _fault(info: tarfile.TarInfo) -> str:
    if info.name.startswith("/") or ".." in PurePosixPath(info.name).parts or "\0" in info.name:
        return f"member {info.name[:80]!r} leads out of the folder"
    return "" if info.isreg() and not info.issparse() else f"member {info.name[:80]!r} is no plain file"


def record_of(data: bytes, question: str, *, draw: bool = False) -> Record:
    """The record of a tar with the members of one sample, such as "000000.json" and "000000.0.png".

    The JSON has the keys that `parse_record` reads, or a ".txt" has the caption; media are images and recordings. A
    "target" of the JSON is the name of a member, without the sample's: "target.png" for "000000.target.png".

    Args:
      data: the bytes of the tar.
      question: the question that a caption answers; "" for none.
      draw: whether the images or recordings of a caption are to be made of it.

    Raises Unusable if a member is refused, or the sample cannot be used.
    """
    files: list[tuple[str, bytes]] = []
    for member in members(io.BytesIO(data), len(data)):
        if member.fault:
            raise Unusable(member.fault)
        files.append((member.suffix, data[member.data : member.data + member.size]))
    contents = dict(files)
    media = sorted((suffix for suffix in contents if _ending(suffix) in (*IMAGES, *RECORDINGS)), key=_natural)
    value = _value(contents)
    if not set(value) - {"id"} and not media:
        raise Unusable("has no json, no txt and no image")
    unknown = [suffix for suffix in contents if suffix not in (*_TEXTS, *media)]
    if not media and unknown and not set(_TURNS) & set(value):
        raise Unusable(f"its caption is of {unknown[0][:40]!r}, which ends as no image and no recording does")
    to_make = _names_of_targets(value)
    for key, endings in (("images", IMAGES), ("audios", RECORDINGS)):
        if names := [suffix for suffix in media if _ending(suffix) in endings and suffix not in to_make]:
            value[key] = names

    def find(suffix: object, kind: str) -> Media:
        if suffix not in contents:
            raise Unusable(f"{kind} {str(suffix)[:60]!r} is no member; a part takes the next of the members")
        return Media(name=str(suffix), data=contents[str(suffix)])

    return parse_record(value, find, question, draw=draw)


def _names_of_targets(value: dict[str, Any]) -> list[object]:
    """The members that a sample's JSON names as pictures to be made, such as "target.png"."""
    listed = (value[key] if isinstance(value[key], list) else [value[key]] for key in _TARGETS if value.get(key))
    return [name for names in listed for name in names]


def _value(contents: dict[str, bytes]) -> dict[str, Any]:
    """The sample as a record, without its media; turns in its JSON take precedence over a caption beside it."""
    value: dict[str, Any] = {}
    if "json" in contents:
        value = {key: item for key, item in _json(contents["json"]).items() if key not in _NAMES}
    if "txt" in contents and not set(_TURNS) & set(value):
        value |= {"caption": _utf8(contents["txt"], "txt")}
    return value


def _ending(suffix: str) -> str:
    return suffix.rpartition(".")[2]


def _natural(suffix: str) -> list[tuple[int, str]]:
    """A sort key that puts 2.jpg before 10.jpg."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", suffix)]


def _json(data: bytes) -> dict[str, Any]:
    value = parse_json(data, "json")
    if not isinstance(value, dict):
        raise Unusable(f"json must be an object, not {type(value).__name__}")
    return value


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unusable(f"{name} is not UTF-8 text ({error.reason} at byte {error.start})") from None


class WebDatasetReader:
    """A `Reader` of WebDataset shards.

    A place is (number of the shard, first byte, number of bytes) of a sample's members with their headers.
    """

    def __init__(self, config: SourceConfig):
        self._paths = storage.expand(config.path)
        self._limit, self._question, self._draw = config.byte_limit, config.question, config.draw

    def files(self) -> Sequence[str]:
        """The shards."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """An entry for every sample of every shard, in order.

        A damaged header becomes an entry with a fault, and the rest of its shard is lost.
        """
        for number, path in enumerate(self._paths):
            with storage.File(path) as file:
                yield from self._shard(number, path, file, file.size)

    def _shard(self, number: int, path: str, file: Any, size: int) -> Iterator[Entry]:
        group: list[_Member] = []
        try:
            for member in members(file, size):
                if group and group[0].key != member.key:
                    yield self._entry(number, path, group)
                    group = []
                group.append(member)
        except Unusable as error:  # the sample before it may lack its last members
            name = f"{path}:{group[0].key.lstrip('/')}" if group else path
            yield Entry(name=name, fault=f"{error}; nothing after it can be read")
            return
        if group:
            yield self._entry(number, path, group)

    def _entry(self, number: int, path: str, group: Sequence[_Member]) -> Entry:
        name = f"{path}:{group[0].key.lstrip('/')}"
        fault = next((member.fault for member in group if member.fault), "")
        if fault:
            return Entry(name=name, fault=fault)
        return Entry(name=name, place=(number, group[0].start, group[-1].end - group[0].start))

    def read(self, place: tuple[int, ...]) -> Record:
        """The record of the members at a place. Raises Unusable if it cannot be used."""
        shard, start, size = place
        data = storage.read(self._paths[shard], start, size, limit=self._limit)
        return record_of(data, self._question, draw=self._draw)
