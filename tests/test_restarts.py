"""Whether a command is started again: exit statuses, progress, and what its command line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmjax.flags import INTERRUPTED, REFUSED
from mmjax.restarts import Restarts, grace_of, is_training, run_dir_of


def write(run: Path, *, commits: int, steps: int) -> None:
    run.mkdir(exist_ok=True)
    (run / "commits.jsonl").write_text('{"step": 1}\n' * commits)
    (run / "metrics.jsonl").write_text('{"step": 1}\n' * steps)


@pytest.mark.parametrize("status", [0, REFUSED, INTERRUPTED, 143])
def test_an_end_that_would_repeat_itself_or_was_asked_for_is_final(status: int) -> None:
    assert Restarts(["-m", "mmjax.train"], 3).again(status) == (False, "")


@pytest.mark.parametrize("status", [1, 3, 75, 134, 137])
def test_given_up_after_three_restarts_without_progress(status: int, tmp_path: Path) -> None:
    write(tmp_path, commits=2, steps=9)
    restarts = Restarts(["-m", "mmjax.train", f"--run_dir={tmp_path}"], 3)
    said = [restarts.again(status) for _ in range(4)]
    assert said == [
        *((True, f"starting again, restart {number} of 3 without progress") for number in (1, 2, 3)),
        (False, "given up: 3 restarts have brought no newer checkpoint and no further step"),
    ]
    assert Restarts(["-m", "mmjax.train"], 0).again(status) == (False, "")


def test_progress_is_a_newer_checkpoint_or_a_further_step(tmp_path: Path) -> None:
    write(tmp_path, commits=0, steps=0)
    restarts = Restarts(["-m", "mmjax.train", "--run_dir", str(tmp_path)], 1)
    # After a restart the rows behind the checkpoint are written again: they bring a run no further.
    counted = [((0, 3), True), ((0, 4), True), ((1, 4), True), ((1, 2), False), ((1, 4), False), ((1, 5), True)]
    for (commits, steps), again in counted:
        write(tmp_path, commits=commits, steps=steps)
        assert restarts.again(1)[0] is again, (commits, steps)


def test_a_run_that_begins_again_from_scratch_goes_on_when_it_has_a_checkpoint(tmp_path: Path) -> None:
    """With the flag it would be refused then; and the lost run's checkpoints are no progress of the new one."""
    write(tmp_path, commits=5, steps=50)
    restarts = Restarts(["-m", "mmjax.train", f"--run_dir={tmp_path}", "--from_scratch"], 1)
    write(tmp_path, commits=0, steps=2)
    assert restarts.again(1)[0] and "--from_scratch" in restarts.command
    write(tmp_path, commits=1, steps=2)
    (tmp_path / "checkpoints" / "00000002").mkdir(parents=True)
    assert restarts.again(1)[0] and restarts.command == ("-m", "mmjax.train", f"--run_dir={tmp_path}")


def test_what_a_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "base.gin").write_text("LIMIT = 40\nCheckpoint.grace_seconds = %LIMIT\n")
    gin = f"--gin_file={tmp_path}/base.gin"
    assert run_dir_of(["-m", "mmjax.train", "--run_dir=a b"]) == Path("a b")
    assert run_dir_of(["-m", "mmjax.train", "--gin_file", "x.gin", "--gin_file=y.gin"]) == Path("runs/y")
    assert run_dir_of(["-m", "the_child"]) is None
    assert grace_of(["-m", "mmjax.train", gin]) == 40
    assert grace_of(["-m", "mmjax.train", gin, "--gin.Checkpoint.grace_seconds=7.5"]) == 7.5
    assert grace_of(["-m", "mmjax.train", "--gin_file=no.gin"]) == grace_of(["-m", "the_child"]) == 25
    assert is_training(["-m", "mmjax.train", gin]) and not is_training(["-m", "mmjax.eval", gin])
