"""`examples/graphs.py`: other graphs, written in Python, are those of gin; they train, and their layouts agree."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from trial_runs import REPOSITORY

import mmjax as mm
from mmjax.config import load_config, operative_config
from mmjax.train.metrics import read_metrics

SCRIPT = REPOSITORY / "examples" / "graphs.py"
GRAPHS = ("clip", "redraw", "speak")


@pytest.fixture(scope="module")
def graphs() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("graphs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_in_python_is_read_again_from_gin(graph: str, graphs: ModuleType, tmp_path: Path) -> None:
    recipe = graphs.make_recipe(graph, 3)
    (tmp_path / "config.gin").write_text(operative_config(recipe))
    assert load_config([tmp_path / "config.gin"]) == recipe
    of_file = load_config([REPOSITORY / "configs" / f"digits_{graph}.gin"])
    edges = [{(edge.source, edge.target) for edge in model.flows} for model in (recipe.model, of_file.model)]
    assert edges[0] == edges[1] and list(recipe.model) == list(of_file.model)


@pytest.mark.long
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_script_trains_each_graph(graph: str, tmp_path: Path) -> None:
    flags = [graph, "--steps=4", f"--run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps, loss " in done.stdout
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.long
def test_the_script_checks_a_graph(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "clip", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "equal", done.stdout + done.stderr


def test_edges_in_python_are_checked_before_a_device_is_touched(graphs: ModuleType) -> None:
    recipe = graphs.make_recipe("clip", 3)
    nodes = recipe.model.nodes.values()
    with pytest.raises(mm.ConfigError, match=r"^Model\.edges=.*nothing reads 'temporal'; add 'temporal -> llm'$"):
        mm.build(mm.Recipe(model=mm.ModelSpec.of(*nodes, edges=["vision -> llm"]), data=recipe.data))
