"""Profiles: they are written and read, errors are one line, and times between trials are interpolated."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from planner.models import MISSING, spoilt

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.lengths import figures_of
from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import Candidate
from mmjax.planner.estimate import Estimate
from mmjax.planner.measured import Line, MeasuredClock, non_negative
from mmjax.planner.profile_file import (
    Compiled,
    Device,
    Profile,
    Trial,
    model_of,
    parse_profile,
    read_profile,
    require_same_model,
    require_writable,
    write_profile,
)
from mmjax.planner.work import StagePart

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "digits_vlm.gin"
PROGRAM, LAYER, FIRST, LAST = 1e-3, 2e-6, 5e-7, 3e-6
"""Seconds of a program; and of a position, in a layer and in the ends."""
PARTS = (
    StagePart(layers=1, first=True, last=True),
    StagePart(layers=2, first=True, last=True),
    StagePart(layers=3, first=True, last=True),
    StagePart(layers=1, first=True),
    StagePart(layers=1, last=True),
)
OP = 1e-4


def seconds(part: StagePart, positions: float, tp: int = 1) -> float:
    """The seconds of a forward whose parts all grow in proportion to positions."""
    return PROGRAM + positions * (LAYER * part.layers + FIRST * part.first + LAST * part.last) / tp


def trials(module: str, rows: tuple[int, ...], width: int, tps: tuple[int, ...] = (1, 2)) -> tuple[Trial, ...]:
    stages = []
    for tp in tps:
        for part in PARTS:
            for count in rows:
                took = seconds(part, count * width, tp)
                shape: Any = {"module": module, "part": part, "tp": tp, "rows": count, "width": width}
                stages.append(Trial(**shape, forward=took, backward=0.0 if module == "vision" else 2 * took))
    return tuple(stages)


def compiled(timed: tuple[Trial, ...]) -> tuple[Compiled, ...]:
    """A byte for each nanosecond of a forward, and three in a backward that there is; loops of the first end too."""
    loops = [replace(stage, part=replace(stage.part, last=False)) for stage in timed if stage.part.layers > 1]
    compiled = []
    for stage in (*timed, *loops):
        shape: Any = {
            "module": stage.module,
            "part": stage.part,
            "tp": stage.tp,
            "rows": stage.rows,
            "width": stage.width,
        }
        size = 1e9 * seconds(stage.part, stage.rows * stage.width, stage.tp)
        compiled.append(Compiled(**shape, forward=size, backward=3 * size if stage.backward else 0.0))
    return tuple(compiled)


def profile(**changes: Any) -> Profile:
    timed = (*trials("llm", (1, 4, 16), 10), *trials("vision", (2, 8), 20))
    result = Profile(
        device=Device(kind="cpu", platform="cpu", count=8, memory=1e9),
        jax="0.10.2",
        dtype="float32",
        model=model_of(load_config([str(CONFIG)], ["llm/Decoder.remat=none", "vision/ViT.remat=none"])),
        data={"llm": figures_of([3, 5, 4]) | {"per_sample": 1.0}},
        trials=timed,
        compiled=compiled(timed),
        moves=((100.0, 1e-4), (1100.0, 2e-4)),
        copies=((100.0, 3e-4), (1100.0, 4e-4)),
        gathers={2: ((100.0, 1e-4), (200.0, 2e-4)), 4: ((100.0, 3e-4), (200.0, 6e-4))},
        reduces={2: ((100.0, 1e-4),)},
        op=OP,
        shared=8.0,
    )
    return replace(result, **changes)


# ---- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rows", [0.5, 1, 2.5, 4, 16, 100])
@pytest.mark.parametrize(
    "part",
    [
        StagePart(layers=7),
        StagePart(layers=1, first=True),
        StagePart(layers=3, last=True),
        StagePart(layers=40, first=True, last=True),
    ],
)
def test_times_in_proportion_are_found_again_at_any_depth_and_number_of_rows(
    part: StagePart, rows: float, tp: int
) -> None:
    took = MeasuredClock(profile=profile()).stage("llm", part, rows=rows, width=10, tp=tp)
    wanted = seconds(part, rows * 10, tp)
    assert took.forward == pytest.approx(wanted - OP, rel=1e-6)
    assert took.backward == pytest.approx(2 * wanted - OP, rel=1e-6)


@pytest.mark.parametrize("rows", [0.5, 2.5, 16])
@pytest.mark.parametrize(
    "part", [StagePart(layers=7), StagePart(layers=1, last=True), StagePart(layers=40, first=True)]
)
def test_temporaries_are_those_of_the_larger_program_at_any_depth(part: StagePart, rows: float) -> None:
    clock = MeasuredClock(profile=profile())
    wanted = 1e9 * seconds(part, rows * 10, 2)
    assert clock.temporaries("llm", part, rows=rows, width=10, tp=2) == pytest.approx(3 * wanted, rel=1e-6)
    least = clock.temporaries("vision", part, rows=rows, width=20, tp=2)  # it has no backward
    assert least == pytest.approx(1e9 * seconds(part, rows * 20, 2), rel=1e-6)


def test_layers_add_nothing_where_an_end_needs_most() -> None:
    """A head of a large vocabulary: bytes of a stage without it follow from stages without it."""
    head = 1e9

    def with_head(stage: Compiled) -> Compiled:
        return replace(stage, backward=max(stage.backward, head)) if stage.part.last else stage

    measured = profile()
    clock = MeasuredClock(profile=replace(measured, compiled=tuple(map(with_head, measured.compiled))))
    for part in (StagePart(layers=2, first=True), StagePart(layers=7, first=True)):
        needed = clock.temporaries("llm", part, rows=16, width=10, tp=1)
        assert needed < head
        assert needed == pytest.approx(3e9 * seconds(part, 160))
    between = clock.temporaries("llm", StagePart(layers=7), rows=16, width=10, tp=1)
    assert between == pytest.approx(3e9 * seconds(StagePart(layers=7, first=True), 160))  # no less than without an end
    for layers in (1, 2, 7):
        assert clock.temporaries("llm", StagePart(layers=layers, last=True), rows=16, width=10, tp=1) == head


def test_a_single_row_says_nothing_of_two() -> None:
    """XLA compiles it otherwise: here it needs five times as much."""
    measured = profile()
    larger = tuple(
        replace(stage, backward=5 * stage.backward) if stage.rows == 1 else stage for stage in measured.compiled
    )
    clock, part = MeasuredClock(profile=replace(measured, compiled=larger)), StagePart(layers=3, first=True)
    for rows, factor in ((1, 15), (1.5, 3), (2, 3), (4, 3), (7, 3)):
        wanted = factor * 1e9 * seconds(part, rows * 10)
        assert clock.temporaries("llm", part, rows=rows, width=10, tp=1) == pytest.approx(wanted), rows
    # With one other number of rows alone, the line to it is all there is.
    few = tuple(stage for stage in larger if stage.rows != 16)
    between = MeasuredClock(profile=replace(measured, compiled=few)).temporaries("llm", part, rows=2.5, width=10, tp=1)
    assert between == pytest.approx(1e9 * (15 * seconds(part, 10) + 3 * seconds(part, 40)) / 2)


def test_what_was_not_compiled_is_one_line() -> None:
    measured = profile()
    few = tuple(
        stage
        for stage in measured.compiled
        if stage.part != StagePart(layers=2, first=True) and (stage.tp, stage.module) != (2, "llm")
    )
    clock = MeasuredClock(profile=replace(measured, compiled=few))
    with pytest.raises(ConfigError, match=r"^llm/Layout.tp=2: the profile has compiled for tp 1; use one of them$"):
        clock.temporaries("llm", PARTS[0], rows=1, width=10, tp=2)
    with pytest.raises(
        ConfigError, match=r"^profile: compiled has no StagePart\(layers=2, first=True, last=False\) of 'llm'"
    ):
        clock.temporaries("llm", StagePart(layers=4), rows=1, width=10, tp=1)


def test_an_estimate_has_the_temporaries_of_the_rows_and_layers_of_its_stages() -> None:
    modules = (models.module("vision", 4, 1.0), models.module("llm", 6, 1.0, after=("vision",)))
    layouts = {"vision": Layout(dp=2, rank_offset=8), "llm": Layout(tp=2, dp=2, pp=2)}
    candidate = Candidate(mode="made up", layouts=layouts, microbatches=2)
    rows = {"vision": (8.0, 20), "llm": (16.0, 10)}
    clock = MeasuredClock(profile=profile())
    needs = Estimate(work=models.model(*modules), clock=clock, candidate=candidate, rows=rows).device_bytes
    for stage, part, positions, tp, larger in (
        ("llm.0", StagePart(layers=3, first=True), 80, 2, 3),
        ("llm.1", StagePart(layers=3, last=True), 80, 2, 3),
        ("vision.0", StagePart(layers=4, first=True, last=True), 80, 1, 1),
    ):
        assert needs[stage].temporaries == pytest.approx(larger * 1e9 * seconds(part, positions, tp), rel=1e-6)


def test_a_single_layer_is_no_loop_of_one() -> None:
    """XLA compiles it otherwise: here a layer takes half as long alone."""
    faster = tuple(
        replace(trial, forward=trial.forward - LAYER * trial.rows * trial.width / trial.tp / 2)
        if trial.part.layers == 1
        else trial
        for trial in trials("llm", (1, 4, 16), 10)
    )
    clock = MeasuredClock(profile=profile(trials=faster))
    for part, less in (
        (StagePart(layers=1), 0.5),
        (StagePart(layers=1, last=True), 0.5),
        (StagePart(layers=5, first=True), 0.0),
    ):
        took = clock.stage("llm", part, rows=8, width=10, tp=1).forward
        assert took == pytest.approx(seconds(part, 80) - less * LAYER * 80 - OP)


def test_a_module_without_backward_has_none() -> None:
    took = MeasuredClock(profile=profile()).stage("vision", PARTS[0], rows=4, width=20, tp=1)
    assert took.backward == 0.0 < took.forward


def test_a_clock_says_how_many_devices_work_at_a_time_unless_all_do() -> None:
    assert [MeasuredClock(profile=profile(shared=count)).shared for count in (8.0, 1.5)] == [0.0, 1.5]


def test_a_line_is_straight_between_points_and_never_falls_beyond_them() -> None:
    line = Line(sizes=(10.0, 20.0, 40.0), values=(5.0, 6.0, 10.0))
    assert [line.at(size) for size in (10, 15, 20, 30, 40)] == [5.0, 5.5, 6.0, 8.0, 10.0]
    assert line.at(80) == 18.0
    assert line.at(5) == 4.5
    falling = Line(sizes=(10.0, 20.0), values=(6.0, 5.0))
    assert (falling.at(5), falling.at(15), falling.at(40)) == (6.0, 5.5, 5.0)
    steep = Line(sizes=(10.0, 20.0), values=(1.0, 9.0))
    assert steep.at(5) == 0.5  # in proportion: below nothing at no size otherwise
    assert Line(sizes=(10.0,), values=(4.0,)).at(5) == 2.0


def test_between_two_widths_times_lie_between_theirs() -> None:
    wide = tuple(
        replace(trial, width=30, rows=trial.rows, forward=3 * trial.forward) for trial in trials("llm", (1, 4), 10)
    )
    clock = MeasuredClock(profile=profile(trials=(*trials("llm", (3, 12), 10), *wide)))
    low, middle, high = (
        clock.stage("llm", PARTS[0], rows=rows, width=width, tp=1).forward
        for rows, width in ((6.0, 10), (3.0, 20), (2.0, 30))
    )
    assert low < middle == pytest.approx((low + high) / 2)
    assert clock.stage("llm", PARTS[0], rows=1, width=60, tp=1).forward == pytest.approx(high)


def test_what_is_not_in_a_profile_is_one_line() -> None:
    clock = MeasuredClock(profile=profile())
    with pytest.raises(ConfigError, match=r"^llm/Layout.tp=8: the profile has trials for tp 1, 2; use one of them$"):
        clock.stage("llm", PARTS[0], rows=1, width=10, tp=8)
    with pytest.raises(ConfigError, match=r"^profile: module 'audio' was not timed"):
        clock.stage("audio", PARTS[0], rows=1, width=10, tp=1)
    assert clock.copy(600) == pytest.approx(3.5e-4)
    of_one_device = profile(gathers={}, reduces={}, moves=(), copies=())
    assert parse_profile(of_one_device.as_json()) == of_one_device
    alone = MeasuredClock(profile=of_one_device)
    assert alone.copy(1) == math.inf
    with pytest.raises(ConfigError, match="made on one device"):
        alone.move(100, across=False)
    with pytest.raises(ConfigError, match="made on one device"):
        alone.gather(100, 2, across=False)
    assert alone.gather(100, 1, across=False) == 0.0


def test_communication_is_as_measured_and_goes_on_like_a_ring() -> None:
    clock = MeasuredClock(profile=profile())
    assert clock.move(600, across=False) == pytest.approx(1.5e-4)
    assert clock.gather(150, 2, across=False) == pytest.approx(1.5e-4)
    assert clock.gather(100, 3, across=False) == pytest.approx(2e-4 * 1)
    assert clock.gather(100, 8, across=False) == pytest.approx(3e-4 * (7 / 8) / (3 / 4))


def test_an_all_to_all_is_as_measured_and_else_as_a_gather() -> None:
    measured = MeasuredClock(profile=profile(all_to_alls={2: ((100.0, 7e-4), (200.0, 9e-4))}))
    assert measured.all_to_all(150, 2, across=False) == pytest.approx(8e-4)
    assert measured.all_to_all(100, 4, across=False) == pytest.approx(7e-4 * (3 / 4) / (1 / 2))
    older = profile().as_json()
    del older["all_to_alls"]
    clock = MeasuredClock(profile=parse_profile(older))
    assert clock.all_to_all(150, 2, across=False) == clock.gather(150, 2, across=False) > 0
    assert clock.all_to_all(150, 1, across=False) == 0


def test_the_closest_unknowns_are_none_below_nothing() -> None:
    matrix = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert non_negative(matrix, np.array([2.0, 5.0])) == pytest.approx([2.0, 3.0])
    assert non_negative(matrix, np.array([5.0, 2.0])) == pytest.approx([3.5, 0.0])
    assert non_negative(matrix, np.array([-1.0, -1.0])) == pytest.approx([0.0, 0.0])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path, config = tmp_path / "profile.json", load_config([str(CONFIG)])
    write_profile(profile(op=1.0), path)
    write_profile(profile(), path)
    assert read_profile(path, config) == profile()
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(profile(op=1.0), path)
    assert read_profile(path) == profile()
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_where_nothing_can_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "is a directory"), (tmp_path / "none" / "p.json", "cannot be written")):
        with pytest.raises(ConfigError, match=reason):
            require_writable(path)
    require_writable(tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "mmjax profile 9", 'is no profile of this version, format is "mmjax profile 9"'),
        ("format", MISSING, "is no profile of this version, format is none"),
        ("op", -1, "op=-1: must be a number of 0 or more"),
        ("opp", 1, "opp: no such field; did you mean 'op'?"),
        ("shared", 0, "shared=0: must be a number above 0"),
        ("jax", 10, "jax=10: must be a text"),
        ("trials", [], "trials=[]: must be a list of one or more"),
        ("trials.3.tp", 0, "trials[3].tp=0: must be a whole number"),
        ("trials.0.first", 1, "trials[0].first=1: must be true or false"),
        ("trials.1.forward", 0, "trials[1].forward=0: must be a number above 0"),
        ("trials.1.backward", MISSING, "trials[1].backward: is missing"),
        ("compiled", [], "compiled=[]: must be a list of one or more"),
        ("compiled.1.backward", MISSING, "compiled[1].backward: is missing"),
        ("compiled.2.forward", -5, "compiled[2].forward=-5: must be a number of 0 or more"),
        ("compiled.3.layers", 1.5, "compiled[3].layers=1.5: must be a whole number"),
        ("format", "mmjax profile 1", "is no profile of this version"),
        ("moves.0", 3, "moves[0]=3: must be [bytes, seconds]"),
        ("moves.1.0", 5, "moves: the bytes must rise"),
        ("gathers.x", [[1, 1]], 'gathers: "x" is no number of ranks'),
        ("device.count", "8", 'device.count="8": must be a whole number'),
        ("device.processes", 3, "device.processes=3: must divide device.count=8"),
        ("data.llm.mean", MISSING, "data.llm.mean: is missing"),
        ("model.llm", 7, "model.llm=7: must be an object"),
    ],
)
def test_what_is_wrong_in_a_profile_is_one_line(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(spoilt(profile().as_json(), path, value)))
    with pytest.raises(ConfigError) as error:
        read_profile(file)
    assert str(error.value).startswith(f"--profile={file}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_that_was_cut_off_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    text = json.dumps(profile().as_json(), indent=1)
    for length in (0, 1, len(text) // 2, len(text) - 2):
        file.write_text(text[:length])
        with pytest.raises(ConfigError, match=r"--profile=.*: no JSON in line"):
            read_profile(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("binding", "difference"),
    [
        ("llm/Decoder.width=128", "llm has width=64 in it, 128 in this run"),
        ("vision/ViT.mlp=96", "vision has mlp=192 in it, 96 in this run"),
        ("vision/Optimizer.frozen=True", "vision has trained=true in it, false in this run"),
        ("llm/Decoder.remat='full'", 'llm has remat="none" in it, "full" in this run'),
        ("Train.dtype='bfloat16'", "is of Train.dtype='float32', this run has 'bfloat16'"),
    ],
)
def test_a_profile_of_another_model_is_refused(tmp_path: Path, binding: str, difference: str) -> None:
    file = tmp_path / "p.json"
    write_profile(profile(), file)
    config = load_config([str(CONFIG)], [binding])
    with pytest.raises(ConfigError) as error:
        read_profile(file, config)
    assert difference in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_of_other_modules_is_refused() -> None:
    config = load_config([str(CONFIG)])
    fewer = {name: sizes for name, sizes in profile().model.items() if name != "vision"}
    for model, message in ((fewer, "has no module 'vision'"), ({**profile().model, "eye": {}}, "module that is not")):
        with pytest.raises(ConfigError, match=message):
            require_same_model(profile(model=model), config)


@pytest.mark.parametrize("binding", ["llm/Decoder.layers=5", "Train.global_batch=8", "llm/Layout.dp=2"])
def test_it_is_the_same_model_with_other_layers_batches_and_layouts(tmp_path: Path, binding: str) -> None:
    file = tmp_path / "p.json"
    write_profile(profile(), file)
    assert read_profile(file, load_config([str(CONFIG)], ["vision/Layout.rank_offset=8", binding])) == profile()
