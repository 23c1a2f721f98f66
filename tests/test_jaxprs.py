"""One test for each thing that ``mmjax.jaxprs`` knows of JAX beyond its stable API."""

from __future__ import annotations

from itertools import compress
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from small_mesh import ROWS, WHOLE, small_mesh, spmd

from mmjax import jax_compat, jaxprs


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return small_mesh()


def test_used_inputs():
    def fn(params, x, unused):
        hidden = params["w"] * x
        return {"out": hidden, "other": params["b"] + 1.0}, unused * 0 + x

    avals = [{"b": jnp.ones(()), "w": jnp.ones(())}, jnp.ones(()), jnp.ones(())]
    assert jaxprs.used_inputs(fn, avals) == [True, True, True, True]
    only = lambda name: lambda shape: ({key: key == name for key in shape[0]}, False)  # noqa: E731
    assert jaxprs.used_inputs(fn, avals, only("out")) == [False, True, True, False]
    assert jaxprs.used_inputs(fn, avals, only("other")) == [True, False, False, False]
    assert jaxprs.used_inputs(fn, avals, only("neither")) == [False] * 4


def test_used_inputs_looks_into_loops_and_shard_map(mesh):
    @spmd(mesh, (ROWS, ROWS, WHOLE), (ROWS, ROWS))
    def fn(x, y, w):
        loop = lambda carry, _: ((carry[0] * w, carry[1] + 1.0), None)  # noqa: E731
        (a, b), _ = lax.scan(loop, (x, y), length=3)
        return a, b

    avals = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((), jnp.float32)]
    assert jaxprs.used_inputs(fn, avals, lambda _: (True, False)) == [True, False, True]
    assert jaxprs.used_inputs(fn, avals, lambda _: (False, True)) == [False, True, False]


def test_without_dead_code(mesh):
    """Within ``shard_map``, where values vary over axes: a sum over ranks, and a loop's, that no result needs."""

    def both(w, x):
        total, scaled = lax.scan(lambda c, v: (c + jnp.sum(v * x), 2 * v), jnp.sum(x), w)
        return [scaled, lax.psum(total, "dp")]

    def local(w, x):
        return jaxprs.without_dead_code(lambda w: both(w, x)[:1], jax_compat.to_varying(w, ["dp"]))[0][None]

    doubled = spmd(mesh, (WHOLE, ROWS), ROWS)(local)
    w, x = jnp.arange(3.0), jnp.arange(4.0)
    np.testing.assert_array_equal(jax.jit(doubled)(w, x), [[0, 2, 4]] * 2)
    text = str(jax.make_jaxpr(doubled)(w, x))
    assert "psum" not in text and "reduce_sum" not in text and "scan" in text


def test_dependencies(mesh):
    @spmd(mesh, (ROWS, ROWS, WHOLE), (ROWS, (ROWS, WHOLE), WHOLE))
    def fn(x, y, w):
        return x * w, (y + x, w * 2.0), jnp.zeros(())

    avals = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((), jnp.float32)]
    assert jaxprs.dependencies(fn, avals) == [
        [True, False, True],
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ]


def test_dependencies_through_loops_and_calls():
    """A carried value depends on all it is made of, over as many rounds as needed. `cond` depends on all branches."""

    known = jnp.arange(4.0)

    @jax.checkpoint
    def fn(a, b, c, x, w, p):
        def body(carry, x):
            a, b, c = carry
            return (b, c * w, c), (a + x, x)

        carry, (ys, xs) = lax.scan(body, (a, b, c), x)
        return carry, ys, xs, lax.cond(p, lambda: a, lambda: b), jax.jit(lambda u, v: (v, u))(a, w), x + known

    number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    avals = (number, number, number, jax.ShapeDtypeStruct((4,), jnp.float32), number, flag)
    names = ["".join(compress("abcxwp", needs)) for needs in jaxprs.dependencies(fn, avals)]
    assert names == ["bcw", "cw", "c", "abcxw", "x", "abp", "w", "a", "x"]


def test_named_reads(mesh):
    """Through a loop, a checkpoint, a transpose and shard_map; two reads, an unnamed one and none are told apart."""

    @spmd(mesh, (WHOLE, ROWS), ROWS)
    def fn(p, x):
        def layer(x, w):
            return x @ checkpoint_name(w, "w"), None

        x, _ = lax.scan(jax.checkpoint(layer), x, jax_compat.to_varying(p["layers"], ("dp",)))
        x = x @ checkpoint_name(p["turned"].T, "w") + x @ checkpoint_name(p["twice"], "w")
        x = x @ checkpoint_name(p["twice"], "w") + p["both"][0] + checkpoint_name(p["other"], "another")[0]
        return jnp.sin(x @ checkpoint_name(p["both"], "w"))

    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    stacked = {"layers": jax.ShapeDtypeStruct((3, 2, 2), jnp.float32)}
    p = dict.fromkeys(("both", "other", "turned", "twice", "unread"), square) | stacked
    reads = jaxprs.named_reads(fn, (p, jax.ShapeDtypeStruct((4, 2), jnp.float32)), ("w",))["w"]
    found = dict(zip(sorted(p), reads, strict=False))
    want = {"both": (1, 1), "layers": (1, 0), "other": (0, 1), "turned": (1, 0), "twice": (2, 0), "unread": (0, 0)}
    assert found == want


def test_named_reads_of_results_aliases_and_several_readers(mesh):
    """A result is a read; an alias is read as often as what it becomes, which may be never."""

    def fn(p):
        unread, turned = p["unread"].T, p["turned"].T
        del unread
        return p["result"], jnp.sin(p["twice"]) + jnp.cos(p["twice"]), turned @ turned

    @spmd(mesh, (WHOLE, WHOLE), ROWS)
    def cast(w, x):
        return x @ checkpoint_name(jax_compat.to_varying(w, ("dp",)), "w")

    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    p = dict.fromkeys(("result", "turned", "twice", "unread"), square)
    assert jaxprs.named_reads(fn, (p,), ("w",))["w"] == [(0, 1), (0, 2), (0, 2), (0, 0)]
    assert jaxprs.named_reads(cast, (square, square), ("w",))["w"] == [(1, 0), (0, 1)]


def test_named_reads_of_what_a_loop_uses_in_every_turn():
    """As many as it has turns: a gradient of all products together is no product of their sums."""

    def fn(p, x):
        def turn(x, row):
            y = x @ checkpoint_name(p["constant"], "w") + row @ checkpoint_name(p["once"][0], "w")
            return y @ p["plain"], row @ checkpoint_name(p["constant"], "w")

        return lax.scan(turn, x, p["rows"])[0] @ checkpoint_name(p["behind"], "w")

    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    p = dict.fromkeys(("behind", "constant", "plain"), square)
    p |= {"once": jax.ShapeDtypeStruct((1, 2, 2), jnp.float32), "rows": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    reads = jaxprs.named_reads(fn, (p, jax.ShapeDtypeStruct((2,), jnp.float32)), ("w",))["w"]
    found = dict(zip(sorted(p), reads, strict=False))
    assert found == {"behind": (1, 0), "constant": (6, 0), "plain": (0, 3), "once": (0, 3), "rows": (0, 2)}


def test_named_reads_of_literals_and_of_functions_with_their_own_derivative():
    """A literal is nobody's; what a function does that has a derivative of its own is not looked into."""
    own = jax.custom_jvp(lambda w: checkpoint_name(w, "w") * 2.0)
    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))
    avals = (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32))
    assert jaxprs.named_reads(lambda v, w: 3.0 * own(w) + v * v, avals, ("w",))["w"] == [(0, 2), (0, 1)]


def test_constants_and_carried_values_of_a_scan():
    """In the parameters of JAX 0.10 and in those of 0.11."""
    parts = SimpleNamespace(unpack=lambda: (("a", "b"), ("c", "d", "e"), ("f",)))
    assert jaxprs.constants_and_carried({"ft_in": parts, "num_consts": 7, "num_carry": 7}) == (2, 3)
    assert jaxprs.constants_and_carried({"num_consts": 4, "num_carry": 5}) == (4, 5)
