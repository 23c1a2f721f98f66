"""`python -m mmjax.check --gin_file=F [--steps=3] [--dtype=float32] [--json]`: checks that a layout is right.

The configured layouts, schedule and placement run a small copy of the model for a few steps on virtual CPU devices, in
fp32 or bf16, and a dense reference runs it in fp32 on one device. Losses, gradients, updates and moments have to be the
same, within the limits of the dtype.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmjax.attention.settings import DTYPES
from mmjax.config import load_config
from mmjax.config.flags import (
    PROCESS_FLAGS,
    Flag,
    join_processes,
    one_line_errors,
    parse_flags,
    require_gin_file,
    run_command,
)
from mmjax.configurable import ConfigError
from mmjax.flags import importing

FLAGS = (
    Flag(name="steps", doc="optimizer steps to compare.", default=3),
    Flag(name="dtype", doc=f"dtype in which the layouts compute: {' or '.join(DTYPES)}.", default="float32"),
    Flag(name="json", doc="prints one line of JSON.", default=False),
)


CRASHED = 3
"""Exit status of a check that ended in a traceback, without a comparison."""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a configuration; returns the exit status, 0 if everything is equal, else 1.

    Args:
      argv: the arguments, without the program's name, such as ["--gin_file=run.gin", "--steps=3"]; by default this
        process's.

    Raises:
      SystemExit: with status 2, after a line on stderr about a wrong flag or setting.
    """
    with one_line_errors():
        flags = parse_flags(sys.argv[1:] if argv is None else argv, (*FLAGS, *PROCESS_FLAGS), "python -m mmjax.check")
        steps, as_json = int(flags.values["steps"]), bool(flags.values["json"])
        if steps < 1:
            raise ConfigError(f"--steps={steps}: must be 1 or more, such as 3")
        if (dtype := str(flags.values["dtype"])) not in DTYPES:
            raise ConfigError(f"--dtype={dtype}: must be {' or '.join(DTYPES)}")
        require_gin_file(flags)
        recipe = load_config(flags.gin_files, flags.bindings, allow_code=flags.allow_code)
        with importing():
            from mmjax import jax_compat
            from mmjax.mesh.processes import broadcast_text, is_first
            from mmjax.parity import check
            from mmjax.train.warm_up import ends_where_down
        jax_compat.compile_cheaply()
        join_processes(flags)
        with ends_where_down():
            report = check(recipe, steps, dtype=dtype, say=_print_change if is_first() else _print_nothing)
    ok = broadcast_text(str(int(report.ok)) if report else "") == "1"
    if not report:
        return 0 if ok else 1
    numbers = report.numbers()
    print(_json(numbers) if as_json else "\n".join(table(numbers)))
    return 0 if ok else 1


def _print_change(line: str) -> None:
    print(f"shrunk: {line}", file=sys.stderr, flush=True)


def _print_nothing(line: str) -> None:
    del line


def _json(numbers: Mapping[str, Any]) -> str:
    # Strict JSON has no infinity; this number is beyond every double, and readers make infinity of it.
    return json.dumps(numbers).replace("Infinity", "1e999")


def table(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report of a check as lines of text, without newlines; the last says whether everything is equal.

    numbers: the result of the method `numbers()` of the report that `mmjax.parity.check(recipe)` returns.
    """
    for name, layout in numbers["layouts"].items():
        yield f"{name}: {layout}"
    yield f"{'relative difference':<24}" + "".join(f"{name:>12}" for name in numbers["limits"])
    for module, differences in numbers["modules"].items():
        yield f"  {module:<22}{'':>12}" + "".join(
            f"{differences[name]:>12.1e}" for name in numbers["limits"] if name != "loss"
        )
    yield f"  {'all':<22}" + "".join(f"{numbers[name]:>12.1e}" for name in numbers["limits"])
    yield f"  {'limit':<22}" + "".join(f"{limit:>12.1e}" for limit in numbers["limits"].values())
    if numbers["ok"]:
        yield f"equal to the dense reference over {numbers['steps']} steps"
        return
    first = numbers["first_off"]
    where = f"first at step {first['step']}" if first["step"] else "before the first step"
    yield f"NOT equal to the dense reference, {where}: {', '.join(first['what'])}"


if __name__ == "__main__":
    run_command(main, crashed=CRASHED)
