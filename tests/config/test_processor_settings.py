"""What is left out of a configuration comes from the processor of the folder that a model starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmjax.config import changed_values, config_of_values, load_config, operative_config
from mmjax.configurable import ConfigError

ORACLES = Path(__file__).parents[1] / "oracles"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json")
DATA = ("Data.sources={'mine': 1.0}", "mine/Source.path=mine.json", "Model.encoders={'vision': 'vit'}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A LLaVA's ``config.json``, with a processor."""
    home = tmp_path / "model"
    home.mkdir()
    shutil.copy(ORACLES / "llava" / "config.json", home)
    for name in FILES:
        shutil.copy(ORACLES / "processors" / "llava" / name, home)
    return home


def loaded(folder: Path, *changes: str):
    return load_config([], [*DATA, f"Model.weights='{folder}'", *changes])


def test_everything_that_is_left_out_comes_from_the_folder(folder: Path) -> None:
    config = loaded(folder)
    source = config.data.sources["mine"]
    assert config.data.settings.tokenizer == str(folder) and source.template == "folder"
    assert (source.resize, source.size, source.edge, source.fit, source.draft) == ("fixed", (28, 28), 28, "crop", False)
    assert source.mean == (0.48145466, 0.4578275, 0.40821073) and source.resample == "bicubic"
    # A run directory has all of it, and the folder may be gone.
    again = folder.parent / "config.gin"
    again.write_text(operative_config(config))
    shutil.rmtree(folder)
    assert load_config([again]) == config


def test_values_by_key_make_the_same_configuration(folder: Path) -> None:
    for changes in ((), ("Data.tokenizer=''", "mine/Source.template='plain'", "mine/Source.resize='budget'")):
        config = loaded(folder, *changes)
        assert config_of_values(changed_values(config)) == config


def test_what_is_set_stands(folder: Path) -> None:
    config = loaded(folder, "Data.tokenizer=''", "mine/Source.preset='llava-next'")
    source = config.data.sources["mine"]
    assert (config.data.settings.tokenizer, source.template, source.resize, source.edge) == ("", "vicuna", "anyres", 0)
    assert loaded(folder, "mine/Source.template='chatml'").data.sources["mine"].template == "chatml"
    assert loaded(folder, "mine/Source.draft=True").data.sources["mine"].draft


def test_a_contradiction_is_named(folder: Path) -> None:
    said = rf"^mine/Source\.size=\(14, 14\): {folder} has \(28, 28\); leave the setting out, or set mine/Source\.resize"
    with pytest.raises(ConfigError, match=said):
        loaded(folder, "mine/Source.size=(14, 14)")
    with pytest.raises(ConfigError, match=r"^mine/Source\.mean=\(0\.5, 0\.5, 0\.5\): "):
        loaded(folder, "mine/Source.preset='siglip'")


def test_a_folder_without_a_processor(folder: Path) -> None:
    (folder / "processor_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    source = loaded(folder).data.sources["mine"]
    assert (source.template, source.resize) == ("vicuna", "budget")  # LLaVA-1.5's own
    with pytest.raises(ConfigError, match=r"^mine/Source\.pieces=.*a folder's template has none"):
        loaded(folder, "mine/Source.template='folder'", "mine/Source.pieces={'question': 'Q: {text}'}")
    (folder / "tokenizer.json").unlink()
    assert loaded(folder).data.settings.tokenizer == ""
    (folder / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"tokenizer\.model alone, .* or set Data\.tokenizer$"):
        loaded(folder)


def test_rules_that_are_not_known_are_named(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Odd"}))
    with pytest.raises(ConfigError, match=r"^mine/Source\.resize is left to .*image_processor_type='Odd' is none of"):
        loaded(folder)
    assert loaded(folder, "mine/Source.resize='budget'").data.sources["mine"].resize == "budget"


@pytest.mark.parametrize(("name", "positions"), [("qwen2_vl", 0.0), ("qwen2_5_vl", 4.0)])
def test_times_are_positions_where_the_llm_has_them(name: str, positions: float, tmp_path: Path) -> None:
    """A Qwen tower before another LLM has no rule for videos, and one that is set is refused."""
    home = tmp_path / "model"
    shutil.copytree(ORACLES / "generated" / name, home)
    shutil.copytree(ORACLES / "processors" / "qwen2_vl", home, dirs_exist_ok=True)
    shutil.copytree(ORACLES / "generated" / name, home, dirs_exist_ok=True)
    source = loaded(home).data.sources["mine"]
    assert (source.video, source.time_positions, source.video_pixels) == ("positions", positions, (128, 1536))
    tower = [*DATA, f"vision/Weights.path='{home}'", "vision/ViT.merge=2", "llm/Decoder.layers=1"]
    plain = load_config([], tower).data.sources["mine"]
    assert (plain.video, plain.time_positions, plain.resize) == ("", 0.0, "smart")
    with pytest.raises(ConfigError, match=r"mine/Source.video='positions': the LLM's positions have no axis of time"):
        load_config([], [*tower, "mine/Source.video='positions'"])
