"""Choices that an expert computes where their number is limited, against loops in the order of choices."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.context import Context
from mmjax.models.experts.capacity import within_capacity
from mmjax.models.experts.router import Router

ROUTER = Router(experts=5, per_token=2, capacity=0.7)
ROWS, TOKENS = 2, 24
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [4, 11, 7, 2]), np.repeat([1, 0], [20, 4])]).astype(np.int32)


def choices() -> np.ndarray:
    """Experts of each token, of which the first are chosen most often; padding has the number of experts."""
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(ROWS, TOKENS, 5)) + np.linspace(1.5, 0, 5)
    best = np.argsort(-scores, axis=2)[..., :2]
    return np.where(SEGMENTS[..., None] > 0, best, 5).astype(np.int32)


def by_loops(experts_BTk: np.ndarray) -> np.ndarray:
    is_kept = np.zeros(experts_BTk.shape, bool)
    for row, segments in enumerate(SEGMENTS):
        for sample in range(1, segments.max() + 1):
            tokens = np.flatnonzero(segments == sample)
            room = np.full(5, math.ceil(Fraction("0.7") * len(tokens) * 2 / 5))
            for choice in range(2):
                for token in tokens:
                    expert = experts_BTk[row, token, choice]
                    is_kept[row, token, choice] = room[expert] > 0
                    room[expert] -= 1
    return is_kept


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(), id="one device"),
        pytest.param(Layout(dp=2, cp=2, tp=2), id="dp, cp and sp"),
        pytest.param(Layout(cp=4, tp=2, sp=False), id="cp"),
    ],
)
@pytest.mark.parametrize("is_permuted", [False, True])
def test_an_expert_takes_first_choices_first_and_tokens_in_order(layout: Layout, is_permuted: bool) -> None:
    """Ranks of cp have tokens in any order; what counts is their place in the row."""
    order = np.random.default_rng(1).permutation(TOKENS) if is_permuted else np.arange(TOKENS)
    order_BT = jnp.asarray(np.broadcast_to(order, (ROWS, TOKENS)).astype(np.int32))
    submesh = Submesh.of(layout, layout.ranks, jax.devices()[: layout.size])

    def run(segments: jax.Array, order_BT: jax.Array, experts: jax.Array) -> jax.Array:
        context = Context.of(submesh.axes, {"segments": segments, "order": order_BT}, "causal")
        return within_capacity(ROUTER, context, context.split_sp(experts))

    spread = submesh.spread
    specs = (spread.tokens,) * 3
    sharded = jax.shard_map(run, mesh=submesh.mesh, in_specs=specs, out_specs=spread.activation(inside=True))
    experts_BTk = choices()
    is_kept = np.asarray(jax.jit(sharded)(SEGMENTS[:, order], order_BT, experts_BTk[:, order]))
    is_token = SEGMENTS > 0
    expected = by_loops(experts_BTk)
    assert 0.2 < np.mean(~expected[is_token]) < 0.6
    np.testing.assert_array_equal(is_kept[is_token[:, order]], expected[:, order][is_token[:, order]])


def test_a_capacity_is_rounded_up_once() -> None:
    """No error of a binary fraction adds a choice."""
    router = Router(experts=10, per_token=1, capacity=1.1)
    assert [router.capacity_of(tokens) for tokens in (0, 1, 10, 11, 100, 101)] == [0, 1, 2, 2, 11, 12]
    assert [ROUTER.capacity_of(tokens) for tokens in (1, 25)] == [1, 7]
