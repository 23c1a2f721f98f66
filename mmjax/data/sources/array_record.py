"""ArrayRecord files, which Grain's sources use. A record is a tar with the members of one sample (see `tar`), or JSON
without media. Files behind URLs are copied to the cache first: the library reads only local files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_json, parse_record
from mmjax.data.sources.tar import record_of


class ArrayRecordReader:
    """A `Reader` of ArrayRecord files. A place is (number of the file, number of the record).

    Args:
      config: the source; `path` names the files.
      cache: folder for copies of files behind URLs.
    """

    def __init__(self, config: SourceConfig, cache: Path):
        self._paths, self._cache = storage.expand(config.path), cache
        self._limit, self._question, self._draw = config.byte_limit, config.question, config.draw
        self._open: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def files(self) -> Sequence[str]:
        """The paths or URLs of the files, in the order of their numbers."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """An entry for every record of every file, in order; a file that cannot be read is one entry with a fault."""
        for number, path in enumerate(self._paths):
            try:
                count = self._file(path).num_records()
            except Unusable as error:
                yield Entry(name=path, fault=str(error))
                continue
            yield from (Entry(name=f"{path}[{record}]", place=(number, record)) for record in range(count))

    def read(self, place: tuple[int, ...]) -> Record:
        """The record at a place. Raises Unusable if it cannot be read."""
        path, number = self._paths[place[0]], place[1]
        try:
            (data,) = self._file(path).read([number])
        except (RuntimeError, IndexError, ValueError) as error:
            raise Unusable(f"no record can be read there ({' '.join(str(error).split())[:120]})") from None
        if not data or len(data) > self._limit:
            raise Unusable(f"a record of {len(data)} bytes; 1 to {self._limit} are legal")
        if not data.startswith(b"{"):
            return record_of(data, self._question, draw=self._draw)
        return parse_record(parse_json(data), _no_media, self._question, draw=self._draw)

    def _file(self, path: str) -> Any:
        if path not in self._open:
            from array_record.python.array_record_module import ArrayRecordReader as Library

            storage.stamp(path)
            library = Library(storage.local_copy(path, self._cache))
            if not library.ok():
                raise Unusable(f"{path} is no ArrayRecord file, or is truncated")
            self._open[path] = library
        return self._open[path]


def _no_media(name: object, kind: str) -> Media:
    raise Unusable(f"{kind} {str(name)[:60]!r}: a record with media is a tar")
