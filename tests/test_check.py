"""``python -m mmjax.check`` as a person runs it: one line of JSON, the exit status, nothing written, wrong flags."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trial_runs import REPOSITORY, Command, write_tiny

from mmjax import parity
from mmjax.check import main


def environment() -> dict[str, str]:
    """As tests have it, but for what the command has to set itself."""
    own = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC")
    return {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": str(REPOSITORY)}


def test_the_command(tmp_path: Path) -> None:
    gin_file = write_tiny(tmp_path)
    flags = [f"--gin_file={gin_file}", "--gin.World.platform=cuda", "--gin.Train.seed=1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.check", *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["ok"] is True and 0 < found["grad"] < 1e-5 and 0 < found["update"] < 1e-4
    assert found["modules"].keys() == {"vision", "vision_projector", "llm"} and found["steps"] == 3
    said = done.stderr.splitlines()
    assert said[0] == "shrunk: Train: global_batch 8 → 14", done.stderr
    assert any(line.startswith("compiling programs") for line in said)
    assert any(line.startswith("steps of the dense reference 3/3") for line in said)
    assert [path.name for path in tmp_path.iterdir()] == [gin_file.name]


@pytest.mark.slow
def test_more_ranks_than_tests_have(tmp_path: Path) -> None:
    flags = ["--gin.vision/Layout.dp=3", "--gin.llm/Layout.dp=4", "--gin.vision/Layout.rank_offset=8", "--steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.check", f"--gin_file={write_tiny(tmp_path)}", *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["vision: dp=3 on ranks 8-10", "llm: dp=4 tp=2 on ranks 0-7"]
    assert lines[-1] == "equal to the dense reference over 1 steps"


def test_a_crash_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was compared: the status is neither that of layouts that differ nor that of a wrong configuration."""

    def broken(*_: object, **__: object) -> None:
        raise ValueError("Computation was compiled for input shardings that disagree")

    monkeypatch.setattr(parity, "check", broken)
    monkeypatch.delitem(sys.modules, "mmjax.check")
    monkeypatch.setattr(sys, "argv", ["check", f"--gin_file={write_tiny(tmp_path)}"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("mmjax.check", run_name="__main__")
    assert done.value.code == 3
    assert capsys.readouterr().err.endswith("ValueError: Computation was compiled for input shardings that disagree\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    command = Command("check", [f"--gin_file={write_tiny(tmp_path)}"], tmp_path / "output")
    command.wait_for(lambda: "shrunk" in command.text())
    command.send(number)
    assert command.end() == 130, command.text()
    assert "Traceback" not in command.text() and command.text().splitlines()[-1] == "interrupted"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--steps=0"], "error: --steps=0: must be 1 or more, such as 3"),
        (["--dtype=float16"], "error: --dtype=float16: must be float32 or bfloat16"),
        (["--steps=few"], "error: --steps=few: must be an integer, such as 3"),
        (["--step=3"], "error: --step=3: no flag --step; did you mean '--steps'?"),
        (["--gin.vision/Layout.tp=3"], "error: vision/Layout.tp=3: must divide vision/ViT.heads (2)"),
        (["--gin.Data.sequence_length=8"], "error: Data.sequence_length=8 is too short"),
    ],
)
def test_refused_in_one_line(flags: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([f"--gin_file={write_tiny(tmp_path)}", *flags])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(error) and captured.err.count("\n") == 1 and not captured.out


def test_a_configuration_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: --gin_file is missing: name a configuration")
