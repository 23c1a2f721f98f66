"""`examples/own_task`: a task in a user's own file, under commands, in worker processes and behind a data server."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trial_runs import REPOSITORY, TINY

import mmjax
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.train.metrics import read_metrics

EXAMPLE = REPOSITORY / "examples" / "own_task"
FILE = EXAMPLE / "own_task.gin"
TASK = ("Data.task='own_task:Squares'", "vision/ViT.channels=3")


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A command from the folder of the task."""
    command = [sys.executable, "-m", f"mmjax.{program}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=280)


def test_its_code_runs_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    data = mmjax.DataConfig(task="own_task:Squares")
    model = load_config(["digits_vlm"]).model
    for refused in (
        lambda: load_config([FILE]),
        lambda: load_config([], ["Data.task='own_task:Squares'", "Data.sources={'a': 1.0}", "a/Source.path='x'"]),
        lambda: mmjax.build(mmjax.Recipe(model=model, data=data)),
    ):
        with pytest.raises(ConfigError, match=r"^Data\.task='own_task:Squares': names code that would be run; add"):
            refused()
    assert "own_task" not in sys.modules


def test_its_settings_are_checked_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    for bindings, message in (
        (("Squares.mist=3",), "Squares.mist=3: Squares has no field 'mist'; did you mean 'most'?"),
        (("Squares.most='many'",), "Squares.most='many': must be an integer, such as 5"),
        (
            ("Data.task='own_task:Circles'",),
            "Data.task='own_task:Circles': own_task has no function or class 'Circles'",
        ),
        (("Data.task='own_tusk:Squares'",), "Data.task='own_tusk:Squares': No module named 'own_tusk'; give "),
        (("Data.task='own_task:SquaresConfig'",), "it is no task; name a subclass of mmjax.Task"),
        (("Checkpoint.best='within_two'",), "Checkpoint.best='within_two': did you mean 'within_one'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
            load_config([FILE], bindings, allow_code=True)
        assert "\n" not in str(refusal.value)


def test_a_recipe_has_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    recipe = load_config([FILE], ["Checkpoint.best='within_one'"], allow_code=True)
    assert recipe.data.origin.Config
    assert recipe.data.task == recipe.data.origin.Config(most=4) and recipe.data.origin.scores.keys() == {"within_one"}
    (tmp_path / "config.gin").write_text(operative_config(recipe))
    assert "\nSquares.most = 4\n" in operative_config(recipe) and "Digits" not in operative_config(recipe)
    assert load_config([tmp_path / "config.gin"], allow_code=True) == recipe
    written = mmjax.Recipe(model=recipe.model, data=mmjax.DataConfig(task="own_task:Squares"), allow_code=True)
    assert written.data.task == recipe.data.origin.Config()


def test_it_is_short_and_uses_public_names_alone() -> None:
    text = (EXAMPLE / "own_task.py").read_text()
    tree = ast.parse(text)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "mmjax"}
    assert len(text.splitlines()) < 60 and used and used <= set(mmjax.__all__)
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {line for line in imports if "mmjax" in line} == {
        "import mmjax",
        "from mmjax.configurable import configurable",
    }


@pytest.mark.long
def test_it_is_trained_scored_and_goes_on(tmp_path: Path) -> None:
    """Two worker processes, and then a data server, import the user's file; both make the same batches."""
    gin_file, gone_on, whole = tmp_path / "tiny.gin", tmp_path / "gone_on", tmp_path / "whole"
    gin_file.write_text(
        TINY + "".join(f"{binding}\n" for binding in (*TASK, "Squares.most = 3", "Optimizer.schedule = 'constant'"))
    )
    flags = (f"--gin_file={gin_file}", "--allow_code", "--gin.Data.workers=2")
    for steps, folder in ((6, gone_on), (12, gone_on), (12, whole)):
        done = run("train", *flags, f"--gin.Train.steps={steps}", f"--run_dir={folder}")
        assert done.returncode == 0, done.stderr
    losses = [[row["loss"] for row in read_metrics(folder / "metrics.jsonl")] for folder in (gone_on, whole)]
    assert len(losses[0]) == 12 and losses[0] == losses[1]
    (*_, row) = (json.loads(line) for line in (gone_on / "eval.jsonl").read_text().splitlines())
    assert 0 <= row["within_one"] <= 1 and "within one" in done.stderr + done.stdout
    evaluated = run("eval", f"--run_dir={gone_on}", "--allow_code", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["within_one"] == row["within_one"]
    refused = run("eval", f"--run_dir={gone_on}")
    assert refused.returncode == 2 and "add --allow_code" in refused.stderr


@pytest.mark.long
def test_a_data_server_makes_its_batches(tmp_path: Path) -> None:
    gin_file = tmp_path / "tiny.gin"
    gin_file.write_text(TINY + "".join(f"{binding}\n" for binding in TASK))
    flags = (f"--gin_file={gin_file}", "--allow_code")
    command = [sys.executable, "-u", "-m", "mmjax.serve", *flags, "--port=0", "--workers=1"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=EXAMPLE, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = next(line.split()[-1] for line in server.stdout if line.startswith("serving on"))
            done = run("train", *flags, f"--run_dir={tmp_path}", f"--gin.Data.servers={address}")
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 12 and {row["data_origin"] for row in rows} == {address}
