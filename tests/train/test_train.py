"""Whole runs: what a run writes, and that stopping it in any way and starting it again changes no bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from PIL import Image
from trial_runs import ALONE, ONE_DEVICE, STEPS, Command, assert_same_leaves, leaves, train_flags, write_tiny

from mmjax.checkpoint import Checkpointer
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.loader import StepMaker
from mmjax.eval.__main__ import main as evaluation_command
from mmjax.export.__main__ import main as export_command
from mmjax.optimizer import learning_rate
from mmjax.recipe.device_defaults import leaves_open, with_earlier_defaults
from mmjax.train.__main__ import main
from mmjax.train.metrics import COLUMNS, read_metrics
from mmjax.train.trainer import Trainer


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every row of metrics.jsonl."""
    return [(row["step"], row["loss"]) for row in map(json.loads, _lines(run_dir / "metrics.jsonl"))]


def assert_same_run(run_dir: Path, other: Path) -> None:
    """The same losses, evaluations, parameters and moments, bit for bit."""
    assert losses(run_dir) == losses(other)
    assert (run_dir / "eval.jsonl").read_text() == (other / "eval.jsonl").read_text()
    assert_same_leaves(leaves(run_dir, STEPS), leaves(other, STEPS))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ---- what a run writes


def test_metrics_have_a_row_for_every_step(tiny_run: Path) -> None:
    rows = [json.loads(line) for line in _lines(tiny_run / "metrics.jsonl")]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    modules = ("vision", "vision_projector", "llm")
    names = {
        *COLUMNS,
        "skipped",
        "data_wait_s",
        "data_origin",
        *(f"{m}/{what}" for m in modules for what in ("learning_rate", "grad_norm")),
        *(f"{m}/busy_s" for m in ("vision", "llm")),
    }
    assert rows[0]["imbalance"] is None and rows[0]["llm/busy_s"] is None
    assert rows[-1]["imbalance"] >= 1 and rows[-1]["vision/busy_s"] > 0 and rows[-1]["llm/busy_s"] > 0
    for row in rows:
        assert set(row) == names
        assert row["data_wait_s"] >= 0 and row["data_origin"] == "local"
        assert row["mfu"] is None and row["peak_memory_bytes"] is None  # a CPU has neither
        numbers = {name: row[name] for name in COLUMNS if row[name] is not None}
        assert all(np.isfinite(value) and value > 0 for value in numbers.values()), numbers
        assert 0 < row["padding"] < 1 and 0 < row["bubble"] < 1 and row["skipped"] == 0
        norms = [row[f"{m}/grad_norm"] for m in modules]
        assert row["grad_norm"] == pytest.approx(float(np.sqrt(np.sum(np.square(norms)))), rel=1e-6)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    # Two updates of warm-up to the highest rate, then a straight line to 0 at the end of the run.
    expected = [min((update + 1) / 3, (STEPS - update) / (STEPS - 2)) for update in range(STEPS)]
    assert [row["llm/learning_rate"] for row in rows] == pytest.approx([0.02 * x for x in expected], rel=1e-5)
    assert [row["vision/learning_rate"] for row in rows] == pytest.approx([0.01 * x for x in expected], rel=1e-5)


def test_rates_agree_with_each_other(tiny_run: Path) -> None:
    for row in read_metrics(tiny_run / "metrics.jsonl"):
        images = row["media_per_s"] * row["step_time_s"]
        tokens = row["tokens_per_s"] * row["step_time_s"]
        assert images == pytest.approx(round(images)) and 8 <= round(images) <= 16  # eight samples of one or two images
        assert tokens == pytest.approx(round(tokens)) and 8 * 10 < round(tokens) < 8 * 36


def test_files_of_a_run(tiny_run: Path) -> None:
    assert [row["step"] for row in read_metrics(tiny_run / "eval.jsonl")] == [5, 10, STEPS]
    for row in read_metrics(tiny_run / "eval.jsonl"):
        shares = {"exact_match", "digit_accuracy", "swapped_vision_digit_accuracy"}
        assert set(row) == {"step", "loss", "perplexity", *shares}
        assert all(0 <= row[name] <= 1 for name in shares) and row["perplexity"] == pytest.approx(np.exp(row["loss"]))
        assert 0.5 * losses(tiny_run)[-1][1] < row["loss"] < 2 * losses(tiny_run)[0][1]
    assert Checkpointer(tiny_run / "checkpoints").steps() == [STEPS - 4, STEPS - 2, STEPS]
    for name in ("timeline.png", "predictions.png", "curves.png"):
        with Image.open(tiny_run / name) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("L").getcolors() or range(9)) > 8  # something is drawn
    events = json.loads((tiny_run / "timeline.json").read_text())["traceEvents"]
    shown = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    assert {"F", "B", "update"} <= shown, shown


def test_config_gin_is_the_whole_configuration(tiny_run: Path) -> None:
    stored, configured = load_config([tiny_run / "config.gin"]), load_config([tiny_run.parent / "tiny.gin"])
    assert stored == with_earlier_defaults(configured, stored).recipe and not leaves_open(stored)
    assert (stored.train.unroll, stored.model.llm.settings.remat) == (False, "none"), "a CPU's"


@pytest.mark.long
def test_a_run_keeps_what_it_has_chosen_for_its_devices(tmp_path: Path) -> None:
    """Also on other devices: what a GPU had chosen stays, and is said."""
    run = tmp_path / "run"
    chosen = {"Train_unroll": True, "llm/Decoder_remat": "dots"}
    with Trainer(load_config([write_tiny(tmp_path, **chosen, Train_eval_samples=0)]), run) as trainer:
        trainer.train(1)
    with Trainer(load_config([write_tiny(tmp_path, Train_eval_samples=0)]), run) as trainer:
        assert trainer.resumed and trainer.recipe.train.unroll is True
        assert trainer.recipe.model.llm.settings.remat == "dots"
        assert "Train.unroll=True, llm/Decoder.remat='dots': as the run so far" in trainer.chosen


# ---- running again


@pytest.fixture
def copied_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run to go on with."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.mark.long
def test_again_and_further(copied_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, first = train_flags(write_tiny(tmp_path), copied_run), losses(copied_run)
    kept = leaves(copied_run, STEPS)
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert f"already trained for {STEPS} steps; raise --gin.Train.steps or choose another --run_dir" in out
    assert losses(copied_run) == first
    assert main([*flags, f"--gin.Train.steps={STEPS + 2}"]) == 0
    shown = capsys.readouterr()
    assert f"continuing after step {STEPS}" in shown.out
    assert (shown.out + shown.err).count("exact match") == 1, "scores are shown once"
    counts = {*re.findall(r"(\d+) programs", shown.out + shown.err), *re.findall(r"programs \d+/(\d+)", shown.err)}
    assert len(counts) == 1, f"programs are counted in several ways: {counts}"
    assert losses(copied_run)[:STEPS] == first
    assert [step for step, _ in losses(copied_run)] == list(range(1, STEPS + 3))
    assert [row["step"] for row in read_metrics(copied_run / "eval.jsonl")] == [5, 10, STEPS, STEPS + 2]
    assert_same_leaves(leaves(copied_run, STEPS), kept)
    moved = leaves(copied_run, STEPS + 2)
    assert all(not np.array_equal(moved[name], kept[name]) for name in kept if name.startswith("params/"))


@pytest.mark.long
def test_the_directory_says_how_the_run_was_configured(
    copied_run: Path, tiny_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags, made = train_flags(write_tiny(tmp_path), copied_run), (tiny_run / "config.gin").read_text()
    before = {path: path.stat().st_mtime_ns for path in copied_run.iterdir() if path.is_file()}
    assert main([*flags, "--gin.Train.log_every=7"]) == 0  # trains nothing, so it changes nothing
    assert (copied_run / "config.gin").read_text() == made
    assert {path.name for path in before} == {path.name for path in copied_run.iterdir() if path.is_file()}
    changed = {path.name for path, at in before.items() if path.stat().st_mtime_ns != at}
    assert changed <= {"curves.png", "lock"}, changed
    assert caplog.text == ""

    # Other flags go on with the run: the old configuration stays under its name, and the change is said.
    assert main([*flags, f"--gin.Train.steps={STEPS + 1}", "--gin.Checkpoint.every=5"]) == 0
    assert f"after step {STEPS} with other settings: Train.steps = {STEPS} → {STEPS + 1}, " in caplog.text
    assert f"Checkpoint.every = 2 → 5; before: config-until-{STEPS}.gin" in caplog.text
    kept = copied_run / f"config-until-{STEPS}.gin"
    assert kept.read_text() == made
    assert load_config([copied_run / "config.gin"]).train.steps == STEPS + 1
    # The same again says nothing more.
    assert main([*flags, f"--gin.Train.steps={STEPS + 1}", "--gin.Checkpoint.every=5"]) == 0
    assert caplog.text.count("other settings") == 1
    assert sorted(path.name for path in copied_run.glob("*.gin")) == [kept.name, "config.gin"]


@pytest.mark.long
def test_stopped_before_its_last_evaluation(copied_run: Path, tiny_run: Path, tmp_path: Path) -> None:
    rows = _lines(copied_run / "eval.jsonl")
    (copied_run / "eval.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    for name in ("predictions.png", "curves.png"):
        (copied_run / name).unlink()
    assert main(train_flags(write_tiny(tmp_path), copied_run)) == 0
    assert_same_run(copied_run, tiny_run)
    assert (copied_run / "predictions.png").read_bytes() == (tiny_run / "predictions.png").read_bytes()
    assert (copied_run / "curves.png").exists()


@pytest.mark.long
def test_stopped_before_its_first_step(copied_run: Path, tmp_path: Path) -> None:
    """The checkpoint that it goes on from stays, also one that an earlier version of mmjax was killed in replacing."""
    newest = copied_run / "checkpoints" / f"{STEPS:08d}"
    newest.rename(newest.with_suffix(".discarded"))
    kept = sorted(path.name for path in newest.parent.iterdir())
    config = load_config([write_tiny(tmp_path)])
    with Trainer(config, copied_run, style="silent") as trainer:
        assert trainer.step == trainer.latest_checkpoint() == STEPS
        trainer.save()  # as Ctrl-C does
    assert sorted(path.name for path in newest.parent.iterdir()) == kept
    with pytest.raises(ConfigError, match=r"--from_scratch: .*/run/checkpoints has checkpoints; leave the flag out"):
        Trainer(config, copied_run, from_scratch=True)


def test_stopping_and_resuming_changes_no_bit(tiny_run: Path, tmp_path: Path) -> None:
    config = load_config([write_tiny(tmp_path)])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.train(steps=3).step == 3
    (tmp_path / "run" / "eval.jsonl").unlink()  # of step 3, which the undisturbed run has not
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.resumed and trainer.step == 3
        result = trainer.train()
    assert (result.step, len(result.losses), result.interrupted) == (STEPS, STEPS - 3, False)
    assert_same_run(tmp_path / "run", tiny_run)


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        "at an update",
        pytest.param("between ops", marks=pytest.mark.slow),
        pytest.param("waiting for data", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_and_sigterm_anywhere_in_a_step(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The checkpoint is of whole steps, wherever the signal arrives."""
    config = load_config([write_tiny(tmp_path)])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        handlers: dict[str, Any] = trainer.executor._run.handlers  # type: ignore[union-attr]
        kind = "update" if where == "at an update" else "B"
        original, calls = handlers[kind], []

        # SIGTERM at an update, as often as a cluster may send it; Ctrl-C elsewhere.
        numbers = [signal.SIGTERM] * 3 if where == "at an update" else [signal.SIGINT]

        def disturbed(op: Any) -> None:
            calls.append(op)
            for number in numbers if len(calls) == 5 else ():
                signal.raise_signal(number)
            original(op)

        if where == "waiting for data":
            loader = trainer._loader
            monkeypatch.setattr(trainer, "_loader", lambda last: _Impatient(loader(last), after=2))
        else:
            handlers[kind] = disturbed
        result = trainer.train()
        assert (
            result.interrupted
            and result.step
            == trainer.latest_checkpoint()
            == ({"between ops": 2, "at an update": 3, "waiting for data": 2}[where])
        )
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, result.step + 1))
    assert main(train_flags(tmp_path / "tiny.gin", tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", tiny_run)


class _Impatient:
    """Batches; a Ctrl-C comes while the one after `after` is waited for."""

    def __init__(self, batches: Any, after: int):
        self._batches, self._left = batches, after

    def __next__(self) -> Any:
        self._left -= 1
        if self._left < 0:
            signal.raise_signal(signal.SIGINT)
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __enter__(self) -> _Impatient:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()


# ---- real processes


@pytest.mark.long
def test_sigkill_and_the_same_command_again(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, Data_workers=1), run)
    command = Command("train", flags, tmp_path / "output")
    command.wait_for(lambda: len(_lines(run / "metrics.jsonl")) >= 5)
    members = command.send(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL
    assert len(members) > 1  # the data worker died with it
    command.assert_nothing_left()
    saved = Checkpointer(run / "checkpoints").latest_step()
    assert saved is not None and 2 <= saved < STEPS, command.text()
    assert main(flags) == 0
    assert_same_run(run, tiny_run)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_and_the_same_command_again(number: signal.Signals, tiny_run: Path, tmp_path: Path) -> None:
    """To the group, as terminals and clusters send it: data workers leave it to the command."""
    run, members, status = tmp_path, [], 0
    for attempt in range(4):  # on a busy machine a run may end before it hears the signal
        run = tmp_path / f"run{attempt}"
        flags = train_flags(write_tiny(tmp_path, Data_workers=1, Checkpoint_every=0), run)
        command = Command("train", flags, tmp_path / "output")
        command.wait_for(lambda run=run: len(_lines(run / "metrics.jsonl")) >= 3)
        members = command.send(number)
        status = command.end()
        if status != 0:
            break
    assert status == 130, command.text()
    assert len(members) > 1
    command.assert_nothing_left()
    saved = Checkpointer(run / "checkpoints").latest_step()
    assert saved is not None and 3 <= saved < STEPS, command.text()
    text = command.text()
    assert "Traceback" not in text and "leaked" not in text
    assert text.splitlines()[-1] == f"stopped after step {saved}; the same command continues after step {saved}"
    assert f"training {STEPS}/{STEPS}" not in text and "\x1b" not in text  # plain lines where there is no terminal
    assert [step for step, _ in losses(run)] == list(range(1, saved + 1))
    assert main(flags) == 0
    assert_same_run(run, tiny_run)


# ---- values that are not finite


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an infinity into a picture of the third step."""
    plain = StepMaker.__call__

    def spoilt(self: StepMaker, step: int) -> Any:
        batch = plain(self, step)
        if step == 2:
            patches = batch.microbatches[1].inputs["vision"]["patches"]
            patches[tuple(axis[0] for axis in np.nonzero(patches))] = np.inf
        return batch

    monkeypatch.setattr(StepMaker, "__call__", spoilt)


@pytest.mark.long
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no parameter and no learning rate, and stopping right behind it changes nothing either."""
    spoil(monkeypatch)
    config, runs = load_config([write_tiny(tmp_path)], ALONE), (tmp_path / "whole", tmp_path / "stopped")
    for run, stops in zip(runs, ((5,), (3, 5)), strict=True):
        for last in stops:
            with Trainer(config, run, style="silent") as trainer:
                result = trainer.train(steps=last)
            assert (result.step, result.skipped) == (last, 1)
    rows = read_metrics(runs[0] / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 1]
    assert [row["loss"] is None for row in rows] == [False, False, True, False, False] and rows[2]["grad_norm"] is None
    rate = learning_rate(config.model.optimizers["llm"], 16)
    assert [row["llm/learning_rate"] for row in rows] == [
        float(np.asarray(rate(updates))) for updates in (0, 1, 2, 2, 3)
    ]
    measured = {"step_time_s", "tokens_per_s", "media_per_s", "tflops_per_device", "data_wait_s", "imbalance"}
    measured |= {f"{module}/busy_s" for module in config.model.layouts}
    exact = [
        [{k: x for k, x in row.items() if k not in measured} for row in read_metrics(r / "metrics.jsonl")] for r in runs
    ]
    assert exact[0] == exact[1]
    assert_same_leaves(leaves(runs[0], 5), leaves(runs[1], 5))
    before, after = (leaves(runs[1], step) for step in (3, 4))
    assert not np.array_equal(before["params/llm/embed"], after["params/llm/embed"])
    assert all(np.isfinite(leaf).all() for leaf in after.values())


@pytest.mark.long
@pytest.mark.parametrize("one_device", [pytest.param(False, marks=pytest.mark.slow), True])
def test_debug_nans_names_step_op_and_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_device: bool
) -> None:
    """Also where the whole step would be one program."""
    spoil(monkeypatch)
    run = tmp_path / "run"
    config = write_tiny(tmp_path, Train_debug_nans=True, Train_eval_samples=0)
    if one_device:
        config.write_text(config.read_text() + ONE_DEVICE + "vision/Layout.rank_offset = 0\n")
    assert main(train_flags(config, run)) == 1
    out, err = capsys.readouterr()
    assert "debug_nans: one program per op" in out
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith("error: step 3: F vision.0 microbatch 1: activation is not finite (nan at [")
    assert "; its host input vision/patches is not finite (inf at [" in lines[0]
    assert "Traceback" not in err
    assert [step for step, _ in losses(run)] == [1, 2]  # and what was done before is written down
    assert Checkpointer(run / "checkpoints").latest_step() == 2


# ---- refused


def test_another_seed_is_refused(
    copied_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: neither data are opened nor programs compiled."""
    monkeypatch.setattr("mmjax.train.trainer.assemble", None)
    before = (copied_run / "config.gin").read_text()
    with pytest.raises(SystemExit) as end:
        main([*train_flags(copied_run / "config.gin", copied_run), "--gin.Train.seed=7"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"error: Train.seed=7: the run in {copied_run} has seed 0, and with it its data; "
        "set it to 0 or name another --run_dir\n"
    )
    assert (copied_run / "config.gin").read_text() == before


def test_steps_without_a_checkpoint_are_not_trained_again_without_a_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = '{"step": 1}\n{"step": 40}\n'
    (run / "metrics.jsonl").write_text(rows)
    # Found before any data is opened, let alone a device.
    monkeypatch.setattr("mmjax.train.trainer.open_source", lambda *_, **__: pytest.fail("further than that"))
    flags = train_flags(write_tiny(tmp_path), run)
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2 and capsys.readouterr().err == (
        f"error: --run_dir='{run}': metrics.jsonl has steps up to 40, but {run}/checkpoints has no checkpoint to go on "
        "from; name another directory, or add --from_scratch to begin again\n"
    )
    with pytest.raises(pytest.fail.Exception, match="further than that"):
        main([*flags, "--from_scratch"])
    # A run that has lost its checkpoints is refused, and one that never had any begins again.
    (run / "commits.jsonl").write_text('{"step": 30}\n')
    with pytest.raises(SystemExit):
        main(flags)
    assert "metrics.jsonl has steps up to 40" in capsys.readouterr().err
    (run / "commits.jsonl").write_text("")
    with pytest.raises(pytest.fail.Exception, match="further than that"):
        main(flags)
    assert [record.getMessage() for record in caplog.records] == [
        f"{run} has steps up to 40, but no checkpoint was whole before the run ended: it begins again"
    ]
    assert (run / "metrics.jsonl").read_text() == rows


def test_a_checkpoint_of_another_model_is_refused(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = train_flags(tiny_run.parent / "tiny.gin", tiny_run)
    with pytest.raises(SystemExit) as end:
        main([*flags, "--gin.llm/Decoder.mlp=32"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "llm/layers/000/mlp/down is float32[16, 16], wanted float32[32, 16]" in error


# ---- other layouts


@pytest.mark.slow
def test_a_tied_run_goes_on_with_its_table_on_another_number_of_stages(tmp_path: Path) -> None:
    """Two stages, one and two again in turn: the losses, answers and parameters of a run that stays on two."""
    gin, tied = write_tiny(tmp_path, Train_steps=6), "llm/Decoder.tied=True"
    one, two = (load_config([gin], [tied, f"llm/Layout.tp={3 - pp}", f"llm/Layout.pp={pp}"]) for pp in (1, 2))
    with Trainer(two, tmp_path / "two", style="silent") as trainer:
        stayed = trainer.train()
        (node,) = trainer.parts.schedule.graph.ties
        assert (node.name, node.src, node.dst) == ("llm/embed", "llm.0", "llm.1")
    for config, last in ((two, 2), (one, 4), (two, 6)):
        with Trainer(config, tmp_path / "moved", style="silent") as trainer:
            assert (
                trainer.step == last - 2 and len(trainer.parts.schedule.graph.ties) == config.model["llm"].layout.pp - 1
            )
            moved = trainer.train(steps=last)
    assert [loss for _, loss in losses(tmp_path / "moved")] == pytest.approx(stayed.losses, rel=1e-4)
    assert moved.evaluation is not None and stayed.evaluation is not None
    assert moved.evaluation.loss == pytest.approx(stayed.evaluation.loss, rel=1e-6)
    assert replace(moved.evaluation, loss=stayed.evaluation.loss) == stayed.evaluation
    wanted, got = leaves(tmp_path / "two", 6), leaves(tmp_path / "moved", 6)
    assert got.keys() == wanted.keys() and "params/llm/head" not in got
    for name, leaf in wanted.items():
        np.testing.assert_allclose(got[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
    # A finished run is evaluated and exported whatever its layout was.
    assert evaluation_command([f"--run_dir={tmp_path / 'two'}", "--gin.llm/Layout.pp=1", "--json"]) == 0
    assert export_command([f"--run_dir={tmp_path / 'two'}", f"--out={tmp_path / 'out'}"]) == 0
    np.testing.assert_array_equal(ocp.load(str(tmp_path / "out"))["llm"]["embed"], wanted["params/llm/embed"])
