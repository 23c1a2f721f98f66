"""Command lines of entry points with a configuration: `--gin_file=F`, `--gin.scope/Class.field=value`, `--help`.

`mmjax.flags` has the flags of every entry point.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from mmjax import flags as flags_of
from mmjax import sigterm
from mmjax.checkpoint.config import CheckpointError
from mmjax.config import scopes_of
from mmjax.config.types import describe, fields_of
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.config import DataConfig
from mmjax.flags import FOLLOWED, INTERRUPTED, REFUSED, WIDTH, Flag, Flags, entry, importing
from mmjax.mesh import company
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
"""Seconds to wait for news of another process's end, which ends this one."""

PROCESS_FLAGS = (
    Flag(name="coordinator", doc="host:port of process 0, where the processes of a run meet; or MMJAX_COORDINATOR."),
    Flag(name="num_processes", doc="how many processes the run has; or MMJAX_NUM_PROCESSES. Default 1."),
    Flag(name="process_id", doc="which of them this is, from 0; or MMJAX_PROCESS_ID."),
)
"""Flags of an entry that may run as several processes; Slurm and Open MPI need none of them."""


def parse_flags(
    argv: Sequence[str], flags: Sequence[Flag] = (), usage: str = "python -m mmjax.train", gin: bool = True
) -> Flags:
    """Parses `argv` (without the program's name); `usage` starts the help text.

    Without `gin`, `--gin_file` and `--gin.…` are no flags of the entry point.
    Both `--flag=value` and `--flag value` are understood. `--help` prints every flag and every configurable with its
    fields, defaults and documentation, and exits.

    Raises:
      ConfigError: a flag is unknown (with the nearest one), has no value, or a value of the wrong type.
      SystemExit: after `--help`.
    """
    return flags_of.parse_flags(argv, flags, usage, gin=gin, helped=lambda: help_text(flags, usage, gin))


def require_gin_file(flags: Flags, what: str = "a configuration") -> None:
    """Requires a `--gin_file`. The message of the ConfigError tells the user to name `what` with it."""
    if not flags.gin_files:
        raise ConfigError(f"--gin_file is missing: name {what}, such as --gin_file=digits_vlm")


def join_processes(flags: Flags) -> None:
    """Meets the other processes of the run, if the flags of `PROCESS_FLAGS` or the environment name any.

    Raises:
      ConfigError: the flags contradict each other, or the processes do not meet.
    """
    found = company.find_processes({name: str(flags.values[name]) for name in company.NAMES})
    if found:
        with importing():
            from mmjax.mesh.processes import join  # JAX, which nobody waits for who made a mistake

        join(found)


def one_line_errors(interrupted: str = "interrupted") -> contextlib.AbstractContextManager[None]:
    """`mmjax.flags.one_line_errors` for a CheckpointError too."""
    return flags_of.one_line_errors(interrupted, (CheckpointError,))


def run_command(main: Callable[[], int], *, crashed: int = 1) -> NoReturn:
    """Ends the process with the status of `main`. After Ctrl-C and SIGTERM at once: threads that compile are not waited
    for.

    Args:
      main: the command.
      crashed: the status after an exception that no `one_line_errors` has caught.
    """
    with Sigterm(sigterm.leave_now) as ending:
        try:
            try:
                status = main()
                ending.react = lambda: None  # the process is ending by itself
                company.leave()
            except SystemExit as end:
                status = end.code
            except KeyboardInterrupt:  # Ctrl-C after the end of `main`
                status = INTERRUPTED
            except Exception as error:
                if isinstance(error, BrokenPipeError) and not company.in_company():
                    raise
                _fallen(error)
                status = crashed
            ending.react = lambda: None
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        if status == INTERRUPTED:
            company.abandon("interrupted", INTERRUPTED)
            sigterm.free_semaphores()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        if company.in_company():  # left early: the others must not be waited for
            # What is refused here is to be refused by all: who starts the command again asks for that status.
            company.abandon(f"exit status {status}", REFUSED if status == REFUSED else FOLLOWED)
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else 1)
        sigterm.expect_end()
    sys.exit(status)


def _fallen(error: Exception) -> None:
    """Prints an exception, and tells the other processes of it; waits first for news of an end that may have caused
    it."""
    if company.in_company():
        time.sleep(NEWS)
    traceback.print_exception(error)
    if company.in_company():
        company.abandon(traceback.format_exception_only(error)[0].strip())


def help_text(flags: Sequence[Flag] = (), usage: str = "python -m mmjax.train", gin: bool = True) -> str:
    """The text that `--help` prints."""
    if not gin:
        return flags_of.help_text(flags, usage)
    example = "such as --gin.vision/Layout.tp=2 or --gin.Train.schedule=gpipe."
    of_gin = (
        entry(
            "  --gin_file",
            "a gin file, or one of mmjax's by name, such as digits_vlm; repeat it, later ones win.",
        ),
        entry("  --gin.KEY=VALUE", f"sets one field, {example}"),
    )
    lines = [flags_of.help_text(flags, usage, gin=of_gin), ""]
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
