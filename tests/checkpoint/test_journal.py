"""The journal of checkpoints: on disk when a line is added, and right about every run directory that a kill leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmjax.checkpoint.journal import Journal
from mmjax.configurable import ConfigError


def steps(journal: Journal) -> list[int]:
    """The steps of its whole lines."""
    found = []
    for line in journal.path.read_text().splitlines():
        if line.endswith("}"):
            found.append(json.loads(line)["step"])
    return found


def test_a_line_for_each_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert not journal.is_empty()  # a missing one says nothing
    journal.begin()
    assert journal.is_empty()
    journal.add(2)
    journal.add(4)
    assert not journal.is_empty() and steps(journal) == [2, 4]
    journal.begin()
    assert journal.is_empty()


@pytest.mark.parametrize("length", range(1, 12))
def test_a_torn_line_counts_and_the_next_one_is_whole(length: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.path.write_text('{"step": 2}'[:length])
    assert not journal.is_empty()
    journal.add(4)
    assert steps(journal)[-1] == 4 and journal.path.read_text().endswith('\n{"step": 4}\n')


def test_a_checkpoint_that_was_not_noted_is(tmp_path: Path) -> None:
    """Of a run of an earlier version, or killed between checkpoint and line."""
    journal = Journal(tmp_path)
    journal.complete(6)
    assert steps(journal) == [6]
    journal.complete(8)
    assert steps(journal) == [6]
    journal.begin()
    journal.complete(8)
    assert steps(journal) == [8]


def test_one_that_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run/commits.jsonl: cannot be read \(Not a directory\); remove it"):
        Journal(tmp_path / "run").is_empty()
    (tmp_path / "commits.jsonl").mkdir()
    assert not Journal(tmp_path).is_empty()
