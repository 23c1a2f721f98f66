"""Parquet tables as Hugging Face writes them: `image` or `images` (bytes, or structs of `bytes` and `path`), and
`conversations`, `messages`, `question` and `answer`, `caption` or `text`.

A row is read with its row group, of which the last few are kept; write groups of a hundred rows or so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_record

COLUMNS = (
    *("image", "images", "audio", "audios", "conversations", "messages"),
    *("question", "answer", "caption", "text"),
)
_GROUPS = 8
_LARGEST_GROUP = 4 << 30


class ParquetReader:
    """A place is (file, row group, row of the group)."""

    def __init__(self, config: SourceConfig):
        self._paths = storage.expand(config.path)
        self._question = config.question
        self._open: dict[str, Any] = {}
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_groups": OrderedDict()}

    def files(self) -> Sequence[str]:
        """The files."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """Every row of every file."""
        for number, path in enumerate(self._paths):
            try:
                metadata = self._file(path).metadata
                rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            except Unusable as error:
                yield Entry(name=path, fault=str(error))
                continue
            count = 0
            for group, size in enumerate(rows):
                fault = self._group_fault(metadata, group)
                if fault:
                    yield Entry(name=f"{path}:{count}-{count + size - 1}", fault=fault)
                for row in range(0 if fault else size):
                    yield Entry(name=f"{path}:{count + row}", place=(number, group, row))
                count += size

    def read(self, place: tuple[int, ...]) -> Record:
        """The record of that row."""
        file, group, row = place
        table = self._group(file, group)
        if row >= len(table):
            raise Unusable(f"the row group has {len(table)} rows")
        (value,) = table.slice(row, 1).to_pylist()
        return parse_record({k: v for k, v in value.items() if v is not None}, _find, self._question)

    @staticmethod
    def _group_fault(metadata: Any, group: int) -> str:
        found = metadata.row_group(group)
        # The footer is not to be trusted with the size of what is allocated, nor a scan with that of a loop.
        if not 0 <= found.total_byte_size <= _LARGEST_GROUP or not 0 <= found.num_rows <= 1 << 24:
            return f"a row group of {found.num_rows} rows and {found.total_byte_size} bytes"
        return ""

    def _group(self, file: int, group: int) -> Any:
        import pyarrow as pa

        key = (file, group)
        if key not in self._groups:
            source = self._file(self._paths[file])
            columns = [name for name in source.schema_arrow.names if name in COLUMNS]
            try:
                # In this thread: worker processes are as many as are wanted.
                table = source.read_row_group(group, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, ValueError, IndexError) as error:
                raise Unusable(f"the row group cannot be read ({_line(error)})") from None
            self._groups[key] = table
            if len(self._groups) > _GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]

    def _file(self, path: str) -> Any:
        if path not in self._open:
            import pyarrow as pa
            import pyarrow.parquet as pq

            storage.stamp(path)
            try:
                self._open[path] = pq.ParquetFile(
                    storage.open_for_library(path) if storage.is_url(path) else pa.OSFile(path)
                )
            except (pa.ArrowException, OSError, ValueError) as error:
                raise Unusable(f"{path} is no Parquet file ({_line(error)})") from None
        return self._open[path]


def _find(value: object, what: str) -> Media:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise Unusable(f"{what} has no bytes in the table")
    return Media(name=what, data=value)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
