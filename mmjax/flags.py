"""Command lines: a command's own flags, `--help`, and errors of one line. It never imports JAX.

`mmjax.config.flags` adds the flags that configure a run: `--gin_file` and `--gin.…`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mmjax import sigterm
from mmjax.configurable import ConfigError, suggest
from mmjax.sigterm import INTERRUPTED as INTERRUPTED
from mmjax.sigterm import Sigterm

REFUSED = 2
"""Exit status after an error that the user must correct: the same command would end in the same way."""
FOLLOWED = 3
"""Exit status of a process that has ended because another process has."""
TOO = "this one ends too"
"""The end of the line that such a process prints."""
STUCK = 75
"""Exit status if a process hangs or no longer answers: EX_TEMPFAIL of ``sysexits.h``, the same command may succeed."""
WIDTH = 120
"""Width of a line of help."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of a command.

    Attributes:
      name: its name without the dashes.
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
      gin_files: gin files in order; later ones override earlier ones.
      bindings: texts such as "llm/Layout.tp=2", in order; they override the files.
      allow_code: whether code that the configuration names may be run.
      values: the values of the command's own flags by name without dashes; the default where a flag is not set.
    """

    gin_files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    allow_code: bool = False
    values: Mapping[str, str | int | bool] = field(default_factory=dict)


ALLOW_CODE = Flag(
    name="allow_code",
    doc="lets the configuration, that of a run directory too, name code that is run, such as a reader of your own: "
    "Source.kind = 'package.module:Factory'. Without it such a value is refused.",
    default=False,
)
"""A flag of every command that has `--gin_file`."""


def parse_flags(
    argv: Sequence[str],
    flags: Sequence[Flag],
    usage: str,
    *,
    gin: bool = False,
    make_help: Callable[[], str] | None = None,
) -> Flags:
    """Parses a command line. Both `--flag=value` and `--flag value` are understood. `--help` prints a text and exits.

    Args:
      argv: the arguments, without the program's name.
      flags: the command's own flags, such as `Flag(name="steps", doc="steps to run.", default=100)`.
      usage: the beginning of the help text, such as "python -m mmjax.check".
      gin: whether `--gin_file`, `--gin.…` and `--allow_code` are flags too.
      make_help: returns the text of `--help`; by default a text of every flag.

    Raises:
      ConfigError: a flag is unknown (with the nearest one), has no value or one of the wrong type, or is required and
        missing.
      SystemExit: after `--help`.
    """
    flags = (*flags, ALLOW_CODE) if gin else flags
    flags_by_name = {flag.name: flag for flag in flags}
    files: list[str] = []
    bindings: list[str] = []
    values = {flag.name: flag.default for flag in flags}
    present: set[str] = set()
    words = list(argv)
    while words:
        name, value = _split(words.pop(0), flags_by_name, gin=gin)
        if name in ("help", "h"):
            print(make_help() if make_help else help_text(flags, usage))
            raise SystemExit(0)
        if value is None and isinstance(values.get(name), bool):
            value = "true"
        if value is None:
            value = _next_word(name, words)
        if name == "gin_file":
            files.append(value)
        elif name.startswith("gin."):
            bindings.append(f"{name.removeprefix('gin.')}={value}")
        else:
            values[name] = _typed(flags_by_name[name], value)
        present.add(name)
    for flag in flags:
        if flag.required and flag.name not in present:
            raise ConfigError(f"--{flag.name} is missing: {flag.doc.rstrip('.')}; write {written(flag)}")
    allowed = bool(values.pop(ALLOW_CODE.name)) if gin else False
    return Flags(gin_files=tuple(files), bindings=tuple(bindings), allow_code=allowed, values=values)


def counted(count: int, noun: str) -> str:
    """A number of things: "1 program", "24 programs". `noun` is in the singular, and its plural has an "s"."""
    return f"{count} {noun}{'s' * (count != 1)}"


@contextlib.contextmanager
def one_line_errors(interrupted: str = "interrupted", kinds: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """A context in which errors that the user can correct become one line on stderr and exit status 2 (SystemExit).

    Ctrl-C and SIGTERM become one line and exit status 130.

    Args:
      interrupted: the line after Ctrl-C and SIGTERM.
      kinds: classes of errors that the user can correct, beside ConfigError.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Sigterm(sigterm.raise_interrupt), _resending_lost_interrupts():
            yield
    except (ConfigError, *kinds) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


@contextlib.contextmanager
def _resending_lost_interrupts() -> Iterator[None]:
    """A context that sends SIGINT again if Python has dropped the exception of Ctrl-C.

    Python drops exceptions in some callbacks, such as JAX's callback of the garbage collector.
    """
    previous_hook = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            previous_hook(dropped)
            return
        # A little later: an exception that is raised in this hook would be dropped too.
        main = threading.main_thread().ident
        timer = threading.Timer(0.05, lambda: main and signal.pthread_kill(main, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for imports of JAX, which take seconds: Ctrl-C and SIGTERM end the process at once.

    Elsewhere they raise an exception, which imports often drop. A command enters this context only after it has checked
    its command line and configuration, so that mistakes are reported at once.
    """
    has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Sigterm(sigterm.leave_now):
        if not has_default or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """A context in which warnings of mmjax are lines on stderr. absl's handler would write level and module first."""
    logger, handler = logging.getLogger("mmjax"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def run_plain(main: Callable[[], int]) -> NoReturn:
    """Calls `main`, and ends the process with the exit status that it returns; for processes that never import JAX.

    The status is 1 if the reader of a pipe has gone.
    """
    try:
        with plain_warnings():
            status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sigterm.expect_end()
    sys.exit(status)


def help_text(flags: Sequence[Flag], usage: str, *, gin: Sequence[str] = ()) -> str:
    """The help text of a command: the usage, the lines `gin`, and an entry for each of its own flags.

    Args:
      flags: the command's own flags, such as `Flag(name="steps", doc="steps to run.")`, without those for gin.
      usage: the command, such as "python -m mmjax.check".
      gin: lines about `--gin_file` and `--gin.…`; () if the command has no such flags.
    """
    flags = (ALLOW_CODE, *flags) if gin else flags
    gin_usage = " [--gin_file=F ...] [--gin.scope/Class.field=value ...]" if gin else ""
    flag_usage = "".join(f" {written(flag)}" if flag.required else f" [{written(flag)}]" for flag in flags)
    lines = [f"usage: {usage}{gin_usage}{flag_usage}", "", *gin]
    for flag in flags:
        default = f" Default {flag.default!r}." if flag.default not in ("", False, 0) else ""
        lines.append(entry(f"  --{flag.name}", flag.doc + default))
    return "\n".join(lines)


def written(flag: Flag) -> str:
    """A flag as it is written on a command line: "--steps=STEPS" for `Flag(name="steps", doc="…")`.

    It is "--json" for a flag "json" whose default is a bool.
    """
    return f"--{flag.name}" if isinstance(flag.default, bool) else f"--{flag.name}={flag.name.upper()}"


def entry(head: str, text: str) -> str:
    """Lines of help as one text: `head`, such as "  --steps", with `text`, not "", wrapped in a column beside it.

    The column begins at character 40, in the next line if `head` reaches it; lines have at most `WIDTH` characters.
    """
    indent = 40
    body = textwrap.wrap(text, WIDTH - indent)
    if len(head) >= indent - 1:
        return "\n".join([head, *(" " * indent + line for line in body)])
    return "\n".join([f"{head:<{indent}}{body[0]}", *(" " * indent + line for line in body[1:])])


def _split(argument: str, flags: Mapping[str, Flag], *, gin: bool) -> tuple[str, str | None]:
    """Name and value of an argument; the value is None if none is attached."""
    if argument == "-h":
        return "h", None
    if not argument.startswith("--"):
        example = "--gin_file=digits_vlm" if gin else "--help"
        raise ConfigError(f"{argument!r} is no flag: flags start with --, such as {example}")
    name, equals, value = argument.removeprefix("--").partition("=")
    legal = [*(["gin_file"] if gin else []), "help", *flags]
    if (gin and name.startswith("gin.")) or name in legal:
        return name, value if equals else None
    raise ConfigError(f"{argument}: no flag --{name}; {_suggest_flag(name, legal)}")


def _suggest_flag(name: str, legal: Sequence[str]) -> str:
    if "." in name and "gin_file" in legal:
        return f"did you mean '--gin.{name}'?"
    return suggest(f"--{name}", [f"--{option}" for option in legal])


def _next_word(name: str, words: list[str]) -> str:
    """Removes the value of `--flag value` from the remaining words and returns it."""
    if words and not words[0].startswith("--"):
        return words.pop(0)
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
