"""Settings that a file gives in steps shrink when a flag asks for fewer steps. No other setting ever changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmjax.config import load_config, load_run_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.recipe import Recipe, advise

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.gin"))


def of(tmp_path: Path, text: str, *bindings: str) -> Recipe:
    path = tmp_path / "x.gin"
    path.write_text(text)
    return load_config([path], bindings)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_runs_for_any_number_of_steps(path: Path) -> None:
    usual = load_config([path])
    assert usual.fitted == ()
    for steps in (*range(1, 11), 30, 49, 50, 51, usual.train.steps, 10 * usual.train.steps):
        config = load_config([path], [f"Train.steps={steps}"])
        changed = {scope for scope, one in config.model.optimizers.items() if one != usual.model.optimizers[scope]}
        for scope, own in usual.model.optimizers.items():
            found = config.model.optimizers[scope].warmup
            assert found == (own.warmup if own.warmup < steps else own.warmup * steps // usual.train.steps) < steps
        assert bool(config.fitted) == bool(changed)
        lines = operative_config(config).splitlines(), operative_config(usual).splitlines()
        other = [one for one, two in zip(*lines, strict=True) if one != two]
        assert all(line.partition(" =")[0].endswith(("Train.steps", "Optimizer.warmup")) for line in other)


def test_a_line_says_what_was_fitted(tmp_path: Path) -> None:
    text = "Train.steps = 800\nOptimizer.warmup = 80\nllm/Optimizer.warmup = 40\nTrain.profile_steps = (10, 12)\n"
    assert of(tmp_path, text, "Train.steps=81").fitted == ()
    config = of(tmp_path, text, "Train.steps=30")
    assert advise(config)[:2] == (
        f"Train.steps=30: Optimizer.warmup is 3 and not 80, the same share as of 800 ({tmp_path}/x.gin:2)",
        f"Train.steps=30: llm/Optimizer.warmup is 1 and not 40, the same share as of 800 ({tmp_path}/x.gin:3)",
    )
    assert (config.model.optimizers["vision"].warmup, config.model.optimizers["llm"].warmup) == (3, 1)
    config = of(tmp_path, text, "Train.steps=11")
    assert config.train.profile_steps == (9, 11)
    assert config.fitted[-1].startswith(
        "Train.steps=11: Train.profile_steps is (9, 11) and not (10, 12), the last ones"
    )
    assert of(tmp_path, text, "Train.steps=2").train.profile_steps == (1, 2)


def test_what_flags_say_together_has_to_fit(tmp_path: Path) -> None:
    text = "N = 800\nTrain.steps = %N\nOptimizer.warmup = 80\n"
    assert of(tmp_path, text, "N=40").model.optimizers["llm"].warmup == 4  # a macro of the command line is a flag too
    for bindings, what in (
        (("Train.steps=30", "Optimizer.warmup=30"), "vision/Optimizer.warmup=30: must be below Train.steps (30)"),
        (("Train.steps=30", "llm/Optimizer.warmup=99"), "llm/Optimizer.warmup=99: must be below Train.steps (30)"),
        (("Optimizer.warmup=800",), "vision/Optimizer.warmup=800: must be below Train.steps (800)"),
        (("Train.steps=9", "Train.profile_steps=(8, 10)"), "Train.profile_steps=(8, 10): must be"),
        (("Train.steps=0",), "Train.steps=0: must be above 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            of(tmp_path, text, *bindings)
        assert str(caught.value).startswith(what) and "\n" not in str(caught.value)


def test_what_a_file_says_has_to_fit(tmp_path: Path) -> None:
    """A file is written once and meant as it is; a flag mends it."""
    text = "Train.steps = 30\nOptimizer.warmup = 80\n"
    with pytest.raises(ConfigError, match=r"vision/Optimizer\.warmup=80: must be below Train\.steps \(30\)"):
        of(tmp_path, text)
    assert of(tmp_path, text, "Train.steps=60").model.optimizers["llm"].warmup == 6
    with pytest.raises(ConfigError, match=r"Optimizer\.warmup='few': must be an integer"):
        of(tmp_path, text.replace("80", "'few'"), "Train.steps=5")


def test_a_runs_own_settings_fit_too(tmp_path: Path) -> None:
    run = of(tmp_path, "Train.steps = 800\nOptimizer.warmup = 80\n")
    (tmp_path / "config.gin").write_text(operative_config(run))
    assert load_run_config(tmp_path).fitted == ()
    assert load_run_config(tmp_path, [], ["Train.steps=30"]).model.optimizers["llm"].warmup == 3
