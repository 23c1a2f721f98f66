"""A pipelined step as one program, over the same step as a program per op: step time, compile time and bytes.

On CPU one process never overlaps two submeshes, so neither lowering can show a gain of its pipeline there.
The times show the overhead of each lowering: dispatch of ops, or branches and padding of the one program.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.steps import Stepper, in_turn
from mmjax.bench.rows import Row
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, most_loaded

CASES = {
    "vision on the first stage": ("digits_vlm_homogeneous.gin", ()),
    "vision on all ranks": ("digits_vlm.gin", ("vision/Layout.rank_offset=0",)),
}
"""Configuration and changes by case."""
LOWERINGS = ("ops", "single")


def bench_lowerings(rounds: int) -> Iterator[Row]:
    """Yields the rows of every case; the two lowerings step in turn."""
    for case, (config, changes) in CASES.items():
        bindings = (*changes, "World.compilation_cache=none")
        steps = {lowering: Stepper(config, [*bindings, f"Train.lowering={lowering}"]) for lowering in LOWERINGS}
        times = in_turn(steps, rounds)

        def row(quantity: str, value: float, unit: str, case: str = case) -> Row:
            return Row(bench="lowerings", case=f"{case}: {quantity}", value=value, unit=unit)

        ratios = [single / ops for single, ops in zip(times["single"], times["ops"], strict=True)]
        yield row("step, single / ops", statistics.median(ratios), "ratio")
        for lowering, step in steps.items():
            programs = {id(program): program for program in step.executor.programs()}.values()
            yield row(f"{lowering}, step", statistics.median(times[lowering]), "s")
            yield row(f"{lowering}, programs", len(programs), "")
            yield row(f"{lowering}, processor time to compile them", step.compile_seconds, "s")
            yield row(f"{lowering}, bytes of the fullest device", device_bytes(step), "B")


def device_bytes(step: Stepper) -> int:
    """Bytes of the fullest device at the fullest moment of a step, with temporaries by ``memory_analysis``.

    For a single program the analysis gives all of them. For programs per op it gives the temporaries of the largest
    program; everything else is counted (see ``memory_by_stage``).
    """
    executor = step.executor
    if not isinstance(executor, Executor):
        analyses = [program.compiled.memory_analysis() for program in executor.programs()]
        arguments = ((a, a.output_size_in_bytes - a.alias_size_in_bytes) for a in analyses)
        return max(a.argument_size_in_bytes + results + a.temp_size_in_bytes for a, results in arguments)
    parts, measured = step.parts, {}
    for (name, _), stage_programs in executor.stage_programs.items():
        temporary = (program.compiled.memory_analysis().temp_size_in_bytes for program in stage_programs.programs)
        measured[name] = max(measured.get(name, 0), *temporary)
    counted = memory_by_stage(parts.placed, parts.schedule, parts.shapes.values())
    by_stage = {name: replace(memory, temporaries=measured[name]) for name, memory in counted.items()}
    return most_loaded(parts.placed, by_stage)[1].total
