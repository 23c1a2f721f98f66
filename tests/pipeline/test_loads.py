"""Biases of routers move by their rate towards equal loads, and their gradients are no part of others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.module import layer_runs
from mmjax.models.parameters import ModuleSlice
from mmjax.pipeline.loads import split_loads
from mmjax.pipeline.trees import by_name
from mmjax.pipeline.zero import ZeroLeaf

BIAS = "llm/layers/experts/router_bias"


def zeros_of(c: DecoderConfig) -> dict[str, ZeroLeaf]:
    module = Llama(c)
    runs = tuple(run for run, _ in layer_runs(module, range(c.layers)))
    part = ModuleSlice("llm", runs, module.parts(first=True, last=True))
    return jax.tree.map(lambda leaf: ZeroLeaf(leaf, None, leaf.shape), {"llm": part.leaves()})


CONFIG = DecoderConfig(
    layers=2, width=8, heads=2, kv_heads=2, mlp=12, vocab=11, experts=6, router_bias=True, router_bias_rate=0.25
)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_bias_moves_towards_the_mean_load(scale: float) -> None:
    """Below the mean up, above it down; at the mean it stays, whose sixth of a sum is no fp32 number."""
    zeros = zeros_of(CONFIG)
    grads = jax.tree.map(lambda zero: jnp.ones(zero.shape), zeros)
    loads = jnp.array([[7, 7, 7, 7, 7, 7], [1, 7, 13, 7, 0, 14]], jnp.float32) * scale
    grads["llm"]["layers"]["experts"]["router_bias"] = loads
    kept, updates = jax.jit(lambda grads: split_loads(zeros, grads))(grads)
    assert list(updates) == [BIAS]
    np.testing.assert_array_equal(updates[BIAS], 0.25 * np.array([[0] * 6, [1, 0, -1, 0, 1, -1]]))
    named = by_name(kept)
    assert not np.asarray(named.pop(BIAS)).any()
    assert all((np.asarray(gradient) == 1).all() for gradient in named.values())


def test_a_module_without_loads_keeps_its_gradients() -> None:
    zeros = zeros_of(DecoderConfig(layers=2, width=8, heads=2, kv_heads=2, mlp=12, vocab=11, experts=4))
    grads = jax.tree.map(lambda zero: jnp.ones(zero.shape), zeros)
    kept, updates = split_loads(zeros, grads)
    assert kept is grads and updates == {}
