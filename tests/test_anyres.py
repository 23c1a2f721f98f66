"""`examples/anyres`: images cut into tiles by a reader of one's own, and a callback that numbers them."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from trial_runs import REPOSITORY

from mmjax import sample_data

EXAMPLE = REPOSITORY / "examples" / "anyres"
GIN = "--gin_file=anyres.gin"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("anyres")
    assert sample_data.main([f"--out={folder / 'data'}", "--samples=80"]) == 0
    return folder


@pytest.fixture
def anyres(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("anyres")


def run(program: str, data: Path, *flags: str, folders: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A command as the example says it, from the folder of its files, on data somewhere else."""
    where = (f"--gin.digits/Source.path={data / 'data/llava/data.json'}", f"--gin.Data.cache={data / 'cache'}")
    command = [sys.executable, "-m", f"mmjax.{program}", *flags, *(where if program != "eval" else ())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, EXAMPLE, *folders)))}
    return subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=280)


def config(anyres: ModuleType, data: Path) -> Any:
    path = str(data / "data/llava/data.json")
    return anyres.SourceConfig(path=path, size=(16, 16), grids=((1, 2), (1, 4), (2, 1), (2, 2)), resize="fixed")


def test_it_is_short() -> None:
    assert len((EXAMPLE / "anyres.py").read_text().splitlines()) < 120


def test_its_code_runs_only_where_that_is_allowed(data: Path) -> None:
    done = run("train", data, GIN, "--dry_run")
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "error: llm/Callbacks.before='anyres:number_views': names code that would be run; add --allow_code if you "
        "trust it (in Python allow_code=True) (anyres.gin:14)"
    ]


def test_the_best_grid_keeps_most_and_wastes_least(anyres: ModuleType) -> None:
    grids = ((1, 2), (1, 4), (2, 1), (2, 2))
    sizes = {(16, 32): (1, 2), (16, 64): (1, 4), (40, 20): (2, 1), (30, 31): (2, 2), (8, 8): (1, 2), (9, 100): (1, 4)}
    assert {size: anyres.best_grid(size, (16, 16), grids) for size in sizes} == sizes


def test_an_image_becomes_a_view_of_the_whole_and_tiles_on_lines_of_their_own(anyres: ModuleType, data: Path) -> None:
    reader = anyres.Tiled(config(anyres, data))
    plain, seen = anyres.LlavaReader(config(anyres, data)), set[int]()
    for entry in list(reader.scan())[:20]:
        made, whole = reader.read(entry.place), plain.read(entry.place)
        views, text = iter(made.images), "".join(turn.text for turn in made.dialogue)
        assert text.count("<image>") == len(made.images) and made.dialogue[-1].text == whole.dialogue[-1].text
        for image in whole.images:
            with Image.open(image.path) as opened:
                original = opened.convert("RGB")
            rows, columns = anyres.best_grid(original.size[::-1], (16, 16), reader.config.grids)
            assert "\n".join(["<image>", *["<image>" * columns] * rows, ""]) in text
            own = islice(views, 1 + rows * columns)
            pixels = [np.asarray(Image.open(io.BytesIO(view.data))) for view in own]
            assert np.array_equal(pixels[0], np.asarray(original.resize((16, 16))))
            lines = [np.concatenate(pixels[1 + row * columns :][:columns], axis=1) for row in range(rows)]
            padded = ImageOps.pad(original, (columns * 16, rows * 16))
            assert np.array_equal(np.concatenate(lines), np.asarray(padded))
            seen.add(rows * columns)
        assert next(views, None) is None
    assert len(seen) > 1, "all images have one grid"


def test_tokens_are_marked_with_the_number_of_their_view(anyres: ModuleType) -> None:
    """Two dialogues in a row: the first with three views, the last two side by side, the second with one."""
    import jax.numpy as jnp

    from mmjax import Context
    from mmjax.mesh.spread import Axes

    views = [-1, *[0] * 4, -1, *[1] * 4, *[2] * 4, -1, *[0] * 4, -1, -1]
    index = np.where(np.array(views) >= 0, 7, -1)[None]  # any number from 0 on
    starts = [15, 4, 2]
    given: Any = {
        "vision_index": index,
        "positions": np.concatenate([np.arange(starts[0]), np.arange(starts[1]), [0, 0]])[None],
        "segments": np.repeat([1, 2, 0], starts)[None],
    }
    assert all(array.shape == (1, len(views)) for array in given.values())
    x = jnp.full((1, len(views), 8), 5.0)
    code = np.asarray(anyres.number_views(Context.of(Axes(), given, "causal"), x) - x)[0]
    assert code.dtype == np.float32 and not code[[view < 0 for view in views]].any()
    angles = np.array(views)[:, None] * 10.0 ** -np.linspace(0, 3, 4)
    wanted = np.where(np.array(views)[:, None] >= 0, np.concatenate([np.sin(angles), np.cos(angles)], 1), 0)
    np.testing.assert_allclose(code, wanted, atol=1e-5)


@pytest.mark.long
def test_a_plan_is_made_of_it(data: Path) -> None:
    plan = run("plan", data, GIN, "--allow_code", "--devices=4", "--accelerator=h100", "--json")
    assert plan.returncode == 0 and "vision" in json.loads(plan.stdout)["plan"]["layouts"], plan.stderr


WRONG = """
from mmjax import reads


def halved(context, x):
    return x[:, ::2]


@reads("colours")
def coloured(context, x):
    return x + context.inputs["colours"]
"""


@pytest.mark.long
def test_wrong_callbacks_are_refused_in_a_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    for place, name, why in (
        (
            "vision/Callbacks.projected",
            "halved",
            "; keep shape and dtype (y.astype(x.dtype)); what changes sizes is a mod",
        ),
        ("llm/Callbacks.after", "coloured", "the data of llm have positions, segments, targets, tokens, vision_index"),
        ("llm/Callbacks.after", "colored", "wrong has no function or class 'colored'"),
    ):
        done = run("train", data, GIN, "--allow_code", f"--gin.{place}=wrong:{name}", "--dry_run", folders=(tmp_path,))
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and last.startswith(f"error: {place}") and why in last, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--gin.vision/Layout.dp=1", "--gin.vision/Layout.pp=2", "--gin.llm/Layout.tp=1", "--gin.llm/Layout.dp=2"),
        ("--gin.vision/Layout.tp=2", "--gin.llm/Layout.tp=1", "--gin.llm/Layout.pp=2", "--gin.Train.schedule=zb-h1"),
    ],
    ids=["dp and tp", "pp and dp", "split backwards"],
)
def test_layouts_train_as_one_device_does(data: Path, layout: tuple[str, ...]) -> None:
    fits = ("--gin.llm/Layout.rank_offset=0", "--gin.vision/Layout.rank_offset=4")
    done = run("check", data, GIN, "--allow_code", *layout, *(fits if layout else ()), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] and "llm: the reference calls anyres:number_views too" in done.stderr


@pytest.mark.slow
def test_it_learns_goes_on_and_is_evaluated(data: Path, tmp_path: Path) -> None:
    short = (
        GIN,
        "--allow_code",
        f"--run_dir={tmp_path}",
        "--gin.digits/Source.held_out=16",
        "--gin.Checkpoint.every=20",
    )
    first = run("train", data, *short, "--gin.Train.eval_samples=8", "--gin.Train.steps=30")
    assert first.returncode == 0, first.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and losses[-1] < 0.6 * losses[0]
    again = run("train", data, *short, "--gin.Train.eval_samples=8", "--gin.Train.steps=34")
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 34
    evaluated = run("eval", data, f"--run_dir={tmp_path}", "--allow_code", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    refused = run("eval", data, f"--run_dir={tmp_path}")
    assert refused.returncode == 2 and "add --allow_code" in refused.stderr
