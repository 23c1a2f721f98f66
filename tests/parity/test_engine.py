"""A check finds what is broken in the product, and says where."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tiny import FAN_IN, bindings, tiny
from trial_runs import REPOSITORY

from mmjax.assembly import batches
from mmjax.assembly.samples import open_source
from mmjax.check import main, table
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data import packing
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder
from mmjax.models import layers
from mmjax.parity import CheckReport, check
from mmjax.pipeline.executor import Executor, StepResult
from mmjax.pipeline.walker import Walker
from mmjax.pipeline.zero import ZeroLeaf
from mmjax.sample_data import main as sample_data
from mmjax.train import warm_up

Found = dict[str, Any]
ENCODER = ["vision grad", "vision_projector grad"]
EVERYTHING = ["loss", *ENCODER, "llm grad"]


def first_off(**changes: Any) -> tuple[int, list[str]]:
    """Where the check of the tiny model finds the first difference."""
    report = check(tiny(**FAN_IN, **changes), 1, style="silent")
    assert report and not report.ok
    found = report.comparison.first_off()
    assert found
    return found


class Shrunk(Exception):
    """Raised where a check has shrunk its configuration, before anything is compiled."""


def test_a_check_needs_no_records_to_hold_out(tmp_path: Path) -> None:
    """It evaluates nothing, and was refused on a few records of a set of which more are held out."""
    assert sample_data([f"--out={tmp_path}", "--samples=12"]) == 0
    path = f"digits/Source.path={str(tmp_path / 'llava' / 'data.json')!r}"
    config = load_config([REPOSITORY / "configs" / "llava_json.gin"], [path])
    assert config.data.sources["digits"].held_out == 40
    with pytest.raises(ConfigError, match=r"digits/Source.held_out=40: of 12 usable records some must be left"):
        open_source(config, split="train")

    def say(line: str) -> None:
        raise Shrunk(line)

    with pytest.raises(Shrunk):
        check(config, 1, say=say, style="silent")


def wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Any) -> None:
    """Replaces a method by ``change(original, self, *args)``."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: change(original, self, *args))


@pytest.mark.long
def test_nothing_is_broken() -> None:
    lines: list[str] = []
    report = check(tiny(**FAN_IN), 1, say=lines.append, style="silent")
    assert isinstance(report, CheckReport) and tuple(lines) == report.shrunk.changes
    numbers = report.numbers()
    assert report.ok, numbers
    assert list(numbers)[:6] == ["ok", "loss", "grad", "update", "moments", "modules"]
    for quantity in ("grad", "update", "moments"):
        assert numbers[quantity] == max(table[quantity] for table in numbers["modules"].values())
        assert min(table[quantity] for table in numbers["modules"].values()) > 0  # two computations, not one
    assert numbers["layouts"] == {"vision": "dp=2 on ranks 2-3", "llm": "tp=2 on ranks 0-1"}


@pytest.mark.long
def test_rows_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(original: Any, self: Walker, op: Any) -> None:
        original(self, op)
        if not op.backward:
            carry = self.carry[op.stage, op.microbatch]
            for source, rows in carry.items():
                carry[source] = jax.device_put(jnp.flip(rows, 0), rows.sharding)

    wrap(monkeypatch, Walker, "unpack", unpack)
    assert first_off() == (1, EVERYTHING)


def crossing_twice(original: Any, self: Walker, op: Any) -> None:
    """A gradient that crosses a boundary comes twice as large."""
    original(self, op)
    if op.backward:
        key = (op.stage, op.microbatch)
        self.cotangents[key] = 2 * self.cotangents[key]


@pytest.mark.long
def test_a_gradient_that_crosses_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, Walker, "unpack", crossing_twice)
    assert first_off() == (1, ENCODER)


@pytest.mark.long
def test_bf16_is_near_the_reference_in_fp32() -> None:
    report = check(tiny(**FAN_IN), 1, dtype="bfloat16", style="silent")
    assert report and report.ok, report and report.numbers()
    assert report.shrunk.recipe.train.dtype == "bfloat16" and report.comparison.largest("grad") > 1e-4
    assert all("leaf" in found for found in report.numbers()["modules"].values())


@pytest.mark.long
def test_in_bf16_the_reference_starts_from_frozen_modules_as_they_are_held() -> None:
    report = check(tiny(**FAN_IN, **{"vision/Optimizer.frozen": True}), 1, dtype="bfloat16", style="silent")
    assert report and report.ok, report and report.numbers()
    assert set(report.comparison.initial.values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [FAN_IN, {"Train.microbatches": 1}], ids=["fan_in", "one_device"])
def test_bf16_finds_gradients_that_are_summed_in_bf16(changes: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(table_VD: jax.Array, index: jax.Array) -> jax.Array:
        rows = jnp.take(table_VD, jnp.maximum(index, 0), axis=0)
        return jnp.where((index >= 0)[..., None], rows, 0)

    monkeypatch.setattr(layers, "lookup", lookup)
    report = check(tiny(**changes), 1, dtype="bfloat16", style="silent")
    assert report
    found = report.comparison
    step, what = found.first_off() or (0, [])
    assert step == 1 and "llm leaf" in what and set(what) <= {"llm grad", "llm leaf"}  # the module may hide its leaf
    assert found.largest("leaf", "llm") > 3 * found.limits["leaf"]


@pytest.mark.slow
def test_bf16_finds_a_gradient_that_crosses_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, Walker, "unpack", crossing_twice)
    report = check(tiny(**FAN_IN), 1, dtype="bfloat16", style="silent")
    assert report and report.comparison.first_off() == (1, [*ENCODER, "vision leaf", "vision_projector leaf"])


@pytest.mark.slow
def test_a_reduction_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(original: Any, self: ZeroLeaf, gradient: Any, axes: Any) -> Any:
        return original(self, jnp.where(lax.axis_index(axes.dp) == 0, gradient, 0), axes)

    wrap(monkeypatch, ZeroLeaf, "reduce", reduce)
    assert first_off() == (1, ENCODER)  # the LLM has dp=1


@pytest.mark.slow
def test_positions_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(original: Any, self: Packer, *args: Any) -> Any:
        made = original(self, *args)
        made.inputs["vision"]["positions"] = made.inputs["vision"]["positions"][..., ::-1].copy()
        return made

    wrap(monkeypatch, Packer, "fill", fill)
    assert first_off() == (1, EVERYTHING)


@pytest.mark.slow
def test_placeholders_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(original: Any, self: Packer, *args: Any) -> Any:
        made = original(self, *args)
        index = made.inputs["llm"]["vision_index"]
        made.inputs["llm"]["vision_index"] = np.where(index >= 0, np.maximum(index - 1, 0), index)
        return made

    wrap(monkeypatch, Packer, "fill", fill)
    assert first_off() == (1, EVERYTHING)


@pytest.mark.slow
def test_a_frozen_module_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(original: Any, self: Executor, *args: Any) -> Any:
        result = original(self, *args)
        master = self.states["vision.0"]["master"]
        self.states["vision.0"]["master"] = jax.tree.map(lambda x: x * jnp.float32(1 + 1e-6), master)
        return result

    wrap(monkeypatch, Executor, "step", step)
    changes = {f"{m}/Optimizer.frozen": True for m in ("vision", "vision_projector")}
    assert first_off(**changes) == (1, ["vision update", "vision_projector update"])


# ---- what becomes of the samples before a program sees them ----------------------------------------------------------

PACKED = {"Data.reorder": "best", "vision/Packing.buckets": ((4, 360), (48, 360))}


def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that takes a sample two times, and another one not at all."""

    def order(original: Any, self: StepOrder, *args: Any) -> Any:
        found = original(self, *args)
        return replace(found, order=(found.order[1], *found.order[1:]))

    wrap(monkeypatch, StepOrder, "__call__", order)


def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows balanced in compute in which media overlap by a patch."""
    original = packing.spread

    def spread(sizes: Any, rows: int, capacity: int, pairs: float, *, alone: bool) -> Any:
        found = original(sizes, rows, capacity, pairs, alone=alone)
        return [(row, max(0, start - 1)) for row, start in found] if pairs else found

    monkeypatch.setattr(packing, "spread", spread)


@pytest.mark.long
@pytest.mark.parametrize("plant", [twice, overlapping])
def test_samples_in_wrong_places(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    step, what = first_off(**PACKED)
    assert step == 1 and {"loss", *ENCODER} <= set(what)


@pytest.mark.long
def test_rows_that_a_process_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the encoder's two shards has no patches."""

    def lacking(placed: Any, names: Any, microbatches: int) -> ProcessRows:
        inputs = {stage.model.module: stage.model.inputs for stage in placed.stages.values()}
        cells = {module: dict.fromkeys(own, (0, 1)) for module, own in inputs.items()}
        return ProcessRows(cells={**cells, "vision": {**cells["vision"], "patches": (0,)}})

    monkeypatch.setattr(batches, "own_rows", lacking)
    with pytest.raises(Exception, match="PartialArray"):  # of one process all rows are put on devices at once
        check(tiny(**FAN_IN, **PACKED), 1, style="silent")


def test_a_boundary_that_is_down(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command ends as training does, at once: a thread may wait for ever."""
    gin_file = tmp_path / "tiny.gin"
    gin_file.write_text("\n".join(bindings(**FAN_IN, **{"World.warm_up": "on"})))

    def end(status: int) -> None:
        raise SystemExit(status)

    def hang(trial: Any) -> float:
        raise TimeoutError("nothing arrived")

    monkeypatch.setattr(warm_up, "_timed", hang)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        main([f"--gin_file={gin_file}", "--steps=1"])
    said = capfd.readouterr().err
    assert ended.value.code == 1 and said.splitlines()[-1].startswith("error: warm-up: vision.0->llm.0 forward, "), said


@pytest.mark.long
def test_a_loss_that_is_no_number_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gin_file = tmp_path / "tiny.gin"
    gin_file.write_text("\n".join(bindings(**FAN_IN)))
    wrap(monkeypatch, StepResult, "fetch", lambda original, self: (math.nan, original(self)[1]))
    assert main([f"--gin_file={gin_file}", "--steps=1", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and "shrunk: Train" in captured.err
    found = json.loads(captured.out)
    assert found["ok"] is False and found["loss"] == math.inf and 0 < found["grad"] < 1e-5
    assert found["first_off"] == {"step": 1, "what": ["loss"]}

    lines = list(table(found))
    assert lines[-1] == "NOT equal to the dense reference, first at step 1: loss"
    assert lines[-3].split()[:2] == ["all", "inf"]
