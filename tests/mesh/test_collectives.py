"""Movement inside one mesh: what each rank holds afterwards, and how many collectives that takes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.mesh.collectives import broadcast_from_leader, exchange
from mmjax.mesh.routes import RowSharding, leader_routes, rounds, sliced_routes
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
    out = jax.jit(Spmd(body, mesh, STACKED, STACKED, check_vma=False))(stack(mesh, spoilt))
    np.testing.assert_array_equal(blocks(out), values[leaders])


SIDES = [
    (RowSharding((0, 1), 2), RowSharding((2, 3, 4, 5, 6, 7), 2)),
    (RowSharding((6, 7), 1), RowSharding((0, 1, 2, 3, 4), 1)),
    (RowSharding((0, 1, 2, 3), 2), RowSharding((4, 5, 6), 3)),
    (RowSharding((0, 1, 2, 3, 4, 5, 6, 7), 4), RowSharding((2, 3), 1)),
    (RowSharding((0, 1, 2, 3, 4, 5), 3), RowSharding((0, 1, 2, 3, 4, 5), 2)),
    (RowSharding((5, 1, 3), 3), RowSharding((2, 6, 0, 7), 2)),
]


@pytest.mark.parametrize("make", [leader_routes, sliced_routes])
@pytest.mark.parametrize(("source", "target"), SIDES)
def test_exchange_hands_over_pieces_along_routes_and_leaves_zeros_elsewhere(mesh, source, target, make):
    routes = make(source, target)
    sent, kept = (1 + max(getattr(route, end) for route in routes) for end in ("source_piece", "target_piece"))
    values = 1 + np.arange(sent * 8 * 3, dtype=np.float32).reshape(sent, 8, 3)
    held, expected = np.full_like(values, np.nan), np.zeros((kept, 8, 3), np.float32)
    for route in routes:
        # Ranks sit at other positions than their numbers.
        held[route.source_piece, 7 - route.source] = values[route.source_piece, route.source]
        expected[route.target_piece, 7 - route.target] = values[route.source_piece, route.source]

    def body(*pieces: jax.Array) -> tuple[jax.Array, ...]:
        return exchange(pieces, routes, kept, {rank: 7 - rank for rank in range(8)}, ("a", "b", "c"))

    spmd = Spmd(body, mesh, STACKED, STACKED, check_vma=False)
    out = jax.jit(spmd)(*(stack(mesh, piece[:, None]) for piece in held))
    assert len(out) == kept
    for got, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(blocks(got)), wanted)
    trace = str(jax.make_jaxpr(spmd)(*(jax.ShapeDtypeStruct((8, 3), jnp.float32) for _ in range(sent))))
    assert len(re.findall(r"\bppermute\b", trace)) == len(rounds(routes))
