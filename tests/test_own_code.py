"""Modules and callbacks of a user's own in a recipe that Python makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmjax as mm
from mmjax.user_code import CodeName, import_named, require_allowed

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "own_encoder"
SCRIPT = """
from dataclasses import replace
from own_encoder import Gated
import mmjax as mm

def louder(context, x):
    return x * 2

shipped = mm.load_config(["own_encoder.gin"], allow_code=True)
model = shipped.model
vision = mm.encoder("vision", Gated(model["vision"].settings), model["vision"].projector.settings)
vision = vision.with_callbacks(after=louder).at(mm.Layout(dp=2)).with_settings(layers=2)
llm = mm.language_model(model.llm.settings).with_settings(layers=1)
recipe = replace(
    shipped,
    model=mm.ModelSpec.of(vision, llm.at(mm.Layout(rank_offset=2))),
    train=replace(shipped.train, global_batch=4, steps=2, eval_samples=4),
    world=mm.WorldConfig(platform="cpu"),
    checkpoint=mm.CheckpointConfig(every=2),
    allow_code=False,
)
if __name__ == "__main__":
    run = mm.build(recipe)
    run.train(run_dir="run")
    print(run.evaluate())
"""


def louder(context: object, x: object) -> object:
    """A callback at the top level of a module."""
    return x


def test_code_that_python_hands_over_needs_no_permission() -> None:
    name = CodeName.of(louder)
    assert name == f"{__name__}:louder" and import_named("vision/Callbacks.after", name) is louder
    require_allowed("vision/Callbacks.after", name, allowed=False)
    with pytest.raises(mm.ConfigError, match="add --allow_code"):
        require_allowed("vision/Callbacks.after", str(name), allowed=False)


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="define it at the top level of a module"):
        mm.CallbacksConfig(after=lambda context, x: x)  # pyright: ignore[reportArgumentType]


def run_script(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder that has the example's gin file."""
    (folder / "own_encoder.gin").write_text((EXAMPLE / "own_encoder.gin").read_text())
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, EXAMPLE)))}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.long
def test_a_recipe_with_code_of_its_own_is_trained_and_read_again(tmp_path: Path) -> None:
    done = run_script(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    stored = (tmp_path / "run" / "config.gin").read_text()
    assert "own_encoder:Gated" in stored and "__main__:louder" in stored
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    command = ("-m", "mmjax.eval", "--run_dir=run", "--allow_code")
    assert "Callbacks.after='__main__:louder'" in run_script(tmp_path, *command).stderr
    # A module's function is found by every command.
    renamed = stored.replace("__main__:louder", "script:louder")
    (tmp_path / "run" / "config.gin").write_text(renamed)
    done = run_script(tmp_path, *command)
    assert done.returncode == 0, done.stderr
