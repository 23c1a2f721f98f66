"""``python -m studies.h100 --gin_file=F [--json]``: a configuration's programs, compiled for H100s without one.

For each program FLOPs, bytes and collectives of a device in one run and its time by a roofline; then the step that
follows from these times, with collectives added to computations and beside them. All but the programs is predicted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mmjax.config import load_config
from mmjax.config.flags import Flag, one_line_errors, parse_flags, require_gin_file, run_command
from studies.h100.compiled import Programs

FLAGS = (
    Flag(name="json", doc="One JSON object a program and one for the step.", default=False),
    Flag(name="packed", doc="Whether rows are packed, and not of one segment each.", default=False),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the programs of stages, and prints what they are."""
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, "python -m studies.h100")
        require_gin_file(flags)
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        programs = Programs(recipe, packed=bool(flags.values["packed"]))
        for found in summary(programs):
            print(json.dumps(found) if flags.values["json"] else _line(found), flush=True)
    return 0


def summary(programs: Programs) -> Iterator[dict[str, Any]]:
    """Each program in numbers, then the step."""
    for name in programs.names:
        compiled = programs.compiled(name)
        work = compiled.work()
        yield {
            "program": name,
            "flops": {kind: flops for kind, flops in work.flops.items() if flops},
            "bytes": work.bytes,
            "collectives": {kind: {"count": sent.count, "bytes": sent.bytes} for kind, sent in work.sent.items()},
            "temporary_bytes": compiled.temporary_bytes,
            "predicted_seconds": work.ordered,
            "predicted_seconds_hidden": work.hidden,
        }
    yield {
        "program": "step",
        "predicted_seconds": programs.step(),
        "predicted_seconds_hidden": programs.step(hidden=True),
    }


def _line(found: dict[str, Any]) -> str:
    times = f"{found['predicted_seconds'] * 1e3:.1f} ms, {found['predicted_seconds_hidden'] * 1e3:.1f} with hidden"
    if "flops" not in found:
        return f"{found['program']:16} {times} collectives, predicted (F, B and W; no moves, reduction and update)"
    sent = found["collectives"].items()
    collectives = [f"{one['count']:g} {kind} of {one['bytes'] / 2**20:,.0f} MiB" for kind, one in sent]
    work = f"{sum(found['flops'].values()) / 1e12:.2f} TFLOP, {found['bytes'] / 1e9:.1f} GB"
    held = f"{found['temporary_bytes'] / 2**30:.2f} GiB of temporaries"
    return f"{found['program']:16} {work}, {', '.join(collectives) or 'no collective'}, {held}; {times}, predicted"


if __name__ == "__main__":
    run_command(main)
