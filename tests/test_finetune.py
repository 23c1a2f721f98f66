"""configs/finetune_*.gin: two settings start a run from a folder, on data that come with an installed package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from trial_runs import REPOSITORY

from mmjax.config import load_config
from mmjax.inspect.sample_text import first_samples
from mmjax.models.config import projector_name
from mmjax.recipe import Recipe
from mmjax.train.__main__ import main as train
from mmjax.train.metrics import read_metrics

CONFIGS, ORACLES = REPOSITORY / "configs", Path(__file__).parent / "oracles"
PARTS: Mapping[str, set[str]] = {
    "": {"llm", "vision_projector"},
    "projector": {"vision_projector"},
    "lora": {"llm_lora", "vision_projector"},
    "tower": {"llm", "vision_projector", "vision"},
}
"""What is trained, by the file that is given after the first."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN: Mapping[str, Any] = {
    "special": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<a>", "<|vision_start|>", "<|vision_end|>"),
        *("<|video_pad|>", "<|image_pad|>"),
    ),
    "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT},
    "images": {
        "image_processor_type": "Qwen2VLImageProcessor",
        **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 24 * 24},
    },
    "said": "{}<|im_end|>",
    "asked": "<|im_start|>assistant",
}
"""What a processor of Qwen-VL has beside its folder."""
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VICUNA_CHAT = (
    "{% for m in messages %}{{ m.role.upper() }}: {% for c in m.content %}"
    "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "config": "finetune_llava15",
        "folder": ORACLES / "llava",
        "special": ("<s>", "</s>", "<pad>", "<unk>", "<a>", "<b>", "<c>", "<image>"),
        "tokens": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        "images": {"image_processor_type": "CLIPImageProcessor", "size": 28, "crop_size": 28},
        "said": "{}</s>",
        "asked": "ASSISTANT:",
    },
    "llava_next": {
        "config": "finetune_llava15",
        "folder": ORACLES / "llava_next",
        "special": ("<s>", "</s>", "<pad>", "<unk>", "<a>", "<b>", "<c>", "<image>"),
        "tokens": {
            **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
            "chat_template": VICUNA_CHAT,
        },
        "images": {
            **{"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 17}, "crop_size": 17},
            "image_grid_pinpoints": [[17, 34], [34, 17]],
        },
        "said": "{}</s>",
        "asked": "ASSISTANT:",
    },
    "qwen2_vl": {"config": "finetune_qwen2_vl", "folder": ORACLES / "qwen" / "qwen2_vl", **QWEN},
    "qwen3_vl": {"config": "finetune_qwen3_vl", "folder": ORACLES / "qwen" / "qwen3_vl", **QWEN},
    "qwen3_5": {"config": "finetune_qwen3_5", "folder": ORACLES / "qwen" / "qwen3_5", **QWEN},
    "gemma3": {
        "config": "finetune_gemma3",
        "folder": ORACLES / "gemma" / "gemma3",
        "special": (
            *("<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<a>"),
            "<image_soft_token>",
        ),
        "tokens": {
            **{"bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>"},
            "chat_template": GEMMA_CHAT,
        },
        "images": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 48, "width": 48}},
        "said": "{}<end_of_turn>",
        "asked": "<start_of_turn>model",
    },
    "gemma4": {
        "config": "finetune_gemma4",
        "folder": ORACLES / "gemma" / "gemma4",
        "special": ("<pad>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|video|>", "<|image|>"),
        "tokens": {
            **{"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"},
            "chat_template": GEMMA_CHAT.replace("<start_of_image>", "<|image|>")
            .replace("<start_of_turn>", "<|turn>")
            .replace("<end_of_turn>", "<turn|>"),
        },
        "images": {
            "image_processor_type": "Gemma4ImageProcessor",
            **{"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 6},
        },
        "said": "{}<turn|>",
        "asked": "<|turn>model",
    },
}
"""By folder, what a processor has beside it."""
ICONS = Path(matplotlib.get_data_path()) / "images"
SMALL = (
    *("Train.global_batch=16", "Train.microbatches=2", "Train.dtype=float32", "Train.log_every=20"),
    *("Train.eval_every=0", "Checkpoint.every=0", "Train.eval_samples=21", "llm/Decoder.remat='none'"),
    *("Data.sequence_length=128", "Data.workers=0", "mine/Source.held_out=0"),
    *("llm/Packing.buckets=()", "vision/Packing.buckets=()", "Optimizer.schedule='constant'", "Optimizer.warmup=0"),
)
ONE_DEVICE = ("llm/Layout.tp=1", "llm/Layout.dp=1", "vision/Layout.dp=1")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A family of whole models."""
    return request.param


def write_folder(family: str, place: Path) -> Path:
    """A tiny random model as ``save_pretrained`` writes it, with tokenizer, processor and chat template."""
    about = FAMILIES[family]
    folder = Path(shutil.copytree(about["folder"], place / family))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(own, special=True, normalized=False) for own in about["special"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(about["tokens"]))
    (folder / "preprocessor_config.json").write_text(json.dumps(about["images"]))
    return folder


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


def two_lines(folder: Path, data: Path) -> tuple[str, ...]:
    return f"Model.weights={str(folder)!r}", f"mine/Source.path={str(data)!r}"


def files(family: str, part: str) -> list[Path]:
    first = CONFIGS / f"{FAMILIES[family]['config']}.gin"
    return [first, *([CONFIGS / "finetune" / f"{part}.gin"] if part else [])]


def trained(recipe: Recipe) -> set[str]:
    return {name for name, own in recipe.model.optimizers.items() if not own.frozen}


@pytest.mark.parametrize("part", PARTS)
def test_two_settings_are_a_configuration_of_each_part(family: str, part: str, tmp_path: Path) -> None:
    given, own = two_lines(FAMILIES[family]["folder"], tmp_path / "data.json"), files(family, part)
    config = load_config(own, given)
    assert trained(config) == PARTS[part] and config.devices == 8
    assert all(own.learning_rate <= 1e-3 for own in config.model.optimizers.values())
    assert config.model["llm"].settings.vocab == 264 and config.model["vision"].settings.width == 16
    alone = load_config([*own, CONFIGS / "finetune" / "one_device.gin"], given)
    assert alone.devices == 1 and trained(alone) == PARTS[part]
    assert alone.train.global_batch // alone.train.microbatches in (1, 2)


def test_a_second_stage_has_the_settings_of_the_folder_and_the_projector_of_the_first(tmp_path: Path) -> None:
    folder = FAMILIES["llava"]["folder"]
    stage1 = f"vision_projector/Weights.init_from={str(tmp_path / 'stage1')!r}"
    given = [*two_lines(folder, tmp_path / "data.json"), stage1]
    config, first = load_config(files("llava", ""), given), load_config(files("llava", "projector"), given[:-1])
    projector = config.model.projectors["vision"].settings
    assert projector == first.model.projectors["vision"].settings and projector.activation == "gelu_exact"
    assert config.init_from(projector_name("vision")) == str(tmp_path / "stage1")
    assert not config.model.folder(projector_name("vision")) and config.model.folder("llm") == str(folder)
    other = load_config(files("llava", ""), [*given, "vision/Projector.activation='quick_gelu'"])
    assert (
        other.model.projectors["vision"].settings.activation == "quick_gelu"
    )  # as it may have been in the first stage


@pytest.mark.parametrize("messages", [False, True])
def test_only_answers_are_learned(family: str, messages: bool, tmp_path: Path) -> None:
    """Template, image rules and tokens are the folder's."""
    data, folder = write_icons(tmp_path / "icons", messages), write_folder(family, tmp_path)
    cache = f"Data.cache={str(tmp_path / 'cache')!r}"
    config = load_config(files(family, ""), [*two_lines(folder, data), *SMALL, cache])
    about = FAMILIES[family]
    for sample, spans in first_samples(config, 3):
        said = "".join(span.text for span in spans if span.learned)
        assert said.strip() == about["said"].format(sample.answer)
        media = [span.text for span in spans if span.medium]
        count = int(sample.placeholders("vision").sum())
        assert media == [f"<image \u00d7{count}>"] and (family != "llava" or count == 16)
        text = "".join(span.text for span in spans if not span.learned)
        assert "What is it?" in text and about["asked"] in text


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("name", "part", "rate", "left", "right"),
    [
        ("llava", "", 0.01, 0.1, 0.8),
        ("llava", "lora", 0.02, 0.35, 0.5),
        ("qwen2_vl", "", 0.01, 0.1, 0.8),
        ("qwen3_vl", "", 0.01, 0.1, 0.8),
        ("qwen3_5", "", 0.01, 0.1, 0.8),
        ("gemma3", "", 0.01, 0.1, 0.4),  # with few steps, from embeddings that are small
    ],
)
def test_icons_are_learned(name: str, part: str, rate: float, left: float, right: float, tmp_path: Path) -> None:
    """Their names, by the language model, or by adapters of one whose embeddings and head stay random."""
    data, folder, run = write_icons(tmp_path / "icons"), write_folder(name, tmp_path), tmp_path / "run"
    flags = [f"--gin_file={file}" for file in files(name, part)] + [f"--run_dir={run}"]
    own = [f"Optimizer.learning_rate={rate}", f"Train.steps={200 if part else 80}"]
    own += [f"Data.cache={str(tmp_path / 'cache')!r}"]
    own += [f"llm_lora/Optimizer.learning_rate={rate}", "llm/Lora.rank=16", "llm/Lora.alpha=32.0"] if part else []
    flags += [f"--gin.{binding}" for binding in (*two_lines(folder, data), *SMALL, *ONE_DEVICE, *own)]
    assert train(flags) == 0
    losses = [row["loss"] for row in read_metrics(run / "metrics.jsonl")]
    (row,) = read_metrics(run / "eval.jsonl")
    assert sum(losses[-5:]) / 5 < left * losses[0] and row["loss"] < left * losses[0]
    assert row["exact_match"] > right
