"""The command `python -m studies`: names, rows, tables and exit status."""

from __future__ import annotations

import json

import pytest

import studies
from mmjax.bench import BENCHES, MOVED
from mmjax.bench.rows import Row
from studies import STUDIES
from studies.__main__ import main

ROW = Row(bench="one", case="a", value=1.25, unit="ratio")


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that were asked for; each returns a row, or a table."""
    asked: list[str] = []

    def function(where: str):
        asked.append(where)
        return lambda **options: {"title": "| table |"} if where.endswith(":tables") else iter([ROW])

    monkeypatch.setattr(studies, "_function", function)
    return asked


def test_all_studies_run_unless_some_are_named(canned: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert canned == [study.rows for study in STUDIES.values()]
    assert main(["--json", "distrain"]) == 0
    assert canned[len(STUDIES) :] == [STUDIES["distrain"].rows]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == ROW.as_json()


def test_tables_stand_in_place_of_rows(canned: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cornstarch", "--tables"]) == 0
    assert canned == [STUDIES["cornstarch"].tables]
    assert capsys.readouterr().out == "### cornstarch: title\n\n| table |\n\n"


@pytest.mark.parametrize("name", STUDIES)
def test_what_a_study_names_is_there(name: str) -> None:
    assert callable(studies._function(STUDIES[name].rows)) and callable(studies._function(STUDIES[name].tables))


def test_help_has_a_sentence_for_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert not end.value.code
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in STUDIES) and "--tables" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nvida"], "error: study 'nvida': there is none of this name; did you mean 'nvidia'?\n"),
        (["nvidia", "--jsn"], "error: --jsn: no flag --jsn; did you mean '--json'?\n"),
    ],
)
def test_a_wrong_command_is_one_line(
    canned: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and not canned
    assert capsys.readouterr().err == message


def test_benchmarks_that_moved_are_studies() -> None:
    assert set(MOVED.values()) <= STUDIES.keys() and not MOVED.keys() & BENCHES.keys()
