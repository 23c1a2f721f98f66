"""Adapters: two more products beside a weight, which start without effect and lie where the weight lies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.models import flops
from mmjax.models.dit.config import DiTConfig
from mmjax.models.families import FAMILIES, module_of
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.handles import Adapted, opened
from mmjax.models.layers import column_parallel, lookup, row_parallel
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.layers import adapted_weights, require_targets
from mmjax.models.lora.merging import merged_adapters, require_adapters
from mmjax.models.lora.names import with_native_names
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.parameters import LayerRun, ModuleSlice, Part, split_logical
from mmjax.models.vit.config import ViTConfig

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "mlp": 24}
LORAS = {
    "vision": LoraConfig(rank=2, targets=("attn/[qkv]", "mlp/*")),
    "llm": LoraConfig(rank=3, alpha=4.5),
    "painter": LoraConfig(rank=1, targets=("modulation/kernel",)),
}
KEPT_SUM = 1.4579224586
"""Sum of these adapters' A, as it always was."""
TP = Axes(dp=("dp",), tp=("tp",))


def model(loras: dict[str, LoraConfig] | None = None) -> MultimodalModel:
    vit, decoder = ViTConfig(**SIZES, patch=2, merge=2), DecoderConfig(**{**SIZES, "layers": 3}, kv_heads=1, vocab=37)
    painter = {"painter": DiTConfig(**SIZES, patch=2, merge=2, frequencies=3)}
    return multimodal({"vision": vit}, decoder, painter, loras=loras)


def slices(model: MultimodalModel, layout: Layout) -> list[ModuleSlice]:
    return [part for stage in model.stages(dict.fromkeys(model.nodes, layout)) for part in stage.slices]


def sizes(model: MultimodalModel) -> dict[str, int]:
    """Number of parameters of each leaf of a stage."""
    leaves = [leaf for part in slices(model, Layout()) for leaf in jax.tree.leaves(part.leaves())]
    return {f"{leaf.module}/{leaf.path}": math.prod(leaf.shape) for leaf in leaves}


def test_products_are_those_of_the_merged_weights_and_so_are_gradients() -> None:
    """A column-parallel and a row-parallel product over tp, and rows over dp."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 8), "a": (6, 2), "b": (2, 8), "v": (8, 6), "c": (8, 3), "d": (3, 6)}
    p = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    x_BTD = rng.normal(size=(4, 5, 6)).astype("f4")

    def local(p: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
        up: Any = Adapted(weight=p["w"], a=p["a"], b=p["b"], scale=0.5)
        down: Any = Adapted(weight=p["v"].T, a=p["d"].T, b=p["c"].T, scale=1.5).T
        assert (up.shape, down.shape, up.dtype) == ((6, 4), (4, 6), jnp.float32)
        (h_BTF,) = column_parallel(x_BTD, [(up, None)], TP)
        y_BTD = row_parallel(jnp.tanh(h_BTF), down, TP)
        return jax.lax.psum(jnp.sum(y_BTD**2), "dp")

    def whole(p: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
        up, down = p["w"] + 0.5 * p["a"] @ p["b"], p["v"] + 1.5 * p["c"] @ p["d"]
        return jnp.sum((jnp.tanh(x_BTD @ up) @ down) ** 2)

    columns, rows, all_of_it = PartitionSpec(None, "tp"), PartitionSpec("tp"), PartitionSpec()
    specs = {"w": columns, "a": all_of_it, "b": columns, "v": rows, "c": rows, "d": all_of_it}
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, PartitionSpec("dp")), out_specs=all_of_it)
    got, grads = jax.jit(jax.value_and_grad(run))(p, x_BTD)
    want, wanted = jax.value_and_grad(whole)(p, x_BTD)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for name in shapes:
        np.testing.assert_allclose(np.asarray(grads[name]), wanted[name], rtol=1e-4, atol=1e-3, err_msg=name)


def test_the_base_is_that_of_a_model_without_adapters() -> None:
    for layout in (Layout(), Layout(pp=2, tp=2)):
        adapted = slices(model(LORAS), layout)
        base = [(p.module, p.runs, p.parts) for p in adapted if not p.module.endswith("_lora")]
        plain = [(p.module, p.runs, p.parts) for p in slices(model(), layout)]
        assert [names(*one) for one in base] == [names(*one) for one in plain]
        assert len(adapted) > len(plain)


def names(module: str, runs: tuple[LayerRun, ...], parts: tuple[Part, ...]) -> tuple[object, ...]:
    """All that decides over initial values."""
    return module, [(run.name, run.layers) for run in runs], [part.name for part in parts]


@pytest.mark.parametrize("unroll", [False, True])
def test_adapters_start_without_effect_and_alike_under_any_layout(unroll: bool) -> None:
    few = replace(model({"llm": LoraConfig(rank=3, targets=("attn/k",))}), unroll=unroll)
    found: dict[str, np.ndarray] = {}
    for part in slices(few, Layout(pp=2 if unroll else 1)):
        if part.module == "llm_lora":
            values = part.initialise(jax.random.key(3))
            own = split_logical(jax.tree.leaves(part.leaves()), jax.tree.leaves(values))
            found |= {name: np.asarray(leaf) for name, leaf in own.items()}
    assert found.keys() == {f"llm_lora/layers/{i:03d}/attn/k/{one}" for i in range(3) for one in "ab"}
    assert [found[f"llm_lora/layers/{i:03d}/attn/k/b"].any() for i in range(3)] == [False] * 3
    a_LDR = np.stack([found[f"llm_lora/layers/{i:03d}/attn/k/a"] for i in range(3)])
    assert a_LDR.shape == (3, 16, 3) and a_LDR.std() == pytest.approx(48**-0.5, rel=0.1)
    assert len({float(a_DR.sum()) for a_DR in a_LDR}) == 3
    assert float(a_LDR.sum()) == pytest.approx(KEPT_SUM, rel=1e-5)


def test_counts() -> None:
    adapted, plain = model(LORAS), model()
    assert adapted.modules == (
        *("vision", "vision_lora", "vision_projector"),
        *("llm", "llm_lora", "painter", "painter_lora", "painter_projector"),
    )
    counted = flops.parameter_count(adapted)
    held = sizes(adapted)
    assert counted == {m: sum(size for n, size in held.items() if n.startswith(f"{m}/")) for m in adapted.modules}
    assert counted["llm_lora"] == 3 * 3 * (32 + 24 + 24 + 32)  # q, k, v and o; keys and values have one head of 8
    lengths = {"vision": [4, 8], "llm": [5, 7], "painter": [4]}
    done = flops.forward_flops(adapted, lengths)
    assert {m: n for m, n in done.items() if "lora" not in m} == flops.forward_flops(plain, lengths)
    assert done["llm_lora"] == 2 * 12 * counted["llm_lora"]
    # Gradients pass through a frozen module to its adapters, and through all that stands behind.
    frozen = {name for name in adapted.modules if name != "llm_lora"}
    factors = flops.training_factors(adapted, frozen)
    assert factors == dict.fromkeys(frozen, 1) | {"llm_lora": 3, "llm": 2, "painter": 2, "painter_projector": 2} | {
        "painter_lora": 2
    }


LATENT: dict[str, Any] = {"kv_heads": 2, "kv_rank": 6, "nope_head_dim": 4, "rope_head_dim": 4}
DELTA: dict[str, Any] = {"delta_heads": 2, "attention_every": 2, "experts": 4}


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (DecoderConfig(**SIZES, vocab=37), "attn/k attn/o attn/q attn/v"),
        (ViTConfig(**SIZES, patch=2, merge=2), "attn/k attn/o attn/q attn/v"),
        (DiTConfig(**SIZES, patch=2, merge=2, frequencies=3), "attn/k attn/o attn/q attn/v"),
        (
            MMDiTConfig(**SIZES, patch=2),
            "attn/k attn/o attn/q attn/v condition_attn/k condition_attn/o condition_attn/q condition_attn/v",
        ),
        (DecoderConfig(**SIZES, vocab=37, **LATENT), "attn/kv_down attn/kv_up attn/o attn/q"),
        (
            DecoderConfig(**SIZES, vocab=37, **LATENT, q_rank=5),
            "attn/kv_down attn/kv_up attn/o attn/q_down attn/q_up",
        ),
        (
            DecoderConfig(**SIZES, vocab=37, **DELTA),
            "attn/k attn/o attn/q attn/v delta/decay delta/gate delta/k delta/o delta/q delta/strength delta/v",
        ),
    ],
)
def test_by_default_products_of_attention_have_adapters_whatever_its_kind(config: Any, weights: str) -> None:
    module = module_of(config)
    require_targets("llm", module, LoraConfig(rank=2))
    adapted = {name for group in module.groups for name, _ in adapted_weights(group.create, LoraConfig(rank=2))}
    assert sorted(adapted) == weights.split()


def test_attention_may_stand_beside_names_of_hugging_face() -> None:
    lora = LoraConfig(rank=2, targets=("attention", "down_proj"))
    native = with_native_names("llm", lora, FAMILIES["llama"], DecoderConfig(**SIZES), "")
    assert native.targets == ("attention", "mlp/down") and native.adapts("attn/k") and not native.adapts("mlp/up")


def test_targets_that_stand_for_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^llm/Lora.targets=.*'attn/w' stands for no weight of llm's layers; they"):
        model({"llm": LoraConfig(rank=2, targets=("attn/q", "attn/w"))})
    with pytest.raises(ConfigError, match="attn/q, attn/v, mlp/down"):
        model({"llm": LoraConfig(rank=2, targets=("attn_norm",))})
    with pytest.raises(ValueError, match="loras: no module 'ear'; use one of"):
        model({"ear": LoraConfig(rank=2)})
    cases: list[dict[str, Any]] = [{"rank": -1}, {"alpha": 0.0}, {"targets": ()}]
    for wrong in cases:
        with pytest.raises(ConfigError, match=f"Lora.{next(iter(wrong))}="):
            LoraConfig(**wrong)


def test_a_weight_that_is_looked_up_can_have_none() -> None:
    table = Adapted(weight=jnp.ones((3, 4)), a=jnp.ones((3, 1)), b=jnp.ones((1, 4)), scale=1.0)
    for use in (opened, lambda table: lookup(table, jnp.zeros(2, jnp.int32))):
        with pytest.raises(ConfigError, match="outside of a product"):
            use(table)


def test_merging_takes_each_module_s_own_alpha() -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 6), "a": (4, 2), "b": (2, 6)}
    w, a, b = (rng.normal(size=shape).astype("f4") for shape in shapes.values())
    names = {m: f"{m}/layers/000/attn/q" for m in ("llm", "vision", "llm_lora")}
    given = {names["llm"]: w, names["vision"]: w, f"{names['llm_lora']}/a": a, f"{names['llm_lora']}/b": b}
    got = merged_adapters(given, "vision/Lora.alpha = 2.0\nllm/Lora.alpha = 3.0\n")
    assert got.keys() == {names["llm"], names["vision"]} and got[names["vision"]] is w
    np.testing.assert_allclose(got[names["llm"]], w + 1.5 * a @ b, rtol=1e-5)
    with pytest.raises(ConfigError, match="--merge_lora=True: the run has no adapters"):
        require_adapters((), merge=True)
    require_adapters((), merge=False)
