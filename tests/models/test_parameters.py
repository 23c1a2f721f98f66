"""Leaves: names, sharding, padding, and initial values that know no stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES

from mmjax.configurable import ConfigError, from_preset
from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import TP_DIMENSIONS
from mmjax.models import flops
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.layers import DecoderLayer, parts
from mmjax.models.llama.module import Llama
from mmjax.models.lora.config import LoraConfig
from mmjax.models.parameters import (
    Create,
    LayerRun,
    Leaf,
    ModuleSlice,
    Part,
    declarations,
    join_logical,
    split_logical,
)
from mmjax.models.projector.layers import Projector
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.layers import ViTLayer, ViTStem
from mmjax.models.whisper.config import WhisperConfig
from mmjax.models.whisper.layers import AudioStem

CONFIG = DecoderConfig(layers=4, width=8, heads=2, kv_heads=1, mlp=12, vocab=7)


def piece(layers: range, *, first: bool = True, last: bool = True, multiple: int = 1) -> ModuleSlice:
    return ModuleSlice(
        "llm",
        (LayerRun(lambda rngs: DecoderLayer(CONFIG, "attn", rngs), layers),),
        parts(CONFIG, first=first, last=last),
        multiple,
    )


def leaves_of(part: ModuleSlice) -> list[Leaf]:
    return jax.tree.leaves(part.leaves())


def logical(part: ModuleSlice, seed: int = 0) -> dict[str, np.ndarray]:
    params = part.initialise(jax.random.key(seed))
    named = split_logical(leaves_of(part), jax.tree.leaves(params))
    return {name: np.asarray(x) for name, x in named.items()}


class Layer(nnx.Module):
    """One parameter, "gate", with this metadata."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs, **metadata: Any):
        self.gate = nnx.Param(jnp.zeros(shape), **metadata)


class Outer(nnx.Module):
    """A layer in a layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = Layer((4, 8, 8), rngs, dims=("embed", "mlp"))


def test_dimensions_of_layers_and_parts() -> None:
    """Those that tp splits: products with an input of all tp ranks by columns, and those that are summed by rows."""
    with_biases = replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    vit, by_columns, by_rows = ViTConfig(class_token=True, layer_scale=True, gated=True), 1, 0
    products = {"attn/q": by_columns, "attn/k": by_columns, "attn/v": by_columns, "attn/o": by_rows}
    products |= {"mlp/gate": by_columns, "mlp/up": by_columns, "mlp/down": by_rows}
    biases = {f"{name}_bias": 0 for name in products if name not in ("attn/o", "mlp/down")}
    for create, split in (
        (partial(DecoderLayer, with_biases, "attn"), products | biases),
        (partial(ViTLayer, vit), products | biases),
        (partial(ViTStem, replace(vit, positions="learned2d")), {}),
        (partial(Projector, 8, 16, 4), {"up": 1, "up_bias": 0, "down": 0}),
        (partial(Projector, 8, 0, 4), {}),
        (parts(CONFIG, first=True, last=False)[0].create, {"embed": 0}),
        (parts(CONFIG, first=False, last=True)[0].create, {"head": 1}),
        (partial(AudioStem, WhisperConfig(positions="learned")), {}),
    ):
        dims = {path: weight.dims_under(1) for path, weight in declarations(create).items()}
        by_tp = {name: [i for i, dim in enumerate(named) if dim in TP_DIMENSIONS] for name, named in dims.items()}
        assert {name: found for name, found in by_tp.items() if found} == {name: [i] for name, i in split.items()}


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (
            partial(Layer, (16, 24)),
            r"Layer\.gate\[16, 24\]: dims=None has .* nnx\.Param\(value, dims=\('embed', 'mlp'\)\)",
        ),
        (partial(Layer, (16,), dims=()), r"Layer\.gate\[16\]: dims=\(\) has .*, dims=\('embed',\)\)"),
        (partial(Layer, (5,), dims="embed"), r"Layer\.gate\[5\]: dims='embed' has "),
        (Outer, r"Outer\.mlp\.gate\[4, 8, 8\]: dims=\('embed', 'mlp'\) has .*, dims=\('embed', 'mlp', 'head'\)\)"),
        (partial(Layer, (6,), dims=("kv_heads",)), r"Layer\.gate\[6\]: kv_heads=0 has .*kv_heads=2\)"),
        (partial(Layer, (6,), dims=("kv_heads",), kv_heads=4), r"Layer\.gate\[6\]: kv_heads=4 has "),
    ],
)
def test_a_parameter_without_named_dimensions_is_refused(create: Create, message: str) -> None:
    """Neither a missing name nor one of another rank becomes a replica in silence."""
    for part in (ModuleSlice("a", (LayerRun(create, range(2)),)), ModuleSlice("a", parts=(Part(create),))):
        with pytest.raises(ConfigError, match=f"^{message}") as refused:
            part.leaves()
        assert "\n" not in str(refused.value)


def test_a_table_of_dimensions_is_refused() -> None:
    @dataclass(frozen=True)
    class Tabled(Llama):
        axes: ClassVar[Any] = {"up": ("embed", "mlp")}

    with pytest.raises(
        ConfigError, match=r'^llm: Tabled\.axes is not read; .*nnx\.Param\(value, dims=\("embed", "mlp"\)\)$'
    ):
        multimodal({}, Tabled(CONFIG))


def test_more_ranks_than_key_value_heads_have_all_of_them() -> None:
    config = replace(CONFIG, heads=4, kv_heads=2, qkv_bias=True)
    model = multimodal({}, config, loras={"llm": LoraConfig(rank=3)})
    names = {f"llm/layers/attn/{name}" for name in ("k", "v", "k_bias", "v_bias")}
    names |= {f"llm_lora/layers/attn/{name}/b" for name in ("k", "v")}
    for tp, split in ((1, True), (2, True), (4, False)):
        (stage,) = model.stages({"llm": Layout(tp=tp)})
        leaves = [leaf for part in stage.slices for leaf in leaves_of(part)]
        by_tp = {f"{leaf.module}/{leaf.path}": not TP_DIMENSIONS.isdisjoint(leaf.dims) for leaf in leaves}
        assert {name: by_tp[name] for name in names} == dict.fromkeys(names, split)
        assert by_tp["llm/layers/attn/q"]
        assert stage.opens.keys() == (set() if split else names)


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
        ModuleSlice(name, (LayerRun(lambda rngs: DecoderLayer(CONFIG, "attn", rngs), range(1)),)).initialise(
            jax.random.key(0)
        )
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
