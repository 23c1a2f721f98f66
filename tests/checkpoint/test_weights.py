"""Parameters of a run, a checkpoint or an export: found, read bit for bit under any layout, or refused in one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_checkpointer import assert_bitwise, largest_file, put, save, targets, values

from mmjax.checkpoint import CheckpointError, SavedParameters, TornCheckpointError, export, find_parameters


def parameters(step: int) -> dict:
    return {name.removeprefix("params/"): a for name, a in values(step).items() if name.startswith("params/")}


def test_of_a_run_a_checkpoint_and_an_export(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 2, 4)
    checkpoint = tmp_path / "run" / "checkpoints" / "00000002"
    about = {"step": 9, "seed": 0, "config": "", "versions": {}, "extra": {}}
    export(put(parameters(9)), tmp_path / "out", metadata=about)
    folders = {str(tmp_path / "run"): 4, str(checkpoint): 2, str(tmp_path / "out"): 9}
    for layout in ("eight", "one"):
        for folder, saved in find_parameters(folders).items():
            step = folders[folder]
            assert (saved.metadata.step, saved.modules) == (step, ("llm", "vision"))
            assert_bitwise(saved.read(targets(parameters(step), layout)), parameters(step))
            vision = {name: a for name, a in parameters(step).items() if name.startswith("vision/")}
            assert_bitwise(saved.read(targets(vision, layout)), vision)  # a module alone


def test_refused(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 2, 4)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.gin").write_text("")
    shutil.copytree(tmp_path / "run" / "checkpoints" / "00000004" / "state", tmp_path / "other" / "state")
    (tmp_path / "other" / "_CHECKPOINT_METADATA").write_text("{}")
    for folder, why in (
        ("no", "is no directory; name a run, one of its checkpoints, or what mmjax.export has written"),
        ("new", "has no checkpoint yet; name one that has"),
        ("run/checkpoints", "is no run, checkpoint or export; name a run, such as runs/stage1"),
        ("other", "was not written by this version of mmjax; name a run, or export it again"),
    ):
        with pytest.raises(CheckpointError) as caught:
            SavedParameters.find(str(tmp_path / folder))
        assert str(caught.value).endswith(f"{tmp_path / folder} {why}"), caught.value
    newest = tmp_path / "run" / "checkpoints" / "00000004"
    saved, file = SavedParameters.find(str(tmp_path / "run")), largest_file(newest)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(TornCheckpointError, match=r"00000004 (cannot be read|is damaged)"):
        saved.read(targets(parameters(4)))
    (newest / "mmjax" / "data.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"00000004 is not .*; name an earlier one, such as .*/00000002$"):
        SavedParameters.find(str(tmp_path / "run"))
