"""Command lines of commands with a configuration: `--gin_file=F`, `--gin.scope/Class.field=value`, `--help`.

`mmjax.flags` has the flags of every command.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from mmjax import flags as base_flags
from mmjax import sigterm
from mmjax.checkpoint.config import CheckpointError
from mmjax.config import scopes_of
from mmjax.config.types import describe
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.config import DataConfig
from mmjax.fields import fields_of
from mmjax.flags import FOLLOWED, INTERRUPTED, REFUSED, WIDTH, Flag, Flags, entry, importing, plain_warnings
from mmjax.mesh import process_group
from mmjax.models.config import ModelConfig
from mmjax.sigterm import Sigterm

__all__ = [
    "INCOMPLETE",
    "INTERRUPTED",
    "PROCESS_FLAGS",
    "Flag",
    "Flags",
    "help_text",
    "join_processes",
    "one_line_errors",
    "parse_flags",
    "require_gin_file",
    "run_command",
]

INCOMPLETE = 1
"""Exit status of a run that has ended, but could not write all files or evaluate the trained model."""
NEWS = 2.0
"""Seconds to wait for a message that another process has ended, which ends this one too."""

PROCESS_FLAGS = (
    Flag(name="coordinator", doc="host:port of process 0, where the processes of a run meet; or MMJAX_COORDINATOR."),
    Flag(name="num_processes", doc="how many processes the run has; or MMJAX_NUM_PROCESSES. Default 1."),
    Flag(name="process_id", doc="which of them this is, from 0; or MMJAX_PROCESS_ID."),
)
"""Flags of a command that may run as several processes. Slurm and Open MPI need none of them."""


def parse_flags(
    argv: Sequence[str], flags: Sequence[Flag] = (), usage: str = "python -m mmjax.train", *, gin: bool = True
) -> Flags:
    """Parses a command line. Both `--flag=value` and `--flag value` are understood.

    `--help` prints every flag and every configurable with its fields, defaults and documentation, and exits.

    Args:
      argv: the arguments, without the program's name.
      flags: the command's flags, such as `Flag(name="steps", doc="steps to run.", default=10)`.
      usage: the beginning of the help text.
      gin: whether the command has `--gin_file`, `--gin.…` and `--allow_code`.

    Returns:
      `gin_files`, `bindings` such as ("vision/Layout.tp=2",), `allow_code`, and `values`: the value of each of `flags`
      by name, {"steps": 10}.

    Raises:
      ConfigError: a flag is unknown (with the nearest one), has no value, a value of the wrong type, or is required and
        missing.
      SystemExit: after `--help`.
    """
    gin_help = functools.partial(help_text, flags, usage, gin=gin)
    return base_flags.parse_flags(argv, flags, usage, gin=gin, make_help=gin_help)


def require_gin_file(flags: Flags, content: str = "a configuration") -> None:
    """Raises ConfigError if there is no `--gin_file`; the message calls it `content`, such as "the trainer's"."""
    if not flags.gin_files:
        raise ConfigError(f"--gin_file is missing: name {content}, such as --gin_file=digits_vlm")


def process_settings(flags: Flags) -> dict[str, str]:
    """Values of `PROCESS_FLAGS` as text, by name; "" for one that is not set."""
    return {name: str(flags.values[name]) for name in process_group.NAMES}


def join_processes(flags: Flags) -> None:
    """Connects to the other processes of the run; does nothing for a run of one process.

    Args:
      flags: a result of `parse_flags` with `PROCESS_FLAGS` among its flags. Where they are not set,
        MMJAX_COORDINATOR, MMJAX_NUM_PROCESSES and MMJAX_PROCESS_ID in the environment count, then Slurm or Open MPI.

    Raises:
      ConfigError: the flags contradict each other, or the processes do not meet.
    """
    processes = process_group.find_processes(process_settings(flags))
    if processes:
        with importing():
            from mmjax.mesh.processes import join  # imports JAX, too slowly for a command line with a mistake

        join(processes)


def one_line_errors(interrupted: str = "interrupted") -> contextlib.AbstractContextManager[None]:
    """A context in which ConfigError and CheckpointError become one line on stderr and ``SystemExit`` with status 2.

    Ctrl-C and SIGTERM become the line `interrupted` and status 130.
    """
    return base_flags.one_line_errors(interrupted, (CheckpointError,))


def run_command(main: Callable[[], int], *, crashed: int = 1) -> NoReturn:
    """Runs a command and ends the process with its status.

    After Ctrl-C and SIGTERM the process ends at once, without waiting for threads that compile.

    Args:
      main: the command; returns the exit status, such as 0.
      crashed: the status after an exception that no `one_line_errors` has caught.
    """
    with Sigterm(sigterm.leave_now) as ending, plain_warnings():
        try:
            try:
                status = main()
                ending.react = sigterm.ignore  # the process is ending by itself
                process_group.leave()
            except SystemExit as end:
                status = end.code
            except KeyboardInterrupt:  # Ctrl-C after the end of `main`
                status = INTERRUPTED
            except Exception as error:
                if isinstance(error, BrokenPipeError) and not process_group.has_peers():
                    raise
                _report_crash(error)
                status = crashed
            ending.react = sigterm.ignore
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        if status == INTERRUPTED:
            process_group.abandon("interrupted", INTERRUPTED)
            sigterm.free_semaphores()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        if process_group.has_peers():  # this process ends early and must not wait for the others
            # All processes end with the status of a refused command: whoever starts it again reads that status.
            process_group.abandon(f"exit status {status}", REFUSED if status == REFUSED else FOLLOWED)
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 1)
        sigterm.expect_end()
    sys.exit(status)


def _report_crash(error: Exception) -> None:
    """Prints an exception and reports it to the other processes.

    Waits first for a message of another process's end, which may be the cause.
    """
    if process_group.has_peers():
        time.sleep(NEWS)
    traceback.print_exception(error)
    if process_group.has_peers():
        process_group.abandon(traceback.format_exception_only(error)[0].strip())


def help_text(flags: Sequence[Flag] = (), usage: str = "python -m mmjax.train", *, gin: bool = True) -> str:
    """The text that `--help` prints: the flags, and with `gin` every configurable with its fields.

    Args:
      flags: the command's flags, such as `Flag(name="steps", doc="steps to run.", default=10)`.
      usage: the beginning of the text.
      gin: whether the command has `--gin_file` and `--gin.…`.
    """
    if not gin:
        return base_flags.help_text(flags, usage)
    example = "such as --gin.vision/Layout.tp=2 or --gin.Train.schedule=gpipe."
    gin_entries = (
        entry(
            "  --gin_file",
            "a gin file, or one of mmjax's by name, such as digits_vlm; repeat it, later ones win.",
        ),
        entry("  --gin.KEY=VALUE", f"sets one field, {example}"),
    )
    lines = [base_flags.help_text(flags, usage, gin=gin_entries), ""]
    lines.append("Configurables. A scope is a module's name; a field bound without a scope is every module's default.")
    for cls, scopes in scopes_of(ModelConfig(), DataConfig()).items():
        lines += ["", *_class_help(cls, scopes)]
    return "\n".join(lines)


def _class_help(cls: type, scopes: tuple[str, ...]) -> Iterator[str]:
    name = gin_name(cls)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    where = f" Scopes here: {', '.join(scopes)}." if scopes else ""
    yield from textwrap.wrap(f"{name}: {summary}{where}", WIDTH)
    for info in fields_of(cls).values():
        yield entry(f"  {name}.{info.name} = {info.default!r}", info.doc or f"{describe(info.annotation)}.")
    presets = getattr(cls, "presets", {})
    if presets:
        wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        yield from wrapper.wrap(f"presets: {', '.join(presets)}")
