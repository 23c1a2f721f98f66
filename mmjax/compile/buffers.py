"""The buffers of a compiled program: its arguments, results and temporaries, each with the line that makes it.

XLA writes its assignment of buffers as text. Temporaries are parts of one allocation, at an offset; values whose parts
overlap are not in memory at the same time. Of these the largest counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmjax.compile.hlo import Module

MOST = 12
"""Buffers of each kind that are kept, the largest."""
KINDS = ("argument", "result", "temporary")
_ALLOCATION = re.compile(r"^allocation \d+: size \d+, (.*)$")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_LAYOUT = re.compile(r"\{[\d,:TSE()*]*\}$")


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """An array of a program on a device.

    Attributes:
      kind: one of `KINDS`.
      bytes: its size.
      array: dtype and dimensions, "bf16[1,640,4096]".
      made_by: what gives it: "fusion", or of an argument its path, "args[0]['llm']['head']".
      source: the line of source that it is from, "mmjax/models/llama/layers.py:165"; "" if that is unknown.
    """

    kind: str
    bytes: int
    array: str
    made_by: str
    source: str = ""

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return f"{self.array} of {self.bytes / 2**30:.2f} GiB, {self.made_by}{place}"


@dataclass(frozen=True)
class _Value:
    name: str
    index: str
    joins: bool
    size: int
    offset: int
    array: str


def read_buffers(text: str, module: Module) -> tuple[Buffer, ...]:
    """The largest buffers of a program of each kind, at most `MOST`, the largest first.

    Args:
      text: XLA's text of its assignment of buffers, as `xla_dump_to` makes it.
      module: the program.
    """
    values: dict[str, list[_Value]] = defaultdict(list)
    kind = ""
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            kind = _kind(head.group(1))
        elif kind and (match := _VALUE.match(line)):
            name, index, joins, size, offset, array = match.groups()
            values[kind].append(_Value(name, index or "", bool(joins), int(size), int(offset), array))
        elif line.startswith("Total bytes"):  # what follows has all values once more
            break
    apart = {"argument": _largest(values["argument"]), "result": _largest(values["result"])}
    buffers = [_buffer(kind, value, module) for kind, largest in apart.items() for value in largest]
    return (*buffers, *(_buffer("temporary", value, module) for value in _beside(values["temporary"])))


def _kind(text: str) -> str:
    """The kind of an allocation's buffers, from XLA's words about it; "" for constants and the like."""
    if "parameter" in text:
        return "argument"
    return "temporary" if "preallocated-temp" in text else "result" if "maybe-live-out" in text else ""


def _largest(values: Iterable[_Value]) -> list[_Value]:
    return sorted(values, key=lambda value: -value.size)[:MOST]


def _beside(values: Iterable[_Value]) -> list[_Value]:
    """The largest values whose parts of the allocation do not overlap."""
    chosen: list[_Value] = []
    for value in sorted(values, key=lambda value: (-value.size, value.joins)):
        end = value.offset + value.size
        if all(
            end <= chosen_value.offset or chosen_value.offset + chosen_value.size <= value.offset
            for chosen_value in chosen
        ):
            chosen.append(value)
        if len(chosen) == MOST:
            break
    return chosen


def _buffer(kind: str, value: _Value, module: Module) -> Buffer:
    instruction = module.instructions.get(value.name)
    array = _LAYOUT.sub("", value.array)
    if instruction is None:
        return Buffer(kind=kind, bytes=value.size, array=array, made_by=value.name)
    made_by = instruction.kind
    if instruction.kind == "parameter" and (path := re.search(r'op_name="([^"]*)"', instruction.text)):
        made_by = path.group(1).replace("\\'", "'")
    elif instruction.target:
        made_by = (
            "workspace of cuBLAS" if "__cublas" in instruction.target and array.startswith("s8") else instruction.target
        )
    return Buffer(kind=kind, bytes=value.size, array=array, made_by=made_by, source=module.source(instruction))


def by_source(buffers: Iterable[Buffer], kind: str = "temporary") -> Mapping[str, int]:
    """Bytes of the buffers of a kind by line of source, the most first; buffers without a line by `made_by`."""
    sizes: dict[str, int] = defaultdict(int)
    for buffer in buffers:
        if buffer.kind == kind:
            sizes[buffer.source or buffer.made_by] += buffer.bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
