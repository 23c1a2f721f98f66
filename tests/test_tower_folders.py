"""Vision towers of ``transformers`` in a run: its encoder starts from their folder, and gives it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trial_runs import write_tiny

from mmjax.config import load_config, operative_config
from mmjax.export import export_folders
from mmjax.run.trainer import Trainer

FOLDERS = Path(__file__).parent / "oracles" / "vision"
LAYOUT = ("vision/Layout.tp=2", "vision/Layout.pp=3", "vision/Layout.dp=1", "vision/Layout.rank_offset=2")


@pytest.mark.long
@pytest.mark.parametrize("family", ["clip", "dinov2"])
def test_out_of_in_is_the_same_folder_under_a_layout(family: str, tmp_path: Path) -> None:
    """Tensors that no leaf needs, CLIP's last norm and DINOv2's masking token, come through as they are."""
    path = write_tiny(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("vision/ViT")))
    own = [f"vision/Weights.path={str(FOLDERS / family)!r}", "Train.eval_samples=0", "Data.sequence_length=256"]
    config = load_config([path], [*own, *LAYOUT])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.started[0].startswith(f"vision: parameters of {FOLDERS / family} (")
        trainer.step = 1
        trainer.save()
    (tmp_path / "run" / "config.gin").write_text(operative_config(config))
    export_folders(tmp_path / "run", tmp_path / "out")
    want, got = (load_file(place / "model.safetensors") for place in (FOLDERS / family, tmp_path / "out"))
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        np.testing.assert_array_equal(got[key], tensor, strict=True)
