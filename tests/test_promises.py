"""Every promise of docs/promises.md names tests that are there, and the issues that it names have addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "promises.md"
LINK = re.compile(r"\[`(\w+)`\]\(([^)]+)\)")
ISSUE = re.compile(r"\[([\w-]+ #\d+)\]")
ADDRESS = re.compile(r"^\[([\w-]+ #\d+)\]: (\S+)$", re.M)


def promises() -> dict[str, str]:
    """The last cell of each row by its first one: the tests that keep a promise."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and not line.startswith(("| promise |", "|---")):
            promise, _, tests = (cell.strip() for cell in line.strip("|").split("|"))
            assert promise not in found, "it stands there twice"
            found[promise] = tests
    return found


@pytest.mark.parametrize(("promise", "tests"), promises().items())
def test_a_promise_is_kept_by_tests_that_are_there(promise: str, tests: str) -> None:
    links = LINK.findall(tests)
    assert links and LINK.sub("", tests).strip(", ") == "", f"not only links to tests: {tests}"
    for name, path in links:
        file = PAGE.parent / path
        assert file.is_file() and file.name.startswith("test_"), path
        assert re.search(rf"^ *def {name}\(", file.read_text(), re.M), f"{path} has no {name}"


def test_there_are_promises_and_each_is_one_sentence() -> None:
    assert len(promises()) >= 15
    assert all(promise.endswith(".") and ". " not in promise for promise in promises())


def test_issues_have_addresses() -> None:
    text = PAGE.read_text()
    addresses = ADDRESS.findall(text)
    assert sorted({label for label, _ in addresses}) == sorted(label for label, _ in addresses)
    assert {label for label, _ in addresses} == set(ISSUE.findall(ADDRESS.sub("", text)))
    for label, address in addresses:
        number = label.partition("#")[2]
        assert re.fullmatch(rf"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/{number}", address), address
