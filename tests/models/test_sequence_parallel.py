"""Products of tokens that ranks of tp share, by one exchange and in rings, against whole ones in fp64.

Shapes: B rows, T tokens, D width, F hidden units, R rank of an adapter.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import submesh

from mmjax.jax_compat import tree_to_varying
from mmjax.mesh.spread import Axes
from mmjax.models import sequence_parallel
from mmjax.models.handles import Adapted, Handle
from mmjax.models.layers import (
    REMAT,
    column_parallel,
    column_parallel_of_parts,
    row_parallel,
    row_parallel_of_parts,
)
from mmjax.models.sequence_parallel import SequenceParallel, TokenParts
from mmjax.models.taps import Computed, Summed, Tapped, Value, divisible, products
from mmjax.models.weight_gradients import weight_gradient

B, T, D, F, R = 2, 12, 6, 24, 3
STREAM, WHOLE, COLUMNS, LINES = P(None, "tp"), P(), P(None, "tp"), P("tp")
SPECS = {"up": COLUMNS, "gate": COLUMNS, "down": LINES, "bias": P("tp"), "end": WHOLE}
SPECS |= {"up_a": WHOLE, "up_b": COLUMNS, "down_a": LINES, "down_b": WHOLE}
SHAPES = {"up": (D, F), "gate": (D, F), "down": (F, D), "bias": (F,), "end": (D,)}
SHAPES |= {"up_a": (D, R), "up_b": (R, F), "down_a": (F, R), "down_b": (R, D)}


def axes(ring: bool) -> Axes:
    return Axes(sp=("tp",), overlap=ring)


def drawn(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(B, T, D)),
        {name: rng.normal(size=s) for name, s in SHAPES.items()},
        rng.normal(size=(B, T, D)),
    )


def whole(x: Any, p: Any) -> Any:
    """A gated two-layer product, with adapters, of all tokens."""
    up = x @ p["up"] + 0.5 * (x @ p["up_a"]) @ p["up_b"] + p["bias"]
    h = jnp.tanh(up) * (x @ p["gate"])
    return h @ p["down"] + 0.5 * (h @ p["down_a"]) @ p["down_b"] + p["end"]


def oracle() -> tuple[Any, Any, Any]:
    with jax.enable_x64(True):
        x, p, dy = jax.tree.map(jnp.float64, drawn())
        y, back = jax.vjp(whole, x, p)
        return jax.tree.map(np.asarray, (y, *back(dy)))


def layer(p: Any, ring: bool, kept_as: str) -> Any:
    """The same on ranks; ``kept_as`` says which form weights have."""
    stored = {name: Handle(stored=w, open=lambda w: 1.0 * w) for name, w in p.items()} if kept_as == "handles" else p
    up = Adapted(weight=stored["up"], a=stored["up_a"], b=stored["up_b"], scale=0.5)
    down = Adapted(weight=stored["down"], a=stored["down_a"], b=stored["down_b"], scale=0.5)

    def run(x: jax.Array) -> jax.Array:
        pairs: Any = [(up, p["bias"]), (stored["gate"], None)]
        u, g = column_parallel(x, pairs, axes(ring))
        return row_parallel(jnp.tanh(u) * g, down, axes(ring), p["end"])  # pyright: ignore[reportArgumentType]

    return run


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("tp", "remat", "kept_as"), [(2, "none", "handles"), (3, "dots", "arrays"), (4, "full", "arrays")]
)
def test_a_layer_and_its_gradients_are_those_of_whole_tokens(tp: int, remat: str, kept_as: str, ring: bool) -> None:
    x, p, dy = jax.tree.map(np.float32, drawn())

    def body(x: jax.Array, p: Any, dy: jax.Array) -> Any:
        p = tree_to_varying(p, ("tp",))
        policy = REMAT[remat]
        run = lambda x, p: layer(p, ring, kept_as)(x)  # noqa: E731
        y, back = jax.vjp(run if policy is None else jax.checkpoint(run, policy=policy), x, p)
        dx, dp = back(dy)
        return y, dx, {n: g if SPECS[n] != WHOLE else jax.lax.psum(g, "tp") for n, g in dp.items()}

    specs = (STREAM, SPECS, STREAM)
    run = jax.shard_map(body, mesh=submesh(tp).mesh, in_specs=specs, out_specs=(STREAM, STREAM, SPECS))
    for got, want in zip(jax.tree.leaves(jax.jit(run)(x, p, dy)), jax.tree.leaves(oracle()), strict=True):
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("ring", [False, True])
def test_what_taps_leave_for_later_is_shared_too(ring: bool) -> None:
    """This rank's tokens of an input that is gathered, and of an output's gradient where the output is scattered."""
    tp = 4
    (x, p, dy), h = jax.tree.map(np.float32, drawn()), np.float32(np.random.default_rng(1).normal(size=(B, T, F)))
    gather, scatter = SequenceParallel(gather=("tp",), ring=ring), SequenceParallel(scatter=("tp",), ring=ring)

    def gradients(sp: SequenceParallel, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        def run(x: jax.Array, taps: Any) -> jax.Array:
            return products(x, [Tapped(weight=w, x=taps[0], dy=taps[1])], sp)[0]

        taps = (Value.of(x).zeros(), Value.of(dy).zeros())
        dx, (kept_x, kept_dy) = jax.vjp(run, x, taps)[1](dy)
        assert (kept_x.shape, kept_dy.shape) == (x.shape, dy.shape)
        dw = weight_gradient(kept_x, kept_dy, w, stacked=False, transposed=False, sp=sp)
        how: Any = {"stacked": True, "transposed": True, "sp": sp}
        turned = weight_gradient(jnp.stack([kept_x] * 2), jnp.stack([kept_dy] * 2), w, **how)
        return dx, dw, turned[1].T

    def body(x: Any, p: Any, h: Any, dy: Any) -> Any:
        dh = (dy @ jnp.ones((D, F // tp), dy.dtype), 0)[0]
        dh = jax.lax.all_gather(dh, "tp", axis=1, tiled=True)
        return gradients(gather, x, p["up"], dh), gradients(scatter, h, p["down"], dy)

    specs, outs = (
        (STREAM, SPECS, P(None, None, "tp"), STREAM),
        ((STREAM, COLUMNS, COLUMNS), (P(None, None, "tp"), LINES, LINES)),
    )
    run = jax.shard_map(body, mesh=submesh(tp).mesh, in_specs=specs, out_specs=outs)
    (dx, d_up, turned_up), (dh, d_down, turned_down) = jax.tree.map(np.asarray, jax.jit(run)(x, p, h, dy))
    dh_of = dy @ np.ones((D, F), np.float32)
    near = lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-4)  # noqa: E731
    near(dx, dh_of @ p["up"].T)
    near(d_up, np.einsum("btd,btf->df", x, dh_of))
    near(turned_up, d_up)
    near(dh, dy @ p["down"].T)
    near(d_down, np.einsum("btf,btd->fd", h, dy))
    near(turned_down, d_down)


@pytest.mark.parametrize("ring", [False, True])
def test_rings_move_chunks_in_place_of_whole_exchanges(ring: bool) -> None:
    """Nothing is summed whole, and in rings nothing is gathered or scattered at once."""
    tp = 3
    x, p, dy = jax.tree.map(np.float32, drawn())

    def body(x: jax.Array, p: Any, dy: jax.Array) -> Any:
        return jax.vjp(lambda x, p: layer(p, ring, "arrays")(x), x, tree_to_varying(p, ("tp",)))[1](dy)

    specs = (STREAM, SPECS, STREAM)
    outs = (STREAM, {n: s if s != WHOLE else P("tp") for n, s in SPECS.items()})
    run = jax.shard_map(body, mesh=submesh(tp).mesh, in_specs=specs, out_specs=outs)
    jaxpr = str(jax.make_jaxpr(run)(x, p, dy))
    found = Counter(re.findall(r"\b(all_gather|reduce_scatter|psum\w*|ppermute|all_reduce)\[", jaxpr))
    assert found.keys() == ({"ppermute"} if ring else {"all_gather", "reduce_scatter"}), found
    assert ("optimization_barrier" in jaxpr) == ring, "products of chunks would become one"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_halves_of_rows_or_tokens_are_exchanged_one_after_the_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are those of whole exchanges; where the rows cannot be halved, the tokens are."""
    tp, tokens = 2, 12
    rng = np.random.default_rng(5)
    x, h = (rng.normal(size=(rows, tokens, n)).astype(np.float32) for n in (D, F))
    up, down = (rng.normal(size=shape).astype(np.float32) for shape in ((D, F), (F, D)))
    gather, scatter = SequenceParallel(gather=("tp",)), SequenceParallel(scatter=("tp",))

    def body(x: jax.Array, h: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        return *gather.forward(x, [up, 2 * up]), *scatter.forward(h, [down])

    specs, outs = (STREAM, P(None, None, "tp"), COLUMNS, LINES), (*[P(None, None, "tp")] * 2, STREAM)
    run = jax.shard_map(body, mesh=submesh(tp).mesh, in_specs=specs, out_specs=outs)
    want = (x @ up, 2 * x @ up, h @ down)
    for exchanges in (1, 2):
        monkeypatch.setattr(sequence_parallel, "HALF_TOKENS", 1 if exchanges == 2 else 10**6)
        jaxpr = str(jax.make_jaxpr(run)(x, h, up, down))
        assert Counter(re.findall(r"\b(all_gather|reduce_scatter)\[", jaxpr)) == {
            "all_gather": exchanges,
            "reduce_scatter": exchanges,
        }
        for got, wanted in zip(jax.jit(run)(x, h, up, down), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        run = jax.shard_map(lambda *args: body(*args), mesh=submesh(tp).mesh, in_specs=specs, out_specs=outs)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_in_two_parts_adds_both_to_its_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of tokens, or of rows: values and gradients of all tokens at once, and each sum counts a weight once."""
    monkeypatch.setattr(sequence_parallel, "HALF_TOKENS", 1)
    tp, tokens = 2, 12
    rng = np.random.default_rng(7)
    x, dy = (rng.normal(size=(rows, tokens, D)).astype(np.float32) for _ in range(2))
    weights = [rng.normal(size=shape).astype(np.float32) for shape in ((D, F), (D, F), (F, D))]
    totals = [rng.normal(size=w.shape).astype(np.float32) for w in weights]

    def run(x: Any, weights: Any, totals: Any) -> Any:
        up, gate, down = list[Any](Summed(weight=w, total=total) for w, total in zip(weights, totals, strict=True))
        assert divisible([up, gate, down])
        parts = TokenParts.of(x, ("tp",), divisible=True)
        assert parts.dimension == (0 if rows == 2 else 1)
        ups, gates = column_parallel_of_parts(parts.split(x), [(up, None), (gate, None)], axes(ring=False))
        in_order_BTF = sequence_parallel._joined_halves(ups, tp) if parts.dimension == 1 else parts.join(ups)
        inner = [Computed(gated, arrays) for arrays in zip(parts.split_gathered(in_order_BTF), gates, strict=True)]
        return parts.join(row_parallel_of_parts(inner, down, axes(ring=False))), in_order_BTF

    def body(x: Any, dy: Any, weights: Any, totals: Any) -> Any:
        weights, totals = tree_to_varying((weights, totals), ("tp",))
        (y, in_order), back = jax.vjp(lambda x, totals: run(x, weights, totals), x, totals)
        return y, in_order, *back((dy, jnp.zeros_like(in_order)))

    split = [COLUMNS, COLUMNS, LINES]
    specs, outs = (STREAM, STREAM, split, split), (STREAM, P(None, None, "tp"), STREAM, split)
    sharded = jax.shard_map(body, mesh=submesh(tp).mesh, in_specs=specs, out_specs=outs)
    y, in_order, dx, new_totals = jax.jit(sharded)(x, dy, weights, totals)

    def whole_mlp(x: Any, weights: Any) -> Any:
        return gated(x @ weights[0], x @ weights[1]) @ weights[2]

    want, back = jax.vjp(whole_mlp, x, weights)
    want_dx, want_weights = back(dy)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(in_order, x @ weights[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-4, atol=1e-3)
    for got, total, wanted in zip(new_totals, totals, want_weights, strict=True):
        np.testing.assert_allclose(got, total + wanted, rtol=1e-4, atol=1e-3)


def gated(up: Any, gate: Any) -> Any:
    return jnp.tanh(up) * gate
