"""``python -m mmjax.inspect``: its figures by hand, its text, its pictures, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.data.reorder import METHODS
from mmjax.inspect import main
from mmjax.run.inspection import inspect

UNEVEN = (
    "--gin.Train.global_batch=16",
    "--gin.Train.microbatches=4",
    "--gin.Digits.images=(1, 4)",
    "--gin.Digits.digits=(1, 4)",
    "--gin.Digits.scale=(1.0, 2.0)",
    "--gin.Data.sequence_length=320",
    "--gin.Data.reorder=best",
    "--gin.llm/Packing.buckets=((2, 160), (2, 320))",
    "--gin.vision/Packing.buckets=((4, 64), (8, 64), (16, 64))",
)


@pytest.mark.long
def test_figures_text_and_pictures(tmp_path, capsys):
    gin = write_tiny(tmp_path)
    inspected = inspect(load_config([gin], [flag.removeprefix("--gin.") for flag in UNEVEN]), 2)
    found = json.loads(json.dumps(inspected.numbers()))
    assert (found["steps"], found["samples"], found["configured"]) == (2, 32, "best")
    assert found["lengths"]["llm"]["count"] == 32
    media, patches = found["media"]["vision"], found["lengths"]["vision"]
    assert patches["count"] == round(32 * media["mean"]) and 1 <= media["median"] <= media["most"] <= 4
    real = {name: own["count"] * own["mean"] for name, own in found["lengths"].items()}
    for method in METHODS:
        own = found["reorder"][method]
        for module, uses in own["buckets"].items():
            assert sum(use["count"] for use in uses) == 8 and sum(use["real"] for use in uses) == round(real[module])
            for use in uses:
                assert use["all"] == use["count"] * use["rows"] * use["width"] * 2  # cells
                assert use["waste"] == pytest.approx(1 - use["real"] / use["all"] if use["all"] else 0)
            assert own["efficiency"][module] == pytest.approx(real[module] / sum(use["all"] for use in uses))
        assert 0 < own["bubble"] < 1 <= own["imbalance"]
    none, best = found["reorder"]["none"], found["reorder"]["best"]
    assert best["makespan"] < none["makespan"] and best["imbalance"] < none["imbalance"]
    assert main([f"--gin_file={gin}", *UNEVEN, "--steps=2", f"--out={tmp_path / 'pictures'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == list(inspected.describe()) and lines[0] == "32 samples in 2 steps"
    line = next(line for line in lines if line.startswith("best"))
    assert line.endswith("(configured)")
    figures = [float(word.rstrip("%")) for word in line.split() if word[0].isdigit()]
    shares = [100 * best["efficiency"][module] for module in ("llm", "vision")]
    np.testing.assert_allclose(
        figures, [best["makespan"], 100 * best["bubble"], best["imbalance"], *shares], atol=0.051
    )
    for name in ("data.png", "samples.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


def test_wrong_flags(tmp_path, capsys):
    gin = f"--gin_file={write_tiny(tmp_path)}"
    (tmp_path / "file").write_text("")
    for flags, said in (
        ([gin, "--steps=0"], "--steps=0: must be 1 or more"),
        ([], "--gin_file is missing"),
        ([gin, f"--out={tmp_path / 'file'}"], "is a file; name a folder"),
    ):
        with pytest.raises(SystemExit) as end:
            main(flags)
        captured = capsys.readouterr()
        assert end.value.code == 2 and captured.out == ""
        assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1
