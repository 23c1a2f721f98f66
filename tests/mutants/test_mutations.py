"""The tool that makes mutants: each kind of change where it belongs, and none where no value depends on it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from mutations import mutants
from run import interval, recorded
from targets import ROOT, TARGETS, mutants_of


def changed(source: str) -> set[str]:
    """Mutated lines of a one-file program."""
    return {mutant.lines[1] for mutant in mutants("a.py", source.encode())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", {"x = 2", "x = 0"}),
        ("x = -1", {"x = 0", "x = (-2)"}),
        ("x = True", {"x = False"}),
        ("x = 0.5", {"x = 1.5", "x = (-0.5)"}),
        ("x = None", {"x = 1"}),
        ("x = 'dp'", {"x = 'dp_'"}),
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a is None", {"x = a is not None"}),
        ("x = a - b", {"x = a + b", "x = b - a"}),
        ("x = a * b", {"x = a // b"}),
        ("x = a % b", {"x = a // b", "x = b % a"}),
        ("x = (1,) + a", {"x = (2,) + a", "x = (0,) + a", "x = (1,) - a", "x = a + (1,)"}),
        ("x = a and b", {"x = a or b", "x = a", "x = b"}),
        ("x = not a", {"x = (a)"}),
        ("x = a[0]", {"x = a[1]", "x = a[(-1)]"}),
        ("x = a[i:]", {"x = a[:]", "x = a[(i) + 1:]", "x = a[(i) - 1:]", "x = a[i:][::-1]"}),
        ("f(a, b)", {"pass", "f(b, a)"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = any(a)", {"x = all(a)"}),
        ("x = sorted(a)", {"x = sorted(a)[::-1]"}),
        ("x = reversed(a)", {"x = (a)"}),
        ("x = lax.psum(a, n)", {"x = lax.pmean(a, n)", "x = (a)", "x = lax.psum(n, a)"}),
        ("x = f(a, axis=n)", {"x = f(a)"}),
        ("x = f(axis=n, to=m)", {"x = f(axis=m, to=n)", "x = f(axis=n)", "x = f(to=m)"}),
        ("x = where(c, a, b)", {"x = where(c, b, a)"}),
        ("x = f(x)", {"pass"}),
        ("x += a", {"pass", "x -= a"}),
        ("x = source, target", {"x = target, source", "x = target, target", "x = source, source"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("x = [i for i in a if b]", {"x = [i for i in a if True]", "x = [i for i in a if False]"}),
        ("def f(): return a", {"def f(): return None"}),
        ("for i in a: pass", {"for i in (): pass"}),
        ("while a: pass", {"while False: pass"}),
    ],
)
def test_each_kind_of_change(source: str, expected: set[str]) -> None:
    assert changed(source) == expected


def test_an_index_that_is_an_integer_is_shifted_and_mirrored() -> None:
    lines = changed("def f(a, i: int, k):\n    x = a[i]\n    y = a[k]\n")
    assert lines == {"x = a[(i) + 1]", "x = a[(i) - 1]", "x = a[-1 - (i)]"}


@pytest.mark.parametrize(
    "source",
    [
        "'''Docstring 1.'''",
        "def f(a: dict[str, 1]) -> tuple[int, ...]:\n    'Docstring.'",
        "import a",
        "assert a == 1, 'never'",
        "raise ValueError(f'{a} of 3', 1)",
        "Alias = dict[str, int]",
        "label = ' '.join(a)",
        "x = Program('name', a)",
        "x = zip(a, strict=True)",
        "x: int = field(metadata={'example': (3, 5)})",
        "if TYPE_CHECKING:\n    x = 1",
        "x = ContextVar('name')",
        "x = UnitGrid.between(a, b)",
    ],
)
def test_what_no_value_depends_on_is_left_alone(source: str) -> None:
    assert changed(source) <= {"x = Program(a, 'name')"}


def test_what_is_equal_or_alone_is_not_exchanged() -> None:
    assert changed("x = f(a=1, b=True)") == {
        *("x = f(b=True)", "x = f(a=1)", "x = f(a=2, b=True)", "x = f(a=0, b=True)", "x = f(a=1, b=False)")
    }
    assert changed("x = a[:1]") == {"x = a[:]", "x = a[:2]", "x = a[:0]"}


@pytest.mark.long
def test_mutants_of_the_targets_differ_and_every_recorded_survivor_is_one_of_today() -> None:
    """One test, since making them all takes seconds. A line of ``docs/mutants.md`` whose code has changed is to be
    removed or run again."""
    for file in TARGETS:
        found = mutants_of(file)
        assert len(found) > 20, file
        assert len({mutant.id for mutant in found}) == len({mutant.mutated for mutant in found}) == len(found), file
        assert all(mutant.lines[0] != mutant.lines[1] for mutant in found), file
    keys = {mutant.key for file in TARGETS for mutant in mutants_of(file)}
    assert recorded() <= keys, sorted(recorded() - keys)


def test_mutants_of_a_target_are_other_programs() -> None:
    file = "mmjax/mesh/submesh.py"
    source = (ROOT / file).read_bytes()
    assert not any(ast.dump(ast.parse(m.mutated)) == ast.dump(ast.parse(source)) for m in mutants(file, source))


@pytest.mark.slow
def test_the_tests_that_are_to_kill_exist() -> None:
    """Pytest finds each of them: one that it does not would end every run at its start."""
    tests = sorted({test for tests in TARGETS.values() for test in tests})
    flags = ("--collect-only", "-q", "-m", "not slow", "-p", "no:cacheprovider")
    found = subprocess.run([sys.executable, "-m", "pytest", *flags, *tests], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]


def test_the_interval_of_a_rate() -> None:
    """Wilson's, against values worked out by hand."""
    assert interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert interval(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
