"""Parquet tables as Hugging Face writes them: `image` or `images` (bytes, or structs of `bytes` and `path`), and
`conversations`, `messages`, `question` and `answer`, `caption` or `text`. Images with a path alone are files. `target`
or `targets` have the pictures to be made.

A row is read with its row group, and the last few groups are kept; write groups of a hundred rows or so. The memory of
a group is computed from page headers before it is decoded. A group that takes too much for its stored size is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.keys import MEDIA, RECORD
from mmjax.data.sources.parquet_pages import column_cost
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_record

COLUMNS = RECORD
_MOST = 1 << 30
"""The most bytes in memory of a row group, and of all groups that are kept."""
_GROWTH = 100
"""The most bytes in memory per byte in the file, for a group that is larger than `Source.byte_limit` in memory."""
_VALUE = 64
"""Bytes of a Python object."""


class ParquetReader:
    """A `Reader` of Parquet tables. A place is (number of the file, row group, row of the group)."""

    def __init__(self, config: SourceConfig):
        self._paths = storage.expand(config.path)
        self._question, self._limit, self._draw = config.question, config.byte_limit, config.draw
        self._folder = storage.media_folder(config.path, config.media)
        self._open: dict[str, Any] = {}
        self._groups: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_groups": OrderedDict()}

    def files(self) -> Sequence[str]:
        """The paths or URLs of the files, in the order of their numbers."""
        return self._paths

    def scan(self) -> Iterator[Entry]:
        """An entry for every row of every file, in order; a file that cannot be read is one entry with a fault."""
        for number, path in enumerate(self._paths):
            try:
                metadata = self._file(path).metadata
                rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
                size, _ = storage.stamp(path)
                # The footer is not trusted with the length of a loop: a record takes at least a byte.
                if min(rows, default=0) < 0 or sum(rows) > size:
                    raise Unusable(f"{path}: {sum(rows)} rows in {size} bytes")
            except Unusable as error:
                yield Entry(name=path, fault=str(error))
                continue
            count = 0
            for group, size in enumerate(rows):
                yield from (Entry(name=f"{path}[{count + row}]", place=(number, group, row)) for row in range(size))
                count += size

    def read(self, place: tuple[int, ...]) -> Record:
        """The record of the row at a place. Raises Unusable if it cannot be read, or is too large."""
        file, group, row = place
        table = self._group(file, group)
        if row >= len(table):
            raise Unusable(f"the row group has {len(table)} rows")
        values = table.slice(row, 1)
        size = sum(_size(column.combine_chunks()) for column in values.columns)
        if size > self._limit:
            raise Unusable(f"the row takes {size} bytes in memory; at most {self._limit} (Source.byte_limit)")
        (value,) = values.to_pylist()
        return parse_record(_without_nulls(value), self._find, self._question, draw=self._draw)

    def _find(self, value: object, kind: str) -> Media:
        if isinstance(value, Mapping):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str):
            return Media(name=f"{kind} {value!r}", path=storage.beside(self._folder, value))
        if not isinstance(value, bytes):
            raise Unusable(f"{kind} has no bytes in the table, and names no file")
        return Media(name=kind, data=value)

    def _group(self, file: int, group: int) -> Any:
        import pyarrow as pa

        key = (file, group)
        if key not in self._groups:
            cost, source = self._cost(self._paths[file], group), self._file(self._paths[file])
            columns = [name for name in source.schema_arrow.names if name in COLUMNS]
            cached = sum(size for _, size in self._groups.values())
            while self._groups and cached + cost > _MOST:
                cached -= self._groups.popitem(last=False)[1][1]
            try:
                # Without threads: `Data.workers` decides how many cores are used.
                table = source.read_row_group(group, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, ValueError, IndexError) as error:
                raise Unusable(f"the row group cannot be read ({_line(error)})") from None
            self._groups[key] = table, cost
        self._groups.move_to_end(key)
        return self._groups[key][0]

    def _cost(self, path: str, group: int) -> int:
        """Bytes of a row group in memory. Raises Unusable if they are too many."""
        metadata, stored, decoded = self._file(path).metadata, 0, 0
        with storage.File(path) as file:
            for number in _leaves(metadata):
                cost = column_cost(file, metadata.row_group(group).column(number))
                stored, decoded = stored + cost.stored, decoded + cost.decoded
            most = min(_MOST, max(self._limit, _GROWTH * min(stored, file.size)))
        if decoded > most:
            rows = metadata.row_group(group).num_rows
            cause = f"a row group of {rows} rows in {stored} bytes takes {decoded} in memory; at most {most}"
            raise Unusable(f"{cause}: write groups of a hundred rows or so")
        return decoded

    def _file(self, path: str) -> Any:
        if path not in self._open:
            import pyarrow as pa
            import pyarrow.parquet as pq

            storage.stamp(path)
            try:
                source = storage.open_for_library(path) if storage.is_url(path) else pa.OSFile(path)
                metadata = pq.read_metadata(source)
                leaves = [metadata.schema.column(number) for number in _leaves(metadata)]
                names = [leaf.path for leaf in leaves]
                if len(set(names)) < len(names):
                    raise Unusable(f"{path} has two columns of one name")
                # A text that the file repeats by its number in a dictionary is repeated so in memory too.
                texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
                self._open[path] = pq.ParquetFile(source, metadata=metadata, read_dictionary=texts)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise Unusable(f"{path} is no Parquet file ({_line(error)})") from None
        return self._open[path]


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without empty keys in its turns and tools: a table gives every struct the keys of all others."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = {key: item if key in MEDIA else clean(item) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) if key in ("conversations", "messages", "tools") else value for key, value in row.items()}


def _leaves(metadata: Any) -> list[int]:
    """Numbers of the file's columns that are read."""
    paths = ((number, metadata.schema.column(number).path) for number in range(metadata.num_columns))
    return [number for number, path in paths if path.partition(".")[0] in COLUMNS]


def _size(array: Any) -> int:
    """Bytes of an array's values as Python objects."""
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute  # its functions are made when it is imported
    objects, kind = len(array) * _VALUE, array.type
    if pa.types.is_struct(kind):
        return objects + sum(map(_size, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return objects + _size(array.flatten())
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return objects + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return objects + (pc.sum(pc.binary_length(array).cast(pa.int64())).as_py() or 0)
    if pa.types.is_primitive(kind) or pa.types.is_null(kind):
        return objects
    raise Unusable(f"a column of {kind} is not read")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
