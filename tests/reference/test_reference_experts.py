"""The reference's experts against loops over tokens in float64 NumPy, and its biases' updates."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax import reference
from mmjax.data.types import Sample
from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.reference.arithmetic import dense_leaves
from mmjax.reference.experts import mixture

PREFIX, WIDTH, HIDDEN, TOKENS = "llm/layers/001", 6, 5, 7
DECODER = DecoderConfig(
    layers=3, width=WIDTH, heads=3, kv_heads=1, mlp=8, vocab=19, experts=6, expert_mlp=HIDDEN, experts_per_token=2
)
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"balance_loss": 0.1},
    "softmax, groups, shared experts": {
        **{"router_groups": 3, "router_group_limit": 2, "router_normalised": False, "shared_experts": 2},
        **{"dense_layers": 1, "router_z_loss": 0.1},
    },
    "sigmoid, groups, bias, gate": {
        **{"router": "sigmoid", "router_groups": 2, "router_group_limit": 1, "router_bias": True, "router_scale": 2.5},
        **{"shared_experts": 1, "shared_gate": True, "balance_loss": 0.1, "router_z_loss": 0.1},
    },
}


def drawn(c: DecoderConfig) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "experts/router": (WIDTH, c.experts),
        "experts/router_bias": (c.experts,),
        **dict.fromkeys(("experts/gate", "experts/up"), (c.experts, WIDTH, HIDDEN)),
        "experts/down": (c.experts, HIDDEN, WIDTH),
        **dict.fromkeys(("shared/gate", "shared/up"), (WIDTH, c.shared_width)),
        "shared/down": (c.shared_width, WIDTH),
        "shared_gate": (WIDTH, 1),
    }
    leaves = {f"{PREFIX}/{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return leaves, rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def mlp(x_D: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return ((x_D @ gate) * sigmoid(x_D @ gate) * (x_D @ up)) @ down


def token_by_token(c: DecoderConfig, leaves: dict[str, np.ndarray], x_ND: np.ndarray) -> tuple[Any, Any, Any]:
    """Outputs, losses and loads; each token computes its experts alone."""
    p = {name.removeprefix(f"{PREFIX}/"): leaf.astype(np.float64) for name, leaf in leaves.items()}
    outputs, chosen, all_scores, z_loss = [], np.zeros((TOKENS, c.experts)), [], 0.0
    for number, x_D in enumerate(x_ND.astype(np.float64)):
        logits = x_D @ p["experts/router"]
        scores = np.exp(logits) / np.exp(logits).sum() if c.router == "softmax" else sigmoid(logits)
        z_loss += np.log(np.exp(logits).sum()) ** 2
        choice = scores + (p["experts/router_bias"] if c.router_bias else 0)
        groups = choice.reshape(c.router_groups, -1)
        values = groups.max(1) if c.router == "softmax" else np.sort(groups)[:, -2:].sum(1)
        legal = np.repeat(np.argsort(np.argsort(-values)) < c.router_group_limit, groups.shape[1])
        experts = np.argsort(np.where(legal, -choice, np.inf))[: c.experts_per_token]
        weights = scores[experts] / (scores[experts].sum() if c.router_normalised else 1) * c.router_scale
        products = ([p[f"experts/{name}"][e] for name in ("gate", "up", "down")] for e in experts)
        y_D = sum(weight * mlp(x_D, *each) for weight, each in zip(weights, products, strict=True))
        if c.shared_experts:
            gate = sigmoid(x_D @ p["shared_gate"])[0] if c.shared_gate else 1.0
            y_D = y_D + gate * mlp(x_D, *(p[f"shared/{name}"] for name in ("gate", "up", "down")))
        outputs.append(y_D)
        chosen[number, experts] = 1
        all_scores.append(scores / scores.sum())
    layers = c.layers - c.dense_layers
    balance = TOKENS * c.experts * (chosen.mean(0) * np.mean(all_scores, 0)).sum()
    return np.array(outputs), {"balance_loss": balance / layers, "router_z_loss": z_loss / layers}, chosen.sum(0)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_a_layer_is_that_of_each_token_alone(changes: dict[str, Any]) -> None:
    c = dataclasses.replace(DECODER, **changes)
    leaves, x_ND = drawn(c)
    y_ND, sums = mixture(dense_leaves(leaves), PREFIX, c, jnp.asarray(x_ND), jnp.asarray(x_ND))
    want, losses, loads = token_by_token(c, leaves, x_ND)
    np.testing.assert_allclose(y_ND, want, rtol=1e-4, atol=1e-4)
    assert sums.losses.keys() == {name for name in losses if getattr(c, name)}
    for name, value in sums.losses.items():
        np.testing.assert_allclose(value, losses[name], rtol=1e-5)
    assert sums.loads.keys() == ({f"{PREFIX}/experts/router_bias"} if c.router_bias else set())
    for value in sums.loads.values():
        np.testing.assert_array_equal(value, loads)


def test_the_first_of_equal_scores_is_chosen() -> None:
    leaves, x_ND = drawn(dataclasses.replace(DECODER, router_bias=True))
    leaves[f"{PREFIX}/experts/router"] *= 0
    c = dataclasses.replace(DECODER, router_bias=True)
    leaves[f"{PREFIX}/experts/router_bias"] = np.array([0, 0, 0, 1, 0, 0], np.float32)
    _, sums = mixture(dense_leaves(leaves), PREFIX, c, jnp.asarray(x_ND), jnp.asarray(x_ND))
    (load,) = sums.loads.values()
    assert np.asarray(load).tolist() == [TOKENS, 0, 0, TOKENS, 0, 0]


# ---- a model ---------------------------------------------------------------------------------------------------------


def model(**changes: Any) -> MultimodalModel:
    vit = ViTConfig(layers=1, width=8, heads=2, mlp=12, patch=2, channels=1, merge=1)
    return multimodal({"vision": vit}, dataclasses.replace(DECODER, **changes))


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 19, length).astype(np.int32) for length in (5, 9, 6)]
    return [
        Sample(tokens=t, loss_weights=np.ones(len(t), np.float32), prompt=1, media={}, question="", answer="")
        for t in tokens
    ]


def leaves_of(m: MultimodalModel) -> dict[str, np.ndarray]:
    rng, leaves = np.random.default_rng(1), {}
    for stage in m.stages(dict.fromkeys(m.nodes, Layout())):
        for part in stage.slices:
            for leaf in jax.tree.leaves(part.leaves()):
                leaves |= {name: 0.3 * rng.normal(size=leaf.logical_shape).astype(np.float32) for name in leaf.names}
    return leaves


@pytest.mark.long
def test_losses_are_means_over_tokens_and_layers() -> None:
    """Each sample counts alone, by its tokens; the step's loss has them times their weights."""
    m = model(balance_loss=0.5, router_z_loss=0.25, dense_layers=1)
    leaves = leaves_of(m)
    whole = reference.step_loss_and_gradients(leaves, m, samples())
    tokens = sum(len(sample.tokens) for sample in samples())
    for name in ("llm/balance_loss", "llm/router_z_loss"):
        alone = [float(reference.loss_sums(leaves, m, sample)[name]) for sample in samples()]
        np.testing.assert_allclose(whole.losses[name], sum(alone) / tokens, rtol=1e-6)
    parts = whole.losses
    expected = parts["llm/loss"] + 0.5 * parts["llm/balance_loss"] + 0.25 * parts["llm/router_z_loss"]
    np.testing.assert_allclose(whole.loss, expected, rtol=1e-6)
    assert parts["llm/balance_loss"] > DECODER.experts_per_token * 0.9  # k for equal loads


@pytest.mark.long
def test_biases_follow_loads_beside_the_optimizer() -> None:
    m = model(router_bias=True, router_bias_rate=0.125, router="sigmoid")
    leaves = leaves_of(m)
    biases = [name for name in leaves if name.endswith("router_bias")]
    result = reference.step_loss_and_gradients(leaves, m, samples())
    tokens = sum(len(sample.tokens) for sample in samples())
    assert result.loads.keys() == set(biases) and len(biases) == 3
    assert all(load.sum() == tokens * DECODER.experts_per_token for load in result.loads.values())
    assert not any(result.gradients[name].any() for name in biases)
    optimizer = OptimizerConfig(learning_rate=0.1, warmup=0, rates={"*router_bias": 0.0}, weight_decay=0.5)
    optimizers = dict.fromkeys(m.modules, optimizer)
    training = reference.train_steps(leaves, m, optimizers, [samples()], clip_norm=1e-3)
    for name in biases:
        load, moved = result.loads[name], training.state.leaves[name] - leaves[name]
        np.testing.assert_allclose(moved, 0.125 * np.sign(load.mean() - load), atol=1e-6)
        assert not training.state.first[name].any() and not training.state.second[name].any()


def test_a_frozen_decoder_keeps_its_biases() -> None:
    m = model(router_bias=True)
    result = reference.step_loss_and_gradients(leaves_of(m), m, samples(), frozen=["llm"])
    assert not result.loads
