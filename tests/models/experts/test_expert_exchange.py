"""Experts on several ranks, by ring and by all-to-all, against all experts for all tokens on one device."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.context import Context
from mmjax.models.experts import exchange
from mmjax.models.experts.layers import Experts, apply_experts
from mmjax.models.experts.router import Router
from mmjax.models.parameters import declarations

ROWS, TOKENS, WIDTH, HIDDEN = 4, 8, 16, 12
ROUTER = Router(experts=8, per_token=3)


def parameters() -> dict[str, jax.Array]:
    module = Experts(ROUTER, WIDTH, HIDDEN, 2, nnx.Rngs(0))
    return dict(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def inputs(tokens: int = TOKENS) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (ROWS, tokens, WIDTH))
    segments = np.ones((ROWS, tokens), np.int32)
    segments[1, 5:] = 0
    segments[2, :8] = [1, 1, 1, 2, 2, 2, 2, 0]
    return x, jnp.asarray(segments)


def densely(p: Any, x_BTD: jax.Array, segments_BT: jax.Array, per_token: int = ROUTER.per_token) -> jax.Array:
    probabilities = jax.nn.softmax(x_BTD @ p["router"])
    best, experts = jax.lax.top_k(probabilities, per_token)
    best = best / best.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(experts, ROUTER.experts) * best[..., None]
    inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x_BTD, p["gate"])) * jnp.einsum("btd,edf->btef", x_BTD, p["up"])
    y = jnp.einsum("btef,efd,btke->btd", inner, p["down"], chosen)
    return jnp.where(segments_BT[..., None] > 0, y, 0)


def on_ranks(layout: Layout, router: Router = ROUTER) -> Any:
    """``(p, x, segments) -> y`` under a layout."""
    submesh = Submesh.of(layout, layout.ranks, jax.devices()[: layout.size])
    spread = submesh.spread
    create = partial(Experts, router, WIDTH, HIDDEN, 2)
    specs = {name: spread.parameter(leaf.dims, stacked=False) for name, leaf in declarations(create).items()}

    def body(p: Any, x: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = submesh.axes
        p = {name: jax_compat.to_varying(leaf, spread.gradient_axes(specs[name])) for name, leaf in p.items()}
        context = Context.of(axes, {"segments": segments}, "causal")
        y, sums = apply_experts(router, p, context, context.split_sp(x), ("router_dropped",))
        return y, jax.lax.psum(sums["router_dropped"], (*axes.dp, *axes.positions))

    rows = spread.activation(inside=True)
    in_specs, out_specs = (specs, spread.tokens, spread.tokens), (rows, PartitionSpec())
    return jax.shard_map(body, mesh=submesh.mesh, in_specs=in_specs, out_specs=out_specs)


LAYOUTS = {
    "one device": Layout(),
    "dp": Layout(dp=4, ep=2),
    "all of dp": Layout(dp=4, ep=4),
    "cp": Layout(cp=2, dp=2, ep=2),
    "cp and dp": Layout(cp=2, dp=2, ep=4),
    "a part of cp": Layout(cp=4, ep=2),
    "tp": Layout(dp=2, tp=2, ep=2),
    "tp without sp": Layout(dp=2, tp=2, ep=2, sp=False),
    "whole experts on ranks of tp": Layout(dp=2, tp=2, ep=2, expert_tp=1),
    "in place of tp": Layout(dp=2, tp=4, expert_tp=1, sp=False),
    "instances": Layout(dp=4, ep=2, optimizer_instances=2),
}


FAST = ("cp and dp", "tp", "whole experts on ranks of tp")


def require_equal(layout: Layout, router: Router = ROUTER, tokens: int = TOKENS) -> None:
    """Values and gradients are those of all experts for all tokens, and none is dropped."""
    p, (x, segments), run = parameters(), inputs(tokens), on_ranks(layout, router)
    weights = jax.random.normal(jax.random.key(2), x.shape)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(densely(p, x, segments, router.per_token) * weights)

    def loss_on_ranks(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, dropped = run(p, x, segments)
        return jnp.sum(y * weights), dropped

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(p, x)
    (actual, dropped), gradients = jax.jit(jax.value_and_grad(loss_on_ranks, (0, 1), has_aux=True))(p, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), (actual, gradients), expected)
    assert dropped == 0


@pytest.mark.long
@pytest.mark.parametrize("ep_way", ["ring", "all-to-all"])
@pytest.mark.parametrize("name", [n if n == "cp and dp" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_choices_beyond_the_capacity_are_dropped_and_counted_alike(name: str, ep_way: str) -> None:
    """Of 24 choices of a row of eight tokens an expert takes two, of fewer tokens fewer; padding is none of them."""
    router, p, (x, segments) = dataclasses.replace(ROUTER, capacity=0.5), parameters(), inputs()
    expected, dropped = jax.jit(on_ranks(Layout(), router))(p, x, segments)
    chosen = ROUTER.per_token * int(jnp.sum(segments > 0))
    assert 0.2 < dropped * ROUTER.per_token / chosen < 0.8
    assert jnp.max(jnp.abs(expected - densely(p, x, segments))) > 0.1
    actual, same = jax.jit(on_ranks(dataclasses.replace(LAYOUTS[name], ep_way=ep_way), router))(p, x, segments)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    assert same == pytest.approx(float(dropped), rel=1e-6)


@pytest.mark.parametrize("ep_way", ["ring", "all-to-all"])
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_values_and_gradients_are_those_of_all_experts_for_all_tokens(name: str, ep_way: str) -> None:
    require_equal(dataclasses.replace(LAYOUTS[name], ep_way=ep_way))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n in FAST[:1] else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if LAYOUTS[n].ep > 1]
)
@pytest.mark.parametrize("spare", [0, 1])
def test_an_exchange_in_halves_and_by_small_buffers_changes_nothing(
    name: str, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sends all tokens to all ranks, or to each those alone that choose its experts, in buffers for fewer."""
    sizes = list[tuple[int, int]]()

    def tokens(self: Router, tokens: int, experts: int) -> int:
        sizes.append((tokens, tokens - spare))
        return tokens - spare

    monkeypatch.setattr(Router, "buffer_tokens", tokens)
    monkeypatch.setattr(exchange, "HALF_TOKENS", 32)
    layout = dataclasses.replace(LAYOUTS[name], ep_way="all-to-all")
    require_equal(layout, dataclasses.replace(ROUTER, per_token=2), tokens=64)
    assert {tokens for tokens, _ in sizes} == {ROWS * 64 // (layout.dp * layout.cp) // 2}


@pytest.mark.parametrize(
    "layout", [Layout(dp=4, ep=4), Layout(dp=2, tp=2, ep=2), Layout(dp=2, tp=2, ep=2, expert_tp=1)]
)
def test_choices_that_do_not_fit_a_buffer_are_dropped_and_counted(layout: Layout) -> None:
    p, (x, segments) = parameters(), inputs()
    layout = dataclasses.replace(layout, ep_way="all-to-all")
    expected = np.asarray(densely(p, x, segments))
    for buffer in (0.0, 0.5):
        y, dropped = jax.jit(on_ranks(layout, dataclasses.replace(ROUTER, buffer=buffer)))(p, x, segments)
        wrong = np.abs(np.asarray(y) - expected).max(-1) > 1e-4
        choices = float(dropped) * ROUTER.per_token
        assert wrong.sum() <= round(choices) <= ROUTER.per_token * wrong.sum()
        assert (choices > 0) == (buffer > 0)
