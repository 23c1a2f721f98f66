"""Ten SIGKILLs at random moments of one run: the curve, the parameters and the moments are an undisturbed run's."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trial_runs import Command, assert_same_leaves, leaves, train_flags, write_tiny

from mmjax.checkpoint import Checkpointer
from mmjax.train.__main__ import main

STEPS, EVERY = 36, 6
PHASES = ("start-up", "compilation", "steps", "checkpoint", "evaluation")


def config(folder: Path) -> Path:
    return write_tiny(folder, Train_steps=STEPS, Train_eval_every=EVERY, Checkpoint_every=2, Data_workers=1)


def steps_of(path: Path) -> list[int]:
    """The steps of the complete lines of a file."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def inside(phase: str, command: Command, run: Path) -> Callable[[], bool]:
    """Whether the command is in the phase now."""

    def now() -> bool:
        text = command.text()
        if phase == "start-up":
            return "run directory" not in text
        if phase == "compilation":
            return "run directory" in text and "took" not in text
        if phase == "checkpoint":
            return any((run / "checkpoints").glob("*.orbax-checkpoint-tmp"))
        trained = text.count("\ntraining ")
        if phase == "steps":
            return trained >= 3
        last = max(steps_of(run / "metrics.jsonl"), default=0)
        return trained > 0 and last > 0 and last % EVERY == 0 and last not in steps_of(run / "eval.jsonl")

    return now


def kill(command: Command, now: Callable[[], bool], delay: float) -> list[int]:
    """Kills the command within a phase, `delay` seconds after it is seen there, or sooner where it is over by then."""
    while True:
        command.wait_for(now)
        time.sleep(delay)
        for member in command.members():
            os.kill(member, signal.SIGSTOP)
        if now():
            return command.send(signal.SIGKILL)
        for member in command.members():
            os.kill(member, signal.SIGCONT)
        delay /= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [7])
def test_ten_kills(seed: int, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(train_flags(config(tmp_path), whole)) == 0
    rng, flags = random.Random(seed), train_flags(config(tmp_path), run)
    phases = [*PHASES, *PHASES]
    rng.shuffle(phases)
    saved, workers = 0, 0
    for number, phase in enumerate(phases):
        command = Command("train", flags, tmp_path / f"output{number}")
        try:
            longest = {"start-up": 3.0, "compilation": 1.0, "checkpoint": 0.1}.get(phase, 0.3)
            members = kill(command, inside(phase, command, run), rng.uniform(0, longest))
            assert command.end() == -signal.SIGKILL, f"{phase}: {command.text()}"
            for member in members:  # those that stood still must hear that the command is gone
                try:
                    os.kill(member, signal.SIGCONT)
                except ProcessLookupError:
                    continue
            command.assert_nothing_left()
        finally:
            command.stop()
        workers += len(members) > 1
        assert "Traceback" not in command.text(), command.text()
        newest = Checkpointer(run / "checkpoints", report=pytest.fail).latest_step() or 0
        assert saved <= newest < STEPS, f"{phase}: a checkpoint was lost"
        saved = newest
    assert workers >= 4 and saved > 0  # the data workers died with the command

    last = Command("train", flags, tmp_path / "last")
    try:
        assert last.end(120) == 0, last.text()
        last.assert_nothing_left()
    finally:
        last.stop()
    assert f"continuing after step {saved}" in last.text()
    assert steps_of(run / "metrics.jsonl") == list(range(1, STEPS + 1))
    curves = (
        [json.loads(line)["loss"] for line in (d / "metrics.jsonl").read_text().splitlines()] for d in (run, whole)
    )
    mine, undisturbed = curves
    assert mine == undisturbed
    assert (run / "eval.jsonl").read_text() == (whole / "eval.jsonl").read_text()
    assert Checkpointer(run / "checkpoints").steps() == Checkpointer(whole / "checkpoints").steps()
    assert_same_leaves(leaves(run, STEPS), leaves(whole, STEPS))
    assert (run / "config.gin").read_text() == (whole / "config.gin").read_text()
    assert not list((run / "checkpoints").glob("*.*")), "half-written checkpoints are left"
