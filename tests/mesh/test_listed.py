"""Boundaries to a stage whose ranks of cp each have a part that was listed for them: routes, and values on every rank.

Parts on a rank are written down from its layout alone, never read from a sharding.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sides import Side, assert_holds, place, submesh_of, the_world

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.routes import RowSharding, UnitGrid, leader_routes, sliced_routes, slices_received, slices_sent
from mmjax.mesh.routing import LISTED_TOKENS
from mmjax.mesh.transfer import LocalTransfer

CELLS, TOKENS, WIDTH = 2, 3, 5
"""Cells of a unit, tokens of a list, and numbers of a token."""


@st.composite
def ends(draw) -> tuple[RowSharding, RowSharding]:
    """A stage with whole rows, and one whose ranks have parts of them."""
    (dp, width), (dp_, parts, width_) = (draw(st.tuples(*[st.integers(1, 4)] * n)) for n in (2, 3))
    whole = RowSharding(tuple(range(dp * width)), dp)
    return whole, RowSharding(tuple(range(50, 50 + dp_ * parts * width_)), dp_, 1, parts)


def held(end: RowSharding, rows: int, parts: int) -> dict[int, list[tuple[int, int]]]:
    """The units that each rank has, in the order in which it numbers them."""
    found = {}
    for number, rank in enumerate(end.ranks):
        interval, part = divmod(number * end.dp * end.parts // len(end.ranks), end.parts)
        own = range(interval * rows // end.dp, (interval + 1) * rows // end.dp)
        found[rank] = list(product(own, [part] if end.parts > 1 else range(parts)))
    return found


@settings(derandomize=True, deadline=None)
@given(ends(), st.booleans())
def test_every_part_of_every_interval_reaches_the_ranks_that_have_it_once(pair, back):
    source, target = pair[::-1] if back else pair
    units = UnitGrid.between(source, target)
    rows, parts = math.lcm(source.dp, target.dp), max(source.parts, target.parts)
    assert (units.rows, units.parts) == (rows, parts)
    sends, keeps = held(source, rows, parts), held(target, rows, parts)
    arrived = Counter()
    for route in leader_routes(source, target):
        unit = sends[route.source][route.source_piece]
        assert keeps[route.target][route.target_piece] == unit
        arrived[unit] += 1
    assert arrived == Counter(dict.fromkeys(product(range(rows), range(parts)), 1))
    count, share = slices_received(source, target), slices_sent(source, target)
    slices = Counter()
    for route in sliced_routes(source, target):
        unit = sends[route.source][route.source_piece // share]
        assert keeps[route.target][route.target_piece // count] == unit
        number = route.source_piece % share * source.width + source.ranks.index(route.source) % source.width
        assert number == target.ranks.index(route.target) % target.width * count + route.target_piece % count
        slices[unit, number] += 1
    every = product(product(range(rows), range(parts)), range(count * target.width))
    assert slices == Counter(dict.fromkeys(every, 1))


PAIRS = (
    (Side(1, at=4), Side(1, cp=4)),
    (Side(2, at=4), Side(2, cp=2)),
    (Side(2, 2, at=4), Side(1, 2, cp=2)),  # fan-in
    (Side(1, 2, at=6), Side(2, cp=3)),  # fan-out
    (Side(3, at=5), Side(2, cp=2)),  # dp that do not divide
    (Side(2, cp=2), Side(2, cp=2, at=4)),  # equal degrees are no peers
    (Side(2, 2), Side(1, 3, cp=2, at=2)),  # ranks of both
    (Side(2, copies=2), Side(2, cp=2, at=4)),
    (Side(1, at=6), Side(1, 2, cp=2, at=1, copies=1)),
    (Side(4, at=4), Side(2, 2)),  # cp 1: whole lists
)
COLOCATED = (
    (Side(4), Side(2, cp=2)),
    (Side(1, 4), Side(1, cp=4)),  # equal dp: a slice, and back a gather
    (Side(2, cp=2), Side(2, cp=2)),
    (Side(2, 4), Side(4, cp=2)),  # fan-out
    (Side(8), Side(1, 2, cp=4)),
    (Side(3, 2), Side(2, cp=3)),  # dp that do not divide
    (Side(2, 2, copies=2), Side(2, cp=2, copies=2)),
    (Side(1, 6, at=1), Side(2, cp=3, at=1)),
)


def distinct_lists(source: Side, target: Side) -> np.ndarray:
    """Different everywhere: cells, and the tokens listed for the ranks of the target one after another."""
    shape = (math.lcm(source.dp, target.dp) * CELLS, target.cp * TOKENS, WIDTH)
    return 1 + np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def assert_has_parts(x: jax.Array, side: Side, dense: np.ndarray) -> None:
    """Every rank of `side` has its cells' tokens that are listed for it."""
    found, per = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}, len(dense) // side.dp
    for rank in range(side.layout.size):
        cell, part = rank // (side.tp * side.cp) % side.dp, rank // side.tp % side.cp
        wanted = dense[cell * per : (cell + 1) * per, part * TOKENS : (part + 1) * TOKENS]
        np.testing.assert_array_equal(found.pop(the_world().devices[side.at + rank]), wanted, err_msg=f"rank {rank}")
    assert not found


@pytest.mark.parametrize(
    ("transport", "route"),
    [
        ("device_put", "leader"),
        ("collective", "sliced"),
        pytest.param("device_put", "sliced", marks=pytest.mark.long),
        pytest.param("collective", "leader", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("source", "target"), [pytest.param(*pair, id=f"{pair[0]}->{pair[1]}") for pair in PAIRS])
def test_between_devices_both_ways(source, target, transport, route):
    check(source, target, transport, route)


@pytest.mark.parametrize(("source", "target"), [pytest.param(*pair, id=f"{pair[0]}->{pair[1]}") for pair in COLOCATED])
def test_colocated_both_ways(source, target):
    boundary = check(source, target, "auto", "leader")
    assert isinstance(boundary.forward, LocalTransfer) and isinstance(boundary.backward, LocalTransfer)


def check(source: Side, target: Side, transport: str, route: str) -> Boundary:
    """Carries tokens to the lists of a target and their gradients back, one replica of each."""
    dense = distinct_lists(source, target)
    aval = jax.ShapeDtypeStruct(dense.shape, jnp.float32)
    boundary = Boundary(
        "a->b", submesh_of(source), submesh_of(target), aval, the_world(), transport, route, LISTED_TOKENS
    )
    out, pull_back = jax.vjp(boundary, place(dense, boundary.forward.source_aval))
    assert_has_parts(out, target, dense)
    (back,) = pull_back(place(3 - dense, boundary.backward.source_aval))
    assert_holds(back, source, 3 - dense)
    return boundary


def test_lists_of_unequal_length_are_refused():
    aval = jax.ShapeDtypeStruct((2, 7, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"^a->b forward: 7 tokens of a cell are no lists of equal length for cp=2"):
        Boundary(
            "a->b", submesh_of(Side(2)), submesh_of(Side(1, cp=2, at=4)), aval, the_world(), placements=LISTED_TOKENS
        )
