"""A UNet of ``diffusers`` in a run: it starts from its folder, draws digits, and is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.export.folders import export_folders
from mmjax.train.trainer import Trainer

FOLDER = Path(__file__).parent / "oracles" / "unet" / "tiny"
TENSORS = "diffusion_pytorch_model.safetensors"
SETTINGS = (
    *("Model.generators={'painter': 'unet'}", f"painter/Weights.path={str(FOLDER)!r}", "Digits.draw=1.0"),
    *(
        "painter/UNet.queries=2",
        "painter/UNet.canvases=((8, 8), (8, 16))",
        "Train.eval_samples=0",
        "Train.eval_every=0",
    ),
    *("painter/Layout.tp=2", "painter/Layout.sp=False", "painter/Layout.rank_offset=4", "Data.sequence_length=64"),
)


@pytest.mark.long
def test_out_of_in_is_the_same_folder(tmp_path: Path) -> None:
    started = save_untrained(load_config([write_tiny(tmp_path)], SETTINGS), tmp_path / "run")
    assert any(line.startswith(f"painter: parameters of {FOLDER} (") for line in started)
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / TENSORS, FOLDER / TENSORS)


@pytest.mark.long
def test_a_frozen_unet_trains_the_llm_that_it_reads(tmp_path: Path) -> None:
    """Two steps, in which the generator's folder stays as it is."""
    own = [*SETTINGS, "painter/Optimizer.frozen=True", "Train.steps=2"]
    config = load_config([write_tiny(tmp_path)], own)
    assert config.model["painter"].settings.widths == (8, 16)
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        losses = trainer.train().losses
    assert len(losses) == 2 and np.isfinite(losses).all()
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / TENSORS, FOLDER / TENSORS)


@pytest.mark.parametrize(
    ("binding", "field"),
    [
        ("painter/Layout.pp=2", "painter/Layout.pp=2"),
        ("painter/Layout.sp=True", "painter/Layout.sp=True"),
        ("painter/Layout.tp=8", "painter/Layout.tp=8"),
        ("painter/UNet.widths=(8, 24)", "painter/UNet.widths=(8, 24)"),
    ],
)
def test_refused_in_one_line(binding: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([write_tiny(tmp_path)], [*SETTINGS, binding])
    assert str(error.value).startswith(field) and "\n" not in str(error.value)
