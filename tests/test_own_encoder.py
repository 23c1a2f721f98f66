"""`examples/own_encoder`: an encoder in a user's own file, with two groups of layers, under every command."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmjax

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "own_encoder"
ALLOWED = ("--gin_file=own_encoder.gin", "--allow_code")


def run(
    program: str, *flags: str, cwd: Path = EXAMPLE, folders: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A command as the example says it, from the folder of the file; ``folders`` are those of further files."""
    command = [sys.executable, "-m", f"mmjax.{program}", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *folders)))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)


def test_its_code_runs_only_where_that_is_allowed() -> None:
    done = run("train", "--gin_file=own_encoder.gin", "--dry_run")
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "error: Model.encoders['vision']='own_encoder:Gated': names code that would be run; add --allow_code if you "
        "trust it (in Python allow_code=True)"
    ]


@pytest.mark.long
def test_its_settings_are_checked_like_any_other() -> None:
    for flag, message in {
        "--gin.vision/Gated.heads=3": "vision/Gated.heads=3: must divide a quarter of Gated.width",
        "--gin.vision/Gated.layer=3": "vision/Gated.layer=3: Gated has no field 'layer'; did you mean 'layers'",
        "--gin.vision/Layout.tp=3": "vision/Layout.tp=3: must divide vision/Gated.heads (4)",
        "--gin.Model.encoders={'vision': 'own_encoder:Gate'}": "own_encoder has no function or class 'Gate'",
        "--gin.Model.encoders={'vision': 'own_encoder:GatedLayer'}": "it has no configurable class as Config",
    }.items():
        done = run("train", *ALLOWED, flag, "--dry_run")
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_it_is_short() -> None:
    assert len((EXAMPLE / "own_encoder.py").read_text().splitlines()) < 120


def test_it_uses_public_names_alone() -> None:
    tree = ast.parse((EXAMPLE / "own_encoder.py").read_text())
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {line for line in imports if "mmjax" in line} == {
        "import mmjax",
        "from mmjax.configurable import configurable",
    }
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mmjax"
    }
    assert used and used <= set(mmjax.__all__)


@pytest.mark.long
def test_a_dry_run_and_a_plan_show_it() -> None:
    dry = run("train", *ALLOWED, "--dry_run")
    assert dry.returncode == 0 and "vision.0" in dry.stdout, dry.stderr
    plan = run("plan", *ALLOWED, "--devices=4", "--accelerator=h100", "--json")
    assert plan.returncode == 0, plan.stderr
    assert "vision" in json.loads(plan.stdout)["plan"]["layouts"]


@pytest.mark.long
def test_it_is_counted_though_it_counts_nothing_itself() -> None:
    """Parameters from the leaves of any number of stages, FLOPs as worked out by hand."""
    program = """
import math, jax
from own_encoder import Gated, GatedConfig
from mmjax import DecoderConfig, Layout, multimodal, parameter_count
for layers in (1, 2, 5):
    model = multimodal({"vision": Gated(GatedConfig(layers=layers, width=32))}, DecoderConfig(vocab=50))
    stages = model.stages({"vision": Layout(pp=min(layers, 3)), "llm": Layout()})
    slices = [part for stage in stages for part in stage.slices if part.module == "vision"]
    leaves = [leaf for part in slices for leaf in jax.tree.leaves(part.leaves())]
    assert parameter_count(model)["vision"] == sum(len(l.names) * math.prod(l.logical_shape) for l in leaves)
    assert len({name for leaf in leaves for name in leaf.names}) == sum(len(leaf.names) for leaf in leaves)
    d, mlp, patch, gated, attending = 32, 128, 16, layers // 2, layers - layers // 2
    products = gated * 3 * d * mlp + attending * (4 * d * d + 2 * d * mlp) + patch * d
    flops = 2 * (64 + 16) * products + attending * 4 * d * (64**2 + 16**2)
    assert model.nodes["vision"].module.forward_flops([64, 16]) == flops
"""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{EXAMPLE}"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--gin.vision/Layout.tp=1", "--gin.vision/Layout.pp=3", "--gin.llm/Layout.rank_offset=3"),
        ("--gin.vision/Layout.tp=1", "--gin.vision/Layout.dp=2", "--gin.Train.schedule=zb-h1", "--gin.llm/Layout.pp=2"),
    ],
    ids=["tp", "groups over stages", "dp, split backwards"],
)
def test_layouts_train_as_one_device_does(layout: tuple[str, ...]) -> None:
    done = run("check", *ALLOWED, *layout, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] and "its own code on one device takes its place" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "encoder"), [(EXAMPLE / "own_encoder.gin", "vision"), (REPOSITORY / "configs/digits_valm.gin", "audio")]
)
def test_callbacks_of_any_encoder_are_compared(config: Path, encoder: str) -> None:
    marks = {"before": "placed", "after": "shaded", "projected": "placed"}
    given = [f"--gin.{encoder}/Callbacks.{place}=marks:{name}" for place, name in marks.items()]
    folders = (REPOSITORY / "tests" / "pipeline", EXAMPLE)
    done = run("check", f"--gin_file={config}", "--allow_code", *given, "--json", folders=folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] and f"{encoder}: the reference calls marks:shaded too" in done.stderr


SCALED = """
import flax.nnx as nnx
import jax.numpy as jnp
from dataclasses import dataclass
from functools import partial

import mmjax
import own_encoder
from own_encoder import Gated, GatedLayer


class ScaledLayer(GatedLayer):
    def __init__(self, c, rngs):
        super().__init__(c, rngs)
        self.boost = nnx.Param(1.5 * jnp.ones(c.width), dims=("embed",))


def scaled_block(context, x):
    def layer(x, p):
        h = mmjax.rms_norm(x, p["before"], 1e-6)
        gate, up = mmjax.column_parallel(h, [(p["gate"], None), (p["up"], None)], context.axes)
        return x + p["boost"] * mmjax.row_parallel(gate * up, p["down"], context.axes)

    return layer


@dataclass(frozen=True)
class Scaled(Gated):
    @property
    def groups(self):
        first, *others = super().groups
        return (mmjax.LayerGroup(first.layers, partial(ScaledLayer, self.config), scaled_block), *others)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [(), ("--gin.vision/Layout.tp=1", "--gin.vision/Layout.dp=2", "--gin.Train.schedule=zb-h1")],
    ids=["tp", "dp, split backwards"],
)
def test_a_learned_scale_is_used_as_it_is(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Backward reads the scale itself; the same with whole matrices is an error of one line."""
    encoders = ("--allow_code", "--gin.Model.encoders={'vision': 'scaled:Scaled'}")
    (tmp_path / "scaled.gin").write_text(f"include '{EXAMPLE / 'own_encoder.gin'}'\n")
    place: Any = {"cwd": tmp_path, "folders": (tmp_path, EXAMPLE)}
    (tmp_path / "scaled.py").write_text(SCALED)
    done = run("check", "--gin_file=scaled.gin", "--steps=1", *encoders, *layout, "--json", **place)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stdout + done.stderr
    (tmp_path / "scaled.py").write_text(SCALED.replace('(p["', '(2 * p["'))
    done = run("check", "--gin_file=scaled.gin", *encoders, *layout, **place)
    assert done.returncode == 2 and "vision/" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr and "a function under jax.checkpoint" in done.stderr


JUDGED = """
from dataclasses import dataclass

import jax.numpy as jnp

from mmjax import Loss
from own_encoder import Gated


@dataclass(frozen=True)
class Judged(Gated):
    '''Two losses of its own, each with its own denominator, and a metric.'''

    losses = {
        "recovered": Loss(weight=0.3),
        "size": Loss(weight=0.05, per="media"),
        "largest": Loss(weight=0.0, per="samples"),
    }

    def inputs(self, *, first, last):
        return tuple(dict.fromkeys((*super().inputs(first=first, last=last), *(("patches",) if last else ()))))

    def loss(self, p, context, x):
        real = context.inputs["segments"] > 0
        off = jnp.mean(x, -1) - jnp.mean(context.inputs["patches"], -1)
        found = {"recovered": off**2, "size": jnp.mean(x**2, -1), "largest": jnp.max(jnp.abs(x), -1)}
        return {name: jnp.sum(jnp.where(real, value, 0)) for name, value in found.items()}
"""


@pytest.mark.slow
def test_an_encoder_with_losses_of_its_own_trains_as_on_one_device(tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(JUDGED)
    (tmp_path / "judged.gin").write_text(f"include '{EXAMPLE / 'own_encoder.gin'}'\n")
    encoders = "--gin.Model.encoders={'vision': 'judged:Judged'}"
    place: Any = {"cwd": tmp_path, "folders": (tmp_path, EXAMPLE)}
    for layout in (
        ("--gin.vision/Layout.tp=1", "--gin.vision/Layout.pp=3", "--gin.llm/Layout.rank_offset=3"),
        ("--gin.vision/Layout.tp=1", "--gin.vision/Layout.dp=2", "--gin.Train.schedule=zb-h1"),
    ):
        done = run("check", "--gin_file=judged.gin", "--allow_code", encoders, *layout, "--json", **place)
        assert done.returncode == 0, done.stdout + done.stderr
    train = ("--gin_file=judged.gin", "--allow_code", encoders, f"--run_dir={tmp_path / 'run'}", "--gin.Train.steps=20")
    done = run("train", *train, "--gin.Train.eval_samples=8", **place)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    parts = {"llm/loss": 1.0, "vision/recovered": 0.3, "vision/size": 0.05}
    for row in rows:
        assert row["loss"] == pytest.approx(sum(weight * row[name] for name, weight in parts.items()))
    assert rows[-1]["vision/recovered"] < 0.8 * rows[0]["vision/recovered"] and rows[-1]["vision/largest"] > 0


@pytest.mark.slow
def test_it_learns_goes_on_and_is_evaluated(tmp_path: Path) -> None:
    short = (f"--run_dir={tmp_path}", "--gin.Train.eval_samples=16", "--gin.Checkpoint.every=30")
    first = run("train", *ALLOWED, *short, "--gin.Train.steps=40")
    assert first.returncode == 0, first.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    again = run("train", *ALLOWED, *short, "--gin.Train.steps=44")
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 44
    evaluated = run("eval", f"--run_dir={tmp_path}", "--allow_code", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    refused = run("eval", f"--run_dir={tmp_path}")
    assert refused.returncode == 2 and "add --allow_code" in refused.stderr
