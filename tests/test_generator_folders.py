"""Generators of ``diffusers`` in a run: they start from their folder behind an LLM, train, draw, and give it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.export.folders import export_folders
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

FOLDER = Path(__file__).parent / "oracles" / "mmdit"
PAINTED = (
    "Model.generators={'painter': 'mmdit'}",
    "Digits.draw=1.0",
    "painter/MMDiT.queries=2",
    f"painter/Weights.path={str(FOLDER)!r}",
    f"painter_projector/Weights.path={str(FOLDER)!r}",
    "painter/Layout.rank_offset=4",
    "painter/Layout.tp=2",
    "painter/Layout.pp=2",
    "llm/Decoder.width=12",
    "llm/Decoder.heads=2",
    "llm/Decoder.kv_heads=2",
    "Train.eval_samples=0",
    "Train.steps=2",
    "Data.sequence_length=64",
)


def painted(folder: Path, *bindings: str) -> Recipe:
    return load_config([write_tiny(folder)], [*PAINTED, *bindings])


@pytest.mark.long
def test_a_transformer_trains_behind_an_llm_and_comes_back(tmp_path: Path) -> None:
    """With its projector, and the same tensors in the same files, over tp and pp."""
    recipe = painted(tmp_path)
    assert recipe.model["painter"].settings.channels == 4
    started = save_untrained(recipe, tmp_path / "run")
    assert started[0].startswith(f"painter, painter_projector: parameters of {FOLDER} (")
    export_folders(tmp_path / "run", tmp_path / "out")
    files = sorted(FOLDER.glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        assert_same_tensors(tmp_path / "out" / file.name, file)
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    with Trainer(recipe, tmp_path / "trained", style="silent") as trainer:
        losses = trainer.train().losses
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_a_transformer_behind_an_llm_of_another_width_needs_a_projector_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        save_untrained(painted(tmp_path, "llm/Decoder.width=16"), tmp_path / "run")
    assert "txt_in.weight" in str(caught.value)


def test_a_folder_decides_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        painted(tmp_path, "painter/MMDiT.heads=4")
    assert str(caught.value).startswith(f"painter/MMDiT.heads=4: {FOLDER} has 2; leave the setting out")
