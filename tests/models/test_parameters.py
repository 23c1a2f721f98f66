"""Leaves: names, sharding, padding, and initial values that know no stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES

from mmjax.configurable import ConfigError, from_preset
from mmjax.mesh.layout import Layout
from mmjax.models import flops
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.layers import DecoderLayer, parts
from mmjax.models.parameters import LayerRun, Leaf, ModuleSlice, join_logical, logical_axes, split_logical
from mmjax.models.vit.config import ViTConfig

CONFIG = DecoderConfig(layers=4, width=8, heads=2, kv_heads=1, mlp=12, vocab=7)


def piece(layers: range, *, first: bool = True, last: bool = True, multiple: int = 1) -> ModuleSlice:
    return ModuleSlice(
        "llm",
        (LayerRun(lambda rngs: DecoderLayer(CONFIG, rngs), layers),),
        parts(CONFIG, first=first, last=last),
        multiple,
    )


def leaves_of(part: ModuleSlice) -> list[Leaf]:
    return jax.tree.leaves(part.leaves())


def logical(part: ModuleSlice, seed: int = 0) -> dict[str, np.ndarray]:
    params = part.initialise(jax.random.key(seed))
    named = split_logical(leaves_of(part), jax.tree.leaves(params))
    return {name: np.asarray(x) for name, x in named.items()}


@pytest.mark.parametrize(
    ("path", "rank", "axes"),
    [
        ("layers/attn/q", 2, ("embed", "heads")),
        ("layers/attn/o", 2, ("heads", "embed")),
        ("layers/attn/k_bias", 1, ("heads",)),
        ("layers/attn/o_bias", 1, ("embed",)),  # added after the sum over tp
        ("layers/mlp/down_bias", 1, ("embed",)),
        ("layers/mlp/up_bias", 1, ("mlp",)),
        ("layers/attn_norm", 1, ("embed",)),
        ("embed", 2, ("vocab", "embed")),
        ("head", 2, ("embed", "vocab")),
        ("up", 2, ("embed", "mlp")),
        ("down", 2, ("mlp", "embed")),
        ("patch/kernel", 2, ("input", "output")),
        ("position", 2, ("place", "embed")),
    ],
)
def test_logical_axes(path: str, rank: int, axes: tuple[str, ...]) -> None:
    assert logical_axes(path, (4,) * rank) == axes


def test_a_parameter_without_named_dimensions_is_refused() -> None:
    """Neither an unlisted name nor a listed one of another rank becomes a replica in silence."""
    with pytest.raises(ConfigError, match=r"^vision/layers/gate\[16, 24\]: its dimensions have no names; .*'gate'"):
        logical_axes("vision/layers/gate", (16, 24))
    with pytest.raises(ConfigError, match=r"^llm/layers/attn/q\[4, 8, 8\]: "):
        logical_axes("llm/layers/attn/q", (4, 8, 8))
    assert logical_axes("vision/layers/gate", (16, 24), {"gate": ("embed", "mlp")}) == ("embed", "mlp")
    assert logical_axes("llm/layers/attn/q", (4, 8, 8), {"q": ("embed", "heads", "head")}) == ("embed", "heads", "head")
    assert logical_axes("a/up", (4, 8), {"up": ("embed", "whole")}) == ("embed", "whole"), "a module's own come first"


def test_specs_shard_over_tp_behind_the_stacking_dimension() -> None:
    specs = {leaf.path: leaf.spec(AXES) for leaf in leaves_of(piece(range(2)))}
    assert specs["layers/attn/q"] == P(None, None, ("tp",))
    assert specs["layers/attn/o"] == P(None, ("tp",), None)
    assert specs["layers/attn_norm"] == P(None, None)
    assert specs["embed"] == P(("tp",), None)
    assert specs["norm"] == P(None)


def test_names_hold_the_global_layer_and_no_stage() -> None:
    part = piece(range(2, 4), first=False)
    names = {name for leaf in leaves_of(part) for name in leaf.names}
    assert {"llm/layers/002/attn/q", "llm/layers/003/mlp/down", "llm/norm", "llm/head"} <= names
    assert not [name for name in names if "000" in name or name == "llm/embed"]
    assert logical(part).keys() == names


def test_scales_and_biases_are_not_decayed_though_they_are_stacked() -> None:
    decayed = {leaf.path for leaf in leaves_of(piece(range(2))) if leaf.decayed}
    attention, mlp = (f"layers/attn/{n}" for n in "qkvo"), (f"layers/mlp/{n}" for n in ("gate", "up", "down"))
    assert decayed == {"embed", "head", *attention, *mlp}


def test_stages_start_from_the_same_numbers_as_one() -> None:
    whole = logical(piece(range(4)))
    halves = logical(piece(range(2), last=False)) | logical(piece(range(2, 4), first=False, multiple=4))
    assert whole.keys() == halves.keys()
    for name, leaf in whole.items():
        np.testing.assert_array_equal(halves[name], leaf, err_msg=name)
    other = logical(piece(range(4)), seed=1)
    assert all((other[n] != leaf).any() for n, leaf in whole.items() if leaf.ndim > 1)
    firsts = [whole[f"llm/layers/00{i}/attn/q"] for i in range(4)]
    assert all((a != b).mean() > 0.9 for i, a in enumerate(firsts) for b in firsts[:i])


def test_layers_that_are_not_stacked_have_the_same_names_and_numbers() -> None:
    stacked = piece(range(1, 4), multiple=2)
    runs = tuple(
        LayerRun(stacked.runs[0].create, range(i, i + 1), f"layer_{i:03d}", stacked=False) for i in range(1, 4)
    )
    apart = replace(stacked, runs=runs)
    want, got = logical(stacked), logical(apart)
    assert want.keys() == got.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)
    specs = {leaf.path: (leaf.spec(AXES), leaf.shape, leaf.decayed) for leaf in leaves_of(apart)}
    assert specs["layer_002/attn/q"] == (P(None, ("tp",)), (8, 8), True)
    assert specs["layer_003/attn_norm"] == (P(None), (8,), False)


def test_modules_start_from_different_numbers() -> None:
    one, other = (
        ModuleSlice(name, (LayerRun(lambda rngs: DecoderLayer(CONFIG, rngs), range(1)),)).initialise(jax.random.key(0))
        for name in ("llm", "other")
    )
    assert (one["layers"]["attn"]["q"] != other["layers"]["attn"]["q"]).mean() > 0.9


def test_a_padded_vocabulary_is_cut_off_and_put_back() -> None:
    part = piece(range(3), multiple=4)
    shapes = {leaf.path: (leaf.shape, leaf.logical_shape) for leaf in leaves_of(part)}
    assert shapes["embed"] == ((8, 8), (7, 8)) and shapes["head"] == ((8, 8), (8, 7))
    params = part.initialise(jax.random.key(0))
    assert not np.asarray(params["embed"])[7:].any() and not np.asarray(params["head"])[:, 7:].any()
    named = split_logical(leaves_of(part), jax.tree.leaves(params))
    assert named["llm/embed"].shape == (7, 8) and named["llm/head"].shape == (8, 7)
    for array, leaf in zip(join_logical(leaves_of(part), named), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(array, leaf)


@pytest.mark.parametrize("decoder", ["llama3-8b", "llama3-70b", "tiny"])
@pytest.mark.parametrize("encoder", ["clip-vit-l14", "vit-h14", "tiny"])
def test_presets_have_the_parameters_that_are_counted(decoder: str, encoder: str) -> None:
    llm = from_preset(DecoderConfig, decoder)
    llm = DecoderConfig(**{**vars(llm), "vocab": llm.vocab or 261})
    model = multimodal({"vision": from_preset(ViTConfig, encoder)}, llm)
    counts: dict[str, Any] = dict.fromkeys(model.modules, 0)
    for stage in model.stages({"vision": Layout(pp=2), "llm": Layout(pp=3, tp=2)}):
        for part in stage.slices:
            for leaf in leaves_of(part):
                counts[leaf.module] += len(leaf.names) * math.prod(leaf.logical_shape)
    assert counts == flops.parameter_count(model)
