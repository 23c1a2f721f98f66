"""``python -m studies [NAME …] [--json] [--tables]``: simulated figures beside those of papers, in a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmjax.bench.rows import print_rows
from mmjax.config.flags import run_command
from mmjax.configurable import ConfigError, suggest
from mmjax.flags import Flag, Flags, entry, help_text, one_line_errors, parse_flags
from studies import STUDIES, rows_of, tables_of

FLAGS = (
    Flag(name="json", doc="One JSON object a row instead of a table.", default=False),
    Flag(name="tables", doc="The tables of the documentation in Markdown instead of rows.", default=False),
    Flag(
        name="only",
        doc="of the study workloads: papers or configurations, by name or beginning, with commas, such as "
        "bigmac,nvidia_3b; all unless given.",
    ),
    Flag(
        name="dry_run", doc="of the study workloads: also the memory of a dry run, 20 s and more each.", default=False
    ),
    Flag(
        name="plan",
        doc="of the study workloads: also the best plan on as many devices, by a search of minutes to hours each.",
        default=False,
    ),
)
USAGE = "python -m studies [NAME …]"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the named studies, or all; returns the exit status, which is 0: studies have no targets."""
    with one_line_errors():
        arguments = list(sys.argv[1:] if argv is None else argv)
        names = [argument for argument in arguments if not argument.startswith("-")]
        rest = [argument for argument in arguments if argument.startswith("-")]
        flags = parse_flags(rest, FLAGS, USAGE, make_help=_help)
        for name in names:
            if name not in STUDIES:
                raise ConfigError(f"study {name!r}: there is none of this name; {suggest(name, STUDIES)}")
        _check_options(names, flags)
        for name in names or STUDIES:
            if flags.values["tables"]:
                _print_tables(name, flags)
            else:
                print_rows(rows_of(name, flags.values), as_json=bool(flags.values["json"]))
    return 0


def _check_options(names: Sequence[str], flags: Flags) -> None:
    """Requires that a flag of some studies is given with the names of these alone, and that it is legal."""
    for flag in FLAGS:
        taking = [name for name, study in STUDIES.items() if flag.name in study.options]
        if taking and flags.values[flag.name] != flag.default and not (names and set(names) <= set(taking)):
            raise ConfigError(
                f"--{flag.name}: is of {', '.join(taking)} alone; name it: {USAGE.split(' [')[0]} {taking[0]}"
            )

    if flags.values["only"]:
        from studies.workloads.cases import chosen

        chosen(str(flags.values["only"]))


def _print_tables(name: str, flags: Flags) -> None:
    for title, table in tables_of(name, flags.values).items():
        print(f"### {name}: {title}\n\n{table}\n", flush=True)


def _help() -> str:
    lines = [help_text(FLAGS, USAGE), "", "Studies; all when none is named:"]
    return "\n".join([*lines, *(entry(f"  {name}", study.doc) for name, study in STUDIES.items())])


if __name__ == "__main__":
    run_command(main)
