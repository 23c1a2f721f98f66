"""Rules for images in an exported folder are those that the run had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmjax.config import load_config
from mmjax.data.processor.image_rules import FREE, image_settings
from mmjax.recipe.image_processor import IMAGES, image_processor

CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 32}


def rules(folder: Path, *, tower: str = "", channels: int = 3, **settings: Any) -> tuple[Any, str]:
    """The rules that a folder of an export has, of a run with these settings of a dataset, and the reason for none."""
    (folder / "x.json").write_text("[]")
    bindings = ["Data.sources={'mine': 1.0}", f"mine/Source.path={str(folder / 'x.json')!r}"]
    recipe = load_config(
        ["digits_vlm"], [*bindings, *(f"mine/Source.{name}={value!r}" for name, value in settings.items())]
    )
    content, reason = image_processor(recipe, tower, channels)
    if not content:
        return None, reason
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / IMAGES).write_bytes(content)
    return image_settings(str(folder / "out")), reason


FIXED: dict[str, Any] = {"resize": "fixed", "size": (32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


@pytest.mark.parametrize(
    "settings",
    [
        {"fit": "stretch", "size": (16, 32), "resample": "bilinear"},
        {"fit": "stretch", "mean": (), "std": ()},
        {"fit": "crop", "edge": 40},
        {"fit": "crop", "size": (16, 32), "edge": 40},
        {"fit": "square", "edge": 32},
    ],
    ids=str,
)
def test_rules_are_read_as_they_were_set(settings: dict[str, Any], tmp_path: Path) -> None:
    wanted = FIXED | settings
    read, reason = rules(tmp_path, **wanted)
    assert reason == "" and {name: read[name] for name in wanted} == wanted


def test_a_gray_mean_is_that_of_each_channel_and_crops_begin_at_the_shorter_side(tmp_path: Path) -> None:
    read, _ = rules(tmp_path, **FIXED | {"fit": "crop", "mean": (0.5,), "std": (0.25,)})
    assert (read["mean"], read["std"], read["edge"]) == ((0.5,) * 3, (0.25,) * 3, 32)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"resize": "budget"}, "mine/Source.resize='budget': it has 'fixed' alone"),
        (FIXED | {"fit": "pad"}, "mine/Source.fit='pad': it has 'stretch'"),
        (FIXED | {"fit": "crop", "size": (16, 32)}, "mine/Source.fit='crop': it has 'stretch', and for squares"),
        (FIXED | {"fit": "stretch", "channels": 1}, "ViT.channels=1: its processors give three channels"),
    ],
    ids=["budget", "pad", "crop", "gray"],
)
def test_rules_that_no_processor_has_are_named(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    read, said = rules(tmp_path, **settings)
    assert read is None and said.startswith(reason)


def test_a_tower_s_file_stays_where_the_run_reads_by_it(tmp_path: Path) -> None:
    tower = tmp_path / "tower"
    tower.mkdir()
    (tower / IMAGES).write_text(json.dumps(CLIP))
    theirs = {name: value for name, value in image_settings(str(tower)).items() if name not in FREE}
    assert rules(tmp_path, tower=str(tower), **theirs)[0] == image_settings(str(tower))
    other, _ = rules(tmp_path, tower=str(tower), **theirs | {"fit": "stretch", "edge": 0})
    assert other["fit"] == "stretch", "the run's own rules, not the tower's"
    assert rules(tmp_path, tower=str(tower), **theirs | {"fit": "pad", "edge": 0})[0] is None
    digits = load_config(["digits_vlm"])
    assert image_processor(digits, str(tower), 3) == ((tower / IMAGES).read_bytes(), "")
    assert image_processor(digits, "", 3) == (b"", "Data.task='digits' has no rules for images")


def test_datasets_with_different_rules_have_no_common_one(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    bindings = ["Data.sources={'a': 1.0, 'b': 1.0}"]
    bindings += [f"{name}/Source.path={str(tmp_path / 'x.json')!r}" for name in "ab"]
    bindings += [f"{name}/Source.{k}={v!r}" for name in "ab" for k, v in (FIXED | {"fit": "stretch"}).items()]
    content, reason = image_processor(load_config(["digits_vlm"], bindings), "", 3)
    assert json.loads(content)["size"] == {"height": 32, "width": 32} and reason == ""
    bindings.append("b/Source.resample='nearest'")
    assert image_processor(load_config(["digits_vlm"], bindings), "", 3) == (
        b"",
        "a, b have different rules for images",
    )
