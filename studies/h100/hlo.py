"""Reads the text of a program that XLA compiled: its computations, and which instructions run how often."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2},
    **{"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "token": 0},
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*->.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """The element type and the dimensions of an array."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return self.size * BYTES[self.dtype]


def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type, which may be a tuple."""
    found = ((dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(text))
    return tuple(Shape(dtype, dims) for dtype, dims in found if dtype in BYTES)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: its name in its computation.
      kind: its opcode, such as "fusion".
      results: the arrays that it gives.
      operands: names of what it reads.
      text: what follows the opcode: operands and attributes.
      is_root: whether its computation gives what it gives.
    """

    name: str
    kind: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls; of a loop the body."""
        return tuple(_CALLED.findall(self.text))

    @property
    def target(self) -> str:
        """Of a custom call, what is called."""
        found = re.search(r'custom_call_target="([^"]+)"', self.text)
        return found.group(1) if found else ""

    @property
    def branches(self) -> tuple[str, ...]:
        """Of a conditional, the computations of which one runs."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        return tuple(re.findall(r"[\w.\-]+", found.group(1))) if found else ()

    @property
    def trips(self) -> int | None:
        """Of a loop, how often its body runs; ``None`` where that is data."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
        return int(found.group(1)) if found else None


Computation = Mapping[str, Instruction]
"""Instructions by name, in order."""


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def of(cls, text: str) -> Module:
        """The program with this text."""
        found: dict[str, dict[str, Instruction]] = {}
        entry, own = "", {}
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if head := _COMPUTATION.match(line):
                own = found[head.group(2)] = {}
                entry = head.group(2) if head.group(1) else entry
            elif one := _instruction(line):
                own[one.name] = one
        return cls(found, entry)

    def run(self, branch: int, trips: float) -> Iterator[tuple[float, Computation, Instruction]]:
        """How often each instruction runs, with its computation, outside of fusions.

        Args:
          branch: of conditionals, the branch that runs; the last where there are fewer.
          trips: of loops whose trips are data, how often their body runs.
        """
        yield from self._run(self.entry, 1.0, branch, trips)

    def _run(
        self, name: str, times: float, branch: int, trips: float
    ) -> Iterator[tuple[float, Computation, Instruction]]:
        computation = self.computations[name]
        for one in computation.values():
            if one.kind == "while":
                yield from self._run(one.called[-1], times * (trips if one.trips is None else one.trips), branch, trips)
            elif one.branches:
                yield from self._run(one.branches[min(branch, len(one.branches) - 1)], times, branch, trips)
            elif one.kind in ("call", "async-start"):
                for called in one.called:
                    yield from self._run(called, times, branch, trips)
            else:
                yield times, computation, one

    @cached_property
    def arrays(self) -> frozenset[Shape]:
        """All arrays that instructions outside of fusions give: what may be in memory."""
        fused = {called for own in self.computations.values() for one in own.values() for called in _inside(one)}
        kept = (own for name, own in self.computations.items() if name not in fused)
        return frozenset(shape for own in kept for one in own.values() for shape in one.results)


def _inside(one: Instruction) -> tuple[str, ...]:
    return one.called if one.kind in ("fusion", "reduce", "all-reduce-start", "sort", "scatter", "map") else ()


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    at = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, _, text = rest[at:].lstrip().partition("(")
    operands = re.findall(r"%([\w.\-]+)", text[: _closing("(" + text, 0) - 1])
    return Instruction(head.group(2), kind, shapes(rest[:at]), tuple(operands), text, bool(head.group(1)))


def _closing(text: str, at: int) -> int:
    """The place behind the parenthesis that closes the one at a place."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
