"""Command lines: `--gin_file=F`, `--gin.scope/Class.field=value`, an entry point's own flags, and `--help`."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from typing import NoReturn

from mmjax.checkpoint.leaves import CheckpointError
from mmjax.config import scopes_of
from mmjax.config.types import describe, fields_of
from mmjax.configurable import ConfigError, gin_name, suggest
from mmjax.mesh import processes
from mmjax.models.multimodal import ModelConfig

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the signal's number."""
INCOMPLETE = 1
"""Exit status of a run that has ended, but could not write everything."""
_WIDTH = 120
_NEWS = 2.0
"""Seconds in which news of another process's end arrives, and ends this one."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of one entry point.

    Attributes:
      name: without the dashes.
      doc: one sentence.
      default: its type is the flag's: str, int or bool (`--json` alone, `--json=false`).
      required: whether leaving it out is an error.
    """

    name: str
    doc: str
    default: str | int | bool = ""
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A parsed command line.

    Attributes:
      gin_files: in order; later files override earlier ones.
      bindings: "scope/Class.field=value", in order; they override the files.
      values: the entry point's own flags by name, defaults filled in.
    """

    gin_files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    values: Mapping[str, str | int | bool] = field(default_factory=dict)


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
    known = {flag.name: flag for flag in flags}
    files: list[str] = []
    bindings: list[str] = []
    values = {flag.name: flag.default for flag in flags}
    given: set[str] = set()
    rest = list(argv)
    while rest:
        name, value = _split(rest.pop(0), known, gin)
        if name in ("help", "h"):
            print(help_text(flags, usage, gin))
            raise SystemExit(0)
        if value is None and isinstance(values.get(name), bool):
            value = "true"
        if value is None:
            value = _following(name, rest)
        if name == "gin_file":
            files.append(value)
        elif name.startswith("gin."):
            bindings.append(f"{name.removeprefix('gin.')}={value}")
        else:
            values[name] = _typed(known[name], value)
        given.add(name)
    for flag in flags:
        if flag.required and flag.name not in given:
            raise ConfigError(f"--{flag.name} is missing: {flag.doc.rstrip('.')}; write {_shown(flag)}")
    return Flags(gin_files=tuple(files), bindings=tuple(bindings), values=values)


def join_processes(flags: Flags) -> None:
    """Meets the other processes of the run, if the flags of ``PROCESS_FLAGS`` or the environment name any.

    Raises:
      ConfigError: what they say does not fit together, or the processes do not meet.
    """
    processes.join(processes.find_processes({name: str(flags.values[name]) for name in processes.NAMES}))


@contextlib.contextmanager
def one_line_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """Around an entry point: what the user can mend becomes one line on stderr and exit status 2, without a traceback.

    So does Ctrl-C, with status 130 and the line `interrupted`.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def run_command(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the status of `main`. After Ctrl-C at once: threads that compile are not waited for."""
    try:
        try:
            status = main()
            processes.leave()
        except SystemExit as end:
            status = end.code
        except Exception as error:
            if not processes.in_company():
                raise
            status = _fallen(error)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if status == INTERRUPTED:
        # Else the semaphores of data workers are reported as leaked. Python's type stubs leave this name out.
        getattr(util, "_run_finalizers")(0)  # noqa: B009
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    if processes.in_company():  # left early: the others must not be waited for
        processes.abandon(f"exit status {status}")
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
    sys.exit(status)


def _fallen(error: Exception) -> int:
    """After an exception in one of several processes, which another one's end may have caused: that is then told."""
    time.sleep(_NEWS)
    traceback.print_exception(error)
    processes.abandon(traceback.format_exception_only(error)[0].strip())
    return 1


def help_text(flags: Sequence[Flag] = (), usage: str = "python -m mmjax.train", gin: bool = True) -> str:
    """What `--help` prints."""
    own = "".join(f" {_shown(flag)}" if flag.required else f" [{_shown(flag)}]" for flag in flags)
    lines = [f"usage: {usage}{' [--gin_file=F ...] [--gin.scope/Class.field=value ...]' if gin else ''}{own}", ""]
    if gin:
        example = "such as --gin.vision/Layout.tp=2 or --gin.Train.schedule=gpipe."
        lines.append(_entry("  --gin_file", "a gin file; repeat it, later files override earlier ones."))
        lines.append(_entry("  --gin.KEY=VALUE", f"sets one field, {example}"))
    for flag in flags:
        default = f" Default {flag.default!r}." if flag.default not in ("", False, 0) else ""
        lines.append(_entry(f"  --{flag.name}", flag.doc + default))
    if not gin:
        return "\n".join(lines)
    lines += ["", "Configurables. A scope is a module's name; a field bound without a scope is every module's default."]
    for cls, scopes in scopes_of(ModelConfig()).items():
        lines += ["", *_class_help(cls, scopes)]
    return "\n".join(lines)


def _shown(flag: Flag) -> str:
    return f"--{flag.name}" if isinstance(flag.default, bool) else f"--{flag.name}={flag.name.upper()}"


def _class_help(cls: type, scopes: tuple[str, ...]) -> Iterator[str]:
    name = gin_name(cls)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    where = f" Scopes here: {', '.join(scopes)}." if scopes else ""
    yield from textwrap.wrap(f"{name}: {summary}{where}", _WIDTH)
    for info in fields_of(cls).values():
        yield _entry(f"  {name}.{info.name} = {info.default!r}", info.doc or f"{describe(info.annotation)}.")
    presets = getattr(cls, "presets", {})
    if presets:
        yield f"  presets: {', '.join(presets)}"


def _entry(head: str, text: str) -> str:
    """`head`, and `text` wrapped beside it."""
    indent = 40
    body = textwrap.wrap(text, _WIDTH - indent)
    if len(head) >= indent - 1:
        return "\n".join([head, *(" " * indent + line for line in body)])
    return "\n".join([f"{head:<{indent}}{body[0]}", *(" " * indent + line for line in body[1:])])


def _split(argument: str, known: Mapping[str, Flag], gin: bool) -> tuple[str, str | None]:
    """Name and value of an argument; the value is None where none is attached."""
    if argument == "-h":
        return "h", None
    if not argument.startswith("--"):
        example = "--gin_file=configs/digits_vlm.gin" if gin else "--help"
        raise ConfigError(f"{argument!r} is no flag: flags start with --, such as {example}")
    name, equals, value = argument.removeprefix("--").partition("=")
    legal = [*(["gin_file"] if gin else []), "help", *known]
    if (gin and name.startswith("gin.")) or name in legal:
        return name, value if equals else None
    raise ConfigError(f"{argument}: no flag --{name}; {_suggest_flag(name, legal)}")


def _suggest_flag(name: str, legal: Sequence[str]) -> str:
    if "." in name and "gin_file" in legal:
        return f"did you mean '--gin.{name}'?"
    return suggest(f"--{name}", [f"--{option}" for option in legal])


def _following(name: str, rest: list[str]) -> str:
    """The value of `--flag value`, taken from `rest`."""
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    raise ConfigError(f"--{name}: a value is missing; write --{name}=VALUE")


def _typed(flag: Flag, value: str) -> str | int | bool:
    if isinstance(flag.default, bool):
        legal = {"true": True, "1": True, "false": False, "0": False}
        if value.lower() not in legal:
            raise ConfigError(f"--{flag.name}={value}: must be true or false")
        return legal[value.lower()]
    if isinstance(flag.default, int):
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"--{flag.name}={value}: must be an integer, such as {flag.default}") from None
    return value
