"""`python -m mmjax.compile --gin_file=F --for=h100 [--json] [--hlo=DIR] [--cache=DIR]`: compiles before you rent.

Every program of a step is compiled for GPUs that are not here: XLA for CUDA is needed, and no GPU. Prints what each
needs and does on a device, and the step that follows. Memory, FLOPs, arrays and collectives are those of the programs;
times are predicted by a roofline. The status is 1 if the step does not fit the devices' memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mmjax.compile.targets import require_compiler, target
from mmjax.config import load_config
from mmjax.config.flags import Flag, one_line_errors, parse_flags, require_gin_file, run_command
from mmjax.configurable import ConfigError
from mmjax.flags import Flags, importing
from mmjax.planner.fullest import FULLEST, read_fullest

FLAGS = (
    Flag(name="for", doc="the GPU to compile for: h100, h200 or a100.", default="h100"),
    FULLEST,
    Flag(name="json", doc="one JSON object a program, and one for the step.", default=False),
    Flag(name="hlo", doc="folder for the optimised HLO text of each program; none by default.", default=""),
    Flag(
        name="cache",
        doc="folder where compiled programs are kept, so that a second run is quick; that of --hlo by default.",
        default="",
    ),
)
USAGE = "python -m mmjax.compile"
TOO_LARGE = 1
"""Exit status if the step does not fit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the programs and the step; returns 1 if the step does not fit the devices, else 0.

    Args:
      argv: the arguments without the program's name, such as ["--gin_file=run.gin", "--for=h100"]; by default those of
        this process.

    Raises:
      SystemExit: 2 after a mistake, with one line on stderr; 130 after Ctrl-C or SIGTERM; 0 after --help.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, FLAGS, USAGE)
        chosen = target(str(flags.values["for"]))
        hlo, cache = _folder(flags, "hlo"), _folder(flags, "cache")
        require_gin_file(flags)
        fullest = read_fullest(flags)
        require_compiler()
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        with importing():
            from mmjax.assembly.epochs import with_steps
            from mmjax.assembly.samples import open_source
            from mmjax.compile import report
            from mmjax.compile.programs import Programs
            from mmjax.compile.step import Step
        source = open_source(recipe, split="train")
        programs = Programs(with_steps(recipe, source), chosen, cache=cache or hlo, source=source, fullest=fullest)
        distinct = programs.distinct(_progress if sys.stderr.isatty() else None)
        step = Step(programs, source)
        if hlo:
            report.write_hlo(distinct, hlo)
        if flags.values["json"]:
            for compiled in distinct:
                print(json.dumps(report.program_figures(programs, compiled)), flush=True)
            print(json.dumps(report.step_figures(programs, step)), flush=True)
        else:
            print("\n".join(programs.assembly.choices), end="\n" * bool(programs.assembly.choices))
            for compiled in distinct:
                print("\n".join(report.program_lines(programs, compiled)), flush=True)
            print("\n".join(report.step_lines(programs, step)), flush=True)
        return 0 if step.fullest.fits else TOO_LARGE


def _folder(flags: Flags, name: str) -> Path | None:
    """The folder of a flag, or None. Raises ConfigError for a file."""
    text = str(flags.values[name])
    if text and Path(text).exists() and not Path(text).is_dir():
        raise ConfigError(f"--{name}={text!r}: is a file; name a folder")
    return Path(text) if text else None


def _progress(done: int, total: int, name: str) -> None:
    print(f"compiled {done} of {total}: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
