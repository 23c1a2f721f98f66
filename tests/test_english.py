"""Two figures of `mmjax/` stay low: names that do not say what they hold, and docstrings that are riddles.

A reader who knows the field should understand a variable from its name and a docstring at the first reading. Both
figures are shares, so that they mean the same while the package grows.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mmjax"
_WORDS = """
own one found given asked about said who them those more rest
whole other others what seen held made kept sent here
"""
VAGUE_NAMES = frozenset(_WORDS.split())
"""Words that could name anything: a variable or parameter needs a noun instead."""
RIDDLE = re.compile(r"\b(what|of which|of those that|that of)\b", re.IGNORECASE)
"""Words that stand for a noun which the reader has to guess."""
MOST_VAGUE, MOST_RIDDLES = 0.002, 0.002
"""The largest shares of vague names among assigned names and parameters, and of riddles among docstrings."""


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is assigned or is a parameter, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def docstrings_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The first paragraph of every docstring, with the line of the module, class or function."""
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (text := ast.get_docstring(node)):
            yield text.partition("\n\n")[0], getattr(node, "lineno", 1)


def is_riddle(paragraph: str) -> bool:
    return RIDDLE.search(paragraph) is not None


def worst_files(places: Iterable[str]) -> str:
    """The files with the most places ("path:line"), for the message of a failure."""
    return ", ".join(
        f"{path} ({count})" for path, count in Counter(p.rpartition(":")[0] for p in places).most_common(8)
    )


def package_trees() -> dict[str, ast.Module]:
    """The syntax trees of the package's files, by path."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE.parent)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_few_names_are_vague() -> None:
    names = [(name, f"{path}:{line}") for path, tree in package_trees().items() for name, line in names_in(tree)]
    vague = [place for name, place in names if name in VAGUE_NAMES]
    assert len(vague) <= MOST_VAGUE * len(names), f"{len(vague)} of {len(names)} names: {worst_files(vague)}"


def test_few_docstrings_are_riddles() -> None:
    docs = [(text, f"{path}:{line}") for path, tree in package_trees().items() for text, line in docstrings_in(tree)]
    riddles = [place for text, place in docs if is_riddle(text)]
    assert len(riddles) <= MOST_RIDDLES * len(docs), f"{len(riddles)} of {len(docs)} docstrings: {worst_files(riddles)}"


def described_in(docstring: str, section: str) -> Iterator[str]:
    """The names that a section of a docstring, "Args" or "Attributes", describes."""
    found = re.search(rf"^{section}:\n((?:  .*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    for names in re.findall(r"^  (\w[\w, *]*):(?: |$)", found[1] if found else "", re.MULTILINE):
        yield from (name.strip(" *") for name in names.split(","))


def stale_descriptions(trees: Iterable[tuple[str, ast.Module]]) -> Iterator[str]:
    """Names that docstrings describe, and that are no parameter of the function or no member of the class."""
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                section, known = "Args", {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
            elif isinstance(node, ast.ClassDef) and not node.bases:
                section, known = "Attributes", members_of(node)
            else:
                continue
            for name in described_in(ast.get_docstring(node) or "", section):
                if name not in known:
                    yield f"{path}:{node.lineno}: {node.name} has no {name!r}"


def members_of(node: ast.ClassDef) -> set[str]:
    """The names that a class defines or sets on itself."""
    children = list(ast.walk(node))
    names = {child.id for child in children if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}
    names |= {child.attr for child in children if isinstance(child, ast.Attribute)}
    return names | {child.name for child in children if isinstance(child, ast.FunctionDef)}


def test_docstrings_describe_what_is_there() -> None:
    assert list(stale_descriptions(package_trees().items())) == []
    stale = 'class C:\n    """C.\n\n    Attributes:\n      a, b: two.\n    """\n    a: int\n'
    stale += 'def f(x, *y):\n    """F.\n\n    Args:\n      x: one.\n      *y: more.\n      z: none.\n    """\n'
    assert list(stale_descriptions([("m.py", ast.parse(stale))])) == ["m.py:1: C has no 'b'", "m.py:8: f has no 'z'"]


@pytest.mark.parametrize(
    ("code", "vague"),
    [
        ("own = 1", ["own"]),
        ("def f(found, *rest, size=1, **more): ...", ["found", "rest", "more"]),
        ("for one in ranks: total += one", ["one"]),
        ("with open(path) as made: pass", ["made"]),
        ("print(lambda what: what)", ["what"]),
        ("owner = layout.own(found=1)", []),  # neither attributes nor keywords of calls
    ],
)
def test_vague_names_are_counted(code: str, vague: list[str]) -> None:
    assert sorted(name for name, _ in names_in(ast.parse(code)) if name in VAGUE_NAMES) == sorted(vague)


@pytest.mark.parametrize(
    ("docstring", "riddle"),
    [
        ("What a rank receives.", True),
        ("Blocks of which each rank has many.", True),
        ("The shape is that of a leaf.", True),
        ("The shapes of all leaves.\n\nWhat follows the first paragraph is not counted.", False),
        ("Whatever a user writes.", False),
    ],
)
def test_riddles_are_counted(docstring: str, riddle: bool) -> None:
    code = f'async def f():\n    """{docstring}"""\n'
    ((paragraph, line),) = docstrings_in(ast.parse(code))
    assert (is_riddle(paragraph), line) == (riddle, 1)
