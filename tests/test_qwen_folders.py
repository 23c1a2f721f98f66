"""Qwen-VL from its folders: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_qwen.py`` made the folders, three sequences with no, one and four images, and their values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from first_step import assert_gradients, first_step, leaves_of_tensors
from qwen_oracle import (
    FOLDERS,
    KINDS,
    MODULES,
    Oracle,
    apart,
    assert_packed_texts,
    configured,
    folder_tensors,
    opened,
    oracle,
    packed,
    places_of,
    run,
    sample_of,
    samples,
    sent_width,
    tokens_of,
)
from safetensors.numpy import load_file, save_file
from trial_runs import assert_same_tensors, save_untrained

from mmjax.configurable import ConfigError, from_preset
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.flops import parameter_count
from mmjax.models.llama.layers import logits
from mmjax.models.pretrained import find_pretrained
from mmjax.models.projector.config import ProjectorConfig
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.reference import encode_image, greedy, sample_logits
from mmjax.reference.arithmetic import project
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import assemble, expand
from mmjax.weights.write import rewrite

ALL = pytest.mark.parametrize("kind", KINDS)
QUICK = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")
"""The kinds whose programs `make test` compiles: windows, features inside of layers and experts, and delta layers."""


def but_long(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases that begin with a kind, the others than quick ones among the long tests."""
    return [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.long) for case in cases]


OLDER = pytest.mark.parametrize("kind", KINDS[:2])

# ---- what transformers computes --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), but_long(*zip(KINDS, (1, 2, 2, 1, 2, 1), strict=True)))
def test_packed_images_have_their_tokens_and_packed_texts_their_values(kind: str, tp: int) -> None:
    """Images of five sizes, most of them cut by windows at their edges; texts with four, one and none of them."""
    of = oracle(kind)
    batch = packed(of)
    tokens, width = tokens_of(of, batch, tp), of.model.token_width("vision")
    segments, positions = batch.inputs["vision"]["segments"][0], batch.inputs["vision"]["positions"][0]
    sides = {segment: tuple(positions[segments == segment].max(axis=0) + 1) for segment in range(1, 6)}
    for number, image in enumerate(of.images):
        rows, columns = image.shape[0] // 4, image.shape[1] // 4
        (segment,) = [own for own, found in sides.items() if found == (rows, columns)]
        here = np.flatnonzero(segments == segment)[::4] // 4
        assert apart(tokens[0, here, :width], of.values[f"merged_{number}"]) < 2e-6, number
        assert_inner_features(of, np.asarray(tokens[0, here, width:]), number)

    assert_packed_texts(of, batch, tokens, tp, bound=4e-5 if kind == "qwen3_5_moe" else 1e-5)


def assert_inner_features(of: Oracle, levels: np.ndarray, number: int) -> None:
    """What an image's features of inner layers become, which lie one beside the other; of Qwen3-VL alone."""
    projector = of.model.nodes["vision"].projector
    assert projector and len([key for key in of.values if key.startswith(f"deep_{number}_")]) == len(projector.inject)
    parts = np.split(levels, len(projector.inject), axis=1) if projector.inject else []
    for place, (level, layer) in enumerate(zip(parts, projector.inject, strict=True)):
        prefix = f"vision_projector/inject{layer:03d}"
        leaves = {name: jnp.asarray(leaf) for name, leaf in of.leaves.items() if name.startswith(prefix)}
        features = project(leaves, prefix, jnp.asarray(level), 1, projector)
        assert apart(features, of.values[f"deep_{number}_{place}"]) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("kind", but_long(*((kind,) for kind in KINDS)))
def test_positions_may_be_large_and_of_three_axes(kind: str) -> None:
    of = oracle(kind)
    tokens, positions = of.values["far_tokens"], of.values["far_positions"]
    about = {"tokens": tokens, "targets": tokens, "segments": np.ones(12), "weights": np.ones(12)}
    row = {name: np.asarray(value, np.int32)[None] for name, value in about.items()}
    row |= {"positions": positions[None].astype(np.int32), "vision_index": np.full((1, 12), -1, np.int32)}
    none = {"vision.0": jnp.zeros((1, 1, sent_width(of.model)))}

    def then(stage: Any, p: Any, inputs: Any, axes: Any, x: Any) -> Any:
        return jax.lax.psum(logits(p["llm"], of.model.llm, axes, x), axes.tp)  # of one rank

    found = run(of, "llm", row, none, 1, then, shared=False)[0]
    # At 30,000 the last bit of a frequency is a thousandth of a radian, and Qwen3-VL's have twice as many layers.
    assert apart(found, of.values["far_logits"]) < (2e-5 if kind in KINDS[:2] else 1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [KINDS[1], KINDS[3], *(pytest.param(KINDS[n], marks=pytest.mark.long) for n in (0, 2, 4, 5))]
)
def test_the_dense_reference_is_transformers_too(kind: str) -> None:
    of = oracle(kind)
    (*_, sample), image = samples(of.values), of.images[0]
    vit, projector = of.model.nodes["vision"].config, of.model.nodes["vision"].projector
    assert projector
    tokens, levels = encode_image(of.leaves, "vision", vit, image, levels=projector.levels, projector=projector)
    assert apart(tokens, of.values["merged_0"]) < 2e-6
    assert_inner_features(of, np.concatenate([tokens[:, :0], *levels], axis=1), 0)
    assert apart(sample_logits(of.leaves, of.model, sample), of.values["logits_2"]) < 1e-5


# ---- folders ---------------------------------------------------------------------------------------------------------


@ALL
def test_parameters_are_counted(kind: str) -> None:
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert sum(parameter_count(oracle(kind).model).values()) == sum(tensor.size for tensor in tensors.values())


@ALL
def test_tensors_go_in_and_out_bit_for_bit(kind: str) -> None:
    """Every one of them, from leaves."""
    of, written = oracle(kind), {}
    theirs = WeightsFolder.open(str(FOLDERS / kind))
    for module, family in MODULES.items():
        own = of.model.nodes["vision"].projector if family is PROJECTOR else of.model.nodes[module].config
        table = expand(find_pretrained(family, theirs.config).rows(own), getattr(own, "layers", 0))
        begins = f"{module}/"
        leaves = {name.removeprefix(begins): leaf for name, leaf in of.leaves.items() if name.startswith(begins)}
        written |= assemble(table, leaves)
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(written[key], tensor, strict=True)


@OLDER
def test_newer_keys_and_older_settings_are_the_same_model(kind: str, tmp_path: Path) -> None:
    """Keys as transformers has them in memory; and the text's settings among the whole model's, as the Hub has them."""
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    new = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
    renamed = {new[(own := key.partition(".")[0] + ".")] + key.removeprefix(own): t for key, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((FOLDERS / kind / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"], vision["model_type"], vision["rope_parameters"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"], vision["in_chans"] = rope["rope_theta"], vision["in_channels"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    model, leaves = opened(tmp_path)
    assert {n: node.config for n, node in model.nodes.items()} == {
        n: node.config for n, node in oracle(kind).model.nodes.items()
    }
    assert model.nodes["vision"].projector == oracle(kind).model.nodes["vision"].projector
    for name, leaf in oracle(kind).leaves.items():
        np.testing.assert_array_equal(leaves[name], leaf, strict=True)


_TEXT_7B = dict(
    **dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, vocab_size=152064),
    **dict(
        num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0, hidden_act="silu", tie_word_embeddings=False
    ),
    **dict(use_sliding_window=False, sliding_window=32768, max_window_layers=28, max_position_embeddings=32768),
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
)
_TOWER_7B = dict(depth=32, num_heads=16, in_chans=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
PUBLISHED = {
    "qwen2-vl-7b": {
        **_TEXT_7B,
        "model_type": "qwen2_vl",
        "vision_config": dict(_TOWER_7B, embed_dim=1280, mlp_ratio=4, hidden_size=3584),
    },
    "qwen2.5-vl-7b": {
        **_TEXT_7B,
        "model_type": "qwen2_5_vl",
        "vision_config": dict(
            **dict(_TOWER_7B, hidden_size=1280, intermediate_size=3420, out_hidden_size=3584, hidden_act="silu"),
            **dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2),
        ),
    },
}
"""What the ``config.json`` of published folders says of sizes."""
_TEXT_3 = dict(
    **dict(attention_bias=False, head_dim=128, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=5000000),
    **dict(vocab_size=151936, max_position_embeddings=262144),
    rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
)
_TOWER_3 = dict(
    **dict(num_heads=16, in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2),
    **dict(hidden_act="gelu_pytorch_tanh", num_position_embeddings=2304),
)
_SMALL_TOWER = dict(_TOWER_3, depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_TOWER = dict(_TOWER_3, depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])
_MOE = dict(decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128)
PUBLISHED_3: Mapping[str, dict[str, Any]] = {
    "qwen3-vl-4b": {
        "model_type": "qwen3_vl",
        "text_config": dict(
            **dict(_TEXT_3, model_type="qwen3_vl_text", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36),
            **dict(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True),
        ),
        "vision_config": dict(_SMALL_TOWER, model_type="qwen3_vl", out_hidden_size=2560),
        "tie_word_embeddings": True,
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "text_config": dict(
            **dict(_TEXT_3, model_type="qwen3_vl_text", hidden_size=4096, intermediate_size=12288),
            **dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8),
        ),
        "vision_config": dict(_TOWER, model_type="qwen3_vl", out_hidden_size=4096),
        "tie_word_embeddings": False,
    },
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe",
        "text_config": dict(
            **dict(_TEXT_3, **_MOE, model_type="qwen3_vl_moe_text", hidden_size=2048, intermediate_size=6144),
            **dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts_per_tok=8),
        ),
        "vision_config": dict(_TOWER, model_type="qwen3_vl_moe", out_hidden_size=2048),
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str) -> None:
    for family in (FAMILIES["vit"], FAMILIES["llama"]):
        given = find_pretrained(family, PUBLISHED[preset]).fields()
        assert given.pop("head_dim", 128) == 128  # 3584 / 28, which presets leave open
        assert family.config(preset=preset, **given) == from_preset(family.config, preset)
    merger = ProjectorConfig(**find_pretrained(PROJECTOR, PUBLISHED[preset]).fields())
    norm = "layer" if preset == "qwen2-vl-7b" else "rms"
    assert merger == ProjectorConfig(hidden=5120, activation="gelu_exact", norm=norm)
    small = {**PUBLISHED[preset], "tie_word_embeddings": True}  # as the 2B has it
    assert find_pretrained(FAMILIES["llama"], small).fields()["tied"]


@pytest.mark.parametrize("preset", PUBLISHED_3)
def test_presets_of_qwen3_vl_are_the_published_models(preset: str) -> None:
    published = PUBLISHED_3[preset]
    for family, extra in ((FAMILIES["vit"], {}), (FAMILIES["llama"], {"balance_loss": 0.001 * preset.endswith("a3b")})):
        given = {**find_pretrained(family, published).fields(), **extra}
        assert family.config(preset=preset, **given) == from_preset(family.config, preset)
    merger, tower = (find_pretrained(family, published).fields() for family in (PROJECTOR, FAMILIES["vit"]))
    levels = tuple(published["vision_config"]["deepstack_visual_indexes"])
    of_inner_layers = {"inject": (1, 2, 3), "levels": levels}
    assert merger == {
        **{"kind": "mlp", "hidden": 4 * tower["width"], "activation": "gelu_exact", "norm": "layer"},
        **of_inner_layers,
    }


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision", {"rope_parameters": {"rope_type": "default"}}, "config.json: rope_type='default': "),
        ("vision", {"temporal_patch_size": [2, 2]}, "config.json: temporal_patch_size=[2, 2]: "),
        ("vision", {"hidden_act": "relu"}, "config.json: hidden_act='relu': "),
        ("vision", {"window_size": 7}, "config.json: window_size=7: must be 8 pixels or more"),
        ("text", {"rope_parameters": {"rope_type": "dynamic"}}, "config.json: rope_type='dynamic': "),
        ("text", {"rope_parameters": {"mrope_section": [1, 2, 3]}}, "Decoder.rope_sections=(1, 2, 3): must be three"),
    ],
)
def test_what_ours_has_not_is_named(part: str, changes: dict[str, Any], message: str) -> None:
    theirs = json.loads((FOLDERS / "qwen2_5_vl" / "config.json").read_text())
    theirs[f"{part}_config"] |= changes
    family = FAMILIES["vit" if part == "vision" else "llama"]
    with pytest.raises(ConfigError) as refusal:
        family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision", {"num_position_embeddings": 40}, "config.json: num_position_embeddings=40: must be the square"),
        ("vision", {"deepstack_visual_indexes": [2, 0]}, "config.json: deepstack_visual_indexes=(2, 0): must rise"),
        ("text", {"norm_topk_prob": False}, "config.json: norm_topk_prob=False: transformers divides by the sum"),
        (
            "text",
            {"rope_parameters": {"mrope_interleaved": False}},
            "config.json: mrope_interleaved=False: transformers interleaves",
        ),
        (
            "text",
            {"rope_parameters": {"mrope_section": [2, 3, 3]}},
            "Decoder.rope_sections=(2, 3, 3): interleaved rows and columns have at most every third of 8 pairs",
        ),
    ],
)
def test_what_qwen3_vl_has_not_is_named(part: str, changes: dict[str, Any], message: str) -> None:
    theirs = json.loads((FOLDERS / "qwen3_vl_moe" / "config.json").read_text())
    theirs[f"{part}_config"] |= changes
    with pytest.raises(ConfigError) as refusal:
        for family in (FAMILIES["vit"], FAMILIES["llama"], PROJECTOR):
            family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


_TEXT_3_5: Mapping[str, Any] = dict(
    **dict(model_type="qwen3_5_text", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, head_dim=256),
    **dict(num_attention_heads=16, num_key_value_heads=4, vocab_size=248320, full_attention_interval=4),
    rope_parameters={
        **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    },
)
PUBLISHED_3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": _TEXT_3_5,
    "vision_config": dict(_TOWER, model_type="qwen3_5", out_hidden_size=4096, deepstack_visual_indexes=[]),
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("sections", [{"mrope_section": [11, 11, 10]}, {}])
def test_a_whole_qwen3_5_has_sections_that_its_text_alone_has_not(sections: dict[str, Any]) -> None:
    """Its tower is Qwen3-VL's, and no layer of the language model reads an inner layer of it."""
    rope = {key: value for key, value in _TEXT_3_5["rope_parameters"].items() if key != "mrope_section"} | sections
    text = {**_TEXT_3_5, "rope_parameters": rope}
    whole = {**PUBLISHED_3_5, "text_config": text}
    seeing = find_pretrained(FAMILIES["llama"], whole).fields()
    assert (seeing["rope_sections"], seeing["rope_interleaved"], seeing["rope_share"]) == ((11, 11, 10), True, 0.25)
    assert FAMILIES["llama"].config(**seeing).axis_of_pair == tuple(pair % 3 for pair in range(32))
    alone = find_pretrained(FAMILIES["llama"], text).fields()
    assert {**seeing, "rope_sections": (), "rope_interleaved": False} == alone
    tower = {**find_pretrained(FAMILIES["vit"], whole).fields()}
    assert FAMILIES["vit"].config(preset="qwen3-vl-8b", **tower) == from_preset(FAMILIES["vit"].config, "qwen3-vl-8b")
    merger = {"kind": "mlp", "hidden": 4 * tower["width"], "activation": "gelu_exact", "norm": "layer"}
    assert find_pretrained(PROJECTOR, whole).fields() == merger


def test_stacked_experts_of_published_folders_are_the_same_model(tmp_path: Path) -> None:
    """They have the transposes of what transformers 5 writes under the same keys, and get them back."""
    kind = "qwen3_vl_moe"
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    stacks = {key for key in tensors if ".experts." in key}
    assert len(stacks) == 8
    published = {key: np.ascontiguousarray(t.swapaxes(1, 2)) if key in stacks else t for key, t in tensors.items()}
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(published, folder / "model.safetensors")
    (folder / "config.json").write_bytes((FOLDERS / kind / "config.json").read_bytes())
    model, leaves = opened(folder)
    theirs = WeightsFolder.open(str(folder))
    rewrite(theirs, places_of(theirs, model), lambda names: {name: leaves[name] for name in names}, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == published.keys()
    for key, tensor in published.items():
        np.testing.assert_array_equal(written[key], tensor, strict=True)
    assert leaves.keys() == oracle(kind).leaves.keys()
    for name, leaf in oracle(kind).leaves.items():
        np.testing.assert_array_equal(leaves[name], leaf, strict=True)


# ---- runs ------------------------------------------------------------------------------------------------------------

ONE_DEVICE = ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")
SPLIT, IN_ORDER = "tp, pp and split backward", "cp, tokens in order"
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ONE_DEVICE,
    SPLIT: (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "dp, unrolled": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3", "Train.unroll=True"),
        *("vision/Layout.dp=3", "vision/Layout.rank_offset=3"),
    ),
    IN_ORDER: (
        *("llm/Layout.tp=1", "llm/Layout.cp=2", "llm/Layout.cp_tokens='contiguous'"),
        *("vision/Layout.dp=1", "vision/Layout.rank_offset=2"),
    ),
}
PLAIN = tuple(layout for layout in LAYOUTS if layout != IN_ORDER)
"""Layouts of all families; delta layers need one with tokens in order."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("qwen2_vl", "qwen3_vl") for layout in PLAIN]
    + [("qwen3_vl_moe", SPLIT), *((kind, way) for kind in KINDS[4:] for way in (SPLIT, IN_ORDER))],
)
def test_loss_and_gradients_are_those_of_torch(kind: str, layout: str, tmp_path: Path) -> None:
    config, values = configured(tmp_path, kind, LAYOUTS[layout]), oracle(kind).values
    step = first_step(config, tmp_path / "run", partial(samples, values))
    assert step.batch.inputs["llm"]["positions"].shape == (3, 96, 3)
    assert step.loss == pytest.approx(float(values["loss"]), rel=2e-6)
    tensors = folder_tensors(kind, np.load(FOLDERS / kind / "gradients.npz"))
    want = leaves_of_tensors(FOLDERS / kind, config, tensors, step.gradients)
    assert step.gradients.keys() == want.keys() and len(want) > 80
    # Torch in fp32 is up to 1e-5 away from itself in fp64 here, with delta layers and experts 5e-5.
    assert_gradients(step.gradients, want, bound={"qwen3_5": 4e-5, "qwen3_5_moe": 1e-4}.get(kind, 2e-5))


def assert_written_as_read(
    config: Recipe, kind: str, tmp_path: Path, parts: str, without: tuple[str, ...] = ()
) -> None:
    """An export before any step is the folder, of which these parts were read; it lacks the parts `without`."""
    started = save_untrained(config, tmp_path / "run")
    assert started[0].startswith(f"{parts}: parameters of {FOLDERS / kind} (")
    made = export_folders(tmp_path / "run", tmp_path / "out")
    assert made.without == without and list(made.tensors) == [str(tmp_path / "out")]
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDERS / kind / "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDERS / kind / "config.json").read_bytes()


@pytest.mark.long
def test_layers_for_a_second_token_are_kept(tmp_path: Path) -> None:
    """Keys ``mtp.*`` of a Qwen3.5, which nothing reads, under tp and pp."""
    folder = Path(shutil.copytree(FOLDERS / "qwen3_5", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = np.arange(64, dtype=np.float32).reshape(32, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = configured(tmp_path, str(folder), LAYOUTS[SPLIT])
    assert_written_as_read(config, str(folder), tmp_path, "vision, vision_projector, llm")


@pytest.mark.long
@ALL
def test_out_of_in_is_the_same_folder(kind: str, tmp_path: Path) -> None:
    """Bit for bit, also the half of a patch's kernel that is for a video's second frame."""
    config = configured(tmp_path, kind, ONE_DEVICE)
    assert_written_as_read(config, kind, tmp_path, "vision, vision_projector, llm")


@pytest.mark.long
def test_the_language_model_alone_is_read_and_written(tmp_path: Path) -> None:
    """Its experts in two parts, beside a tower of new values; the folder's tower is copied."""
    layout = ("llm/Layout.tp=1", "llm/Layout.dp=2", "llm/Layout.ep=2", "llm/Layout.pp=2", "vision/Layout.rank_offset=4")
    config = configured(tmp_path, "qwen3_vl_moe", layout, start="llm/Weights.path")
    assert config.model["llm"].settings.rope_interleaved and config.model["llm"].settings.experts == 4
    assert_written_as_read(config, "qwen3_vl_moe", tmp_path, "llm", ("vision", "vision_projector"))


@pytest.mark.long
@ALL
def test_the_dense_reference_says_what_transformers_says(kind: str) -> None:
    """Greedy decoding behind two images: positions go on behind the largest number so far."""
    of = oracle(kind)
    prompt = sample_of(of.values["prompt"], of.images)
    assert greedy(of.leaves, of.model, prompt, max_new=64, eos=-1) == of.values["generated"].tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in KINDS[:2] for layout in PLAIN]
    + [*((kind, SPLIT) for kind in KINDS[2:]), *((kind, IN_ORDER) for kind in KINDS[4:])],
)
def test_layouts_train_as_the_dense_reference_does(kind: str, layout: str, tmp_path: Path) -> None:
    # Rounding in an update changes the next gradients of Qwen3-VL's folders, whose parameters are large, by 1e-5.
    steps = 3 if kind in KINDS[:2] else 1
    found = check(configured(tmp_path, kind, LAYOUTS[layout]), steps=steps, style="silent")
    assert found and found.ok, found


@pytest.mark.long
@ALL
def test_a_cache_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """The language model in two stages; positions of new tokens have three equal axes."""
    layout = ("vision/Layout.dp=1", "vision/Layout.rank_offset=4", "llm/Layout.pp=2", "llm/Layout.tp=2")
    values = dict(np.load(FOLDERS / kind / "values.npz"))
    with Trainer(configured(tmp_path, kind, layout), style="silent") as trainer:
        parts = trainer.parts
        images = [values[f"image_{number}"] for number in range(5)]
        prompt = sample_of(values["prompt"], images, parts.tokenizer.media_token("vision"))
        evaluator = Evaluator(parts, room=len(values["prompt"]) + 64)
        ((_, own),) = evaluator.rounds([prompt])
        evaluator.predictor.load(trainer.executor.states)
        said = evaluator.predictor.generate(own.batch, own.starts, 64, ())
    ((m, row),) = own.places
    assert said[m][row].tokens == values["generated"].tolist()
