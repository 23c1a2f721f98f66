"""Computes the memory of a column of a Parquet row group from its page headers, before anything is decoded.

Compression and dictionaries can turn a few kilobytes into gigabytes, and the footer need not tell. The page headers
decide how much a library allocates. They are structs in Thrift's compact protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmjax.data.sources.storage import File, Unusable

PER_VALUE = 16
"""Bytes of a value beside its content: an index or offset, levels, and whether it is null."""
_HEADS = (1 << 12, 1 << 17)
"""Bytes that are read for a page header: at first, and if these are not enough."""
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The size of a column of a row group.

    Attributes:
      stored: bytes in the file.
      decoded: the most bytes in memory, a dictionary included.
    """

    stored: int
    decoded: int


def column_cost(file: File, chunk: Any) -> Cost:
    """The size of a column chunk, in bytes: `.stored` in the file, `.decoded` at most in memory.

    Reads only page headers, and moves the position in `file`.

    Args:
      file: the parquet file, `storage.File("data.parquet")`.
      chunk: pyarrow's `ColumnChunkMetaData` of a row group, such as `metadata.row_group(0).column(0)`.

    Raises Unusable for malformed pages, and for encodings in which a few bytes may stand for many long values.
    """
    if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
        raise Unusable("a column of FIXED_LEN_BYTE_ARRAY is not read")
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
        at = chunk.dictionary_page_offset
    start, end, counted, decoded = at, at + chunk.total_compressed_size, 0, 0
    while counted < chunk.num_values and at < end:
        head, size = _header(file, at)
        kind, page_size, stored = (_number(head, field) for field in (1, 2, 3))
        values, encoding = _values(head, kind)
        at += size + stored
        if at > file.size:
            raise Unusable("a page ends after the file")
        if encoding == _DELTA_BYTE_ARRAY:
            raise Unusable("DELTA_BYTE_ARRAY is an encoding that is not read; write the table without it")
        decoded += page_size + values * PER_VALUE
        counted += values if kind in (_DATA, _DATA_V2) else 0
    return Cost(stored=at - start, decoded=decoded)


def _values(head: dict[int, Any], kind: int) -> tuple[int, int]:
    """Number of values of a page, and their encoding."""
    where = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}.get(kind)
    if where is None:
        return 0, 0
    struct = head.get(where[0])
    if not isinstance(struct, dict):
        raise Unusable("a page header is damaged")
    return _number(struct, 1), _number(struct, where[1])


def _number(struct: dict[int, Any], field: int) -> int:
    value = struct.get(field)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise Unusable("a page header is damaged")
    return value


def _header(file: File, at: int) -> tuple[dict[int, Any], int]:
    """A page header by field number, and its length in bytes."""
    for most in _HEADS:
        if not 0 <= at < file.size:
            break
        file.seek(at)
        data = file.read(most)
        try:
            reader = _Reader(data)
            return reader.struct(0), reader.at
        except IndexError:
            continue  # the header is longer than the bytes read
    raise Unusable("a page header is damaged")


class _Reader:
    """Reads Thrift's compact protocol. Raises IndexError if the data end too early."""

    def __init__(self, data: bytes):
        self._data, self.at = data, 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Integers and structs by field number; other fields are skipped."""
        values: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            value = self._value(head & 15, depth)
            if value is not None:
                values[field] = value
        return values

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Unusable("a page header is nested too deeply")
        if kind in (1, 2):  # true and false are types of a field
            return None
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (3, 7, 8):
            self._pass({3: 1, 7: 8}.get(kind) or self._varint())
            return None
        raise Unusable("a page header is damaged")  # lists, sets and maps are in no page header

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise Unusable("a page header is damaged")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
