"""A full disk while a run goes on: it is reported, training goes on, and what there is room for later is written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trial_runs import Command, assert_same_leaves, leaves, train_flags, write_tiny

from mmjax.checkpoint import Checkpointer
from mmjax.configurable import ConfigError
from mmjax.train.__main__ import main
from mmjax.train.files import RunFiles
from mmjax.train.metrics import MetricsWriter, read_metrics

STEPS = 40
MIB = 1 << 20


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """An empty file system of `size` bytes, in a mount namespace of its own: nothing of it outlives the test."""
    folder.mkdir()
    script = f"mount -t tmpfs -o size={size} tmpfs {folder} && echo mounted && exec cat"
    holder = subprocess.Popen(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with holder:
        assert holder.stdin and holder.stdout
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("this process may not mount a file system")
        try:
            yield Path(f"/proc/{holder.pid}/root{folder}")
        finally:
            holder.stdin.close()  # `cat` ends, and with it the namespace and the mount


def fill(disk: Path) -> Path:
    """Takes all the room there is."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\1" * size) == size:
                    pass
    assert os.statvfs(disk).f_bavail == 0
    return ballast


@contextlib.contextmanager
def standing_still(command: Command) -> Iterator[None]:
    """The command does nothing meanwhile."""
    for member in command.members():
        os.kill(member, signal.SIGSTOP)
    try:
        yield
    finally:
        for member in command.members():
            os.kill(member, signal.SIGCONT)


def rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(train_flags(config(folder), folder / "run")) == 0
    return folder / "run"


def config(folder: Path) -> Path:
    return write_tiny(folder, Train_steps=STEPS, Train_eval_every=10, Checkpoint_every=4)


def assert_same_run(run: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        mine, theirs = ([json.loads(line) for line in (d / name).read_text().splitlines()] for d in (run, other))
        assert [row["step"] for row in mine] == [row["step"] for row in theirs], name
    assert [r["loss"] for r in read_metrics(run / "metrics.jsonl")] == [
        r["loss"] for r in read_metrics(other / "metrics.jsonl")
    ]
    assert (run / "eval.jsonl").read_text() == (other / "eval.jsonl").read_text()
    assert_same_leaves(leaves(run, STEPS), leaves(other, STEPS))


def launched(processes: int, flags: list[str], output: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The run in one process, or in several, which have to find their devices by themselves."""
    if processes == 1:
        return Command("train", flags, output)
    for name in ("JAX_NUM_CPU_DEVICES", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    return Command("launch", ["-n", str(processes), "--max_restarts=0", "-m", "mmjax.train", *flags], output)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_is_full_for_a_while(
    undisturbed: Path, tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two processes each has a module of its own, so every number equals that of one process."""
    with small_disk(tmp_path / "disk", 32 * MIB) as disk:
        run = disk / "run"
        command = launched(processes, train_flags(config(tmp_path), run), tmp_path / "output", monkeypatch)
        try:
            command.wait_for((run / "checkpoints" / "00000004").exists, 240)
            with standing_still(command):
                ballast = fill(disk)
                before = rows(run / "metrics.jsonl")
                kept = Checkpointer(run / "checkpoints").latest_step() or 0
                assert 4 <= kept < STEPS - 8
            command.wait_for(lambda: "metrics.jsonl cannot be written" in command.text())
            command.wait_for(lambda: "was not saved" in command.text())
            with standing_still(command):
                assert Checkpointer(run / "checkpoints").latest_step() == kept
                assert rows(run / "metrics.jsonl") < before + 20  # what still fitted into the file's last page
                ballast.unlink()
            assert command.end() == 0, command.text()
        finally:
            command.stop()
        text = command.text()
        assert "Traceback" not in text
        assert text.count("/metrics.jsonl cannot be written (No space left on device); training goes on") == 1
        assert text.count("/metrics.jsonl is written again") == 1
        assert text.count("No space left on device); 0.0 GiB are free there") == text.count("was not saved") >= 1
        assert f"training {STEPS}/{STEPS}" in text and "not written" not in text
        assert_same_run(run, undisturbed)
        assert Checkpointer(run / "checkpoints").steps() == [STEPS - 8, STEPS - 4, STEPS]
        left = {path.name for path in run.iterdir()}
        assert left == {path.name for path in undisturbed.iterdir()}


@pytest.mark.slow
def test_a_disk_that_stays_full(undisturbed: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 32 * MIB) as disk:
        run, flags = disk / "run", train_flags(config(tmp_path), disk / "run")
        command = Command("train", flags, tmp_path / "output")
        try:
            command.wait_for((run / "checkpoints" / "00000004").exists)
            with standing_still(command):
                ballast = fill(disk)
                kept = Checkpointer(run / "checkpoints").latest_step()
            assert command.end() == 1, command.text()
        finally:
            command.stop()
        text = command.text()
        assert "Traceback" not in text and f"training {STEPS}/{STEPS}" in text
        lacking = [line for line in text.splitlines() if line.startswith("not written: ")]
        found = [line.removeprefix("not written: ").split(" (")[0] for line in lacking]
        assert found[0].startswith("metrics.jsonl: steps ") and found[0].endswith(f" to {STEPS}")
        # A row of eval.jsonl is short: what the file's last page has room for is written.
        pictures_and_checkpoint = {"predictions.png", "curves.png", f"the checkpoint of step {STEPS}"}
        assert set(found[1:]) - {"eval.jsonl"} == pictures_and_checkpoint
        assert all("No space left on device)" in line for line in lacking), lacking
        assert Checkpointer(run / "checkpoints").latest_step() == kept
        assert not list(run.glob("new-*"))

        # A start on a full disk is refused in one line; with room the same command ends as if nothing had been.
        again = Command("train", flags, tmp_path / "refused")
        assert again.end() == 2
        (line,) = [line for line in again.text().splitlines() if line.startswith("error: ")]
        assert f"--run_dir='{run}': cannot be written (No space left on device); make room there" in line
        assert "Traceback" not in again.text()
        ballast.unlink()
        assert main(flags) == 0
        assert_same_run(run, undisturbed)


# ---- where nothing can be mounted: a limit on the size of files fails writes half-way


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_wait_for_room_and_stay_whole(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    with MetricsWriter(path, columns=("step", "note"), report=said.append) as writer:
        for step in range(1, 9):
            with limited(200 if step < 7 else 10_000):
                writer.write({"step": step, "note": "n" * 40})
            if step == 4:
                assert path.stat().st_size == 200  # the middle of a row
                assert writer.unwritten == "metrics.jsonl: step 4 (File too large)"
                assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
        assert writer.unwritten == ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 9))
    assert said == [
        f"{path} cannot be written (File too large); training goes on, and rows wait in memory until there is room",
        f"{path} is written again, from step 4 on",
    ]


def test_close_is_the_last_attempt(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    writers = [MetricsWriter(tmp_path / name, columns=("step",), report=said.append) for name in ("a", "b")]
    with limited(5):
        for writer in writers:
            writer.write({"step": 1})
            writer.write({"step": 2})
        writers[0].close()
    writers[1].close()
    assert writers[0].unwritten == "a: steps 1 to 2 (File too large)" and writers[1].unwritten == ""
    assert [row["step"] for row in read_metrics(tmp_path / "b")] == [1, 2]
    assert not path.exists()


def test_evaluations_and_pictures(tmp_path: Path) -> None:
    said: list[str] = []
    files = RunFiles(tmp_path / "run", said.append)
    (files.run_dir / "p.png").write_bytes(b"the old one")

    def draw(path: Path) -> None:
        path.write_bytes(b"\2" * 500)

    row: dict[str, Any] = {"step": 5, "exact_match": 0.5}
    files.add_evaluation(row)
    with limited(45):
        files.add_evaluation({**row, "step": 10})
        files.add_evaluation({**row, "step": 15})
        files.draw("p.png", draw)
        assert files.unwritten == ("eval.jsonl (File too large)", "p.png (File too large)")
        assert (files.run_dir / "p.png").read_bytes() == b"the old one"
        assert [r["step"] for r in files.evaluations] == [5]
    files.add_evaluation({**row, "step": 20, "exact_match": 0.25})
    files.add_evaluation({**row, "step": 20})  # evaluated again: it takes the place of the first
    files.draw("p.png", draw)
    assert files.unwritten == ()
    lines = [json.loads(line) for line in (files.run_dir / "eval.jsonl").read_text().splitlines()]
    assert [(line["step"], line["exact_match"]) for line in lines] == [(step, 0.5) for step in (5, 10, 15, 20)]
    assert (files.run_dir / "p.png").stat().st_size == 500
    names = ["eval.jsonl", "p.png"]
    assert said == [
        *(f"{files.run_dir / name} cannot be written (File too large); training goes on" for name in names),
        *(f"{files.run_dir / name} is written again" for name in names),
    ]
    assert {path.name for path in files.run_dir.iterdir()} == set(names)


def test_a_start_that_cannot_write_is_refused(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run", pytest.fail)
    (files.run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with limited(5), pytest.raises(ConfigError, match=r"run': cannot be written \(File too large\); make room there"):
        files.open_metrics(2, ())
    assert [path.name for path in files.run_dir.iterdir()] == ["metrics.jsonl"]
    assert [row["step"] for row in read_metrics(files.run_dir / "metrics.jsonl")] == [1, 2, 3]
