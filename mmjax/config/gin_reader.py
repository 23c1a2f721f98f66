"""Reads gin text into bindings: files, `include`, `%MACRO`, scopes and blocks, and names of earlier versions.

It knows no class and no type. gin-config is only the parser: its registry, its global state and its calls into user
code are not used, so reading is repeatable in a notebook and runs no code. (A value may name code that runs later if
the user allows it, see `mmjax.user_code`.) As in gin, a later binding of the same key replaces an earlier one, a scoped
binding is more specific than an unscoped one, and macros are looked up after everything was read.
"""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mmjax.config.shipped import find_config, nearest_file
from mmjax.configurable import ConfigError, near_misses, suggest
from mmjax.data.tasks.registry import MOVED

_BARE_WORD = re.compile(r"Failed to parse token '([A-Za-z_]\w*)'")
_MOST_TEXT, _MOST_VALUES, _MOST_STRINGS, _MOST_SHOWN = 1 << 22, 100_000, 500, 300
"""Limits: characters of a file, literals of a value, strings joined to one, characters of a line in messages."""


@dataclass(frozen=True)
class Macro:
    """A `%name` inside a value that was not looked up yet."""

    name: str


@dataclass(frozen=True)
class RawText:
    """A value on the command line that is no gin literal; legal for a field of type str."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One assignment.

    Attributes:
      scope: "vision" in `vision/Layout.tp = 2`, "" when there is none.
      cls: the configurable's gin name, "Layout"; for a macro its name.
      field: "tp"; "" for a macro.
      value: a Python literal, in which `Macro`s may occur before `resolve`.
      where: "configs/x.gin:3" or "--gin.vision/Layout.tp=2", for messages.
      text: the value as written, if it came from the command line.
      from_flag: whether it came from the command line, or contains a macro that did.
    """

    scope: str
    cls: str
    field: str
    value: object
    where: str
    text: str | None = None
    from_flag: bool = False

    @property
    def key(self) -> str:
        """The left side: "vision/Layout.tp"."""
        head = f"{self.scope}/{self.cls}" if self.scope else self.cls
        return f"{head}.{self.field}" if self.field else head


@cache
def _parser() -> tuple[Any, Any]:
    """gin's parser module, and the delegate it calls, which turns `%name` into a `Macro` and refuses `@name`.

    gin-config is imported only to read text: a configuration given as values (`config_of_values`) does without it.
    """
    from gin import config_parser

    class Delegate(config_parser.ParserDelegate):
        def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> object:
            fix = "write a literal such as 1, 'text' or (1, 2)"
            raise SyntaxError(f"@{scoped_configurable_name} is not supported; {fix}")

        def macro(self, macro_name: str) -> object:
            return Macro(macro_name)

    return config_parser, Delegate()


def read_bindings(files: Sequence[str | os.PathLike[str]], lines: Sequence[str] = ()) -> list[Binding]:
    """Reads the bindings of gin files and then of command lines, and looks macros up.

    Args:
      files: paths, or names of mmjax's own such as "digits_vlm".
      lines: bindings such as "vision/Layout.tp=2".

    Returns:
      A `Binding` for each setting, with scope "vision", cls "Layout", field "tp" and value 2. They are in the order of
      the text, so that of two with one key the later one counts.

    Raises:
      ConfigError: a file or include is missing, the text is no gin, or a macro has no value.
    """
    bindings: list[Binding] = []
    for file in files:
        bindings.extend(_read_file(find_config(file), f"--gin_file={file}", ()))
    for line in lines:
        bindings.append(_read_line(line))
    return resolve(bindings)


def resolve(bindings: Iterable[Binding]) -> list[Binding]:
    """Replaces every `Macro` by its value, and names of earlier versions by today's; leaves definitions of macros out.

    Args:
      bindings: settings such as `Binding(scope="vision", cls="Layout", field="tp", value=Macro("TP"),
        where="x.gin:3")`, and definitions of macros: bindings with the macro's name as `cls` and the field "".

    Returns:
      The settings in their order; `from_flag` is set where `text` is not None, or where a macro from the command line
      is read.

    Raises:
      ConfigError: a macro has no value or contains itself, or no value uses a macro from the command line.
    """
    bindings = list(bindings)
    macros = {b.key: b for b in bindings if not b.field}
    used = {name for b in bindings for name in _macros_in(b.value)}
    for binding in bindings:
        if not binding.field and binding.text is not None and binding.key not in used:
            near = "".join(f"{name!r}, or " for name in near_misses(binding.key, used)[:1])
            fix = f"write {near}a field with its class, such as Train.steps"
            raise ConfigError(f"{binding.where}: no value is %{binding.key}; {fix}")
    counts: dict[str, int] = {}
    for binding in bindings:
        if _count(binding.value, macros, counts) > _MOST_VALUES:
            fix = f"its macros make more than {_MOST_VALUES} values; write fewer"
            raise ConfigError(f"{binding.key}: {fix} ({binding.where})")
    looked_up = [_renamed(replace(b, value=_look_up(b.value, b, macros, ()))) for b in bindings if b.field]
    from_flag = [b.text is not None or _uses_flag(b.value, macros) for b in bindings if b.field]
    return [replace(binding, from_flag=is_flag) for binding, is_flag in zip(looked_up, from_flag, strict=True)]


def renamed(key: str) -> str:
    """Returns the name of today of a setting: "Digits.scale" for "Data.scale"; a name of today stays as it is.

    A scope stays in front: "vision/Layout.tp".
    """
    scope, slash, name = key.rpartition("/")
    return f"{scope}{slash}{MOVED.get(name, name)}"


def _renamed(binding: Binding) -> Binding:
    cls, _, field = renamed(f"{binding.cls}.{binding.field}").partition(".")
    return replace(binding, cls=cls, field=field)


def _uses_flag(value: object, macros: Mapping[str, Binding]) -> bool:
    """Whether a value contains a macro from the command line; all of its macros must have values."""
    return any(macros[name].text is not None or _uses_flag(macros[name].value, macros) for name in _macros_in(value))


def _macros_in(value: object) -> Iterator[str]:
    if isinstance(value, Macro):
        yield value.name
    elif isinstance(value, dict):
        yield from _macros_in([*value, *value.values()])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _macros_in(item)


def _count(value: object, macros: Mapping[str, Binding], counts: dict[str, int]) -> int:
    """Counts the literals of a value with its macros looked up; `counts` caches the numbers of macros."""
    if isinstance(value, Macro):
        if value.name not in counts:
            counts[value.name] = 1  # for a macro that contains itself, which `_look_up` refuses
            macro = macros.get(value.name)
            counts[value.name] = _count(macro.value, macros, counts) if macro else 1
        return counts[value.name]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return sum(_count(item, macros, counts) for item in value) if isinstance(value, (tuple, list)) else 1


def _look_up(value: object, user: Binding, macros: Mapping[str, Binding], inside: tuple[str, ...]) -> object:
    if isinstance(value, Macro):
        name = value.name
        if name in inside:
            raise ConfigError(f"{user.key}=%{name}: macro {name!r} is made of itself; give it a literal ({user.where})")
        if name not in macros:
            hint = suggest(name, macros) if macros else f"define it with a line such as {name} = 1"
            raise ConfigError(f"{user.key}=%{name}: macro {name!r} has no value; {hint} ({user.where})")
        return _look_up(macros[name].value, macros[name], macros, (*inside, name))
    if isinstance(value, (tuple, list)):
        return type(value)(_look_up(item, user, macros, inside) for item in value)
    if isinstance(value, dict):
        return {_look_up(k, user, macros, inside): _look_up(v, user, macros, inside) for k, v in value.items()}
    return value


def _read_file(path: Path, requester: str, parents: tuple[Path, ...]) -> Iterator[Binding]:
    if path.resolve() in parents:
        raise ConfigError(f"{requester}: the file includes itself; remove one of the includes")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_TEXT + 1)
    except IsADirectoryError:
        raise ConfigError(f"{requester}: that is a directory; {nearest_file(path / 'x.gin')}") from None
    except FileNotFoundError:
        raise ConfigError(f"{requester}: no such file; {nearest_file(path, parents)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{requester}: cannot be read as text ({error}); name a gin file") from None
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"{requester}: has more than {_MOST_TEXT} characters; name a gin file")
    config_parser, _ = _parser()
    for statement in _statements(text, str(path)):
        where = f"{path}:{statement.location.line_num}"
        if isinstance(statement, config_parser.IncludeStatement):
            included = _included(path, statement.filename)
            yield from _read_file(included, f"{where}: include {statement.filename!r}", (*parents, path.resolve()))
        elif isinstance(statement, config_parser.ImportStatement):
            raise ConfigError(f"{where}: {statement.format()}: a config imports nothing; delete the line")
        elif isinstance(statement, config_parser.BindingStatement):
            yield _binding(statement, where)


def _included(parent: Path, name: str) -> Path:
    """The path of an include: relative to the including file if it exists there, else found by `find_config`."""
    relative, shipped = parent.parent / name, find_config(name)
    return relative if relative.exists() or not shipped.exists() else shipped


def _read_line(line: str) -> Binding:
    """One binding from the command line; a value that is no literal is kept as text, for fields of type str."""
    key, equals, text = (part.strip() for part in line.partition("="))
    where = f"--gin.{line}" if "\n" not in line else f"--gin.{line!r}"
    if "\n" in line:
        raise ConfigError(f"{where}: one binding at a time, such as --gin.Train.steps=100")
    if not equals or not key:
        raise ConfigError(f"{where}: expected a key and a value, such as --gin.Train.steps=100")
    if binding := _only_binding(f"{key} = {text}", where):
        return replace(binding, text=text)
    if binding := _only_binding(f"{key} = 0", where):
        return replace(binding, value=RawText(text), text=text)
    raise ConfigError(f"{where}: {key!r} is no key; write one such as vision/Layout.tp or Train.steps")


def _only_binding(text: str, where: str) -> Binding | None:
    """Parses text as a single binding; None if it is anything else."""
    try:
        (statement,) = _statements(text, where)
    except (ConfigError, ValueError):
        return None
    return _binding(statement, where) if isinstance(statement, _parser()[0].BindingStatement) else None


def _binding(statement: Any, where: str) -> Binding:
    return Binding(
        scope=statement.scope, cls=statement.selector, field=statement.arg_name, value=statement.value, where=where
    )


def _statements(text: str, name: str) -> list[Any]:
    """Parses all statements of gin text; `name` is the file's, for messages."""
    config_parser, delegate = _parser()
    try:
        _require_few_strings(text, name)
        return list(config_parser.ConfigParser(text, delegate))
    except tokenize.TokenError as error:
        line = error.args[1][0] if len(error.args) > 1 else 1
        raise ConfigError(_syntax_message(text, name, line, "it does not end; is a bracket or quote open?")) from None
    except SyntaxError as error:
        raise ConfigError(_syntax_message(text, name, error.lineno or 1, str(error.msg))) from None
    except RecursionError:
        raise ConfigError(f"{name}: a value is nested too deeply; take brackets away") from None


def _require_few_strings(text: str, name: str) -> None:
    """Raises ConfigError for too many adjacent strings: gin's time grows with the square of their number."""
    if text.count('"') + text.count("'") < 2 * _MOST_STRINGS:
        return
    adjacent = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            adjacent += 1
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            adjacent = 0
        if adjacent > _MOST_STRINGS:
            reason = f"it has more than {_MOST_STRINGS} strings side by side; write one"
            raise ConfigError(_syntax_message(text, name, token.start[0], reason))


def _syntax_message(text: str, name: str, line: int, reason: str) -> str:
    lines = text.splitlines() or [""]
    line = min(line, len(lines))  # a statement that never ends may be reported after the last line
    source = lines[line - 1].strip()
    source = source if len(source) <= _MOST_SHOWN else f"{source[:_MOST_SHOWN]}…"
    word = _BARE_WORD.search(reason)
    if word:
        fix = f"put the text in quotes, {word[1]!r}"
    elif reason.endswith("?"):
        fix = reason
    else:
        fix = " ".join(reason.split()).rstrip(".") + "; a line is such as vision/Layout.tp = 2"
    return f"{name}:{line}: {source!r} is no gin: {fix}"
