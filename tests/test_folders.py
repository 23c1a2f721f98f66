"""Modules that start from folders of safetensors, and folders made of runs: whole commands on a model that is tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trial_runs import ALONE, assert_same_leaves, leaves, train_flags, write_tiny

from mmjax.assembly.buckets import build_packer
from mmjax.checkpoint import Checkpointer, CheckpointError
from mmjax.config import load_config, load_run_config, operative_config
from mmjax.config.from_folder import folder_bindings
from mmjax.configurable import ConfigError
from mmjax.data.loader import tokenizer_of
from mmjax.export.__main__ import main
from mmjax.export.folders import export_folders
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.llama.weights import rows as entries_of
from mmjax.models.llama.weights import to_hf_config
from mmjax.models.module import layer_runs
from mmjax.models.parameters import ModuleSlice
from mmjax.recipe import advise
from mmjax.train.__main__ import main as train
from mmjax.train.trainer import Trainer
from mmjax.weights.table import expand
from mmjax.weights.write import write

TOWER = Path(__file__).parent / "oracles" / "vision" / "siglip"
LONGER = ("llm/Decoder.qkv_bias=True", "llm/Decoder.layers=3", "llm/Decoder.norm_eps=1e-6")
ONE_STEP = ("Train.steps=1", "Optimizer.warmup=0", "Optimizer.schedule='constant'", "Checkpoint.every=1")


def gin(bindings: tuple[str, ...]) -> list[str]:
    return [f"--gin.{binding}" for binding in bindings]


def leaf_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a language model's leaves by name in the module."""
    module = Llama(c)
    runs = tuple(run for run, _ in layer_runs(module, range(c.layers)))
    own = jax.tree.leaves(ModuleSlice("llm", runs, module.parts(first=True, last=True)).leaves())
    return {name.removeprefix("llm/"): leaf.logical_shape for leaf in own for name in leaf.names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with random numbers in bf16, in several files; the last one has a single tensor."""
    c = DecoderConfig(layers=3, width=16, heads=2, kv_heads=2, mlp=16, vocab=260, qkv_bias=True, norm_eps=1e-6)
    home = tmp_path_factory.mktemp("folder") / "qwen"
    write_drawn(c, home, shard_bytes=8000)
    assert len(list(home.glob("model-*.safetensors"))) > 3
    (home / "tokenizer_config.json").write_text("{}")
    return home


def write_drawn(c: DecoderConfig, home: Path, **options: Any) -> None:
    """A folder of a language model in bf16, whose parameters are drawn."""
    shapes, rng = leaf_shapes(c), np.random.default_rng(0)

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: rng.normal(size=shapes[name], scale=0.2).astype(np.float32) for name in names}

    hf_config = to_hf_config(c)
    write(hf_config, expand(entries_of(c, hf_config["model_type"]), c.layers), read, home, dtype="bfloat16", **options)


def assert_same_bits(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and np.array_equal(actual[key], tensor), key


def everything(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def without_sizes(folder: Path) -> Path:
    """The tiny configuration, its LLM's sizes left to a folder."""
    path = write_tiny(folder)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("llm/Decoder")))
    return path


@pytest.mark.long
def test_out_of_in_of_a_deepseek_is_the_same_folder_under_a_layout(tmp_path: Path) -> None:
    """No step: bit for bit, with biases of experts in fp32 as published folders have them, and the layer that no leaf
    needs.
    """
    sizes: dict[str, Any] = dict(layers=3, width=16, heads=4, kv_heads=4, mlp=24, vocab=261, norm_eps=1e-6)
    sizes |= dict(kv_rank=6, q_rank=10, nope_head_dim=5, rope_head_dim=4, v_head_dim=3, experts=4, expert_mlp=8)
    sizes |= dict(shared_experts=1, dense_layers=1, router="sigmoid", router_bias=True, router_scale=2.5)
    c = DecoderConfig(**sizes)
    rng, home = np.random.default_rng(1), tmp_path / "deepseek"
    write_drawn(c, home)
    tensors = everything(home)
    for key in [key for key in tensors if key.endswith("e_score_correction_bias")]:
        tensors[key] = rng.normal(size=4).astype(np.float32)
    tensors["model.layers.3.eh_proj.weight"] = tensors["lm_head.weight"]
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    layout = ("llm/Layout.tp=2", "llm/Layout.dp=2", "llm/Layout.ep=2", "vision/Layout.rank_offset=4")
    got = exported(home, layout, tmp_path)
    assert len([t for t in got.values() if t.dtype == np.float32]) == 2
    assert_same_bits(got, tensors)


@pytest.mark.long
def test_out_of_in_of_stacked_experts_is_the_same_folder(tmp_path: Path) -> None:
    """Qwen3.5's as published, gates before ups; the experts of each rank of ep are parts of the stacks."""
    theirs, home = TOWER.parents[1] / "llm" / "qwen3_5_moe_text", tmp_path / "qwen"
    tensors = everything(theirs)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):  # as many tokens as there are bytes and marks
        tensors[key] = np.concatenate([tensors[key]] * 4)
    listed = {key for key in tensors if ".experts." in key}

    def stack(layer: int, name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.mlp.experts.{at}.{name}_proj.weight"] for at in range(6)])

    stacked = {key: tensor for key, tensor in tensors.items() if key not in listed}
    for layer in range(len([key for key in listed if ".experts.0.up_proj" in key])):
        place = f"model.layers.{layer}.mlp.experts"
        stacked[f"{place}.gate_up_proj"] = np.concatenate([stack(layer, "gate"), stack(layer, "up")], axis=1)
        stacked[f"{place}.down_proj"] = stack(layer, "down")
    home.mkdir()
    save_file(stacked, home / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "vocab_size": 4 * config["vocab_size"]}))
    layout = ("llm/Layout.tp=2", "llm/Layout.dp=2", "llm/Layout.ep=2", "vision/Layout.rank_offset=4")
    got = exported(home, layout, tmp_path)
    assert listed
    assert_same_bits(got, stacked)


def exported(home: Path, layout: Sequence[str], tmp_path: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder that a run of no steps writes from those of ``home``."""
    bindings = [f"llm/Weights.path={str(home)!r}", *layout, "Train.dtype='bfloat16'", "Train.eval_samples=0"]
    config = load_config([without_sizes(tmp_path)], bindings)
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        trainer.state.step = 1
        trainer.save()
    (tmp_path / "run" / "config.gin").write_text(operative_config(config))
    export_folders(tmp_path / "run", tmp_path / "out")
    return everything(tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [False, True])
def test_out_of_in_of_a_qwen35_is_the_same_folder_under_a_layout(tmp_path: Path, *, is_whole: bool) -> None:
    """No step: bit for bit, with rates in fp32 as published folders have them, layers for a second token, and beside a
    tower that is not read.
    """
    sizes: dict[str, Any] = dict(layers=3, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=261, norm_eps=1e-6)
    sizes |= dict(qk_norm=True, norm_plus_one=True, attention_gate=True, rope_share=0.25, attention_every=2)
    c = DecoderConfig(**sizes, delta_heads=2, delta_value_heads=4, delta_key_dim=6, delta_value_dim=5)
    rng, home = np.random.default_rng(1), tmp_path / "qwen"
    write_drawn(c, home)
    tensors = everything(home)
    for key in [key for key in tensors if key.endswith("A_log")]:
        tensors[key] = rng.normal(size=4).astype(np.float32)
    if is_whole:
        tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = tensors["lm_head.weight"]
        whole = {"model_type": "qwen3_5", "text_config": json.loads((home / "config.json").read_text())}
        (home / "config.json").write_text(json.dumps(whole))
    tensors["mtp.fc.weight"] = tensors["lm_head.weight"]
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    got = exported(home, ("llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.rank_offset=4"), tmp_path)
    assert len([t for t in got.values() if t.dtype == np.float32]) == 2
    assert_same_bits(got, tensors)


GEMMA4 = {
    "experts": ("gemma4_moe", ("llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.rank_offset=4")),
    "inputs of layers": ("gemma4_per_layer", ("llm/Layout.tp=2", "llm/Layout.dp=2", "vision/Layout.rank_offset=4")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GEMMA4)
def test_out_of_in_of_a_gemma4_is_the_same_folder_under_a_layout(name: str, tmp_path: Path) -> None:
    """No step: bit for bit, of layers of two shapes, and columns of one table for each layer."""
    kind, layout = GEMMA4[name]
    theirs, home = TOWER.parents[1] / "llm" / kind, tmp_path / "gemma"
    tensors = everything(theirs)
    for key in [key for key in tensors if "embed_tokens" in key]:  # as many tokens as there are bytes and marks
        tensors[key] = np.concatenate([tensors[key]] * 4)
    home.mkdir()
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    rows = {"vocab_size": 4 * config["vocab_size"], "vocab_size_per_layer_input": 4 * config["vocab_size"]}
    (home / "config.json").write_text(json.dumps({**config, **rows}))
    assert_same_bits(exported(home, layout, tmp_path), tensors)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phi3", {"rope_share": 0.5, "window": 9}),
        (
            "olmo3",
            {
                **{"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True, "window": 9},
                **{"full_every": 2, "local_rope_theta": 500000.0},
            },
        ),
    ],
)
def test_out_of_in_of_small_families_is_the_same_folder_under_a_layout(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """No step: bit for bit, with joined products that ranks of tp read parts of, and norms of heads split over them."""
    sizes: dict[str, Any] = dict(layers=4, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=261, norm_eps=1e-6)
    home = tmp_path / kind
    write_drawn(DecoderConfig(**sizes, **changes), home)
    assert json.loads((home / "config.json").read_text())["model_type"] == kind
    tensors = everything(home)
    assert any("qkv_proj" in key for key in tensors) == (kind == "phi3")
    got = exported(home, ("llm/Layout.tp=4", "llm/Layout.pp=1", "vision/Layout.rank_offset=4"), tmp_path)
    assert_same_bits(got, tensors)


@pytest.mark.long
def test_out_of_in_is_the_same_folder_under_a_layout(folder: Path, tmp_path: Path) -> None:
    """No step: what is written is what was read, bit for bit; padded vocabularies and shards of devices between."""
    own = [f"llm/Weights.path={str(folder)!r}", "llm/Layout.tp=2", "llm/Layout.pp=3", "vision/Layout.rank_offset=6"]
    config = load_config([without_sizes(tmp_path)], [*own, "Train.eval_samples=0"])
    assert config.model["llm"].settings.qkv_bias and config.model["llm"].settings.layers == 3
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.started[0].startswith(f"llm: parameters of {folder} (")
        assert trainer.started[1] == "vision, vision_projector: new values"
        trainer.state.step = 1
        trainer.save()
    (tmp_path / "run" / "config.gin").write_text(operative_config(config))
    made = export_folders(tmp_path / "run", tmp_path / "out")
    assert made.tensors == {str(tmp_path / "out"): (("llm",), len(everything(folder)))}
    want, got = everything(folder), everything(tmp_path / "out")
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and np.array_equal(got[key], tensor), key
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    shutil.move(folder, tmp_path / "away")  # the run's own configuration says all, so it can go on without the folder
    try:
        assert load_run_config(tmp_path / "run").model == config.model
    finally:
        shutil.move(tmp_path / "away", folder)


@pytest.mark.long
def test_the_first_loss_is_the_same_under_layouts(folder: Path, tmp_path: Path) -> None:
    """The steps of a run that starts from a folder, on one device and under tp and pp; export is what was learned."""
    own = (f"llm/Weights.path={str(folder)!r}", "Train.steps=2", "Train.eval_samples=0", "Optimizer.warmup=0")
    layouts = {
        "one": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
        "many": ("llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.rank_offset=4", "Train.schedule='zb-h1'"),
    }
    losses = {}
    for name, layout in layouts.items():
        flags = [*train_flags(without_sizes(tmp_path), tmp_path / name), *gin((*own, *layout))]
        assert train(flags) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows]
    assert losses["many"] == pytest.approx(losses["one"], rel=1e-5)
    export_folders(tmp_path / "many", tmp_path / "out")
    learned, stored = everything(tmp_path / "out"), leaves(tmp_path / "many", 2)
    want = stored["params/llm/layers/002/attn/k"].T.astype(ml_dtypes.bfloat16)
    assert np.array_equal(learned["model.layers.2.self_attn.k_proj.weight"], want)
    assert not np.array_equal(want, everything(folder)["model.layers.2.self_attn.k_proj.weight"])


@pytest.mark.long
def test_adapters_of_a_folder_are_merged_into_its_copy(folder: Path, tmp_path: Path) -> None:
    own = (f"llm/Weights.path={str(folder)!r}", "llm/Optimizer.frozen=True", "Train.steps=2", "Train.eval_samples=0")
    lora = ("llm/Lora.rank=2", "llm/Lora.alpha=3", "llm/Lora.targets=('attn/[kv]',)", "Optimizer.warmup=0")
    many = ("llm/Layout.pp=2", "vision/Layout.rank_offset=4")
    run = tmp_path / "run"
    assert train([*train_flags(without_sizes(tmp_path), run), *gin((*own, *lora, *many))]) == 0
    assert main([f"--run_dir={run}", f"--out={tmp_path / 'out'}", "--format=safetensors", "--merge_lora"]) == 1
    before, after = everything(folder), everything(tmp_path / "out")
    names = {f"model.layers.{i}.self_attn.{one}_proj.weight" for i in range(3) for one in "kv"}
    assert {key for key in before if not np.array_equal(before[key], after[key])} == names
    stored = {name.removeprefix("params/"): leaf for name, leaf in leaves(run, 2).items()}
    a, b = (stored[f"llm_lora/layers/002/attn/k/{one}"] for one in "ab")
    want = (stored["llm/layers/002/attn/k"] + np.float32(1.5) * (a @ b)).T.astype(ml_dtypes.bfloat16)
    assert np.array_equal(after["model.layers.2.self_attn.k_proj.weight"], want)
    assert export_folders(run, tmp_path / "base").without == ("vision", "vision_projector", "llm_lora")
    assert all(np.array_equal(before[key], tensor) for key, tensor in everything(tmp_path / "base").items())


def test_a_folder_and_a_setting_that_contradict_each_other(folder: Path, tmp_path: Path) -> None:
    path = f"llm/Weights.path={str(folder)!r}"
    for bindings, message in (
        ([path, "llm/Decoder.width=32"], f"llm/Decoder.width=32: {folder} has 16; leave the setting out (--gin"),
        (
            [path, "llm/Lora.rank=2", f"llm_lora/Weights.path={str(folder)!r}"],
            f"llm_lora/Weights.path={str(folder)!r}: name a folder of PEFT in llm/Lora.path, or a run in llm_lora/",
        ),
        ([path, "llm/Weights.init_from='runs/x'"], "llm/Weights.init_from='runs/x': Weights.path="),
        (["vision/Weights.path='nowhere'"], "vision/Weights.path='nowhere': nowhere is no directory"),
        ([f"vision/Weights.path={str(folder)!r}"], f"vision/Weights.path={str(folder)!r}: "),
        (
            [f"Model.weights={str(folder)!r}"],
            f"Model.weights={str(folder)!r}: its model_type is 'qwen2'; mmjax reads whole models of gemma3, gemma4, "
            "llava, llava_next, llava_onevision, paligemma, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, "
            "qwen3_vl_moe; name the folder of a single module in its Weights.path",
        ),
        ([f"vision_projector/Weights.path={str(folder)!r}"], "its model_type is 'qwen2', which has no projector"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([without_sizes(tmp_path)], bindings)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_alone_of_another_whole_model_is_refused_as_one(tmp_path: Path) -> None:
    """Not as a language model, which it is not."""
    (tmp_path / "config.json").write_text('{"model_type": "llama4", "vision_config": {}}')
    assert folder_bindings(str(tmp_path))[1] == f"Model.weights={str(tmp_path)!r}"
    with pytest.raises(ConfigError, match="its model_type is 'llama4'; mmjax reads whole models of gemma3, gemma4, "):
        load_config([], folder_bindings(str(tmp_path)))


def test_a_folder_that_lacks_a_tensor_is_refused_before_any_device(folder: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    tensors = everything(folder)
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, torn / "model.safetensors")
    shutil.copy(folder / "config.json", torn)
    config = load_config([without_sizes(tmp_path)], [f"llm/Weights.path={str(torn)!r}"])
    with pytest.raises(ConfigError, match=r"llm/Weights\.path='.*torn': .*missing model\.layers\.1\.self_attn\.q_proj"):
        Trainer(config, tmp_path / "run", style="silent")


@pytest.mark.long
def test_a_model_of_new_values_becomes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the language model alone; a run that starts from it has its parameters."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert train([*train_flags(write_tiny(tmp_path), run), *gin((*ALONE, *LONGER, *ONE_STEP))]) == 0
    assert main([f"--run_dir={run}", f"--out={out}", "--format=safetensors"]) == 1
    said = capsys.readouterr().out
    assert f"{out}: llm of step 1 in " in said and "not written: vision, vision_projector" in said
    for flags, message in (
        ([f"--out={out}", "--format=safetensors"], "exists: remove it"),
        ([f"--out={tmp_path / 'two'}", "--format=safetensor"], "did you mean 'safetensors'?"),
    ):
        with pytest.raises(SystemExit):
            main([f"--run_dir={run}", *flags])
        assert message in capsys.readouterr().err
    stored = {name: leaf for name, leaf in leaves(run, 1).items() if name.startswith("params/llm/")}
    config = load_config([without_sizes(tmp_path)], [*ALONE, f"llm/Weights.path={str(out)!r}"])
    with Trainer(config, tmp_path / "again", style="silent") as trainer:
        held = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items() if name in stored}
    assert_same_leaves(held, stored)


@pytest.mark.long
def test_the_copy_of_a_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    """Of a folder that has both tensors; its old index is left behind."""
    c = DecoderConfig(
        layers=2, width=16, heads=2, kv_heads=2, mlp=16, vocab=260, qkv_bias=True, norm_eps=1e-6, tied=True
    )
    shapes, rng, home = leaf_shapes(c), np.random.default_rng(0), tmp_path / "qwen"

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: rng.normal(size=shapes[name], scale=0.2).astype(np.float32) for name in names}

    write(to_hf_config(c), expand(entries_of(c), c.layers), read, home)
    before = everything(home)
    embed = before["model.embed_tokens.weight"]
    save_file({**before, "lm_head.weight": embed}, home / "model.safetensors", metadata={"format": "pt"})
    (home / "model.safetensors.index.json").write_text('{"weight_map": {"gone": "gone.safetensors"}}')
    own = (f"llm/Weights.path={str(home)!r}", *ALONE, *ONE_STEP)
    assert train([*train_flags(without_sizes(tmp_path), tmp_path / "run"), *gin(own)]) == 0
    export_folders(tmp_path / "run", tmp_path / "out")
    after = everything(tmp_path / "out")
    assert after.keys() == {*before, "lm_head.weight"}
    np.testing.assert_array_equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not np.array_equal(after["lm_head.weight"], embed)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def with_tokenizer(home: Path, rows: int) -> Path:
    """A Qwen2 with a tokenizer of 299 tokens and so many rows."""
    c = DecoderConfig(layers=2, width=16, heads=2, kv_heads=2, mlp=16, vocab=rows, qkv_bias=True, norm_eps=1e-6)
    shapes, rng = leaf_shapes(c), np.random.default_rng(0)

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: rng.normal(size=shapes[name], scale=0.2).astype(np.float32) for name in names}

    write(to_hf_config(c), expand(entries_of(c), c.layers), read, home)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOWER.parents[1] / "processors" / "chatml" / name, home)
    return home


def test_new_tokens_make_room(tmp_path: Path) -> None:
    """Rows beyond the folder's where it has too few; without the setting it is named."""
    path, new = without_sizes(tmp_path), "llm/Weights.new_tokens=('<tool>', '</tool>')"
    for rows, vocab in ((299, 301), (320, 320)):
        config = load_config([path], [f"llm/Weights.path={str(with_tokenizer(tmp_path / str(rows), rows))!r}", new])
        assert (config.model["llm"].settings.vocab, config.data.settings.new_tokens) == (vocab, ("<tool>", "</tool>"))
        frozen = replace(config, model=config.model.replace(llm=config.model.llm.frozen()))
        said = "llm/Optimizer.frozen=True: rows of Data.new_tokens=('<tool>'"
        assert any(line.startswith(said) for line in advise(frozen))
        saved = tmp_path / f"{rows}.gin"
        saved.write_text(operative_config(config))
        assert load_config([saved]) == config
        tokenizer = tokenizer_of(config.data.settings, ("vision",))
        assert tokenizer.encode("a<tool>b</tool>")[1::2] == [299, 300] and tokenizer.media_token("vision") == 301
        assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool>b"
    small = f"llm/Weights.path={str(with_tokenizer(tmp_path / 'small', 297))!r}"
    with pytest.raises(
        ConfigError, match=r"Decoder\.vocab=297: .*llm/Weights\.new_tokens=\('<\|im_start\|>', '<\|im_end"
    ):
        build_packer(
            load_config([path], [small]), tokenizer_of(load_config([path], [small]).data.settings, ("vision",))
        )
    for bindings, message in (
        (["vision/Weights.new_tokens=('<a>',)"], "vision/Weights.new_tokens=('<a>',): is of the language model; write"),
        ([new, "Data.new_tokens=('<a>',)"], "Data.new_tokens=('<a>',): llm/Weights.new_tokens=('<tool>', '</tool>')"),
        (["llm/Weights.new_tokens=('',)"], "llm/Weights.new_tokens=('',): has an empty text"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([path], bindings)
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.long
def test_new_tokens_are_trained_and_come_with_the_export(tmp_path: Path) -> None:
    """Rows of the folder move as little as without them; the copy has the rows, their number and the tokens."""
    home, new = with_tokenizer(tmp_path / "qwen", 299), "llm/Weights.new_tokens=('<tool>', '</tool>')"
    own = (f"llm/Weights.path={str(home)!r}", new, *ALONE, *ONE_STEP, "Optimizer.learning_rate=1e-3")
    lengths = ("Data.sequence_length=256",)
    assert train([*train_flags(without_sizes(tmp_path), tmp_path / "run"), *gin((*own, *lengths))]) == 0
    export_folders(tmp_path / "run", tmp_path / "out")
    before, after = everything(home), everything(tmp_path / "out")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[key].shape == (301, 16)
        moved = np.abs(after[key][:299] - before[key])
        assert 0 < moved.max() < 2e-3 and not np.array_equal(after[key][299], after[key][300])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 301
    again = load_config([tmp_path / "tiny.gin"], [f"llm/Weights.path={str(tmp_path / 'out')!r}", *ALONE, *lengths])
    assert again.model["llm"].settings.vocab == 301 and not again.data.settings.new_tokens
    assert tokenizer_of(again.data.settings, ("vision",)).encode("a<tool>b</tool>")[1::2] == [299, 300]


@pytest.mark.long
def test_a_frozen_base_stays_in_its_folder(folder: Path, tmp_path: Path) -> None:
    """A bf16 LLM in an fp32 run: held as it is stored, left out of checkpoints, bit for bit in an export."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder, base)
    own = [f"llm/Weights.path={str(base)!r}", "llm/Optimizer.frozen=True", "Checkpoint.copy_frozen=False"]
    config = load_config([without_sizes(tmp_path)], [*ALONE, *own, "Train.steps=4"])
    assert config.model.optimizers["llm"].frozen_dtype == "bfloat16"
    with Trainer(config, run, style="silent") as trainer:
        trainer.train(steps=2)
        held = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    assert {str(leaf.dtype) for name, leaf in held.items() if name.startswith("params/llm/")} == {"bfloat16"}
    stored = Checkpointer(run / "checkpoints").metadata(2).leaves
    assert {name.split("/")[1] for name, leaf in stored.items() if not leaf.folder} == {"vision", "vision_projector"}
    about = stored["params/llm/layers/002/attn/k"]
    assert (about.folder, about.name) == (str(base), "model.layers.2.self_attn.k_proj.weight")
    with Trainer(config, run, style="silent") as trainer:
        assert_same_leaves({name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}, held)
        trainer.train(steps=3)
    export_folders(run, tmp_path / "out")
    before, after = everything(base), everything(tmp_path / "out")
    assert all(np.array_equal(before[key], after[key]) for key in before.keys() | after.keys())
    # Gone, of another shape or of other values, it is named.
    changed = next(base.glob("model-00001-*"))
    whole = load_file(changed)
    for wrong, message in (
        ({key: leaf[:-1] for key, leaf in whole.items()}, "has changed since .*00000003, which needs it: .* is "),
        ({key: -leaf for key, leaf in whole.items()}, "has changed since .*00000003, which needs params/llm/.* of it"),
    ):
        save_file(wrong, changed, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{base} {message}") as refusal:
            Trainer(config, run, style="silent")
        assert "\n" not in str(refusal.value)
    shutil.rmtree(base)
    saved = load_run_config(run)
    with pytest.raises(CheckpointError, match=f"needs {base}, which has its frozen modules and is gone; bring it back"):
        Trainer(saved, run, style="silent")


@pytest.mark.long
def test_a_frozen_tower_is_not_rounded_by_a_bf16_run(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("vision/ViT")))
    own = [f"vision/Weights.path={str(TOWER)!r}", "vision/Optimizer.frozen=True", "Train.dtype='bfloat16'"]
    own += ["Data.sequence_length=256", "Train.steps=2"]
    config = load_config([path], [*ALONE, *own])
    assert config.model.optimizers["vision"].frozen_dtype == "float32"
    narrow = load_config([path], [*ALONE, *own, "vision/Optimizer.frozen_dtype='bfloat16'"])
    assert narrow.model.optimizers["vision"].held_in("float32") == "bfloat16"
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.started[0].startswith(f"vision: parameters of {TOWER} (")
        assert "rounded" not in trainer.started[0]
        trainer.train()
    export_folders(tmp_path / "run", tmp_path / "out")
    before, after = everything(TOWER), everything(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor, strict=True)


def test_a_frozen_module_is_held_as_its_folder_holds_it(folder: Path, tmp_path: Path) -> None:
    own = [*ALONE, f"llm/Weights.path={str(folder)!r}", "llm/Optimizer.frozen=True"]
    path = without_sizes(tmp_path)

    def held(*more: str) -> str:
        return load_config([path], [*own, *more]).model.optimizers["llm"].frozen_dtype

    assert (held(), held("llm/Optimizer.frozen_dtype='float16'")) == ("bfloat16", "float16")
    assert held("llm/Optimizer.frozen=False") == held("llm/Weights.path=''", "llm/Decoder.layers=1") == ""
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    file = next(mixed.glob("model-00001-*"))
    save_file({key: leaf.astype(np.float16) for key, leaf in load_file(file).items()}, file)
    assert held(f"llm/Weights.path={str(mixed)!r}") == "float32"
    saved = tmp_path / "config.gin"
    saved.write_text(operative_config(load_config([path], own)).replace(str(folder), "moved away"))
    assert load_config([saved]).model.optimizers["llm"].frozen_dtype == "bfloat16"
    with pytest.raises(
        ConfigError, match=r"llm/Optimizer\.frozen_dtype='int8': legal: 'float32', 'bfloat16', 'float16'"
    ):
        held("llm/Optimizer.frozen_dtype='int8'")
