"""One process at a time in a run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trial_runs import train_flags, write_tiny

from mmjax.configurable import ConfigError
from mmjax.train.__main__ import main
from mmjax.train.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from mmjax.train.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(300)
"""


def test_a_second_process_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(SystemExit) as end:
            main(train_flags(write_tiny(tmp_path), run))
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error == (
            f"error: --run_dir={str(run)!r}: process {holder.pid} is training in it; "
            "wait for it to end, or name another directory\n"
        )
        assert sorted(path.name for path in run.iterdir()) == ["lock"]  # the other's run is as it was
    finally:
        holder.kill()  # nothing of its own releases the lock
        holder.wait()
        if holder.stdout:
            holder.stdout.close()
    RunLock(run).close()


def test_a_second_trainer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(ConfigError, match=rf"another Trainer of this process \(pid {os.getpid()}\) is open in it"):
            RunLock(tmp_path)
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    lock = RunLock(tmp_path)
    lock.close()
    lock.close()


def test_programs_that_a_run_starts_do_not_hold_its_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False)
    try:
        lock.close()
        RunLock(tmp_path).close()
    finally:
        child.kill()
        child.wait()


def test_a_lock_that_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match=r"lock cannot be opened \(Is a directory\); move it away"):
        RunLock(tmp_path)


def test_a_lock_that_is_no_text_shows_its_beginning(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / "lock").write_bytes(b"\xff" * 1000)
        with pytest.raises(ConfigError, match=r"process \ufffd{20} is training in it"):
            RunLock(tmp_path)
