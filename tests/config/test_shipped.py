"""Configurations that come with mmjax are found by name, from any directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmjax.config import config_that_fits, default_run_dir, load_config
from mmjax.config.shipped import CONFIGS, config_names, find_config, nearest_file
from mmjax.configurable import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_configuration_has_a_name() -> None:
    assert {"digits_vlm", "llava15", "finetune/lora"} <= set(config_names())
    assert all(find_config(name) == CONFIGS / f"{name}.gin" for name in config_names())


@pytest.mark.parametrize("name", ["digits_vlm", "digits_vlm.gin", "configs/digits_vlm.gin", "configs/digits_vlm"])
def test_a_name_and_its_path_in_a_checkout_are_the_same(name: str) -> None:
    assert find_config(name) == CONFIGS / "digits_vlm.gin"
    assert load_config([name]) == load_config([CONFIGS / "digits_vlm.gin"])
    assert default_run_dir([name]) == Path("runs/digits_vlm")


def test_a_file_that_is_there_comes_first(elsewhere: Path) -> None:
    (elsewhere / "digits_vlm.gin").write_text("Train.steps = 7\n")
    assert find_config("digits_vlm.gin") == Path("digits_vlm.gin")
    assert load_config(["digits_vlm.gin"]).train.steps == 7 and load_config(["digits_vlm"]).train.steps == 520


def test_a_file_of_ones_own_includes_one_by_name(elsewhere: Path) -> None:
    (elsewhere / "mine.gin").write_text("include 'digits_vlm'\nTrain.seed = 7\n")
    mine = load_config(["mine.gin"])
    assert mine.train.seed == 7 and mine.model.layouts == load_config(["digits_vlm"]).model.layouts


def test_what_fits_is_named_as_the_given_one_was(elsewhere: Path) -> None:
    assert config_that_fits(4, ["digits_vlm"]) == (Path("digits_vlm_one_device"), 1)
    assert config_that_fits(4) == (Path("digits_vlm_one_device"), 1)
    given = CONFIGS / "digits_vlm.gin"
    assert config_that_fits(4, [given]) == (given.with_stem("digits_vlm_one_device"), 1)


def test_names_lead_into_the_folder_alone() -> None:
    for name in ("../pyproject", "../configs/digits_vlm", "/digits_vlm", "none", "configs"):
        assert find_config(name) == Path(name)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("digits_vml", "did you mean 'digits_vlm'?"),
        ("configs/digit_vlm.gin", "did you mean 'digits_vlm'?"),
        ("finetune/lor", "did you mean 'finetune/lora'?"),
        ("weather", "there is no gin file in .; use one of mmjax's, such as digits_vlm"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name: str, fix: str) -> None:
    assert nearest_file(Path(name)) == fix
    with pytest.raises(ConfigError) as error:
        load_config([name])
    assert str(error.value) == f"--gin_file={name}: no such file; {fix}"
