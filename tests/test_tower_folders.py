"""Vision towers and ears of ``transformers`` in a run: its encoder starts from their folder, and gives it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trial_runs import REPOSITORY, SMALL_EARS, assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.export.folders import export_folders
from mmjax.train.trainer import Trainer

FOLDERS = Path(__file__).parent / "oracles" / "vision"
LAYOUT = ("vision/Layout.tp=2", "vision/Layout.pp=3", "vision/Layout.dp=1", "vision/Layout.rank_offset=2")


@pytest.mark.long
@pytest.mark.parametrize("family", ["clip", "dinov2", "dinov2_with_registers", "dinov3_vit_gated"])
def test_out_of_in_is_the_same_folder_under_a_layout(family: str, tmp_path: Path) -> None:
    """Tensors that no leaf needs, CLIP's last norm and DINOv2's masking token, come through as they are."""
    path = write_tiny(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("vision/ViT")))
    own = [f"vision/Weights.path={str(FOLDERS / family)!r}", "Train.eval_samples=0", "Data.sequence_length=256"]
    config = load_config([path], [*own, *LAYOUT])
    started = save_untrained(config, tmp_path / "run")
    assert started[0].startswith(f"vision: parameters of {FOLDERS / family} (")
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDERS / family / "model.safetensors")


@pytest.mark.long
def test_a_frozen_whisper_hears_padded_calls_and_stays_as_it_is(tmp_path: Path) -> None:
    """Two steps in bf16 over tp and pp; the decoder comes through too."""
    folder, path = FOLDERS.parent / "whisper", tmp_path / "ears.gin"
    lines = (REPOSITORY / "configs" / "digits_valm.gin").read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("audio/Whisper")))
    own = [binding for binding in SMALL_EARS if not binding.startswith("audio/Whisper")]
    own += [f"audio/Weights.path={str(folder)!r}", "audio/Optimizer.frozen=True", "audio/Whisper.merge=5"]
    own += ["audio/Layout.tp=2", "audio/Layout.pp=1", "Train.dtype='bfloat16'", "Train.steps=2", "Train.eval_samples=0"]
    config = load_config([path], own)
    assert config.model["audio"].settings.mels == 20 and config.model.optimizers["audio"].frozen_dtype == "float32"
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        packer = trainer.parts.packer
        assert {width % 50 for _, width in packer.encoders["audio"].buckets} == {0}
        losses = trainer.train().losses
    assert len(losses) == 2 and np.isfinite(losses).all()
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", folder / "model.safetensors")
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
