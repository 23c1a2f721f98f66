"""Memory of compiled programs, as compiled and as a dry run counts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mmjax.compile.programs import Programs, Use
from mmjax.mesh.spmd import Program
from mmjax.pipeline.last_backward import REDUCING
from mmjax.pipeline.memory import reduce_temporaries, shard_bytes

FORECAST = ("F", "B", "W", *REDUCING.values(), "reduce", "update")
"""Kinds of programs whose temporaries a dry run counts."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes of a program on a device, while it runs.

    Attributes:
      counted: as a dry run counts them: the arguments that it reads, results that lie in no argument, and temporaries.
      temporaries: part of `counted`, an estimate.
      compiled: the same total of the compiled program.
    """

    counted: int
    temporaries: int
    compiled: int

    @property
    def error(self) -> float:
        """How much more is counted than compiled, as a share of it: 0.05 for 5 % more."""
        return self.counted / self.compiled - 1


def forecast(programs: Programs, use: Use | None) -> Forecast | None:
    """The memory of a use's program, counted and compiled; None for a kind that is not one of `FORECAST`."""
    if use is None or use.kind not in FORECAST:
        return None
    program, temporaries = use.program, 0
    if use.kind == "reduce":
        temporaries = reduce_temporaries(programs.assembly.placed.stages[use.name].state)
    elif use.kind != "update":
        temporaries = program.temporary_bytes()
    avals, is_read = jax.tree.leaves(program.avals), program.reads()
    arguments = shard_bytes([aval for aval, read in zip(avals, is_read, strict=True) if read])
    results = shard_bytes(program.outputs) - _overwriting(program, is_read)
    compiled = programs.executable(use).bytes
    return Forecast(counted=arguments + results + temporaries, temporaries=temporaries, compiled=compiled)


def _overwriting(program: Program, is_read: Sequence[bool]) -> int:
    """Bytes of the results that lie in donated arguments: JAX pairs those of one shape, dtype and sharding."""
    arguments = jax.tree.unflatten(jax.tree.structure(program.avals), is_read)
    read = [jax.tree.leaves(arguments[number]) for number in program.donated]
    donated = [jax.tree.leaves(program.avals[number]) for number in program.donated]
    pairs = [pair for leaves, flags in zip(donated, read, strict=True) for pair in zip(leaves, flags, strict=True)]
    free = Counter(_shape(aval) for aval, is_used in pairs if is_used)
    both = free & Counter(map(_shape, jax.tree.leaves(program.outputs)))
    return sum(math.prod(shape) * dtype.itemsize * count for (shape, dtype), count in both.items())


def _shape(aval: Any) -> tuple[tuple[int, ...], Any]:
    return aval.sharding.shard_shape(aval.shape), aval.dtype
