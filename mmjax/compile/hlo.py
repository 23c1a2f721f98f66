"""Reads the text of a program that XLA compiled: its computations, and which instructions run how often."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

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
    arrays = ((dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(text))
    return tuple(Shape(dtype, dims) for dtype, dims in arrays if dtype in BYTES)


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
        """The function that a custom call calls; "" for other instructions."""
        match = re.search(r'custom_call_target="([^"]+)"', self.text)
        return match.group(1) if match else ""

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations that a conditional chooses from; () for other instructions."""
        match = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        return tuple(re.findall(r"[\w.\-]+", match.group(1))) if match else ()

    @property
    def trips(self) -> int | None:
        """The number of times that a loop's body runs; ``None`` where that is data."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
        return int(match.group(1)) if match else None


Computation = Mapping[str, Instruction]
"""Instructions by name, in order."""


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
      frames: places in the source by number, "mmjax/models/llama/layers.py:165".
    """

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Module:
        """The program with this text."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, computation = "", {}
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if head := _COMPUTATION.match(line):
                computation = computations[head.group(2)] = {}
                entry = head.group(2) if head.group(1) else entry
            elif instruction := _instruction(line):
                computation[instruction.name] = instruction
        return cls(computations, entry, _frames(text))

    def run(self, branch: int, trips: float) -> Iterator[tuple[float, Computation, Instruction]]:
        """How often each instruction runs, with its computation, outside of fusions.

        Loops and calls are left out, and the instructions inside them stand in their place; a conditional comes before
        those of its branch.

        Args:
          branch: of conditionals, the branch that runs; the last where there are fewer.
          trips: of loops whose trips are data, how often their body runs.
        """
        yield from self._run(self.entry, 1.0, branch, trips)

    def _run(
        self, name: str, times: float, branch: int, trips: float
    ) -> Iterator[tuple[float, Computation, Instruction]]:
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.kind == "while":
                yield from self._run(
                    instruction.called[-1],
                    times * (trips if instruction.trips is None else instruction.trips),
                    branch,
                    trips,
                )
            elif instruction.branches:
                yield times, computation, instruction
                yield from self._run(
                    instruction.branches[min(branch, len(instruction.branches) - 1)], times, branch, trips
                )
            elif instruction.kind in ("call", "async-start"):
                for called in instruction.called:
                    yield from self._run(called, times, branch, trips)
            else:
                yield times, computation, instruction

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """All instructions by name, also those inside of fusions."""
        return {
            name: instruction for computation in self.computations.values() for name, instruction in computation.items()
        }

    def source(self, instruction: Instruction) -> str:
        """The line of source that an instruction is from, "mmjax/models/llama/layers.py:165"; "" if it is from none.

        A fusion without a line has that of the last instruction in it that has one.
        """
        if number := re.search(r"stack_frame_id=(\d+)", instruction.text):
            return self.frames.get(int(number.group(1)), "")
        if line := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.text):
            return f"{_short(line.group(1))}:{line.group(2)}"
        fused = instruction.called[:1] if instruction.kind == "fusion" else ()
        inside = (self.source(part) for name in fused for part in reversed([*self.computations[name].values()]))
        return next(filter(None, inside), "")

    @cached_property
    def arrays(self) -> frozenset[Shape]:
        """All arrays that instructions outside of fusions give, and that may be in memory."""
        fused = {
            called
            for computation in self.computations.values()
            for instruction in computation.values()
            for called in _inside(instruction)
        }
        kept = (computation for name, computation in self.computations.items() if name not in fused)
        return frozenset(
            shape for computation in kept for instruction in computation.values() for shape in instruction.results
        )


def _frames(text: str) -> dict[int, str]:
    """File and line of each frame in the tables at the beginning of a program's text."""
    head = text.partition("\nENTRY ")[0]
    files = dict(re.findall(r'^(\d+) "([^"]*)"$', head.partition("FunctionNames")[0], re.M))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", head, re.M)
    lines = {place: f"{_short(files[file])}:{line}" for place, file, line in places if file in files}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", head, re.M)
    return {int(number): lines[place] for number, place in frames if place in lines}


def _short(path: str) -> str:
    """A path from the package on: "mmjax/models/llama/layers.py"; another's last two parts."""
    parts = path.split("/")
    start = len(parts) - 1 - parts[::-1].index("mmjax") if "mmjax" in parts else -2
    return "/".join(parts[start:])


def _inside(instruction: Instruction) -> tuple[str, ...]:
    return (
        instruction.called
        if instruction.kind in ("fusion", "reduce", "all-reduce-start", "sort", "scatter", "map")
        else ()
    )


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


# ---- groups of devices ----------------------------------------------------------------------------------------------


def replica_groups(line: str) -> list[list[int]]:
    """The device groups of a collective in a line of compiled HLO, as flat indices into the program's mesh.

    XLA prints them in three notations: ``{{0,1},{2,3}}``; ``[2,2]<=[2,2]T(1,0)``, an iota of that shape, transposed and
    cut into rows; and, from jax 0.11 on, ``mesh['dp'=2,'tp'=2] {'tp'}``, the axes that a group spans.

    Raises:
      ValueError: the line has no groups in one of these notations.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,{}]*)\}\}", line):
        return [_numbers(group) for group in listed[1].split("},{")]
    if counted := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = (_numbers(text or "") for text in counted.groups())
        numbers = np.arange(math.prod(dims)).reshape(dims)
        return numbers.transpose(order or None).reshape(shape).tolist()
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        along = re.findall(r"'(\w+)'(?=,|$)", named[2])
        if set(along) <= set(sizes) and len(along) == len(named[2].split(",")):
            axes, places = list(sizes), np.arange(math.prod(map(int, sizes.values())))
            order = [*(i for i, axis in enumerate(axes) if axis not in along), *(axes.index(axis) for axis in along)]
            rows = places.reshape([*map(int, sizes.values())]).transpose(order)
            return rows.reshape(-1, math.prod(int(sizes[axis]) for axis in along)).tolist()
    raise ValueError(f"no groups of devices in {line.strip()!r}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
