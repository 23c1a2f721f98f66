"""Runs that start from the weights of others, and runs that go on with other modules frozen."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trial_runs import ALONE, REPOSITORY, STEPS, TINY, assert_same_leaves, leaves, write_tiny

from mmjax.checkpoint import find_parameters
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.export.parameters import export_run
from mmjax.mesh.world import World
from mmjax.train.__main__ import main
from mmjax.train.metrics import read_metrics
from mmjax.train.starts import find_starts
from mmjax.train.trainer import Trainer

Leaves = dict[str, np.ndarray]


def of(module: str, named: Leaves, kind: str = "params") -> Leaves:
    return {name: leaf for name, leaf in named.items() if name.startswith(f"{kind}/{module}/")}


def held(trainer: Trainer) -> Leaves:
    return {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}


@pytest.mark.long
def test_each_module_from_its_own_folder_under_another_layout(tiny_run: Path, tmp_path: Path) -> None:
    export_run(tiny_run, tmp_path / "out", step=STEPS - 2)
    earlier = tiny_run / "checkpoints" / f"{STEPS - 4:08d}"
    bindings = [
        f"Checkpoint.init_from={str(tmp_path / 'out')!r}",
        f"vision/Weights.init_from={str(earlier)!r}",
        "vision_projector/Weights.init_from='fresh'",
        *("vision/Optimizer.frozen=True", "llm/Optimizer.b2=0.99", "Train.global_batch=4", "Train.eval_samples=0"),
        *("llm/Layout.tp=1", "llm/Layout.pp=2", "vision/Layout.dp=1"),
    ]
    with Trainer(load_config([write_tiny(tmp_path)], bindings), tmp_path / "run", style="silent") as trainer:
        got, key = held(trainer), jax.random.key(0)
        states = {name: stage.state.initialise(key) for name, stage in trainer.parts.placed.stages.items()}
        trainer.executor.states = states
        fresh = held(trainer)
    assert trainer.started == (
        f"vision: parameters of {earlier} after step {STEPS - 4}",
        f"llm: parameters of {tmp_path / 'out'} after step {STEPS - 2}",
        "vision_projector: new values",
    )
    assert got.keys() == fresh.keys() and not of("vision", got, "adam_m")
    assert_same_leaves(of("llm", got), of("llm", leaves(tiny_run, STEPS - 2)))
    assert_same_leaves(of("vision", got), of("vision", leaves(tiny_run, STEPS - 4)))
    assert_same_leaves(of("vision_projector", got), of("vision_projector", fresh))
    assert not any(leaf.any() for name, leaf in got.items() if name.startswith("adam_"))


def test_what_does_not_fit_is_refused_before_any_device(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gin, start = write_tiny(tmp_path), f"Checkpoint.init_from={str(tiny_run)!r}"
    own = f"llm/Weights.init_from={str(tiny_run)!r}"
    for bindings, message in (
        (
            [start, "llm/Decoder.layers=3"],
            f"{start}: llm has 2 layers there and 3 here, so llm/layers/002/attn/k is on one side alone; make equal "
            "what is llm/Decoder.layers = 2 there, 3 here; or set llm/Weights.init_from='fresh' for new values",
        ),
        (
            [own, "llm/Decoder.tied=True"],
            f"{own}: llm/head of llm is there and not here; make equal what is llm/Decoder.tied = False there, True "
            "here; or set",
        ),
        (
            [start, "vision/Projector.hidden=24"],
            f"{start}: vision_projector/down of vision_projector is float32[16, 16] there and float32[24, 16] here; "
            "make equal what is vision/Projector.hidden = 0 there, 24 here; or set vision_projector/Weights.init_from",
        ),
        (
            [f"vision/Weights.init_from={str(tmp_path)!r}"],
            f"vision/Weights.init_from={str(tmp_path)!r}: {tmp_path} is no",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            find_starts(load_config([gin], bindings))
        assert message in str(caught.value) and "\n" not in str(caught.value), caught.value
    renamed = tmp_path / "eye.gin"
    renamed.write_text(
        TINY.replace("vision/", "eye/") + "Model.encoders = {'eye': 'vit'}\nData.image_encoder = 'eye'\n"
    )
    monkeypatch.setattr(World, "create", lambda *_, **__: pytest.fail("a device is touched"))
    with pytest.raises(SystemExit) as end:
        main([f"--gin_file={renamed}", f"--gin.{start}", f"--run_dir={tmp_path / 'run'}"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert end.value.code == 2 and line == (
        f"error: {start}: it has vision, vision_projector, llm and no module 'eye'; name another folder, or set "
        "eye/Weights.init_from='fresh' for new values"
    )


@pytest.mark.long
def test_a_run_goes_on_with_a_module_newly_frozen_and_newly_trained(tiny_run: Path, tmp_path: Path) -> None:
    run, other, gin = tmp_path / "run", tmp_path / "other", write_tiny(tmp_path)
    shutil.copytree(tiny_run, run)
    trained = load_config([gin], ALONE)
    frozen = load_config([gin], [*ALONE, "vision/Optimizer.frozen=True"])
    with Trainer(frozen, run, style="silent") as trainer:
        assert trainer.started == (f"from step {STEPS} on, vision (frozen now): moments dropped",)
        assert_same_leaves(
            held(trainer), {n: x for n, x in leaves(run, STEPS).items() if "adam_" not in n or "/vision/" not in n}
        )
        trainer.train(steps=STEPS + 1)
    before, start = leaves(run, STEPS), leaves(run, STEPS + 1)
    assert_same_leaves(of("vision", start), of("vision", before))
    assert all(not np.array_equal(leaf, before[name]) for name, leaf in of("llm", start).items())
    shutil.copytree(run, other)

    with Trainer(trained, run, style="silent") as trainer:
        assert trainer.started == (f"from step {STEPS + 1} on, vision (frozen before): new moments",)
        got = held(trainer)
        assert_same_leaves({name: got[name] for name in start}, start)
        anew = {name for name in got if name not in start}
        assert anew == {
            f"{kind}/{n.removeprefix('params/')}" for n in of("vision", got) for kind in ("adam_m", "adam_v")
        }
        assert not any(got[name].any() for name in anew)
        trainer.train(steps=STEPS + 3)
    # Of the first update Adam's correction is that of one update, while the learning rate is that of the run's step.
    after, optimizer = leaves(run, STEPS + 2), trained.model.optimizers["vision"]
    rate = read_metrics(run / "metrics.jsonl")[STEPS + 1]["vision/learning_rate"]
    assert rate == pytest.approx(0.01 * (16 - 13) / 14)
    for name, old in of("vision", start).items():
        m, v = (after[name.replace("params", kind)] for kind in ("adam_m", "adam_v"))
        step = m / (1 - optimizer.b1) / (np.sqrt(v / (1 - optimizer.b2)) + optimizer.eps)
        step = step + optimizer.weight_decay * old * (old.ndim > 1)
        np.testing.assert_allclose(old - after[name], rate * step, rtol=1e-3, atol=1e-7, err_msg=name)

    for last in (STEPS + 2, STEPS + 3):  # stopped behind it, the moments keep their age
        with Trainer(trained, other, style="silent") as trainer:
            assert len(trainer.started) == (last == STEPS + 2)
            trainer.train(steps=last)
    assert_same_leaves(leaves(other, STEPS + 3), leaves(run, STEPS + 3))


@pytest.mark.long
def test_a_module_is_rounded_where_it_is_frozen_in_bf16_and_trained_again_from_there(
    tiny_run: Path, tmp_path: Path
) -> None:
    run, gin, half = tmp_path / "run", write_tiny(tmp_path), ("Train.dtype='bfloat16'", "vision/Optimizer.frozen=True")
    shutil.copytree(tiny_run, run)
    with Trainer(load_config([gin], [*ALONE, *half]), run, style="silent") as trainer:
        said = "vision (frozen now): moments dropped, float32 rounded to bfloat16"
        assert trainer.started == (f"from step {STEPS} on, {said}",)
        trainer.train(steps=STEPS + 1)
    before, after = leaves(run, STEPS), leaves(run, STEPS + 1)
    rounded = {name: leaf.astype(jnp.bfloat16) for name, leaf in of("vision", before).items()}
    assert any((leaf != before[name]).any() for name, leaf in rounded.items())
    assert_same_leaves(of("vision", after), rounded)
    assert {name for name, leaf in after.items() if leaf.dtype == jnp.bfloat16} == rounded.keys()

    # Under another layout, where its ranks share it, nothing is said and nothing changes; an export has what is held.
    with Trainer(load_config([gin], [*half, "Train.eval_samples=0", "Train.steps=16"]), run, style="silent") as trainer:
        assert trainer.started == ()
        assert_same_leaves(held(trainer), after)
    export_run(run, tmp_path / "out")
    stored = find_parameters([str(tmp_path / "out")])[str(tmp_path / "out")].leaves
    assert {name for name, leaf in stored.items() if leaf.dtype == "bfloat16"} == {
        name.removeprefix("params/") for name in rounded
    }

    widened = {name: leaf.astype(np.float32) for name, leaf in after.items()}
    begun = load_config([gin], [*ALONE, f"Checkpoint.init_from={str(tmp_path / 'out')!r}"])
    with Trainer(begun, tmp_path / "begun", style="silent") as trainer:
        (line,) = trainer.started
        assert line.endswith(f"after step {STEPS + 1}; vision: bfloat16 widened to float32")
        got = held(trainer)
        assert_same_leaves({name: got[name] for name in got if name.startswith("params/")},
                           {name: leaf for name, leaf in widened.items() if name.startswith("params/")})  # fmt: skip
    with Trainer(load_config([gin], [*ALONE, half[0]]), run, style="silent") as trainer:
        said = "vision (frozen before): new moments, bfloat16 widened to float32"
        assert trainer.started == (f"from step {STEPS + 1} on, {said}",)
        got = held(trainer)
        assert_same_leaves({name: got[name] for name in widened}, widened)
        assert not any(leaf.any() for name, leaf in got.items() if name not in widened)
        trainer.train(steps=STEPS + 2)
    trained = leaves(run, STEPS + 2)
    assert all((leaf != trained[name]).any() for name, leaf in of("vision", widened).items())
    assert {str(leaf.dtype) for leaf in trained.values()} == {"float32"}


@pytest.mark.long
def test_the_two_commands_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "guide" / "configure.md").read_text()
    section = page.split("\n## In stages\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    small = [
        line.replace(" ", "")
        for line in TINY.splitlines()
        if line and not line.startswith("#") and "Layout" not in line
    ]
    small += [
        "Optimizer.warmup=0",
        "Train.steps=2",
        "Train.eval_samples=0",
        "Digits.curriculum=()",
        "Data.sequence_length=64",
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    commands = [shlex.split(line) for line in block.splitlines()]
    for command in commands:
        assert command[:3] == ["python", "-m", "mmjax.train"]
        assert main([*command[3:], *(f"--gin.{binding}" for binding in small)]) == 0
    assert "vision, vision_projector, llm: parameters of runs/stage1 after step 2\n" in capsys.readouterr().out
    one, two = (leaves(tmp_path / "runs" / name, 2) for name in ("stage1", "stage2"))
    for module, moved in (("vision", False), ("vision_projector", True), ("llm", True)):
        mine = of(module, two)
        assert all(np.array_equal(leaf, one[name]) != moved for name, leaf in mine.items()), module
    assert {name.split("/")[1] for name in one if name.startswith("adam_")} == {"vision_projector"}
    assert {name.split("/")[1] for name in two if name.startswith("adam_")} == {"vision_projector", "llm"}
