"""``python -m mmjax.bench [NAME …] [--json]``: repeats the measurements behind the project's claims about speed.

Alternatives are measured in turn in one process, so that noise of the machine affects all of them. On CPU one process
never overlaps two submeshes: a pipelined step there shows overhead, not a pipeline's gain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from mmjax.bench import BENCHES, MOVED, run_bench
from mmjax.bench.rows import print_rows
from mmjax.config.flags import Flag, help_text, one_line_errors, parse_flags, run_command
from mmjax.configurable import ConfigError, suggest
from mmjax.flags import entry

FLAGS = (
    Flag(name="json", doc="One JSON object a row instead of a table.", default=False),
    Flag(
        name="rounds",
        doc="Measurements of each case; the median counts. `simulate`, `schedules`: three at most, `bf16`: one.",
        default=15,
    ),
)
USAGE = "python -m mmjax.bench [NAME …]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named benchmarks, or all, and prints each row at once; returns 1 if a target was missed, else 0.

    Args:
      argv: the arguments without the program's name; by default those of this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM.
    """
    all_ok = True
    with one_line_errors():
        arguments = list(sys.argv[1:] if argv is None else argv)
        if {"--help", "-h"} & set(arguments):
            print(_help())
            return 0
        names, flag_words = _split(arguments)
        names = names or [name for name, bench in BENCHES.items() if not bench.on_request]
        for name in names:
            _require_name(name)
        flags = parse_flags(flag_words, [*FLAGS, *_bench_flags(names)], USAGE, gin=False)
        rounds = int(flags.values["rounds"])
        if rounds < 1:
            raise ConfigError(f"--rounds={rounds}: must be at least 1, such as 15")
        for name in names:
            values = {flag.name: flags.values[flag.name] for flag in BENCHES[name].flags}
            all_ok &= print_rows(run_bench(name, rounds, **values), as_json=bool(flags.values["json"]))
    return int(not all_ok)


def _require_name(name: str) -> None:
    """Raises a ConfigError where no benchmark has this name, or an installed package lacks it."""
    if name in MOVED:
        study = f"run `python -m studies {MOVED[name]}` in a checkout of mmjax"
        raise ConfigError(f"benchmark {name!r}: it measures nothing and is a study now; {study}")
    if name not in BENCHES:
        raise ConfigError(f"benchmark {name!r}: there is none of this name; {suggest(name, BENCHES)}")
    if not BENCHES[name].available:
        command = f"run `python -m mmjax.bench {name}` there"
        raise ConfigError(f"benchmark {name!r}: an installed package has no such benchmark, a checkout has; {command}")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of benchmarks, and flags with their values."""
    with_value = {f"--{flag.name}" for flag in (*FLAGS, *_bench_flags(BENCHES)) if not isinstance(flag.default, bool)}
    names, flag_words, previous = [], [], ""
    for argument in arguments:
        (flag_words if argument.startswith("-") or previous in with_value else names).append(argument)
        previous = argument
    return names, flag_words


def _bench_flags(names: Iterable[str]) -> list[Flag]:
    """The flags that only these benchmarks have, each once."""
    return list(dict.fromkeys(flag for name in names for flag in BENCHES[name].flags))


def _help() -> str:
    """The benchmarks with their flags; those that need a checkout are only named where there is none."""
    lines = [help_text(FLAGS, USAGE, gin=False), "", "Benchmarks; all but those marked * when none is named:"]
    available = {name: bench for name, bench in BENCHES.items() if bench.available}
    if missing := BENCHES.keys() - available.keys():
        lines.append(entry("  ", f"In a checkout of mmjax there are also {', '.join(sorted(missing))}."))
    for name, bench in available.items():
        lines.append(entry(f"  {name}{'*' if bench.on_request else ''}", bench.doc))
        lines += [entry(f"    --{flag.name}", flag.doc) for flag in bench.flags]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
