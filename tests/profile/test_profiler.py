"""The profiler on a tiny model: the stages that it times, and a whole profile that plans can be made from."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from trial_runs import REPOSITORY, write_tiny

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.world import World
from mmjax.planner.measured import MeasuredClock
from mmjax.planner.node_processes import waiting_free
from mmjax.planner.profile_file import read_profile
from mmjax.planner.work import StagePart
from mmjax.profile import __main__ as command
from mmjax.profile.profiler import sampled, world_for
from mmjax.profile.trials import Point, attempts, best_trials, compiled, legal_tps, points
from mmjax.recipe import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_config([str(write_tiny(tmp_path))], ["World.devices=4"])


def parts_of(recipe: Recipe) -> tuple[Any, ...]:
    tokenizer = make_tokenizer(recipe.data.settings.tokenizer, recipe.model.media)
    return tokenizer, build_packer(recipe, tokenizer)


def test_shapes_go_up_to_all_rows_of_a_microbatch_in_the_widest_buckets(recipe: Recipe) -> None:
    _, packer = parts_of(recipe)
    rows = recipe.train.global_batch // recipe.train.microbatches
    full, quick = points(packer, rows, quick=False), points(packer, rows, quick=True)
    assert full[0].shapes == quick[0].shapes
    assert full[0].shapes["llm"] == (rows, recipe.data.settings.sequence_length)
    per_cell, width = max(packer.buckets_of("vision"), key=lambda bucket: (bucket[1], bucket[0]))
    assert full[0].shapes["vision"] == (per_cell * packer.cells, width)
    assert full[1].shapes["llm"][0] == full[1].shapes["vision"][0] == 1
    assert [point.ends for point in full[:2]] == [True, True]
    assert not any(point.ends for point in full[2:])
    # Of these, two have more rows than one, and so have a line of their own beside the single row.
    assert [point.loops for point in full] == [index < 3 for index in range(len(full))]
    assert sum(point.shapes["llm"][0] > 1 for point in full if point.loops) == 2


def test_tp_divides_the_sizes_of_a_module_and_fits_the_devices(recipe: Recipe) -> None:
    heads = recipe.model["llm"].settings.kv_heads
    assert legal_tps(recipe, "llm", 8) == tuple(tp for tp in (1, 2, 4, 8) if heads % tp == 0)
    assert legal_tps(recipe, "llm", 1) == (1,)


def test_the_data_are_looked_at_through_their_metadata(recipe: Recipe) -> None:
    source = open_source(recipe, split="train")
    found = sampled(recipe, source, 32)
    lengths = [source.meta(index).tokens for index in range(32)]
    assert found["llm"]["mean"] == pytest.approx(sum(lengths) / 32)
    assert found["llm"]["most"] == max(lengths)
    assert found["vision"]["count"] == 32 * found["vision"]["per_sample"] > 0


@pytest.mark.long
def test_a_trial_times_the_forward_and_the_backward_of_a_stage(recipe: Recipe) -> None:
    tokenizer, packer = parts_of(recipe)
    world = world_for(recipe)
    assert isinstance(world, World)
    assert world.size == 4
    point = Point(
        shapes={"llm": (2, recipe.data.settings.sequence_length), "vision": (1, packer.buckets_of("vision")[0][1])}
    )
    every = attempts(recipe, tokenizer, packer, world, 1, [point])
    found = list(itertools.islice(every, 2))
    compiled(found, lambda *_: None)
    count = []
    trials, calls = best_trials(found, lambda: count.append(1))
    assert [(trial.module, trial.tp, trial.rows) for trial in trials] == [("vision", 1, 1), ("llm", 1, 2)]
    assert {trial.part for trial in trials} == {StagePart(layers=1, first=True, last=True)}
    assert all(trial.forward > 0 and trial.backward > 0 for trial in trials)
    for one, trial in zip(found, trials, strict=True):
        needs = one.compiled()
        assert (needs.module, needs.part, needs.tp, needs.rows) == (trial.module, trial.part, trial.tp, trial.rows)
        held = [program.compiled.memory_analysis().temp_size_in_bytes for program in one.programs.programs]
        assert [needs.forward, needs.backward] == held
        assert min(held) > 0
    assert all(called > 0 for called in calls)
    assert len(count) > len(found)
    # The other cuts: two layers and three, for this point has no ends apart.
    others = {(one.stage.model.module, one.part.layers, one.part.first, one.part.last) for one in every}
    assert others == {(name, layers, True, True) for name in ("vision", "llm") for layers in (2, 3)}


@pytest.mark.slow
def test_a_profile_of_a_tiny_model_gives_times_for_any_of_its_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_tiny(tmp_path), tmp_path / "profile.json"
    flags = [f"--gin_file={file}", "--gin.World.devices=4", f"--out={out}", "--quick", "--json"]
    assert command.main(flags) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    profile = read_profile(out, load_config([str(file)]))
    assert profile.device.count == 4
    assert set(profile.gathers) == set(profile.all_to_alls) == {2, 4}
    assert all(seconds > 0 for samples in profile.all_to_alls.values() for _, seconds in samples)
    assert 1 <= profile.shared <= 4
    clock = MeasuredClock(profile=profile)
    for module in ("llm", "vision"):
        for tp in profile.tps(module):
            width = next(trial.width for trial in profile.trials if trial.module == module)
            short, long = (
                clock.stage(module, StagePart(layers=n, last=True), rows=2, width=width, tp=tp).forward for n in (1, 20)
            )
            assert 0 < short <= long


@pytest.mark.slow
def test_two_processes_make_one_profile_of_both_their_devices(tmp_path: Path) -> None:
    """tp 2 is over both, tp 1 on the first alone; what crosses between them has been there and back."""
    file, out = write_tiny(tmp_path), tmp_path / "profile.json"
    launch = [sys.executable, "-m", "mmjax.launch", "-n", "2", "--devices_per_process=1", "-m", "mmjax.profile"]
    flags = [f"--gin_file={file}", "--gin.vision/Layout.rank_offset=0", f"--out={out}", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*launch, *flags], check=True, env=environment, timeout=300, capture_output=True)
    profile = read_profile(out)
    assert (profile.device.count, profile.device.processes) == (2, 2)
    assert "processor time" not in profile.source and "of 2 processes" in profile.source
    assert {trial.tp for trial in profile.trials if trial.module == "llm"} == {1, 2}
    assert all(trial.forward > 0 for trial in profile.trials)
    (small, least), (large, most) = profile.moves[0], profile.moves[-1]
    assert least > 0 and most > (large - small) / 100e9, "no wire between processes is so fast"
    assert set(profile.gathers) == set(profile.all_to_alls) == set(profile.reduces) == {2}
    clock = MeasuredClock(profile=profile)
    assert waiting_free("collective", "node", clock.node, clock.platform) == 1
    assert waiting_free("auto", "node", clock.node, clock.platform) == 0, "between CPUs no sender waits"


@pytest.mark.slow
def test_an_interrupted_profiler_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out" / "profile.json"
    out.parent.mkdir()
    command_line = [sys.executable, "-m", "mmjax.profile", f"--gin_file={write_tiny(tmp_path)}", f"--out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it compiles
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "interrupted: no profile was written"
    assert not list(out.parent.iterdir())
