"""``python -m mmjax.launch``: what it says of its processes, and how it ends them. None of them imports JAX."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trial_runs import REPOSITORY

from mmjax import launch
from mmjax.launch import main

# What each process does, by its number.
CHILD = """
import os, signal, sys, time
me, what = int(os.environ["MMJAX_PROCESS_ID"]), sys.argv[1:]
act = what[me] if me < len(what) else "end"
if act == "busy":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("hello of", os.environ["MMJAX_NUM_PROCESSES"], flush=True)
if act == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    if "READY" in os.environ:
        open(os.environ["READY"], "w").close()
    time.sleep(60)
if act in ("stop", "busy"):
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
if act == "slow":
    wait, over = [], lambda *_: (wait.append(1), print("heard", flush=True))
    signal.signal(signal.SIGTERM, over)
    print("slow", flush=True)
    while not wait:
        time.sleep(0.01)
    time.sleep(0.4)
    print(f"saved after {len(wait)}", flush=True)
    sys.exit(130)
if act.startswith("until"):
    # One more line each time, as a checkpoint leaves one in a run's journal, until there are so many.
    with open(os.environ["RUN"] + "/commits.jsonl", "a+") as file:
        file.seek(0)
        steps = len(file.readlines())
        if steps < int(act[5:]):
            print(steps, file=file)
            sys.exit(1)
if act == "follow":
    print("error: process 1 has ended; this one ends too", file=sys.stderr, flush=True)
    time.sleep(0.1)
    sys.exit(2)
if act.isdecimal():
    time.sleep(0.3)
    print("oh no", file=sys.stderr, flush=True)
    sys.exit(int(act))
if act == "die":
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "the_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    return ["-m", "the_child"]


def test_output_comes_with_the_process_in_front(child, capsys):
    assert main(["-n", "3", *child]) == 0
    out = capsys.readouterr()
    assert sorted(out.out.splitlines()) == [f"[{i}] hello of 3" for i in range(3)] and not out.err


def test_a_command_written_as_it_is_installed():
    words = ["--gin_file=digits_vlm", "--dry_run"]
    assert launch._parse(["-n", "2", "mmjax", "train", *words]) == launch._parse(
        ["-n", "2", "-m", "mmjax.train", *words]
    )


def test_a_command_written_as_for_one_process(child, capsys):
    assert main(["-n", "1", sys.executable, *child]) == 0
    assert capsys.readouterr().out == "[0] hello of 1\n"


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith(f"usage: {launch.USAGE} --gin_file=F")
    heads = [line.split()[0] for line in said.splitlines() if line.startswith("  -")]
    assert heads == ["-n", "--devices_per_process", "--max_restarts", "-m"]


@pytest.mark.parametrize(("act", "status", "why"), [("7", 7, "ended with status 7"), ("die", 137, "SIGKILL")])
def test_one_that_fails_is_named_and_the_others_end(child, act, status, why, capsys, monkeypatch):
    assert launch.GRACE < 15
    monkeypatch.setattr(launch, "GRACE", 1.5)
    monkeypatch.setattr(launch, "_NEWS", 0.5)
    started = time.monotonic()
    assert main(["-n=3", *child, "stop", act, "deaf"]) == status
    assert time.monotonic() - started < 15
    said = capsys.readouterr().err
    assert f"launch: process 1 {'was ended by' if act == 'die' else ''}".rstrip() in said and why in said
    assert ("  oh no" in said) == (act == "7")


def test_who_followed_another_is_not_blamed(child, capsys):
    assert main(["-n", "2", *child, "3", "7"]) == 7  # 3 is the status of those that follow
    assert "launch: process 1 ended with status 7" in capsys.readouterr().err


def test_who_followed_one_that_was_refused_is_not_blamed_either(child, capsys):
    """It has the same status, so that Slurm, which knows the highest alone, hears of it."""
    assert main(["-n", "2", *child, "follow", "2"]) == 2
    assert "launch: process 1 ended with status 2" in capsys.readouterr().err


def test_a_command_that_is_none(capsys):
    assert main(["-n", "2", "-m", "no_such_module"]) == 1
    assert "No module named no_such_module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["-m", "mmjax.train"], "error: -n is missing: give the number of processes, such as 2"),
        (["-n", "2"], "error: -m is missing: name what to run"),
        (["-n", "2", "-m"], "error: -m is missing: name what to run"),
        (["-n", "2", "python", "train.py"], "error: -m is missing: name what to run"),
        (["-n", "two", "-m", "x"], "error: -n=two: must be an integer of 1 or more, such as 2"),
        (["-n=0", "-m", "x"], "error: -n=0: must be an integer of 1 or more, such as 2"),
        (["-n", "2", "twice", "-m", "x"], "error: 'twice' is no flag"),
        (["-n", "2", "--devices_per_process=-1", "-m", "x"], "error: --devices_per_process=-1: must be 1 or more"),
        (["-n", "2", "--devices=2", "-m", "x"], "error: --devices=2: no flag --devices; did you mean"),
        (["-n", "2", "--max_restarts=-1", "-m", "x"], "error: --max_restarts=-1: must be an integer of 0 or more"),
    ],
)
def test_refused_in_one_line(argv, error, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(error) and said.count("\n") == 1


@pytest.mark.parametrize("other", ["stop", "busy"])
def test_ctrl_c_stops_all_also_one_that_does_not_hear_it(child, other):
    launcher = subprocess.Popen(
        [sys.executable, "-m", "mmjax.launch", "-n", "2", *child, "stop", other],
        env=dict(os.environ),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[0] hello of 2\n", "[1] hello of 2\n"}
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(15) == 130
    launcher.stdout.close()


def test_sigterm_is_passed_on_once_and_waited_out(child):
    """However often it comes; the other process has ended long before."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "mmjax.launch", "-n", "2", *child, "slow", "stop"],
        env=dict(os.environ),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert launcher.stdout is not None
    assert any("slow" in line for line in launcher.stdout)
    for _ in range(3):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    said = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 130 and said.count("heard") == 1 and "saved after 1" in said
    assert "launch:" not in said


def test_who_does_not_end_in_time_after_sigterm_is_killed(child, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    monkeypatch.setattr(launch, "MARGIN", 0.5)
    monkeypatch.setattr(launch, "grace_of", lambda command: 0.5)
    wait = f"while [ ! -e {tmp_path}/ready ]; do sleep 0.05; done; kill -TERM {os.getpid()}"
    alarm = subprocess.Popen(["sh", "-c", wait])
    started = time.monotonic()
    assert main(["-n", "1", *child, "deaf"]) == 130
    assert time.monotonic() - started < 20
    assert "launch: process 0 has not ended in time: killed\n" in capsys.readouterr().err
    alarm.wait()


def test_starts_again_as_long_as_there_is_progress(child, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "PAUSE", 0.01)
    monkeypatch.setenv("RUN", str(tmp_path))
    assert main(["-n", "1", "--max_restarts=2", *child, "until4", f"--run_dir={tmp_path}"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "again" in line]
    assert said == ["launch: starting again, restart 1 of 2 without progress"] * 4


@pytest.mark.parametrize(
    ("act", "status", "starts"),
    [("7", 7, 3), ("75", 75, 3), ("2", 2, 1), ("130", 130, 1), ("143", 143, 1)],
)
def test_gives_up_without_progress_and_at_once_where_it_cannot_help(child, act, status, starts, capsys, monkeypatch):
    monkeypatch.setattr(launch, "PAUSE", 0.01)
    assert main(["-n", "1", "--max_restarts=2", *child, act]) == status
    out = capsys.readouterr()
    assert out.out == "[0] hello of 1\n" * starts
    last = "launch: given up: 2 restarts have brought no newer checkpoint and no further step"
    assert (out.err.splitlines()[-1] == last) == (starts > 1)


def test_only_training_starts_again_by_itself(child, capsys):
    assert main(["-n", "1", *child, "7"]) == 7
    assert capsys.readouterr().out == "[0] hello of 1\n"


def test_the_launcher_does_not_import_jax():
    code = "import sys, mmjax.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
