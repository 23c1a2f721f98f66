"""The faults of `bench faults`: settings that are accepted, lines that name them, and one fault for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmjax.bench.faults import bench_faults
from mmjax.bench.faults.kinds import AT, KINDS
from mmjax.bench.faults.trial import CONFIGURATION, STEPS, FaultFailure, FaultTrial
from mmjax.bench.soak.forked import Process, program
from mmjax.config import load_config
from mmjax.configurable import ConfigError


def test_every_fault_has_a_configuration_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.gin"
    path.write_text(CONFIGURATION)
    for name, fault in KINDS.items():
        config = load_config([path], fault.settings)
        assert config.train.steps == STEPS > AT, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"processes": "3", "only": ""}, r"^--processes='3': must be 2, 4 or both"),
        ({"processes": "2", "only": "kil"}, r"there is no fault 'kil'; did you mean 'kill'\?"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(bench_faults(1, out=str(tmp_path), **flags))


def saying(trial: FaultTrial, *lines: str) -> None:
    """Gives the trial a command that has written these lines and ended."""
    process = Process(program(["-S", "-c", f"print({chr(10).join(lines)!r})"]), trial.folder / "0.log")
    process.wait(60)
    trial.commands.append(process)


def test_only_a_line_after_the_fault_names_it(tmp_path: Path) -> None:
    trial = FaultTrial(processes=2, folder=tmp_path)
    saying(trial, "process 1 is there", "process 1 is gone")
    trial._text_before_fault = trial.command.text.index("is there")
    assert trial.wait_for_line(r"process 1\b", 0.0)[0] == "process 1 is gone"
    with pytest.raises(FaultFailure, match="ended before a line like 'process 2'"):
        trial.wait_for_line("process 2", 0.0)


def test_the_last_start_counts_for_lost_steps(tmp_path: Path) -> None:
    trial = FaultTrial(processes=2, folder=tmp_path)
    saying(trial, "nothing")
    assert trial.resumed_after() is None
    saying(trial, "[0] continuing after step 4", "[0] continuing after step 8")
    assert trial.resumed_after() == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_process_costs_no_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmjax.bench", "faults", "--processes=2", "--only=kill", f"--out={tmp_path}"]
    # Each process has as many virtual devices as its modules want, and not those of this one.
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes, kill: named (launch: process 1 was ended by SIGKILL" in done.stdout
    assert "faults survived of 1" in done.stdout and "MISSED" not in done.stdout
