"""A last backward that reduces its stage's gradients, against two programs, compiled for H100s; nothing has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mmjax.bench.rows import Row
from mmjax.compile.executables import Executable
from mmjax.compile.programs import Programs
from mmjax.compile.roofline import Work, work_of
from mmjax.mesh.spmd import Program
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.last_backward import reducing_program
from mmjax.pipeline.overwriting import reduce_program
from studies.h100.report import programs, row_of

_LAYERS = (
    *("llm/Decoder.layers=12", "llm/Layout.pp=3", "llm/Layout.dp=8", "vision/Layout.rank_offset=24"),
    *("Data.sequence_length=2048", "llm/Packing.buckets=()", "Train.global_batch=256", "Train.microbatches=8"),
    *("llm/Decoder.remat='dots'", "Train.unroll=True", "Train.overlap_grad_reduce=True"),
)
CASES: Mapping[str, tuple[str, ...]] = {
    "dp 8": _LAYERS,
    "dp 4, tp 2": (*_LAYERS, "llm/Layout.dp=4", "llm/Layout.tp=2"),
    "dp 8, states whole on each rank": (*_LAYERS, "llm/Layout.optimizer_instances=8"),
    "dp 8, W of zb-h1": (*_LAYERS, "Train.schedule='zb-h1'"),
    "dp 16, two nodes": (*_LAYERS, "llm/Layout.dp=16", "vision/Layout.rank_offset=48", "Train.global_batch=512"),
}
"""The settings of the inner stage of four layers of Vicuna-7B, four rows of 2,048 tokens, by what differs."""
STAGE = "llm.1"


@dataclass(frozen=True)
class Reduction:
    """The programs of a stage's last B or W.

    Attributes:
      backward, reduce: B or W, and the reduction, as two programs.
      both: as one.
      temporaries: bytes of ``backward`` and ``both``.
    """

    backward: Work
    reduce: Work
    both: Work
    temporaries: tuple[int, int]

    @property
    def seconds(self) -> tuple[float, float]:
        """Predicted of two programs, and of one."""
        return self.backward.ordered + self.reduce.ordered, self.both.ordered

    @property
    def hidden(self) -> float:
        """Seconds of collectives that lie beside computations in one program."""
        return self.both.seconds["collectives"] - self.both.shown


def reduction(bindings: tuple[str, ...]) -> Reduction:
    """The programs of ``STAGE`` under these settings."""
    found = programs(bindings)
    executor = found.assembly.executor
    assert isinstance(executor, Executor)
    (known,) = (value for (place, _), value in executor.stage_programs.items() if place == STAGE)
    reduce = reduce_program(found.assembly.placed.stages[STAGE].state)
    backward = known.weights or known.backward
    assert backward is not None
    parts = (backward, reduce, known.reducing or reducing_program(STAGE, known.functions))
    compiled = [found.compiler(program) for program in parts]
    alone, reduced, both = (_work(found, *pair) for pair in zip(parts, compiled, strict=True))
    return Reduction(alone, reduced, both, (compiled[0].temporaries, compiled[2].temporaries))


def _work(found: Programs, program: Program, compiled: Executable) -> Work:
    return work_of(compiled.module, ranks=found.ranks_of(program))


def rows() -> Iterator[Row]:
    """Milliseconds of both ways, and what is hidden."""
    for name, bindings in CASES.items():
        case = reduction(bindings)
        for words, seconds in zip(("two programs", "one program"), case.seconds, strict=True):
            yield row_of(f"last backward and reduction, {name}: {words}, predicted", seconds * 1e3, "ms")
        yield row_of(f"last backward and reduction, {name}: collectives hidden, predicted", case.hidden * 1e3, "ms")
        programs.cache_clear()


def tables() -> dict[str, str]:
    """The table of docs/h100.md."""
    return {"Gradients beside the last backward": _table()}


def _table() -> str:
    lines = ["| | B or W, ms | reduce, ms | one program, ms | collectives, hidden of all, ms | temporaries, GiB |"]
    lines.append("|---|---|---|---|---|---|")
    for name, bindings in CASES.items():
        case = reduction(bindings)
        alone, together = (f"{size / 2**30:.2f}" for size in case.temporaries)
        values = [f"{seconds * 1e3:.1f}" for seconds in (case.backward.ordered, case.reduce.ordered, case.both.ordered)]
        hidden = f"{case.hidden * 1e3:.1f} of {case.both.seconds['collectives'] * 1e3:.1f}"
        lines.append(f"| {name} | {' | '.join(values)} | {hidden} | {alone} → {together} |")
        programs.cache_clear()
    return "\n".join(lines)
