"""Exported parameters, read back by plain Orbax."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from trial_runs import STEPS, assert_same_leaves, flatten, leaves

from mmjax.config import load_run_config
from mmjax.export.__main__ import main
from mmjax.export.parameters import export_run
from mmjax.train.trainer import Trainer


def test_equals_the_trainers_parameters(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(tiny_run, tmp_path / "run")
    with Trainer(load_run_config(copy), copy, style="silent") as trainer:
        assert trainer.step == STEPS
        wanted = {
            name.removeprefix("params/"): np.asarray(leaf)
            for name, leaf in trainer.leaves().items()
            if name.startswith("params/")
        }
    monkeypatch.chdir(tmp_path.parent)
    assert main([f"--run_dir={tiny_run}", f"--out={tmp_path.name}/out"]) == 0  # Orbax takes no relative path
    tree = ocp.load(str(tmp_path / "out"))
    assert set(tree) == {"llm", "vision", "vision_projector"}
    assert tree["llm"]["layers"]["001"]["attn"]["q"].shape == (16, 16)
    assert tree["llm"]["embed"].shape == (260, 16)  # bytes, three specials and one placeholder; no padding for tp=2
    assert_same_leaves(flatten(tree), wanted)
    count = sum(leaf.size for leaf in wanted.values())
    said, command = capsys.readouterr().out.splitlines()
    assert said == f"{tmp_path.name}/out: {count:,} parameters of step {STEPS} in {len(wanted)} leaves; to read them:"
    python, *rest = shlex.split(command)
    read = subprocess.run([sys.executable, *rest], capture_output=True, text=True, timeout=120, check=True)
    assert (python, read.stdout.split()) == ("python", ["llm", "vision", "vision_projector"]), read.stderr
    metadata = ocp.metadata(str(tmp_path / "out")).custom_metadata
    assert isinstance(metadata, dict) and metadata["step"] == STEPS
    assert metadata["config"] == (tiny_run / "config.gin").read_text()


def test_an_earlier_step(tiny_run: Path, tmp_path: Path) -> None:
    done = export_run(tiny_run, tmp_path / "out", step=STEPS - 4)
    stored = {n.removeprefix("params/"): x for n, x in leaves(tiny_run, STEPS - 4).items() if n.startswith("params/")}
    assert (done.step, done.leaves) == (STEPS - 4, len(stored))
    assert_same_leaves(flatten(ocp.load(str(tmp_path / "out"))), stored)


@pytest.mark.long
def test_builds_no_model(tiny_run: Path, tmp_path: Path) -> None:
    """A process that exports needs one host device, whatever the run's layouts, and traces nothing of the model."""
    script = (
        "import sys, jax\n"
        "from mmjax.export.__main__ import main\n"
        "main(sys.argv[1:])\n"
        "print(jax.default_backend(), "
        "any(name in sys.modules for name in ('mmjax.pipeline.place', 'mmjax.train.trainer')))\n"
    )
    flags = [f"--run_dir={tiny_run}", f"--out={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "cpu False"
    assert done.stderr == ""


def test_refused(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = f"--run_dir={tiny_run}", f"--out={tmp_path / 'out'}"
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    steps = f"{STEPS - 4}, {STEPS - 2}, {STEPS}"
    cases = {
        (run,): "--out is missing: the directory to make; it must not exist; write --out=OUT",
        (run, f"--out={tmp_path / 'there'}"): f"--out='{tmp_path}/there' exists: remove it or name another path",
        (run, out, "--step=3"): f"--step=3: there is no such checkpoint; use one of {steps}",
        (f"--run_dir={tmp_path / 'no'}", out): f"--run_dir='{tmp_path}/no' is no directory: name",
        (f"--run_dir={tmp_path / 'there'}", out): f"--run_dir='{tmp_path}/there' has no readable checkpoint: name",
        (run, f"--out={tmp_path / 'file' / 'x'}"): f"--out='{tmp_path}/file/x': cannot be written (Not a directory)",
        (run, out, "--gin.Train.steps=3"): "--gin.Train.steps=3: no flag --gin.Train.steps; use one of",
    }
    for flags, message in cases.items():
        with pytest.raises(SystemExit) as end:
            main(flags)
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n")) == (2, 1) and error.startswith(f"error: {message}"), error
    assert not (tmp_path / "out").exists()
