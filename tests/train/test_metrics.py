"""Metrics: what is in the file after every kind of end, and the numbers that JSON cannot hold."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.train.metrics import COLUMNS, MetricsWriter, read_metrics, require_sinks


def write(path: Path, steps: range, **options) -> None:
    with MetricsWriter(path, columns=("step", "loss"), **options) as writer:
        for step in steps:
            writer.write({"step": step, "loss": step / 4})


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_row_has_every_column_of_the_run_and_null_where_unknown(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": jnp.float32(0.5), "vision/grad_norm": np.float32(0.25), "skipped": False})
        (line,) = path.read_text().splitlines()  # visible before the file is closed
    row = json.loads(line)
    assert tuple(row)[: len(COLUMNS)] == COLUMNS
    promised = (
        "step, loss, grad_norm, tokens_per_s, media_per_s, tflops_per_device, mfu, bubble, padding, step_time_s, "
        "peak_memory_bytes, imbalance"
    )
    assert ", ".join(COLUMNS) == promised
    assert (row["step"], row["loss"], row["vision/grad_norm"], row["skipped"]) == (1, 0.5, 0.25, False)
    assert [name for name, value in row.items() if value is None] == list(COLUMNS[2:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.float32("inf")])
def test_numbers_that_json_cannot_hold_become_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 3, "loss": value, "norms": {"llm": [value, 2.0]}})
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    (row,) = read_metrics(path)
    assert row["loss"] is None and row["norms"] == {"llm": [None, 2.0]}


def test_integers_stay_exact_and_bfloat16_is_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": np.int64(7), "peak_memory_bytes": 2**53 + 1, "loss": jnp.bfloat16(1.5)})
    (row,) = read_metrics(path)
    assert (row["step"], row["peak_memory_bytes"], row["loss"]) == (7, 2**53 + 1, 1.5)


def test_a_resume_drops_the_rows_beyond_the_checkpoint_so_that_each_step_is_there_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    before = path.read_text()
    write(path, range(6, 11), resume_step=5)
    assert steps(path) == list(range(1, 11))
    assert path.read_text().startswith("".join(before.splitlines(keepends=True)[:5]))
    write(path, range(1, 3), resume_step=0)
    assert steps(path) == [1, 2]
    write(path, range(3, 4))
    assert steps(path) == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4, "loss"', "\0" * 40, "\0" * 40 + "\n"])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "a") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    write(path, range(4, 6), resume_step=3)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    write(path, range(4, 5))
    assert steps(path) == [1, 2, 3, 4]


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 10_000), resume=st.integers(0, 12))
def test_any_cut_of_the_file_resumes(tmp_path_factory, cut, resume):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write(path, range(1, 11))
    data = path.read_bytes()
    path.write_bytes(data[: cut % (len(data) + 1)])
    survived = [step for step in range(1, 11) if step <= min(resume, len(read_metrics(path)))]
    write(path, range(resume + 1, resume + 4), resume_step=resume)
    assert steps(path) == [*survived, resume + 1, resume + 2, resume + 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a JSON object"):
        read_metrics(path)


def test_reading_takes_the_last_row_of_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "a": 3}\n')
    assert read_metrics(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 3}]


@pytest.mark.parametrize("row", [{"loss": 1.0}, {"step": None}, {"step": 1, "loss": object()}])
def test_a_row_that_cannot_be_written_is_refused_whole(tmp_path, row):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(ValueError, match=r"step|loss"):
        writer.write(row)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_an_unknown_sink_is_suggested(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        MetricsWriter(tmp_path / "metrics.jsonl", sinks=("tensorbord",))


@pytest.mark.parametrize(("sink", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_known_before_a_run_starts(monkeypatch, sink, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^Train\.sinks='{sink}': .*pip install {package}, or use \(\)"):
        require_sinks([sink])
    require_sinks([])


@pytest.mark.parametrize(("sink", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, sink, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install {package}"):
        MetricsWriter(tmp_path / "metrics.jsonl", sinks=(sink,))


def test_sinks_get_the_finite_numbers(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, logdir):
            calls.append(logdir)

        def add_scalar(self, name, value, global_step):
            calls.append((name, value, global_step))

        def close(self):
            calls.append("closed")

    class Run:
        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finished")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: Run()))
    with MetricsWriter(tmp_path / "m.jsonl", sinks=("tensorboard", "wandb")) as writer:
        writer.write({"step": 2, "loss": 1.5, "grad_norm": math.nan, "note": "text", "skipped": True})
    assert calls == [str(tmp_path / "tensorboard"), ("loss", 1.5, 2), ({"loss": 1.5}, 2), "closed", "finished"]
