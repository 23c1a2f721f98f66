"""Movement inside one mesh: what each rank holds afterwards, and how many collectives that takes."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.mesh.collectives import broadcast_from_leader, exchange
from mmjax.mesh.routes import Placement, leader_routes, rounds
from mmjax.mesh.spmd import Spmd

STACKED = PartitionSpec(("a", "b", "c"))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))


def stack(mesh: Mesh, blocks: np.ndarray) -> jax.Array:
    """Block `i` on rank `i`."""
    return jax.device_put(blocks.reshape(-1, *blocks.shape[2:]), NamedSharding(mesh, STACKED))


def blocks(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


@pytest.mark.parametrize(
    ("axes", "leaders"),
    [
        ((), [0, 1, 2, 3, 4, 5, 6, 7]),
        (("c",), [0, 0, 2, 2, 4, 4, 6, 6]),
        (("b", "c"), [0, 0, 0, 0, 4, 4, 4, 4]),
        (("b",), [0, 1, 0, 1, 4, 5, 4, 5]),
        (("a", "b", "c"), [0] * 8),
    ],
)
def test_a_group_gets_its_first_rank_s_value_whatever_the_others_hold(mesh, axes, leaders):
    values = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    spoilt = values.copy()
    spoilt[[rank for rank in range(8) if rank not in leaders]] = [[np.nan, np.inf, 7.0]] * 2
    body = lambda x: broadcast_from_leader(x, axes)  # noqa: E731
    out = Spmd(body, mesh, STACKED, STACKED, check_vma=False)(stack(mesh, spoilt))
    np.testing.assert_array_equal(blocks(out), values[leaders])


SIDES = [
    (Placement((0, 1), 2), Placement((2, 3, 4, 5, 6, 7), 2)),  # groups of three
    (Placement((6, 7), 1), Placement((0, 1, 2, 3, 4), 1)),  # five
    (Placement((0, 1, 2, 3), 2), Placement((4, 5, 6), 3)),
    (Placement((0, 1, 2, 3, 4, 5, 6, 7), 4), Placement((2, 3), 1)),
    (Placement((0, 1, 2, 3, 4, 5), 3), Placement((0, 1, 2, 3, 4, 5), 2)),
]


@pytest.mark.parametrize(("source", "target"), SIDES)
def test_exchange_fills_targets_with_rows_and_the_rest_with_zeros(mesh, source, target):
    total = math.lcm(source.dp, target.dp)
    held, wanted = total // source.dp, total // target.dp
    dense = 1 + np.arange(total * 2, dtype=np.float32)
    x = np.full((8, held * 2), np.nan, np.float32)
    expected = np.zeros((8, wanted * 2), np.float32)
    for interval in range(source.dp):
        x[source.leader(interval)] = dense.reshape(source.dp, -1)[interval]
    for interval in range(target.dp):
        expected[list(target.group(interval))] = dense.reshape(target.dp, -1)[interval]
    routes = leader_routes(source, target)

    def body(x: jax.Array) -> jax.Array:
        position = {rank: rank for rank in range(8)}
        return exchange(x, routes, target.groups, position, held, wanted, ("a", "b", "c"))

    spmd = Spmd(body, mesh, STACKED, STACKED, check_vma=False)
    np.testing.assert_array_equal(blocks(spmd(stack(mesh, x))), expected)
    trace = str(jax.make_jaxpr(spmd)(jax.ShapeDtypeStruct((8 * held * 2,), jnp.float32)))
    doublings = math.ceil(math.log2(target.width))
    assert len(re.findall(r"\bppermute\b", trace)) == len(rounds(routes)) + doublings
