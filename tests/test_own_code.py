"""Modules and callbacks of a user's own in a recipe that Python makes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mmjax as mm
from mmjax.config import operative_config
from mmjax.data.origin import task_class
from mmjax.data.tasks.digits.task import Digits
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


class Counting(mm.Task):
    """A task at the top level of a module."""


def test_tasks_and_readers_are_handed_over_too() -> None:
    data = mm.DataConfig(task=Counting)  # pyright: ignore[reportArgumentType]
    assert data.task == f"{__name__}:Counting" and pickle.loads(pickle.dumps(data)) == data
    assert task_class(data.task) is Counting and operative_text(data) == f"'{__name__}:Counting'"
    source = mm.SourceConfig(kind=louder, path="x")  # pyright: ignore[reportArgumentType]
    assert import_named("x/Source.kind", source.kind) is louder
    with pytest.raises(ValueError, match="define it at the top level of a module"):
        mm.SourceConfig(kind=lambda config: config, path="x")  # pyright: ignore[reportArgumentType]


def test_a_task_that_is_handed_over_has_its_settings() -> None:
    data = mm.DataConfig(task=Digits)  # pyright: ignore[reportArgumentType]
    recipe = mm.Recipe(model=mm.load_config(["digits_vlm"]).model, data=data)
    assert recipe.data.task == mm.DigitsConfig()


def operative_text(data: mm.DataConfig) -> str:
    """The task as a run's file has it."""
    recipe = mm.Recipe(model=mm.load_config(["digits_vlm"]).model, data=data)
    (line,) = [line for line in operative_config(recipe).splitlines() if line.startswith("Data.task =")]
    return line.partition(" = ")[2]
