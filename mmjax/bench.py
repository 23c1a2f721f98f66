"""``python -m mmjax.bench [NAME …] [--json]``: what the project claims about speed, measured again.

Every row is a ratio of two things measured in turn in one process: a noisy machine moves both. On CPU one process
never overlaps two submeshes: a pipelined step there shows overhead, not a pipeline's gain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mmjax.benches import BENCHES, run_bench
from mmjax.benches.rows import Row
from mmjax.config.flags import Flag, one_line_errors, parse_flags
from mmjax.configurable import ConfigError, suggest

FLAGS = (
    Flag(name="json", doc="One JSON object a row instead of a table.", default=False),
    Flag(name="rounds", doc="Measurements of each case; the median counts.", default=15),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named benchmarks, or all; exit status 1 when a target is missed."""
    with one_line_errors():
        arguments = list(sys.argv[1:] if argv is None else argv)
        names = [a for a in arguments if not a.startswith("-")] or list(BENCHES)
        flags = parse_flags([a for a in arguments if a.startswith("-")], FLAGS, "python -m mmjax.bench [NAME …]")
        for name in names:
            if name not in BENCHES:
                raise ConfigError(f"benchmark {name!r}: there is none of this name; {suggest(name, BENCHES)}")
        rows = [row for name in names for row in run_bench(name, int(flags.values["rounds"]))]
    for row in rows:
        print(json.dumps({**asdict(row), "ok": row.ok}) if flags.values["json"] else _line(row))
    return 0 if all(row.ok for row in rows) else 1


def _line(row: Row) -> str:
    target = "" if row.target is None else f"  target ≤ {row.target:g}  {'ok' if row.ok else 'MISSED'}"
    return f"{row.bench:10} {row.case:32} {row.value:10.4g} {row.unit}{target}"


if __name__ == "__main__":
    sys.exit(main())
