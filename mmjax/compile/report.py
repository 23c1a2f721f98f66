"""Reports on compiled programs and their step: objects for JSON, and lines for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmjax.compile.buffers import by_source
from mmjax.compile.forecast import forecast
from mmjax.compile.programs import Compiled, Programs
from mmjax.compile.roofline import Work
from mmjax.compile.step import Fullest, Step

GIB, MIB, TERA, GIGA = 2**30, 2**20, 1e12, 1e9
LINES = 3
"""Lines of source that a program's largest temporaries are shown for."""
SMALL = 2**20
"""Bytes of temporaries below which no line is shown."""
RATES = ("rates", "fast_rates")


def program_figures(programs: Programs, compiled: Compiled) -> dict[str, Any]:
    """A program in numbers: bytes, FLOPs and seconds of one run on a device.

    "program" is its name, "programs" the names of all equal ones. "dry_run" of its "memory" is what a dry run counts
    for it, None for what it does not count by program. Times are predicted: "predicted_seconds" at the
    target's rates and in "fast" at the faster ones.

    Args:
      programs: the programs.
      compiled: one of `programs.distinct()`.
    """
    target, executable = programs.target, compiled.executable
    work, fast = (compiled.work(rates) for rates in (target.rates, target.fast_rates))
    ideal, counted = compiled.model_flops.causal / target.datasheet.flops, forecast(programs, compiled.use)
    return {
        "program": compiled.names[0],
        "programs": list(compiled.names),
        "memory": {
            "arguments": executable.arguments,
            "results": executable.results,
            "aliased": executable.aliased,
            "temporaries": executable.temporaries,
            "total": executable.bytes,
            "dry_run": counted and counted.counted,
        },
        "temporary_bytes": executable.temporaries,
        "flops": {kind: flops for kind, flops in work.flops.items() if flops},
        "model_flops": asdict(compiled.model_flops),
        "bytes": work.bytes,
        "collectives": {
            kind: {"count": collectives.count, "bytes": collectives.bytes}
            for kind, collectives in work.collectives.items()
        },
        "collective_seconds": {"all": work.seconds["collectives"], "shown": work.shown},
        "kernels": work.kernels,
        "launches": work.launches,
        "conditionals": work.conditionals,
        "products": dict(work.products),
        "accumulating": work.accumulating,
        "largest": [asdict(buffer) for buffer in executable.buffers],
        "temporaries_by_line": by_source(executable.buffers),
        "predicted_seconds": work.ordered,
        "predicted_seconds_hidden": work.hidden,
        "mfu": ideal / work.ordered if ideal and work.ordered else None,
        "fast": {
            "predicted_seconds": fast.ordered,
            "mfu": ideal / fast.ordered if ideal and fast.ordered else None,
        },
        "compile_seconds": executable.seconds,
    }


def step_figures(programs: Programs, step: Step) -> dict[str, Any]:
    """The step in numbers: predicted seconds, samples a second, MFU by both rules, and the fullest device.

    Args:
      programs: the programs.
      step: their step.
    """
    target, fullest, batch = programs.target, step.fullest, programs.recipe.train.global_batch
    timeline, figures = step.timeline(target.rates), dict[str, Any]()
    for name in RATES:
        seconds = step.seconds(getattr(target, name))
        mfu = step.mfu(seconds)
        figures[name] = {
            "predicted_seconds": seconds,
            "samples_per_second": batch / seconds,
            "mfu": mfu.causal,
            "mfu_full_attention": mfu.full,
        }
    return {
        "program": "step",
        "target": target.name,
        "devices": programs.assembly.world.size,
        **figures["rates"],
        "predicted_seconds_hidden": step.seconds(target.rates, hidden=True),
        "bubble": timeline.bubble if timeline else 0.0,
        "schedule": programs.assembly.schedule.name,
        "choices": list(programs.assembly.choices),
        "fast": figures["fast_rates"],
        "memory": {
            "rank": fullest.rank,
            "op": fullest.op,
            "bytes": fullest.bytes,
            "limit": fullest.limit,
            "fits": fullest.fits,
            "kinds": dict(fullest.kinds),
        },
        "blame": _blame_figures(fullest),
    }


def _blame_figures(fullest: Fullest) -> dict[str, Any]:
    blame = fullest.blame
    buffer = asdict(blame.buffer) if blame.buffer else None
    return {"kind": blame.kind, "bytes": blame.bytes, "program": blame.program, "buffer": buffer}


# ---- for people ------------------------------------------------------------------------------------------------------


def program_lines(programs: Programs, compiled: Compiled) -> Iterator[str]:
    """Yields lines about a program; arguments as for `program_figures`."""
    figures = program_figures(programs, compiled)
    work, fast, memory = compiled.work(programs.target.rates), figures["fast"], figures["memory"]
    yield show_names(compiled.names)
    flops = f"{sum(work.flops.values()) / TERA:.2f} TFLOP, " if work.products else ""
    if figures["model_flops"]["causal"]:
        flops += f"the model's {figures['model_flops']['causal'] / TERA:.2f}, "
    yield f"  {flops}{work.bytes / GIGA:.2f} GB; predicted {_times(figures)}, at faster rates {_times(fast)}"
    aliased = f" ({_gib(memory['aliased'])} of them in arguments)" if memory["aliased"] else ""
    counted = f"; a dry run counts {_gib(memory['dry_run'])}" if memory["dry_run"] else ""
    yield (
        f"  memory {_gib(memory['total'])}: arguments {_gib(memory['arguments'])}, results {_gib(memory['results'])}"
        f"{aliased}, temporaries {_gib(memory['temporaries'])}{counted}"
    )
    if largest := list(_lines_of_source(figures["temporaries_by_line"])):
        yield f"  largest temporaries: {', '.join(largest)}"
    if work.collectives:
        each = [
            f"{collectives.count:g} {kind} of {collectives.bytes / 2**20:,.0f} MiB"
            for kind, collectives in work.collectives.items()
        ]
        took, shown = work.seconds["collectives"] * 1e3, work.shown * 1e3
        yield f"  {', '.join(each)}; of {took:.1f} ms {took - shown:.1f} lie beside computations"
    yield f"  {_kernels(work)}"


def show_names(names: tuple[str, ...]) -> str:
    """Names of equal programs: "F llm.1 (and 4 equal: llm.2, llm.3, llm.4, llm.5)"."""
    first, *equals = names
    kind, _, _ = first.partition(" ")
    equal_names = [name.removeprefix(f"{kind} ") for name in equals]
    return f"{first} (and {len(equal_names)} equal: {', '.join(equal_names)})" if equal_names else first


def _times(figures: Mapping[str, Any]) -> str:
    mfu = "" if figures["mfu"] is None else f" (MFU {figures['mfu']:.0%})"
    return f"{figures['predicted_seconds'] * 1e3:.2f} ms{mfu}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def _lines_of_source(sizes: Mapping[str, int]) -> Iterator[str]:
    for place, size in [(place, size) for place, size in sizes.items() if size >= SMALL][:LINES]:
        yield f"{_gib(size)} {place}"


def _kernels(work: Work) -> str:
    waits = f"{work.conditionals:g} conditionals, for which the host waits" if work.conditionals else "no conditional"
    text = f"{work.kernels} kernels, {work.launches:,.0f} launches, {waits}"
    if work.products:
        products = [f"{count:g} {dtypes}" for dtypes, count in work.products.items()]
        text += f"; products: {', '.join(products)}; {work.accumulating:g} add to an accumulator"
    return text


def step_lines(programs: Programs, step: Step) -> Iterator[str]:
    """Yields lines about the step; arguments as for `step_figures`."""
    figures = step_figures(programs, step)
    devices = f"{figures['devices']} x {programs.target.datasheet.name}"
    yield f"step on {devices}, predicted, by rates that are assumed"
    for name, by_rates in (("assumed rates", figures), ("faster rates", figures["fast"])):
        speed = f"{by_rates['samples_per_second']:,.1f} samples/s"
        yield (
            f"  {name}: {by_rates['predicted_seconds'] * 1e3:,.1f} ms, {speed}, "
            f"MFU {by_rates['mfu']:.1%}, with all pairs of causal attention {by_rates['mfu_full_attention']:.1%}"
        )
    yield f"  bubble {figures['bubble']:.1%} ({figures['schedule']}); the host's time is left out"
    yield f"  {memory_line(step.fullest)}"
    if not step.fullest.fits:
        yield f"  {misfit(step.fullest)}"


def memory_line(fullest: Fullest) -> str:
    """The fullest device, and its bytes by kind."""
    kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in sorted(fullest.kinds.items(), key=lambda kv: -kv[1]))
    return (
        f"fullest: rank {fullest.rank} during {fullest.op}, {_gib(fullest.bytes)} of {_gib(fullest.limit)}; by kind, "
        f"each at its peak: {kinds}"
    )


def misfit(fullest: Fullest) -> str:
    """One line about a device that holds too much, with the buffer that takes most."""
    return (
        f"does not fit: rank {fullest.rank} holds {_gib(fullest.bytes)} during {fullest.op} and a run may take "
        f"{_gib(fullest.limit)}; most is {fullest.blame}"
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def write_hlo(programs: list[Compiled], folder: Path) -> list[Path]:
    """Writes each program's optimised HLO text to a file with its name, such as "B_llm.1.hlo.txt"; makes the folder.

    Several programs of one name are numbered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for compiled in programs:
        name = re.sub(r"[^\w.\-]+", "_", compiled.names[0].replace("->", "-to-"))
        file, number = folder / f"{name}.hlo.txt", 1
        while file in written:
            number += 1
            file = folder / f"{name}_{number}.hlo.txt"
        file.write_text(compiled.executable.text, encoding="utf-8")
        written.append(file)
    return written
