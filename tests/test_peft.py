"""Low-rank adapters in PEFT's folders, in and out, and targets in Hugging Face's names.

``tests/oracles/make_peft.py`` made a folder with PEFT, and the logits of the model with its adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_composed_export import language_model
from trial_runs import ALONE, assert_same_tensors, write_tiny

from mmjax import reference
from mmjax.assembly.model import build_model
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import Sample
from mmjax.export.__main__ import main
from mmjax.export.adapters import export_adapters
from mmjax.models.lora.peft import adapter_config, adapter_rows
from mmjax.recipe import Recipe, advise
from mmjax.recipe.pretrained import adapted_module, folder_parameters, pretrained_folders
from mmjax.train.starts import shapes_of_model
from mmjax.train.trainer import Trainer

ORACLES = Path(__file__).parent / "oracles"
PEFT, BASE = ORACLES / "adapters", ORACLES / "llm" / "qwen2"
ADAPTED = (f"llm/Lora.path={str(PEFT)!r}", "llm/Optimizer.frozen=True")


def configured(folder: Path, *bindings: str) -> Recipe:
    path = write_tiny(folder)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("llm/Decoder")))
    sizes = ("Data.sequence_length=64", "Train.eval_samples=0", *ALONE)
    return load_config([path], [f"llm/Weights.path={str(BASE)!r}", *sizes, *bindings])


def leaves_of(recipe: Recipe) -> tuple[Any, dict[str, np.ndarray]]:
    """The model, and its language model's leaves from the folders."""
    model, leaves = build_model(recipe, make_tokenizer("", ("vision",))), dict[str, np.ndarray]()
    shapes = shapes_of_model(model)
    for path in pretrained_folders(recipe):
        found = folder_parameters(recipe, path, shapes)
        for leaf, (key, view) in found.places.items():
            whole = tuple(slice(0, size) for size in shapes[leaf])
            leaves[leaf] = view.read(found.folder.tensor(key), shapes[leaf], whole)
    return model, leaves


def test_a_folder_decides_rank_alpha_and_targets(tmp_path: Path) -> None:
    """And a run's own configuration has all of it, so that it needs the folder no more."""
    config = configured(tmp_path, *ADAPTED)
    lora = config.model["llm"].lora.settings
    assert (lora.rank, lora.alpha, set(lora.targets)) == (3, 5.0, {"attn/q", "attn/v", "mlp/down"})
    assert config.model.folder("llm_lora") == str(PEFT)
    saved = tmp_path / "saved.gin"
    saved.write_text(operative_config(config).replace(str(PEFT), "gone"))
    assert load_config([saved]).model["llm"].lora.settings.targets == lora.targets
    with pytest.raises(ConfigError, match=r"llm/Lora\.rank=8: .*adapters has 3; leave the setting out"):
        configured(tmp_path, *ADAPTED, "llm/Lora.rank=8")


@pytest.mark.long
def test_logits_are_those_of_peft(tmp_path: Path) -> None:
    model, leaves = leaves_of(configured(tmp_path, *ADAPTED))
    values = np.load(PEFT / "values.npz")
    tokens = values["tokens"].astype(np.int32)
    about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {}}
    sample = Sample(tokens=tokens, loss_weights=np.ones(len(tokens), np.float32), media={}, **about)
    logits = np.asarray(reference.sample_logits(leaves, model, sample))[:, : values["logits"].shape[1]]
    np.testing.assert_allclose(logits, values["logits"], rtol=0, atol=1e-5 * np.abs(values["logits"]).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type='IA3': mmjax reads 'LORA' alone"),
        ({"use_dora": True}, "adapter_config.json: use_dora=True: mmjax has no such adapters; merge them with PEFT"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: mmjax has no such adapters"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}: "),
    ],
)
def test_other_adapters_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PEFT, tmp_path / "other"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, f"llm/Lora.path={str(folder)!r}")
    assert str(caught.value).startswith(f"llm/Lora.path={str(folder)!r}: ") and message in str(caught.value)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A layer without adapters, and adapters of another module."""
    tensors = load_file(PEFT / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    folder = Path(shutil.copytree(PEFT, tmp_path / "other"))
    for own, message in (
        ({name: tensor for name, tensor in tensors.items() if name != key}, f"missing {key}"),
        (
            {**tensors, "base_model.model.visual.blocks.0.mlp.up.lora_A.weight": tensors[key]},
            "unexpected base_model.mo",
        ),
    ):
        save_file(own, folder / "adapter_model.safetensors")
        config = configured(tmp_path, f"llm/Lora.path={str(folder)!r}")
        with pytest.raises(ConfigError) as caught:
            folder_parameters(
                config, str(folder), shapes_of_model(build_model(config, make_tokenizer("", ("vision",))))
            )
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_targets_may_have_the_names_of_hugging_face(tmp_path: Path) -> None:
    """Of the folder that the module starts from, at once; what is none of them is refused with both names."""

    def targets(*names: str, module: str = "llm") -> tuple[str, ...]:
        given = (f"{module}/Lora.rank=2", f"{module}/Lora.targets={names!r}")
        return configured(tmp_path, *given).model[module].lora.settings.targets

    assert targets("q_proj", "v_proj", "down_proj") == ("attn/q", "attn/v", "mlp/down")
    assert targets("self_attn.o_proj", "mlp/up") == ("attn/o", "mlp/up")
    assert len(targets("all-linear")) == 7 and targets("mlp/*") == ("mlp/*",)
    with pytest.raises(
        ConfigError, match=r"'x_proj' stands for no weight of llm's layers; they have attn/q \(q_proj\)"
    ):
        targets("q_proj", "x_proj")


def test_rows_longer_than_the_positions_are_said(tmp_path: Path) -> None:
    """Where a folder says for how many tokens its model was made."""
    most = json.loads((BASE / "config.json").read_text())["max_position_embeddings"]
    for length, count in ((most, 0), (most + 1, 1)):
        lines = [line for line in advise(configured(tmp_path, f"Data.sequence_length={length}")) if "positions" in line]
        assert len(lines) == count
    assert f"was made for {most} tokens (max_position_embeddings)" in lines[0]


@pytest.mark.parametrize("kind", ["llava", "qwen/qwen2_5_vl"])
def test_weights_of_whole_models_have_the_names_of_todays_transformers(kind: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    gone = ("vision/ViT", "llm/Decoder", "Packing")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(gone)))
    lora = ("llm/Lora.rank=2", "llm/Lora.alpha=3", "llm/Lora.targets=('k_proj',)")
    config = load_config([path], [f"Model.weights={str(ORACLES / kind)!r}", "Data.sequence_length=96", *lora])
    about = adapter_config(adapted_module(config, "llm"), "base")
    names = [f"model.language_model.layers.{layer}.self_attn.k_proj" for layer in range(2)]
    assert (about["target_modules"], about["r"], about["lora_alpha"]) == (names, 2, 3)
    keys = [key for row in adapter_rows(adapted_module(config, "llm")) for key in row.keys]
    assert "base_model.model.model.language_model.layers.{}.self_attn.k_proj.lora_A.weight" in keys and len(keys) > 2


@pytest.mark.long
def test_adapters_go_in_and_out_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a run that was adapted anew; a run without adapters has none to write."""
    words = language_model(tmp_path, "qwen2", 14) / "tokenizer.json"
    config = configured(tmp_path, *ADAPTED, f"Data.tokenizer={str(words)!r}", "Data.sequence_length=256")
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert any(line.startswith(f"llm_lora: parameters of {PEFT} (") for line in trainer.started)
        trainer.state.step = 1
        trainer.save()
    (tmp_path / "run" / "config.gin").write_text(operative_config(config))
    assert export_adapters(tmp_path / "run", tmp_path / "out") == [(str(tmp_path / "out"), "llm")]
    assert_same_tensors(tmp_path / "out" / "adapter_model.safetensors", PEFT / "adapter_model.safetensors")
    assert main([f"--run_dir={tmp_path / 'run'}", f"--out={tmp_path / 'two'}", "--format=peft"]) == 0
    assert "llm_lora, which PeftModel.from_pretrained adds" in capsys.readouterr().out
    again = configured(tmp_path, f"llm/Lora.path={str(tmp_path / 'out')!r}")
    assert set(again.model.llm.lora.settings.targets) == set(config.model["llm"].lora.settings.targets)
    assert (again.model.llm.lora.settings.rank, again.model.llm.lora.settings.alpha) == (3, 5.0)
