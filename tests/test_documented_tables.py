"""Tables in docs are those that their commands print, and every picture has a place."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from trial_runs import REPOSITORY

from mmjax.plan.__main__ import main

DOCS = REPOSITORY / "docs"
PAGE = DOCS / "planner.md"


def blocks(language: str = "") -> list[str]:
    """The page's blocks of a language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    return [text for name, text in fenced if name == language]


def test_the_table_of_numbers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problem.json").write_text(blocks("json")[0])
    assert main([f"--problem={tmp_path / 'problem.json'}"]) == 0
    assert capsys.readouterr().out in blocks()


@pytest.mark.slow
def test_the_table_of_a_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (shown,) = (text for text in blocks() if text.startswith("the plan has "))
    command = blocks()[blocks().index(shown) - 1]
    assert main(shlex.split(command.removeprefix("python -m mmjax.plan "))) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_every_picture_has_a_place() -> None:
    pages = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    places = {
        (page.parent / path).resolve() for page in pages for path in re.findall(r"\]\((\S+\.png)\)", page.read_text())
    }
    assert {path for path in places if path.is_relative_to(DOCS / "images")} == {*(DOCS / "images").iterdir()}
