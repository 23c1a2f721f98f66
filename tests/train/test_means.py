"""Running means of parameters: a plain loop's, under sharded states and another layout; read by what predicts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from painted_runs import painted_run
from PIL import Image
from trial_runs import leaves

from mmjax.assembly.assembly import place
from mmjax.checkpoint import SavedParameters
from mmjax.config import load_run_config
from mmjax.eval.evaluator import load_parameters
from mmjax.export.parameters import export_run
from mmjax.generate.__main__ import main
from mmjax.optimizer import make_optimizer, mean_of, next_mean, with_mean
from mmjax.optimizer_config import OptimizerConfig
from mmjax.train.trainer import Trainer

DECAY, STEPS = 0.7, 4
MEANS = (
    *(f"Optimizer.ema={DECAY}", "llm/Optimizer.ema=0.0", f"Train.steps={STEPS}"),
    *("Checkpoint.every=1", "Checkpoint.keep=10", "painter/Layout.dp=2", "painter/Layout.pp=1"),
)
ELSEWHERE = ("painter/Layout.dp=1", "painter/Layout.tp=2", "llm/Layout.pp=1", "llm/Layout.dp=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return painted_run(tmp_path_factory.mktemp("means"), MEANS)


def kind(run: Path, step: int, prefix: str) -> dict[str, np.ndarray]:
    named = leaves(run, step)
    return {name.removeprefix(prefix): np.asarray(leaf) for name, leaf in named.items() if name.startswith(prefix)}


@pytest.mark.long
def test_means_are_those_of_a_plain_loop(run: Path) -> None:
    """From the parameters of all checkpoints; a module with a decay of 0 has none."""
    means = kind(run, 1, "ema/")
    assert {name.partition("/")[0] for name in means} == {"painter", "painter_projector"}
    for step in range(2, STEPS + 1):
        params = kind(run, step, "params/")
        means = {name: DECAY * mean + (1 - DECAY) * params[name] for name, mean in means.items()}
        saved = kind(run, step, "ema/")
        for name, mean in means.items():
            np.testing.assert_allclose(saved[name], mean, rtol=1e-5, atol=1e-7, err_msg=name)
        assert any(np.abs(saved[name] - params[name]).max() > 1e-3 for name in saved)


@pytest.mark.long
def test_a_run_goes_on_with_its_means_under_another_layout(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the middle, to the same means in the end, which draw the same from a seed; one that had none begins with
    the parameters.
    """
    for step in range(3, STEPS + 1):
        assert (run / "checkpoints" / f"{step:08d}").is_dir()
    copy = tmp_path / "run"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "checkpoints" / "00000002").symlink_to(run / "checkpoints" / "00000002")
    recipe = load_run_config(run, [], [*ELSEWHERE, "llm/Optimizer.ema=0.5"])
    with Trainer(recipe, copy, style="silent") as trainer:
        assert trainer.state.step == 2
        trainer.train()
    for name, mean in kind(run, STEPS, "ema/").items():
        np.testing.assert_allclose(kind(copy, STEPS, "ema/")[name], mean, rtol=1e-4, atol=1e-5, err_msg=name)
    second, third, last = (kind(copy, step, "params/") for step in (2, 3, 4))
    for name, mean in kind(copy, STEPS, "ema/llm/").items():
        at = f"llm/{name}"
        want = 0.25 * second[at] + 0.25 * third[at] + 0.5 * last[at]
        np.testing.assert_allclose(mean, want, rtol=1e-4, atol=1e-6, err_msg=name)
    one, other = (drawn(of, tmp_path / name, "llm/Optimizer.ema=0.0") for name, of in {"a": run, "b": copy}.items())
    np.testing.assert_allclose(one, other, atol=1)
    assert one.std() > 1
    capsys.readouterr()


def drawn(run: Path, out: Path, *bindings: str) -> np.ndarray:
    """Levels of the pictures of a prompt that a run draws from seed 5."""
    prompt = out.with_suffix(".json")
    prompt.write_text(json.dumps([{"role": "user", "content": "red"}]))
    flags = (f"--run_dir={run}", f"--messages={prompt}", "--generate_size=8x8", "--samples=2", "--seed=5")
    assert main([*flags, f"--out={out}", *(f"--gin.{binding}" for binding in bindings)]) == 0
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(out.iterdir())])


@pytest.mark.long
def test_predictions_and_exports_read_means(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means, params = kind(run, STEPS, "ema/"), kind(run, STEPS, "params/")
    export_run(run, tmp_path / "export")
    exported = SavedParameters.find(str(tmp_path / "export"))
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    targets = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host) for n, leaf in exported.leaves.items()}
    for name, leaf in exported.read(targets).items():
        np.testing.assert_array_equal(leaf, means.get(name, params[name]), err_msg=name)

    recipe = load_run_config(run)
    parts = place(recipe, trained=False)
    _, states = load_parameters(parts, run)
    state, stage = states["painter.0"], parts.placed.stages["painter.0"].state
    assert state["opt"] == {}
    kernel = np.asarray(jax.device_get(state["master"]["painter"]["patch"]["bias"]))
    np.testing.assert_array_equal(kernel[: means["painter/patch/bias"].size], means["painter/patch/bias"])
    trained = stage.from_logical({name: jax.numpy.asarray(leaf) for name, leaf in leaves(run, STEPS).items()}, STEPS)
    evaluated = stage.evaluated(trained)["master"]["painter"]["patch"]["bias"]
    np.testing.assert_array_equal(
        np.asarray(evaluated)[: means["painter/patch/bias"].size], means["painter/patch/bias"]
    )

    asked = tmp_path / "m.json"
    asked.write_text(json.dumps([{"role": "user", "content": "red"}]))
    flags = (f"--run_dir={run}", f"--messages={asked}", "--generate_size=8x8")
    assert main([*flags, f"--out={tmp_path / 'mean'}"]) == 0
    plain = [f"--gin.{module}/Optimizer.ema=0.0" for module in ("painter", "painter_projector")]
    assert main([*flags, f"--out={tmp_path / 'last'}", *plain]) == 0
    assert (tmp_path / "mean" / "1-1.png").read_bytes() != (tmp_path / "last" / "1-1.png").read_bytes()
    capsys.readouterr()


def test_an_optimizer_keeps_a_mean_only_where_it_is_asked_for() -> None:
    params = {"w": jax.numpy.arange(3.0)}
    assert mean_of(make_optimizer(OptimizerConfig(), 5, {"w": True}).init(params)) is None
    state = make_optimizer(OptimizerConfig(ema=0.9), 5, {"w": True}).init(params)
    moved = with_mean(state, next_mean(mean_of(state), {"w": params["w"] + 1}, 0.9))
    mean = mean_of(moved)
    assert mean is not None
    np.testing.assert_allclose(mean["w"], params["w"] + 0.1, rtol=1e-6)
