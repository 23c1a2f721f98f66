"""Commands as several real processes: equal to one device, and to one process; a death among them, and what follows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from trial_runs import (
    REPOSITORY,
    SMALL_CLIP,
    SMALL_EARS,
    SMALL_HANDS,
    SMALL_REDRAW,
    STEPS,
    TINY,
    Command,
    assert_same_leaves,
    flatten,
    leaves,
    train_flags,
    write_tiny,
)

from mmjax.checkpoint import Checkpointer
from mmjax.config import load_run_config
from mmjax.eval.report import evaluate
from mmjax.export import __main__ as export
from mmjax.flags import STUCK
from mmjax.mesh.layout import Layout
from mmjax.parity.compare import relative
from mmjax.train.trainer import Trainer

OWN = ("JAX_NUM_CPU_DEVICES", "NPROC")  # what a run of several processes has to set itself


HERE = {name: os.environ[name] for name in OWN}  # with which JAX starts in this process


def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has set anything."""
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch)


def layout(module: str, **degrees: int) -> list[str]:
    return [f"--gin.{module}/Layout.{name}={value}" for name, value in degrees.items()]


DEGREES = ("dp", "cp", "cp_way", "tp", "pp", "rank_offset")


def bindings(vision: Layout, llm: Layout, **changes: object) -> list[str]:
    """The tiny configuration on eight ranks as bindings; changes by "scope__Class_field"."""
    lines = dict(line.split(" = ", 1) for line in TINY.strip().splitlines())
    for module, own in (("vision", vision), ("llm", llm)):
        lines |= {f"{module}/Layout.{name}": repr(getattr(own, name)) for name in DEGREES}
    lines |= {name.replace("__", "/").replace("_", ".", 1): repr(value) for name, value in changes.items()}
    return [f"{name}={value}" for name, value in lines.items()]


Given = dict[str, list[str]]
"""Files and bindings of a configuration."""


def tiny(vision: Layout, llm: Layout, **changes: object) -> Given:
    """`bindings` as a configuration."""
    return {"files": [], "bindings": bindings(vision, llm, **changes)}


def small(name: str, changes: Sequence[str]) -> Given:
    """A configuration that comes with the project, smaller."""
    return {"files": [str(REPOSITORY / "configs" / f"{name}.gin")], "bindings": list(changes)}


UNET = {
    "Model_generators": {"painter": "unet"},
    "painter__Layout_sp": False,
    "painter__Packing_buckets": (),
    **{
        f"painter__UNet_{name}": value
        for name, value in {
            **dict(width=12, queries=2, channels=1, widths=(8, 16), heads_by_level=(1, 0), mid_heads=2),
            **dict(groups=4, canvases=((4, 4),), drop_condition=0.5),
        }.items()
    },
}
STREAMS = {
    "Model_generators": {"painter": "mmdit"},
    "painter__Packing_buckets": (),
    "painter__MMDiT_queries": 4,
    "painter__MMDiT_width": 32,
}
# Of two processes the first has ranks 0-3, of four each has two.
CHECKED = {
    "homogeneous": tiny(Layout(dp=4), Layout(dp=4, pp=2)),
    "colocated": tiny(Layout(dp=8), Layout(dp=4, tp=2)),
    "apart": tiny(Layout(dp=4, rank_offset=4), Layout(dp=2, tp=2)),
    "uneven": tiny(Layout(dp=3, rank_offset=4), Layout(dp=2, pp=2)),
    "tied": tiny(Layout(dp=8), Layout(dp=2, tp=2, pp=2), llm__Decoder_tied=True),
    "reordered": tiny(
        Layout(dp=4, rank_offset=4),
        Layout(dp=2, tp=2),
        Data_reorder="best",
        vision__Packing_buckets=((8, 64), (32, 64)),
    ),
    "rows over processes": tiny(Layout(cp=2, rank_offset=6), Layout(cp=6)),
    "lists over processes": tiny(Layout(tp=2, dp=2, rank_offset=4), Layout(cp=4), World_route="sliced"),
    "rings over processes": tiny(Layout(dp=2, rank_offset=6), Layout(dp=2, cp=3, cp_way="ring")),
    # Both stages of the LLM have layers that features enter, both of the encoder layers that they leave.
    "inner features over processes": tiny(
        Layout(pp=2, rank_offset=6),
        Layout(dp=3, pp=2),
        llm__Decoder_layers=4,
        llm__Decoder_rope_sections=(2, 1, 1),
        llm__Decoder_rope_interleaved=True,
        vision__ViT_layers=3,
        vision__ViT_positions="learned2d+axial",
        vision__ViT_grid=5,
        vision__ViT_interpolate="corners",
        vision__Projector_norm="layer",
        vision__Projector_inject=(1, 2, 3),
        vision__Projector_levels=(0, 1, 2),
    ),
    # The mean of one norm of all heads, and the sides of images, over ranks of both.
    "heads and images over processes": tiny(
        Layout(cp=8),
        Layout(tp=8),
        llm__Decoder_heads=8,
        llm__Decoder_head_dim=4,
        llm__Decoder_kv_heads=4,
        llm__Decoder_mlp=40,
        llm__Decoder_pre_norms=False,
        llm__Decoder_post_norms=True,
        llm__Decoder_qk_norm=True,
        llm__Decoder_qk_norm_whole=True,
        llm__Decoder_norm_eps=1e-2,
        vision__ViT_positions="axial_centres",
        vision__ViT_class_token=True,
        vision__ViT_registers=2,
        vision__ViT_k_bias=False,
        vision__ViT_gated=True,
    ),
    "experts over processes": tiny(
        Layout(dp=2, rank_offset=6),
        Layout(dp=6),
        llm__Decoder_experts=6,
        llm__Decoder_balance_loss=0.01,
        llm__Layout_ep=6,
        llm__Layout_ep_way="all-to-all",
    ),
    # The second stage has the layer whose keys another one reads.
    "layers of two shapes over processes": tiny(
        Layout(dp=2, rank_offset=6),
        Layout(dp=3, pp=2),
        llm__Layout_layers=(1, 3),
        **{
            f"llm__Decoder_{name}": value
            for name, value in {
                **dict(
                    layers=4, window=6, full_every=2, head_dim=8, global_head_dim=16, global_kv_heads=1, norm_eps=0.1
                ),
                **dict(keys_as_values=True, qk_norm=True, v_norm=True, post_norms=True, layer_scalar=True),
                **dict(rope_scaling="proportional", rope_share=0.5, local_rope_theta=100.0, kv_shared_layers=1),
            }.items()
        },
    ),
    "shards over processes": tiny(
        Layout(dp=2, rank_offset=6),
        Layout(dp=6),
        llm__Decoder_experts=2,
        llm__Layout_ep=2,
        llm__Layout_shard="parameters",
        vision__Layout_shard="gradients",
    ),
    # Parts of a convolution, and of a row of condition and patches, on ranks 2 to 5.
    "a UNet over processes": tiny(
        Layout(rank_offset=6),
        Layout(tp=2),
        **UNET,
        painter__Layout_tp=4,
        painter__Layout_rank_offset=2,
        painter__UNet_mid_heads=4,
    ),
    "a UNet's pictures over processes": tiny(
        Layout(dp=2, rank_offset=6), Layout(pp=2), **UNET, painter__Layout_dp=3, painter__Layout_rank_offset=2
    ),
    "streams over processes": tiny(
        Layout(dp=2, rank_offset=6), Layout(pp=2), **STREAMS, painter__Layout_cp=4, painter__Layout_rank_offset=2
    ),
    # Each module on ranks of its own: the LLM's two stages, and the encoders or encoders and generator.
    "sees and hears": small("digits_valm", SMALL_EARS),
    "encoder behind encoder": small("digits_clip", SMALL_CLIP),
    "draws what it sees": small("digits_redraw", SMALL_REDRAW),
    "draws": small("digits_draw", (*SMALL_HANDS, "vision/Offload.activations=True", "audio/Offload.activations=True")),
}
COLOCATED = layout("vision", dp=4, rank_offset=0) + layout("llm", dp=2, tp=2)
TWO_ONLY = {
    "homogeneous",
    "apart",
    "draws",
    "encoder behind encoder",
    "draws what it sees",
    "a UNet over processes",
    "a UNet's pictures over processes",
    "streams over processes",
    "rows over processes",
    "lists over processes",
    "rings over processes",
    "inner features over processes",
    "heads and images over processes",
    "layers of two shapes over processes",
}
APART: list[str] = []  # the tiny configuration's own


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("count", [2, 4])
def test_check(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All by the same processes; see `several_checks`. What schedules and placements do: `test_toy_over_processes`."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    cases = {name: given for name, given in CHECKED.items() if count == 2 or name not in TWO_ONLY}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    flags = ["-n", str(count), f"--devices_per_process={8 // count}", "-m", "several_checks"]
    command = [sys.executable, "-m", "mmjax.launch", *flags, str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=2600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line.removeprefix("[0] ")) for line in done.stdout.splitlines()]
    assert [one["name"] for one in found] == list(cases)
    for one in found:
        assert one["ok"] is True and one["grad"] < 1e-5 and one["update"] < 1e-4 and one["loss"] < 1e-5, one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_check_sees_rows_that_a_process_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads what its own devices work on, as in training."""
    clean(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    flags = ["-n", "2", "-m", "spoilt_check", f"--gin_file={write_tiny(tmp_path)}", "--steps=1"]
    command = Command("launch", flags, tmp_path / "out")
    try:
        assert command.end(500) == 1, command.text()
    finally:
        command.stop()
    assert "error: process 1 has ended" in command.text() and "PartialArray" in command.text(), command.text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [APART, COLOCATED], ids=["one_stage_each", "stages_of_both"])
def test_debug_nans_ends_all_with_one_message(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is on a device of process 1, which shares the stage with the other one or has it alone."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    config = write_tiny(tmp_path, Train_debug_nans=True, Train_eval_samples=0)
    run = tmp_path / "run"
    command = Command("launch", ["-n", "2", "-m", "spoilt_train", *train_flags(config, run), *flags], tmp_path / "out")
    try:
        command.wait_for(lambda: "training 1/" in command.text(), 300)
        assert command.end(60) == 1
    finally:
        command.stop()
    said = [line for line in command.text().splitlines() if "error: " in line and line.startswith("[")]
    message = "step 3: F vision.0 microbatch 1: activation is not finite (nan at ["
    assert {line[1] for line in said} == {"0", "1"} and all(message in line for line in said), command.text()
    assert any("; its host input vision/patches is not finite (inf at [" in line for line in said)
    texts = {line.partition(message)[2].partition("; this one ends too")[0] for line in said}
    assert len(texts) == 1, texts
    assert "Traceback" not in command.text()
    command.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_value_that_is_not_finite_in_one_process_is_saved_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See `unsound_train`; the same command goes on from the checkpoint before."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, Train_eval_samples=0, Train_steps=6), run)
    command = Command("launch", ["-n", "2", "-m", "unsound_train", *flags], tmp_path / "out")
    try:
        assert command.end(400) == 1, command.text()
    finally:
        command.stop()
    message = "step 4: process 1: params/vision/"
    said = [line for line in command.text().splitlines() if line.startswith("[") and message in line]
    assert said and all(" is not finite (nan at [" in line for line in said), command.text()
    assert "Traceback" not in command.text()
    assert Checkpointer(run / "checkpoints").steps() == [2]


def numbers(run: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def process_of(launcher: Command, number: int) -> int:
    """The id of process `number` of a launch, whose data workers and others have the same environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        own = parent == launcher._process.pid and b"mmjax.train" in words
        if own and f"MMJAX_PROCESS_ID={number}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no process {number}:\n{launcher.text()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    flags = train_flags(write_tiny(folder, Train_eval_every=0), folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        clean(patch)
        command = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], folder / "output")
        assert command.end(900) == 0, command.text()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_death_ends_all_and_the_same_command_goes_on(dead: int, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = train_flags(write_tiny(tmp_path, Train_eval_every=0), run)
    flags = ["-n", "2", "--max_restarts=0", "-m", "mmjax.train", *own]
    broken = Command("launch", flags, tmp_path / "broken")
    try:
        broken.wait_for(lambda: "training 5/" in broken.text(), 300)
        os.kill(process_of(broken, dead), signal.SIGKILL)
        killed = time.monotonic()
        assert broken.end(60) == 128 + signal.SIGKILL
        assert time.monotonic() - killed < 15, broken.text()
    finally:
        broken.stop()
    said = broken.text()
    assert f"launch: process {dead} was ended by SIGKILL" in said
    assert f"[{1 - dead}] error: process {dead} has ended" in said
    again = Command("launch", flags, tmp_path / "again")
    assert again.end(400) == 0, again.text()
    assert "continuing after step 4" in again.text() or "continuing after step 2" in again.text()
    assert_same_leaves(leaves(run, STEPS), leaves(undisturbed, STEPS))
    assert numbers(run) == numbers(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_launch_starts_again_after_deaths(undisturbed: Path, tmp_path: Path) -> None:
    """Before the first checkpoint is whole, where the run begins again, and after it, where it goes on."""
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, Train_eval_every=0, Checkpoint_every=4), run)
    command = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], tmp_path / "output")
    try:
        for dead, (step, since) in enumerate(((2, 0), (6, 1))):
            command.wait_for(
                lambda n=step, k=since: f"training {n}/" in command.text().split("starting again")[k:][0], 400
            )
            if since:  # a checkpoint is written beside the steps
                command.wait_for(lambda: (run / "commits.jsonl").stat().st_size > 0, 60)
            os.kill(process_of(command, dead), signal.SIGKILL)
            command.wait_for(lambda n=dead: command.text().count("starting again") > n, 60)
        assert command.end(400) == 0, command.text()
        command.assert_nothing_left()
    finally:
        command.stop()
    said = command.text()
    assert said.count("launch: starting again, restart 1 of 3 without progress") == 2, said
    assert "no checkpoint was whole before the run ended: it begins again" in said and "Traceback" not in said
    assert f"[0] continuing after step {4}" in said
    assert_same_leaves(leaves(run, STEPS), leaves(undisturbed, STEPS))
    assert numbers(run) == numbers(undisturbed)


def warmed(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[Command, Path]:
    """Two steps of two processes, of which process 1 is bad at sending; see `deaf_train`."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    monkeypatch.setenv("DEAF", how)
    run = tmp_path / (how or "well")
    config = write_tiny(tmp_path, Train_eval_samples=0, Train_steps=2, Optimizer_warmup=1, **changes)
    flags = ["-n", "2", "-m", "deaf_train", *train_flags(config, run)]
    return Command("launch", flags, tmp_path / f"{run.name}.out"), run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_warm_up_names_what_is_slow_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, run = warmed(tmp_path, "slow", monkeypatch)
    assert command.end(300) == 0, command.text()
    lines = [line for line in command.text().splitlines() if "warm-up" in line]
    assert len(lines) == 2 and lines[0].startswith("[0] warm-up: 1 boundary, "), command.text()
    assert "slowest vision.0->llm.0 backward, " in lines[0]
    assert lines[1].startswith("[0] warm-up: vision.0->llm.0 backward is slow: "), command.text()
    assert ", ranks 0–1 of process 0 on " in lines[1] and " to ranks 2–3 of process 1 on " in lines[1]
    links = {link["name"]: link for link in json.loads((run / "warm_up.json").read_text())["links"]}
    assert set(links) == {
        *(f"vision.0->llm.0 {way}" for way in ("forward", "backward")),
        *("vision.0 gather", "vision.0 reduce", "llm tp 0-1", "world norm"),
    }
    assert [name for name, link in links.items() if link["slow"]] == ["vision.0->llm.0 backward"]
    assert links["vision.0->llm.0 forward"]["processes"] == [[1], [0]] and links["vision.0 reduce"]["processes"] == [
        [1]
    ]
    command, plain = warmed(tmp_path, "", monkeypatch, World_warm_up="off")
    assert command.end(300) == 0 and "warm-up" not in command.text(), command.text()
    assert numbers(plain) == numbers(run) and not (plain / "warm_up.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "reason"), [("hang", "nothing arrived in 5 s"), ("fail", "no route to host")])
def test_warm_up_names_what_is_down(how: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, run = warmed(tmp_path, how, monkeypatch, World_warm_up_seconds=5.0)
    assert command.end(300) == 1, command.text()
    command.assert_nothing_left()
    errors = [line for line in command.text().splitlines() if "error: warm-up: vision.0->llm.0 forward, " in line]
    assert errors and reason in errors[0], command.text()
    assert "ranks 2–3 of process 1 on " in errors[0] and " to ranks 0–1 of process 0 on " in errors[0]
    assert "Traceback" not in command.text() and not (run / "metrics.jsonl").read_text()


def stuck(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, degrees: Sequence[str] = (), **changes: object
) -> tuple[Command, Path]:
    """A run of two processes, of which process 1 goes wrong in step 3; see `stuck_train`."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    monkeypatch.setenv("STUCK", how)
    config = write_tiny(tmp_path, Train_eval_samples=0, **changes)
    flags = ["-n", "2", "-m", "stuck_train", *train_flags(config, tmp_path / "run"), *degrees]
    return Command("launch", flags, tmp_path / "out"), tmp_path / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "state"), [("op", "has not ended"), ("host", "has not dispatched")])
def test_a_hang_is_noticed(how: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes live, and beat. All end by themselves, each with its stacks."""
    command, run = stuck(tmp_path, how, monkeypatch, World_hang_seconds=6.0)
    try:
        command.wait_for(lambda: "training 2/" in command.text(), 400)
        assert command.end(60) == STUCK, command.text()
    finally:
        command.stop()
    command.assert_nothing_left()
    lines = [line for line in command.text().splitlines() if line.startswith("[")]
    errors = [line for line in lines if "error: nothing has moved for " in line]
    assert {line[:3] for line in errors} == {"[0]", "[1]"}, command.text()
    assert (
        f"process 1 {state} F vision.0 microbatch " in errors[0] and " of step 3; process 0, which waits" in errors[0]
    )
    assert str(run / "stacks-*.txt") in errors[0] and "Traceback" not in command.text()
    stacks = [(run / f"stacks-{process}.txt").read_text() for process in range(2)]
    assert "stuck_train.py" in stacks[1], stacks[1]
    assert "in _watch\n" in stacks[0], stacks[0]  # it may have dispatched all: senders do not wait


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_who_compiles_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, run = stuck(tmp_path, "late", monkeypatch, World_hang_seconds=4.0)
    assert command.end(400) == 0, command.text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS and max(row["step_time_s"] for row in rows) > 12
    assert all(row["imbalance"] >= 1 for row in rows[-4:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vision is on all ranks, and has no collective in a forward: the ranks of process 1 end later by themselves."""
    command, run = stuck(tmp_path, "slow", monkeypatch, COLOCATED, Train_lowering="ops")
    assert command.end(400) == 0, command.text()
    lines = [line for line in command.text().splitlines() if "× the median of its module" in line]
    named = {line.partition(": ")[2].partition(" takes ")[0] for line in lines}
    assert {"rank 2 (vision)", "rank 3 (vision)"} <= named and not named & {"rank 0 (vision)", "rank 1 (vision)"}, lines
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["vision/busy_s"] > 0.6, rows[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checkpoints_go_from_two_processes_to_one_and_back(tmp_path: Path) -> None:
    config = write_tiny(tmp_path, Train_eval_samples=0)
    two, one = tmp_path / "two", tmp_path / "one"

    def launched(directory: Path, steps: int, *more: str) -> str:
        own = [*train_flags(config, directory), f"--gin.Train.steps={steps}", *more]
        command = Command("launch", ["-n", "2", "-m", "mmjax.train", *own], tmp_path / f"{directory.name}-{steps}")
        assert command.end(400) == 0, command.text()
        return command.text()

    launched(two, 4)
    subprocess.run(["cp", "-r", str(two), str(one)], check=True)
    alone = Command("train", [*train_flags(config, one), "--gin.Train.steps=4"], tmp_path / "alone")
    assert alone.end(200) == 0 and "already trained for 4 steps" in alone.text(), alone.text()
    alone = Command("train", [*train_flags(config, one), "--gin.Train.steps=6"], tmp_path / "alone6")
    assert alone.end(200) == 0 and "continuing after step 4" in alone.text(), alone.text()
    text = launched(one, 8)
    assert "continuing after step 6" in text
    # A torn checkpoint is skipped by both alike.
    (one / "checkpoints" / "00000008" / "mmjax" / "data.json").write_text("{")
    text = launched(one, 10)
    assert "skipped" in text and "continuing after step 6" in text, text
    # Another run of two starts from it with a module frozen in bf16, and goes on with all trained.
    then, frozen = tmp_path / "then", ["--gin.vision/Optimizer.frozen=True", "--gin.Train.dtype=bfloat16"]
    text = launched(then, 4, *frozen, f"--gin.Checkpoint.init_from={one}")
    start = f"[0] vision, vision_projector, llm: parameters of {one} after step 10; vision: float32 rounded to bfloat16"
    assert start in text, text
    kept, found = leaves(one, 10), leaves(then, 4)
    vision = {name: leaf.astype(jnp.bfloat16) for name, leaf in kept.items() if name.startswith("params/vision/")}
    assert vision and {str(found[name].dtype) for name in vision} == {"bfloat16"}
    assert all(np.array_equal(found[name], leaf) for name, leaf in vision.items())
    assert not np.array_equal(found["params/llm/embed"], kept["params/llm/embed"])
    text = launched(then, 6)
    assert "[0] from step 4 on, vision (frozen before): new moments, bfloat16 widened to float32" in text, text
    found = leaves(then, 6)
    assert {str(leaf.dtype) for leaf in found.values()} == {"float32"}
    assert all(not np.array_equal(found[name], leaf) for name, leaf in vision.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_that_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes train and evaluate it; one goes on from their checkpoint to the same end and answers alike."""
    run, alone, out = tmp_path / "run", tmp_path / "alone", tmp_path / "exported"
    file, changes = REPOSITORY / "configs" / "digits_draw.gin", (*SMALL_HANDS, "Checkpoint.every=4")
    flags = [*train_flags(file, run), *(f"--gin.{binding}" for binding in changes)]
    trained = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], tmp_path / "trained")
    assert trained.end(600) == 0, trained.text()
    shutil.copytree(run, alone)
    shutil.rmtree(alone / "checkpoints" / "00000006")
    config = load_run_config(alone)
    with monkeypatch.context() as own:
        for name, value in HERE.items():
            own.setenv(name, value)
        with Trainer(config, alone, style="silent") as trainer:
            assert trainer.step == 4
            trainer.train()
        numbers_alone = evaluate(config, alone, style="silent").numbers()
    # Only the sum of squared norms over all devices is another order of additions.
    want, got = leaves(alone, 6), leaves(run, 6)
    assert relative(got, want) < 1e-6 and any(name.startswith("adam_v/painter_projector/") for name in got)
    np.testing.assert_allclose(numbers(run), numbers(alone), rtol=1e-6)
    asked = Command("launch", ["-n", "2", "-m", "mmjax.eval", f"--run_dir={run}", "--json"], tmp_path / "asked")
    assert asked.end(400) == 0, asked.text()
    (answered,) = [line.removeprefix("[0] ") for line in asked.text().splitlines() if line.startswith("[0] {")]
    found = json.loads(answered)
    assert found.keys() == numbers_alone.keys()
    for name, value in numbers_alone.items():
        rounded = name in ("loss", "perplexity") or name.endswith("_losses")
        assert found[name] == (pytest.approx(value, rel=1e-5) if rounded else value), name
    assert "drawing_accuracy" in answered and '"step": 6' in answered
    assert export.main([f"--run_dir={run}", f"--out={out}"]) == 0
    parameters = {name.removeprefix("params/"): leaf for name, leaf in got.items() if name.startswith("params/")}
    assert_same_leaves(flatten(ocp.load(str(out))), parameters)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_that_one_process_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on everywhere, and the next checkpoint is written; see `failing_train`.

    The last one is missed: the status says so, and the same command goes on from the one before it.
    """
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, Train_eval_samples=0, Checkpoint_keep=9), run)
    command = Command("launch", ["-n", "2", "-m", "failing_train", *flags], tmp_path / "out")
    try:
        command.wait_for(lambda: "training 1/" in command.text(), 300)
        assert command.end(90) == 1, command.text()
    finally:
        command.stop()
    # Not those that the launcher repeats, where it sees process 0 end before process 1: they have no number.
    lines = [line for line in command.text().splitlines() if line.startswith("[") and "was not saved" in line]
    assert len(lines) == 4, command.text()
    causes = ("File too large", "Is a directory", "Cannot rename", "File too large")
    for line, step, cause in zip(lines, (2, 4, 6, STEPS), causes, strict=True):
        who = 0 if step in (4, 6) else 1
        assert f"checkpoint {run}/checkpoints/{step:08d} was not saved (process {who}: " in line and cause in line
        assert line.startswith("[0]") and "training goes on and the next save tries again" in line
    assert f"[0] not written: the checkpoint of step {STEPS} (process 1: " in command.text()
    checkpoints, trained = run / "checkpoints", numbers(run)
    assert Checkpointer(checkpoints).steps() == [8, 10]
    assert {path.name for path in checkpoints.iterdir()} - {"00000006"} == {"00000008", "00000010"}
    assert len(trained) == STEPS
    assert "Traceback" not in command.text()
    command.assert_nothing_left()
    again = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], tmp_path / "again")
    assert again.end(400) == 0, again.text()
    assert "continuing after step 10" in again.text() and "was not saved" not in again.text()
    assert Checkpointer(checkpoints).latest_step() == STEPS and numbers(run) == trained


def interrupted(
    flags: Sequence[str],
    output: Path,
    when: Callable[[Command], bool],
    send: Callable[[Command], object] = lambda command: command.send(signal.SIGINT),
) -> str:
    """Starts a launch, interrupts it once `when` holds, by default as by Ctrl-C, and returns its output.

    The time limits allow for a busy machine: a process that misses the signal ends with another status, or never.
    """
    command = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], output)
    try:
        command.wait_for(lambda: when(command), 600)
        send(command)
        assert command.end(180) == 130, command.text()
        command.assert_nothing_left(60)
    finally:
        command.stop()
    text = command.text()
    assert not any(word in text for word in ("Traceback", "error", "leaked", "again, restart")), text
    assert (send is not single) <= ("launch: process" not in text), text
    return text


def assert_goes_on(flags: Sequence[str], saved: int, run: Path, undisturbed: Path, output: Path) -> None:
    """The same command goes on after step `saved`, and ends with the state and the numbers of an undisturbed run."""
    again = Command("launch", ["-n", "2", "-m", "mmjax.train", *flags], output)
    assert again.end(600) == 0, again.text()
    assert f"continuing after step {saved}" in again.text()
    assert_same_leaves(leaves(run, STEPS), leaves(undisturbed, STEPS))
    assert numbers(run) == numbers(undisturbed)


def everywhere(command: Command) -> None:
    """Sends SIGTERM to every process, data workers too, and more than once, as a cluster may."""
    for _ in range(3):
        for member in command.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGTERM)
        time.sleep(0.1)


def single(command: Command) -> None:
    """Sends SIGTERM to one process of two."""
    os.kill(process_of(command, 1), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("send", [everywhere, single, lambda command: command.send(signal.SIGTERM)])
def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(
    send: Callable[[Command], object], undisturbed: Path, tmp_path: Path
) -> None:
    """While programs are compiled, and while steps run: to all processes, to one, or to the launcher alone."""
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, **INTERRUPTED), run)
    text = interrupted(flags, tmp_path / "compiling", lambda command: "compiling programs" in command.text(), send)
    assert "interrupted" in text and not Checkpointer(run / "checkpoints").steps()
    # The evaluation after step 6 keeps a run on a busy machine from ending before it hears the signal.
    long = [*flags, "--gin.Train.eval_samples=3000", "--gin.Train.eval_every=6"]
    text = interrupted(long, tmp_path / "training", lambda command: "training 3/" in command.text(), send)
    saved = Checkpointer(run / "checkpoints").latest_step()
    assert saved is not None and 3 <= saved <= 6, text
    assert f"[0] stopped after step {saved}; the same command continues after step {saved}" in text
    assert_goes_on(flags, saved, run, undisturbed, tmp_path / "again")


INTERRUPTED = {"Train_eval_samples": 0, "Data_workers": 1, "Checkpoint_every": 0}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_before_the_first_step(tmp_path: Path) -> None:
    """To the launcher's group, as a terminal sends it: while JAX is imported, and while programs are compiled."""
    flags = train_flags(write_tiny(tmp_path, **INTERRUPTED), tmp_path / "run")

    def importing(command: Command) -> bool:
        return sum("jaxlib" in Path(f"/proc/{member}/maps").read_text() for member in command.members()) == 2

    # Nothing is said while the imports go on; a process that is through with them says what one that compiles says.
    said = interrupted(flags, tmp_path / "importing", importing).splitlines()
    assert all(line.endswith("interrupted; the same command continues from the last checkpoint") for line in said)
    text = interrupted(flags, tmp_path / "compiling", lambda command: "compiling programs" in command.text())
    assert "interrupted; the same command continues from the last checkpoint" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_saves_a_checkpoint_and_the_same_command_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    """While steps run, and in an evaluation that would take minutes."""
    run = tmp_path / "run"
    flags = train_flags(write_tiny(tmp_path, **INTERRUPTED), run)
    long = "--gin.Train.eval_samples=3000"
    # The evaluation after step 6 keeps a run on a busy machine from ending before it hears the signal.
    own = [*flags, long, "--gin.Train.eval_every=6"]
    text = interrupted(own, tmp_path / "training", lambda command: "training 3/" in command.text())
    saved = Checkpointer(run / "checkpoints").latest_step()
    assert saved is not None and 3 <= saved <= 6 and "has ended" not in text, text
    assert f"[0] stopped after step {saved}; the same command continues after step {saved}" in text
    saved += 1
    own = [*flags, long, f"--gin.Train.eval_every={saved}"]
    text = interrupted(own, tmp_path / "evaluating", lambda command: f"training {saved}/" in command.text())
    assert f"[0] stopped after step {saved}; the same command continues after step {saved}" in text
    assert_goes_on(flags, saved, run, undisturbed, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process or in both: all hear of it, and train on together; see `unscored_train`."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    run, alone = tmp_path / "run", tmp_path / "alone"
    config = write_tiny(tmp_path)
    command = Command("launch", ["-n", "2", "-m", "unscored_train", *train_flags(config, run)], tmp_path / "out")
    try:
        command.wait_for(lambda: "training 1/" in command.text(), 300)
        assert command.end(200) == 0, command.text()
    finally:
        command.stop()
    assert "Traceback" not in command.text()
    said = [line for line in command.text().splitlines() if "the evaluation has failed" in line]
    reasons = ("process 1: OSError: the disk has gone", "process 0: MemoryError: too large")
    assert said == [
        f"[0] step {step}: the evaluation has failed, training goes on: {reason}"
        for step, reason in zip((5, 10), reasons, strict=True)
    ]
    plain = Command("launch", ["-n", "2", "-m", "mmjax.train", *train_flags(config, alone)], tmp_path / "plain")
    try:
        assert plain.end(400) == 0, plain.text()
    finally:
        plain.stop()
    assert numbers(run) == numbers(alone)
    rows, whole = ([json.loads(line) for line in (at / "eval.jsonl").read_text().splitlines()] for at in (run, alone))
    assert [row.get("failure") for row in rows] == [*reasons, None] and rows[-1] == whole[-1]
