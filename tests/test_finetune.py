"""configs/finetune_*.gin: two settings start a run from a folder, on data that come with an installed package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import pytest
from trial_runs import REPOSITORY

from mmjax.config import Config, load_config
from mmjax.models.config import projector_name
from mmjax.run.metrics import read_metrics
from mmjax.run.sample_text import first_samples
from mmjax.train import main as train

CONFIGS, FOLDER = REPOSITORY / "configs", Path(__file__).parent / "oracles" / "llava"
LLAVA = CONFIGS / "finetune_llava15.gin"
PARTS: Mapping[str, set[str]] = {
    "": {"llm", "vision_projector"},
    "projector": {"vision_projector"},
    "lora": {"llm_lora", "vision_projector"},
    "tower": {"llm", "vision_projector", "vision"},
}
"""What is trained, by the file that is given after the first."""
ICONS = Path(matplotlib.get_data_path()) / "images"
SMALL = (
    *(
        "Train.global_batch=16",
        "Train.microbatches=2",
        "Train.dtype=float32",
        "Train.log_every=20",
        "Train.eval_every=0",
    ),
    *("Data.sequence_length=96", "Data.workers=0", "mine/Source.held_out=0", "llm/Decoder.remat='none'"),
    *("llm/Packing.buckets=()", "vision/Packing.buckets=()", "Optimizer.schedule='constant'", "Optimizer.warmup=0"),
    *("Checkpoint.every=0", "Train.eval_samples=21"),
)
SIZE = ("mine/Source.size=(28, 28)",)
ONE_DEVICE = ("llm/Layout.tp=1", "llm/Layout.dp=1", "vision/Layout.dp=1")


def write_icons(folder: Path, messages: bool = False) -> Path:
    """Icons of a toolbar with their names, as LLaVA's JSON or as Hugging Face's messages; the images beside them."""
    folder.mkdir()
    rows = []
    for icon in sorted(ICONS.glob("*.png")):
        shutil.copy(icon, folder)
        name = icon.stem.removesuffix("_large").replace("_", " ")
        if messages:
            asked = [{"type": "image", "image": icon.name}, {"type": "text", "text": "What is it?"}]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": name}]
            rows.append({"messages": turns})
        else:
            turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": name}]
            rows.append({"id": icon.stem, "image": icon.name, "conversations": turns})
    path = folder / ("icons.jsonl" if messages else "icons.json")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if messages else json.dumps(rows))
    return path


def two_lines(data: Path) -> tuple[str, ...]:
    return f"Model.weights={str(FOLDER)!r}", f"mine/Source.path={str(data)!r}"


def files(part: str) -> list[Path]:
    return [LLAVA, *([CONFIGS / "finetune" / f"{part}.gin"] if part else [])]


def trained(config: Config) -> set[str]:
    return {name for name, own in config.optimizers.items() if not own.frozen}


@pytest.mark.parametrize("part", PARTS)
def test_two_settings_are_a_configuration_of_each_part(part: str, tmp_path: Path) -> None:
    config = load_config(files(part), two_lines(tmp_path / "data.json"))
    assert trained(config) == PARTS[part] and config.devices == 8
    assert all(own.learning_rate <= 1e-3 for own in config.optimizers.values())
    assert config.modules["llm"].width == 24 and config.modules["vision"].layers == 2
    alone = load_config([*files(part), CONFIGS / "finetune" / "one_device.gin"], two_lines(tmp_path / "data.json"))
    assert alone.devices == 1 and trained(alone) == PARTS[part]
    assert alone.train.global_batch // alone.train.microbatches in (1, 2)


def test_a_second_stage_has_the_settings_of_the_folder_and_the_projector_of_the_first(tmp_path: Path) -> None:
    stage1 = f"vision_projector/Weights.init_from={str(tmp_path / 'stage1')!r}"
    given = [*two_lines(tmp_path / "data.json"), stage1]
    config, first = load_config(files(""), given), load_config(files("projector"), given[:-1])
    assert config.projectors == first.projectors and config.projectors["vision"].activation == "gelu_exact"
    assert config.init_from(projector_name("vision")) == str(tmp_path / "stage1")
    assert not config.pretrained(projector_name("vision")) and config.pretrained("llm") == str(FOLDER)
    other = load_config(files(""), [*given, "vision/Projector.activation='quick_gelu'"])  # as in the first stage
    assert other.projectors["vision"].activation == "quick_gelu"


@pytest.mark.parametrize("messages", [False, True])
def test_only_answers_are_learned(messages: bool, tmp_path: Path) -> None:
    data = write_icons(tmp_path / "icons", messages)
    config = load_config(files(""), [*two_lines(data), *SMALL, *SIZE, f"Data.cache={str(tmp_path / 'cache')!r}"])
    for sample, spans in first_samples(config, 3):
        said = "".join(span.text for span in spans if span.learned)
        assert said.startswith((sample.answer, f" {sample.answer}")) and len(said) < len(sample.answer) + 8
        assert [span.text for span in spans if span.medium] == ["<image \u00d716>"]
        assert "What is it?" in "".join(span.text for span in spans if not span.learned)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("part", "rate", "left", "right"), [("", 0.01, 0.1, 0.8), ("lora", 0.02, 0.35, 0.5)])
def test_icons_are_learned(part: str, rate: float, left: float, right: float, tmp_path: Path) -> None:
    """Their names, by the language model, or by adapters of one whose embeddings and head stay random."""
    data, run = write_icons(tmp_path / "icons"), tmp_path / "run"
    flags = [f"--gin_file={file}" for file in files(part)] + [f"--run_dir={run}"]
    own = [
        f"Optimizer.learning_rate={rate}",
        f"Train.steps={200 if part else 80}",
        f"Data.cache={str(tmp_path / 'cache')!r}",
    ]
    own += [f"llm_lora/Optimizer.learning_rate={rate}", "llm/Lora.rank=16", "llm/Lora.alpha=32.0"] if part else []
    flags += [f"--gin.{binding}" for binding in (*two_lines(data), *SMALL, *SIZE, *ONE_DEVICE, *own)]
    assert train(flags) == 0
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
    (row,) = read_metrics(run / "eval.jsonl")
    assert sum(losses[-5:]) / 5 < left * losses[0] and row["loss"] < left * losses[0]
    assert row["exact_match"] > right
