"""``python -m studies [NAME …] [--json] [--tables]``: simulated figures beside those of papers, in a checkout.

``python -m studies parity --curves`` trains, and keeps what it has trained in a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.bench.rows import print_rows
from mmjax.config.flags import run_command
from mmjax.configurable import ConfigError, suggest
from mmjax.flags import Flag, Flags, entry, help_text, importing, one_line_errors, parse_flags
from studies import STUDIES, rows_of, tables_of

FLAGS = (
    Flag(name="json", doc="One JSON object a row instead of a table.", default=False),
    Flag(name="tables", doc="The tables of the documentation in Markdown instead of rows.", default=False),
    Flag(
        name="only",
        doc="Of the study 'workloads': papers or configurations, by name or beginning, with commas, such as "
        "bigmac,nvidia_3b. Of --curves: runs, by name or pattern. All unless given.",
    ),
    Flag(
        name="dry_run", doc="Of the study 'workloads': also the memory of a dry run, 20 s and more each.", default=False
    ),
    Flag(
        name="plan",
        doc="Of the study 'workloads': also the best plan on as many devices, by a search of minutes to hours each.",
        default=False,
    ),
)
CURVES = (
    Flag(
        name="curves",
        doc="Of the study 'parity': trains its runs. Those that are finished are left out.",
        default=False,
    ),
    Flag(
        name="steps", doc="Of --curves: steps of each run; 0 for the paper's 100 in fp32 and 1000 in bf16.", default=0
    ),
    Flag(
        name="check",
        doc="Of --curves: steps of which parameters, gradients and moments are compared under each fp32 layout, by "
        "mmjax.check; 0 leaves this out.",
        default=10,
    ),
    Flag(name="out", doc="Of --curves: the folder of losses, tables and picture.", default="runs/parity"),
)
"""Flags of the study that trains."""
TRAINS = "parity"
USAGE = "python -m studies [NAME …]"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the named studies, or all; returns the exit status, which is 0: studies have no targets."""
    with one_line_errors():
        arguments = list(sys.argv[1:] if argv is None else argv)
        names = [argument for argument in arguments if not argument.startswith("-")]
        flag_arguments = [argument for argument in arguments if argument.startswith("-")]
        flags = parse_flags(flag_arguments, (*FLAGS, *CURVES), USAGE, make_help=_help)
        for name in names:
            if name not in STUDIES:
                raise ConfigError(f"study {name!r}: there is none of this name; {suggest(name, STUDIES)}")
        if _trains(names, flags):
            _train(flags)
            return 0
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


def _trains(names: Sequence[str], flags: Flags) -> bool:
    """Whether runs are to be trained. Raises ConfigError if flags of training do not fit the rest of the command."""
    if not flags.values["curves"]:
        for flag in CURVES:
            if (value := flags.values[flag.name]) != flag.default:
                raise ConfigError(
                    f"--{flag.name}={value}: belongs to --curves; write python -m studies {TRAINS} --curves"
                )
        return False
    if list(names) != [TRAINS]:
        raise ConfigError(f"--curves: is of the study {TRAINS!r} alone; write python -m studies {TRAINS} --curves")
    for flag in FLAGS:
        if flag.name != "only" and flags.values[flag.name]:
            out = flags.values["out"]
            raise ConfigError(f"--{flag.name}: --curves writes its results into --out={out}; leave it out")
    for name in ("steps", "check"):
        if (value := int(flags.values[name])) < 0:
            raise ConfigError(f"--{name}={value}: must be 0 or more, such as 10")
    return True


def _train(flags: Flags) -> None:
    from studies.parity.runs import chosen

    runs, out = chosen(str(flags.values["only"])), Path(str(flags.values["out"]))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out}: is a file; name a folder")
    with importing():
        from studies.parity.curves import Sweep
        from studies.parity.report import write_report
    Sweep(runs=runs, out=out, steps=int(flags.values["steps"]), check=int(flags.values["check"])).execute()
    print(write_report(out), flush=True)


def _help() -> str:
    lines = [help_text((*FLAGS, *CURVES), USAGE), "", "Studies; all when none is named:"]
    return "\n".join([*lines, *(entry(f"  {name}", study.doc) for name, study in STUDIES.items())])


if __name__ == "__main__":
    run_command(main)
