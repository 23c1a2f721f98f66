"""The soak: what it draws, what it requires of a run, and processes that it forks."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.samples import open_source
from mmjax.bench.soak.draws import Draw, make_draw
from mmjax.bench.soak.files import held_out_records
from mmjax.bench.soak.forked import CRASHED, Process, program
from mmjax.bench.soak.trial import Failure, Refused, SoakTrial
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.sources.writers import write_all, write_pictures
from mmjax.data.tasks.digits.dialogues import digit_dialogues
from mmjax.data.tokenizer import make_tokenizer

DATA = {kind: Path("/data") / kind for kind in ("llava", "webdataset", "array_record", "parquet", "pictures")}
DRAW = Draw(
    seed=0,
    number=1,
    shared=("Train.eval_samples=4", "Train.eval_every=2", "Train.dtype='float32'"),
    layout=("llm/Layout.dp=1",),
    other_layout=("llm/Layout.dp=2",),
    steps=3,
    processes=1,
    data_server=False,
    stop_after=1,
    ending="kill",
    delay=0.0,
    data_grow=False,
    from_folder=False,
    restore_up_to=0,
    eval_elsewhere=False,
)


@pytest.mark.long
def test_draws_are_legal_different_and_the_same_again() -> None:
    draws = [make_draw(3, number, DATA) for number in range(4)]
    for draw in draws:
        assert draw.layout != draw.other_layout
        for layout in (draw.layout, draw.other_layout):
            config = load_config([], [*draw.shared, *layout], allow_code=True)
            assert config.train.steps == draw.steps > draw.stop_after
    assert len({draw.shared for draw in draws}) == len(draws)
    assert not any(draw.from_folder for draw in draws)
    assert make_draw(3, 2, DATA) == draws[2] != make_draw(4, 2, DATA)


@pytest.mark.long
def test_ten_draws_are_refused_or_have_a_plan_for_every_step(tmp_path: Path) -> None:
    """Needs no device: finds data that cannot be read or packed under a drawn layout, as a soak would first."""
    dialogues, planned = digit_dialogues(24, seed=0), 0
    data = write_all(tmp_path, dialogues, per_shard=10) | {"pictures": write_pictures(tmp_path / "pictures", dialogues)}
    for number in range(10):
        draw = make_draw(7, number, data)
        config = load_config([], [*draw.shared, *draw.layout], allow_code=True)
        source, tokenizer = open_source(config, split="train"), make_tokenizer("", config.model.media)
        try:
            config = with_buckets(config, source)
            packer = build_packer(config, tokenizer, one_bucket=one_bucket(config), source=source)
        except ConfigError as refused:
            assert "\n" not in str(refused)
            continue
        planned += 1
        for step in range(10):
            first = step * config.train.global_batch
            metas = [source.meta(first + sample) for sample in range(config.train.global_batch)]
            assert len(packer.plan(step, metas).microbatches) == config.train.microbatches
    assert planned > 5


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_draw_trains_stops_resumes_moves_evaluates_and_exports(tmp_path: Path) -> None:
    """In a process of its own, which forks: the backend of this one is running."""
    flags = ["--seed=31", "--first=9", "--draws=1", f"--out={tmp_path}"]
    command = [sys.executable, "-m", "mmjax.bench", "soak", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "draw 9 passed: stopped by kill after step" in done.stdout, done.stdout
    assert "the same under another layout" in done.stdout, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"data", "weights"}  # a draw that passes leaves nothing


FORKS = """
import os, sys
from pathlib import Path
from mmjax.bench.soak import write_data

threads = len(os.listdir("/proc/self/task"))
paths = write_data(Path(sys.argv[1]))
assert len(paths) == 5 and paths["array_record"].exists()
assert len(os.listdir("/proc/self/task")) <= threads, "forked processes would not have them"
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads that Linux has")
def test_data_are_written_without_a_thread_that_forked_processes_would_miss(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rows(*losses: float, first: int = 1) -> list[dict[str, Any]]:
    rate = {"llm/learning_rate": 0.1}
    return [{"step": first + i, "loss": loss, "grad_norm": 2.0} | rate for i, loss in enumerate(losses)]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("metrics", "evaluated", "message"),
    [
        (rows(3.0, 2.0, 1.0), [2, 3], None),
        (rows(3.0, 2.0), [2, 3], "metrics.jsonl has the steps [1, 2], not 1 to 3"),
        ([*rows(3.0, 2.0), *rows(2.0, 1.0, first=2)], [2, 3], "metrics.jsonl has the steps [1, 2, 2, 3]"),
        (rows(3.0, float("nan"), 1.0), [2, 3], "losses are not finite"),
        (rows(3.0, 2.0, 1.0), [3], "eval.jsonl of run has the steps [3], not [2, 3]"),
        (rows(3.0, 2.0, 1.0), [2, 2, 3], "eval.jsonl of run has the steps [2, 2, 3], not [2, 3]"),
    ],
)
def test_every_step_and_every_evaluation_is_there_once(
    tmp_path: Path, metrics: list[dict[str, Any]], evaluated: list[int], message: str | None
) -> None:
    trial = SoakTrial(DRAW, tmp_path)
    write(trial.run / "metrics.jsonl", metrics)
    write(trial.run / "eval.jsonl", [{"step": step} for step in evaluated])
    if message is None:
        trial._require_rows(trial.run)
        return
    with pytest.raises(Failure) as failure:
        trial._require_rows(trial.run)
    assert str(failure.value).startswith(message)


def test_an_evaluation_that_failed_is_a_failure(tmp_path: Path) -> None:
    trial = SoakTrial(DRAW, tmp_path)
    write(trial.run / "metrics.jsonl", rows(3.0, 2.0, 1.0))
    write(trial.run / "eval.jsonl", [{"step": 2, "failure": "no room"}, {"step": 3}])
    with pytest.raises(Failure, match=r"^the evaluation after step 2 failed: no room$"):
        trial._require_rows(trial.run)


def test_another_layout_has_the_same_losses_norms_and_rates(tmp_path: Path) -> None:
    trial = SoakTrial(DRAW, tmp_path)
    one = rows(3.0, 2.0, 1.0)
    trial._require_same_losses(one, rows(3.0, 2.001, 1.0005), 0)
    changes = [{"loss": 3.001}, {"grad_norm": 2.01}, {"llm/learning_rate": 0.2}]
    for step, change in ((1, changes[0]), (2, changes[1]), (3, changes[2])):
        other = [row | change if row["step"] == step else row for row in one]
        with pytest.raises(Failure, match=f"^step {step} under another layout"):
            trial._require_same_losses(one, other, 0)
        trial._require_same_losses(one, other, step)  # it went on from a later checkpoint


def test_in_bf16_norms_are_those_of_the_first_step_from_a_shared_state(tmp_path: Path) -> None:
    shared = ("Train.eval_samples=4", "Train.eval_every=2", "Train.dtype='bfloat16'")
    trial = SoakTrial(dataclasses.replace(DRAW, shared=shared), tmp_path)
    one = rows(3.0, 2.0, 1.0)
    second = [row | {"grad_norm": 2 * row["grad_norm"]} if row["step"] == 2 else row for row in one]
    trial._require_same_losses(one, second, 0)
    with pytest.raises(Failure, match=r"^step 2 under another layout: grad_norm"):
        trial._require_same_losses(one, second, 1)
    with pytest.raises(Failure, match=r"^step 2 under another layout: loss"):
        trial._require_same_losses(one, rows(3.0, 2.5, 1.0), 0)


def test_held_out_records_stay_so_when_data_grow(tmp_path: Path) -> None:
    trial = SoakTrial(dataclasses.replace(DRAW, data_grow=True), tmp_path)
    trial._held_out = {"mine": "0123456789abcdef"}
    trial._require_held_out({"mine": "0123456789abcdef", "new": ""})
    with pytest.raises(Failure, match="mine: other records are held out since the data grew"):
        trial._require_held_out({"mine": "fedcba9876543210"})
    checkpoint = tmp_path / "run" / "checkpoints" / "00000002" / "mmjax"
    checkpoint.mkdir(parents=True)
    (checkpoint / "data.json").write_text(json.dumps({"extra": {"data": {"mine": {"held_out": "ab"}}}}))
    assert held_out_records(checkpoint.parent) == {"mine": "ab"}


def test_scores_are_those_of_the_run(tmp_path: Path) -> None:
    trial, row = SoakTrial(DRAW, tmp_path), {"step": 3, "exact_match": 0.5, "kinds": {"read": 0.5}}
    trial._require_same_scores(row, row, 4)
    with pytest.raises(Failure, match=r"exact_match 0\.25, the run 0\.5"):
        trial._require_same_scores(row, {**row, "exact_match": 0.25}, 4)
    moved = SoakTrial(dataclasses.replace(DRAW, eval_elsewhere=True), tmp_path)
    moved._require_same_scores(row, {**row, "exact_match": 0.25}, 4)  # a tie in one sample
    with pytest.raises(Failure):
        moved._require_same_scores(row, {**row, "exact_match": 0.0}, 4)
    with pytest.raises(Failure, match="step 2"):
        moved._require_same_scores(row, {**row, "step": 2}, 4)


def ended(folder: Path, text: str, status: int, name: str = "1.train") -> Process:
    """A process that has said this and ended so."""
    code = f"import sys; print({text!r}); sys.exit({status})"
    process = Process(program(["-S", "-c", code]), folder / f"{name}.log")
    process.wait(60)
    return process


def test_a_refusal_is_one_line_before_the_first_step(tmp_path: Path) -> None:
    trial = SoakTrial(DRAW, tmp_path)
    trial._require_end(ended(tmp_path, "done", 0, "0.train"), {0})
    refused = ended(tmp_path, "error: Train.steps=0: must be above 0", 2)
    with pytest.raises(Refused, match=r"^Train\.steps=0: must be above 0$"):
        trial._require_end(refused, {0})
    write(trial.run / "metrics.jsonl", rows(3.0))
    with pytest.raises(Failure, match="refused after 1 steps"):
        trial._require_end(refused, {0})
    for text, status in (("error: one\nerror: two", 2), ("died", 1), ("", 70)):
        with pytest.raises(Failure, match=f"exit status {status}"):
            trial._require_end(ended(tmp_path, text, status, f"3.{status}{len(text)}"), {0})
    with pytest.raises(Failure, match="traceback: ValueError: no"):
        trial._require_end(ended(tmp_path, "Traceback (most recent call last)\nValueError: no", 0, "4.train"), {0})


def test_a_forked_process_has_a_log_a_status_and_a_group(tmp_path: Path) -> None:
    def fall() -> None:
        raise ValueError("fallen")

    fallen = Process(fall, tmp_path / "fallen.log")
    assert fallen.wait(60) == CRASHED and "ValueError: fallen" in fallen.text
    seen = Process(lambda: print(os.environ["SEEN"], flush=True) or 3, tmp_path / "seen.log", {"SEEN": "yes"})
    assert seen.wait(60) == 3 and seen.text == "yes\n"

    child = f"import subprocess, sys; print('up', flush=True); subprocess.run([{sys.executable!r}, '-c', 'input()'])"
    parent = Process(program(["-c", child]), tmp_path / "parent.log")
    assert parent.wait(60, lambda: "up" in parent.text) is None
    parent.signal(signal.SIGKILL)
    assert parent.status == -signal.SIGKILL

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        Process(lambda: time.sleep(60), tmp_path / "late.log").wait(0.2)
    assert time.monotonic() - began < 30


def test_a_trial_writes_configurations_that_can_be_read(tmp_path: Path) -> None:
    draw = make_draw(0, 4, DATA)
    SoakTrial(draw, tmp_path)
    read = load_config([tmp_path / "draw.gin", tmp_path / "other.gin"], allow_code=True)
    assert read == load_config([], [*draw.shared, *draw.other_layout], allow_code=True)
