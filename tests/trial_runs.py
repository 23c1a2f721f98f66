"""Whole runs of a model so small that a run costs seconds: its configuration, and what commands leave behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from mmjax.checkpoint import Checkpointer
from mmjax.config import operative_config
from mmjax.parity.compare import MOMENTS, Run, module_of, of_kind, of_module, relative
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

REPOSITORY = Path(__file__).parents[1]
STEPS = 12
_MARK = "MMJAX_TEST_COMMAND"
# Vision on ranks 2-3, the LLM on ranks 0-1. The learning rate falls to the last step, so a resumed run must know it.
TINY = f"""
Train.steps = {STEPS}
Train.global_batch = 8
Train.microbatches = 2
Train.eval_every = 5
Train.eval_samples = 6
Train.log_every = 1
Checkpoint.every = 2
Checkpoint.keep = 3
Digits.images = (1, 2)
Digits.digits = (1, 2)
Digits.scale = (1.0, 1.0)
Digits.aspect = (1.0, 1.0)
Data.sequence_length = 36
Packing.buckets = ()
Data.workers = 0
Optimizer.learning_rate = 0.02
Optimizer.schedule = 'linear'
Optimizer.warmup = 2
Optimizer.weight_decay = 0.1
vision/Optimizer.learning_rate = 0.01
vision/ViT.layers = 1
vision/ViT.width = 16
vision/ViT.heads = 2
vision/ViT.mlp = 16
llm/Decoder.layers = 2
llm/Decoder.width = 16
llm/Decoder.heads = 2
llm/Decoder.kv_heads = 2
llm/Decoder.mlp = 16
llm/Layout.tp = 2
vision/Layout.dp = 2
vision/Layout.rank_offset = 2
"""
# Changes of `configs/digits_valm.gin`, three modules in their layouts, and `configs/digits_draw.gin`, four of them
# nested: on eight devices the LLM in two stages, the others in two lanes.
SMALL_EARS = (
    *("Train.steps=6", "Train.global_batch=16", "Train.microbatches=2", "Train.eval_samples=4", "Train.eval_every=0"),
    *("Data.workers=0", "Digits.digits=(1, 1)", "Digits.curriculum=()", "Digits.same=1.0", "Data.sequence_length=72"),
    *("vision/ViT.layers=1", "vision/ViT.width=16", "vision/ViT.mlp=16", "vision/Packing.buckets=()"),
    *("audio/Whisper.width=16", "audio/Whisper.mlp=16", "audio/Whisper.mels=8", "audio/Packing.buckets=()"),
    *("llm/Decoder.layers=2", "llm/Decoder.width=16", "llm/Decoder.mlp=16", "Optimizer.warmup=1"),
)
SMALL_HANDS = (
    *(one for one in SMALL_EARS if not one.startswith(("Digits.same", "Train.microbatches"))),
    *("painter/DiT.layers=1", "painter/DiT.width=16", "painter/DiT.mlp=16", "painter/DiT.steps=3"),
    *("Train.microbatches=4", "llm/Layout.pp=2", "llm/Layout.dp=2", "vision/Layout.tp=2", "painter/Layout.dp=4"),
    *("vision/Layout.lanes=2", "audio/Layout.dp=4", "audio/Layout.lanes=2", "painter/Layout.lanes=2"),
)
SMALL_CLIP = (
    *(binding for binding in SMALL_EARS if not binding.startswith(("audio", "Digits.same"))),
    *("temporal/Temporal.layers=1", "temporal/Temporal.width=16", "temporal/Temporal.mlp=16"),
)
SMALL_REDRAW = (
    *(binding for binding in SMALL_EARS if not binding.startswith(("audio", "Digits.same"))),
    *("painter/DiT.layers=1", "painter/DiT.width=16", "painter/DiT.mlp=16", "painter/DiT.steps=3"),
)
ONE_DEVICE = "llm/Layout.tp = 1\nvision/Layout.dp = 1\n"
# All of it on one device: a step is one program, and so few compilations are shared by tests of what follows steps.
ALONE = (
    *("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0", "Train.steps=16", "Train.eval_samples=0"),
    *("Train.eval_every=0", "Checkpoint.every=1"),
)


def write_tiny(folder: Path, **changes: object) -> Path:
    """The tiny configuration as a gin file in `folder`; `changes` by "Class_field"."""
    path = folder / "tiny.gin"
    lines = [f"{name.replace('_', '.', 1)} = {value!r}\n" for name, value in changes.items()]
    path.write_text(TINY + "".join(lines))
    return path


def train_flags(gin_file: Path, run_dir: Path) -> list[str]:
    """The command line of a run, without the program."""
    return [f"--gin_file={gin_file}", f"--run_dir={run_dir}"]


def leaves(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every leaf of a checkpoint, moments too."""
    checkpointer = Checkpointer(run_dir / "checkpoints")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = checkpointer.metadata(step).leaves
    targets = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in stored.items()}
    return {name: np.asarray(leaf) for name, leaf in checkpointer.restore(step, targets).items()}


def flatten(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    """Nested dicts as one, names joined with "/"."""
    result: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        result |= flatten(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: np.asarray(value)}
    return result


def assert_same_leaves(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} leaves differ: {different[:5]}"


def assert_same_tensors(actual: Path, expected: Path) -> None:
    """Two files of safetensors have the same keys, dtypes and bits."""
    ours, theirs = load_file(actual), load_file(expected)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor, strict=True, err_msg=key)


def save_untrained(recipe: Recipe, run_dir: Path) -> Sequence[str]:
    """Saves a run with the parameters that it begins with, as of step 1; returns the lines on where they come from."""
    with Trainer(recipe, run_dir, style="silent") as trainer:
        trainer.state.step = 1
        trainer.save()
    (run_dir / "config.gin").write_text(operative_config(recipe))
    return trainer.started


_numbers = itertools.count()


class Command:
    """`python -m mmjax.<name>` in a process and a session of its own, its output in a file."""

    def __init__(self, name: str, flags: Sequence[str], output: Path):
        self.output = output
        # In the environment of all that it starts, also where these have sessions of their own.
        self._mark = f"{os.getpid()}.{next(_numbers)}"
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"mmjax.{name}", *flags],
                cwd=REPOSITORY,
                env={**os.environ, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Returns when `condition` holds; fails when the command ends before, or time is up."""
        end = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, f"ended too early:\n{self.text()}"
            assert time.monotonic() < end, f"not in {seconds} s:\n{self.text()}"
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> list[int]:
        """Sends a signal as a terminal does, SIGKILL to the command alone; returns all its processes."""
        members = self.members()
        if number is signal.SIGKILL:
            os.kill(self._process.pid, number)
        else:
            os.killpg(self._process.pid, number)
        return members

    def end(self, seconds: float = 60) -> int:
        """Waits for the end; the exit status."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise AssertionError(f"did not end in {seconds} s:\n{self.text()}") from None

    def stop(self) -> None:
        """Ends whatever of it still lives."""
        for member in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self._process.wait()

    def text(self) -> str:
        """The output so far."""
        return self.output.read_text()

    def members(self) -> list[int]:
        """Living processes of the command, whatever their session."""
        found, mark = [], f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not ended and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def assert_nothing_left(self, seconds: float = 10) -> None:
        """No process of the command lives on."""
        end = time.monotonic() + seconds
        while self.members() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.members(), f"still running: {self.members()}"


def assert_same_training(run: Run, want: Run) -> None:
    """Losses, norms, parameters and moments of every step; the first moment after one step is the gradient, scaled."""
    assert run.losses == pytest.approx(want.losses, rel=1e-5)
    for norms, wanted in zip(run.norms, want.norms, strict=True):
        assert norms == pytest.approx(wanted, rel=1e-5)
    for step in range(1, len(want.losses) + 1):
        for kind in ("params", *MOMENTS):
            mine, theirs = of_kind(run.leaves[step], kind), of_kind(want.leaves[step], kind)
            for module in {module_of(name) for name in theirs}:
                gap = relative(of_module(mine, module), of_module(theirs, module))
                assert gap <= (1e-5 if (kind, step) == (MOMENTS[0], 1) else 1e-4), (kind, module, step)
