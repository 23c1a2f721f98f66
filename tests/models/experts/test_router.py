"""Routers against loops in NumPy: choices, weights, losses and metrics, and the gradient that is a load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from mmjax.mesh.spread import Axes
from mmjax.models.context import Context
from mmjax.models.experts.router import Router, Routing, route, router_sums

WIDTH, ROWS, TOKENS = 6, 2, 9
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 3, 3, 3, 3, 3, 0, 0]], np.int32)
NAMES = ("balance_loss", "router_z_loss", "router_entropy", "router_fullest")


def drawn(router: Router, seed: int) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(seed)
    p = {"router": rng.normal(size=(WIDTH, router.experts))}
    if router.has_bias:
        p["router_bias"] = 0.3 * rng.normal(size=router.experts)
    return {name: jnp.asarray(x, jnp.float32) for name, x in p.items()}, jnp.asarray(
        rng.normal(size=(ROWS, TOKENS, WIDTH)), jnp.float32
    )


def on_a_device(fn: Any, *args: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()))(*args)


def routed(router: Router, p: Any, h_BTD: jax.Array) -> tuple[Routing, dict[str, jax.Array]]:
    def body(p: Any, h_BTD: jax.Array) -> tuple[Routing, dict[str, jax.Array]]:
        context = Context.of(Axes(), {"segments": jnp.asarray(SEGMENTS)}, "causal")
        routing = route(router, p, h_BTD, context.inputs["segments"] > 0)
        return routing, router_sums(router, routing, context, NAMES)

    return on_a_device(body, p, h_BTD)


def by_hand(router: Router, p: Any, h_D: np.ndarray) -> tuple[dict[int, float], Any, Any]:
    """The weight of each expert of a token, its probabilities and its logits."""
    logits = h_D.astype(np.float64) @ np.asarray(p["router"], np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum()
    scores = softmax if router.scores == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + (np.asarray(p["router_bias"], np.float64) if router.has_bias else 0)
    groups = np.split(np.arange(router.experts), router.groups)
    best = 1 if router.scores == "softmax" else 2
    ranked = sorted(groups, key=lambda group: -sum(sorted(choice[group])[-best:]))
    legal = [expert for group in ranked[: router.group_limit] for expert in group]
    experts = sorted(legal, key=lambda expert: -choice[expert])[: router.per_token]
    total = scores[experts].sum() if router.normalised else 1.0
    return {int(e): float(router.scale * scores[e] / total) for e in experts}, scores / scores.sum(), logits


@st.composite
def routers(draw: st.DrawFn) -> Router:
    groups = draw(st.sampled_from([1, 2, 4]))
    limit, each = draw(st.integers(1, groups)), draw(st.integers(2, 4))
    return Router(
        experts=groups * each,
        per_token=draw(st.integers(1, limit * each)),
        scores=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        group_limit=limit,
        bias_rate=draw(st.sampled_from([None, 0.01])),
    )


@given(routers(), st.integers(0, 99))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_choices_weights_and_sums_are_those_of_loops(router: Router, seed: int) -> None:
    p, h_BTD = drawn(router, seed)
    routing, sums = routed(router, p, h_BTD)
    want, loads = dict.fromkeys(NAMES, 0.0), np.zeros(router.experts)
    for row in range(ROWS):
        for segment in set(SEGMENTS[row]) - {0}:
            places = np.flatnonzero(SEGMENTS[row] == segment)
            shares, means = np.zeros(router.experts), np.zeros(router.experts)
            for t in places:
                weights, probabilities, logits = by_hand(router, p, np.asarray(h_BTD[row, t]))
                got = dict(zip(routing.experts_BTk[row, t].tolist(), routing.weights_BTk[row, t].tolist(), strict=True))
                assert got.keys() == weights.keys()
                np.testing.assert_allclose([got[e] for e in weights], [*weights.values()], rtol=1e-5)
                np.testing.assert_allclose(routing.probabilities_BTE[row, t], probabilities, rtol=1e-5, atol=1e-7)
                shares[[*weights]] += 1 / len(places)
                means += probabilities / len(places)
                loads[[*weights]] += 1
                want["router_z_loss"] += np.log(np.exp(logits).sum()) ** 2
                want["router_entropy"] -= (probabilities * np.log(probabilities)).sum()
            assert np.isclose(shares.sum(), router.per_token)
            want["balance_loss"] += len(places) * router.experts * (shares * means).sum()
    want["router_fullest"] = loads.max() / loads.mean() * (SEGMENTS > 0).sum()
    for name in NAMES:
        np.testing.assert_allclose(sums[name], want[name], rtol=2e-5, err_msg=name)


def test_padding_chooses_no_expert() -> None:
    router = Router(experts=4, per_token=2)
    routing, _ = routed(router, *drawn(router, 0))
    padding = SEGMENTS == 0
    assert (np.asarray(routing.experts_BTk)[padding] == router.experts).all()
    assert (np.asarray(routing.weights_BTk)[padding] == 0).all()
    assert (np.asarray(routing.experts_BTk)[~padding] < router.experts).all()


def test_a_bias_chooses_but_does_not_weigh() -> None:
    router = Router(experts=4, per_token=1, scores="sigmoid", normalised=False, bias_rate=0.1)
    p, h_BTD = drawn(router, 1)
    p["router_bias"] = jnp.array([0.0, 0.0, 9.0, 0.0])
    routing, _ = routed(router, p, h_BTD)
    is_token = SEGMENTS > 0
    assert (np.asarray(routing.experts_BTk)[is_token] == 2).all()
    scores = jax.nn.sigmoid(h_BTD @ p["router"])[..., 2]
    np.testing.assert_allclose(np.asarray(routing.weights_BTk)[..., 0], np.where(is_token, scores, 0), rtol=1e-5)


def test_the_gradient_of_a_bias_is_its_load_whatever_the_loss() -> None:
    router = Router(experts=4, per_token=2, bias_rate=0.1)
    p, h_BTD = drawn(router, 2)
    routing, _ = routed(router, p, h_BTD)
    loads = [(np.asarray(routing.experts_BTk) == expert).sum() for expert in range(4)]

    def loss(p: Any, factor: float) -> jax.Array:
        weights_BTk = route(router, p, h_BTD, jnp.asarray(SEGMENTS > 0)).weights_BTk
        return factor * jnp.sum(weights_BTk**2)

    for factor in (1.0, 1e-3):
        gradients = on_a_device(jax.grad(lambda p, factor=factor: loss(p, factor)), p)
        assert gradients["router_bias"].tolist() == loads
        assert np.abs(gradients["router"]).max() > 0


def test_sums_of_a_sample_do_not_depend_on_its_row() -> None:
    """The balance loss of two samples, packed or apart."""
    router = Router(experts=4, per_token=2)
    p, h_BTD = drawn(router, 3)

    def balance(segments: np.ndarray, h_BTD: jax.Array) -> float:
        def body(p: Any, h_BTD: jax.Array) -> jax.Array:
            context = Context.of(Axes(), {"segments": jnp.asarray(segments)}, "causal")
            routing = route(router, p, h_BTD, context.inputs["segments"] > 0)
            return router_sums(router, routing, context, ["balance_loss"])["balance_loss"]

        return float(on_a_device(body, p, h_BTD))

    packed = balance(np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2]], np.int32), h_BTD[:1])
    apart = [balance(np.ones((1, n), np.int32), x) for n, x in ((5, h_BTD[:1, :5]), (4, h_BTD[:1, 5:]))]
    np.testing.assert_allclose(packed, sum(apart), rtol=1e-6)
    assert abs(packed - balance(np.ones((1, 9), np.int32), h_BTD[:1])) > 1e-3
