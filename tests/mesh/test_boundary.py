"""Boundaries against the dense array, by value on every rank: all elements differ, so that no mapping but one passes.

A `Pair` is two stages; a way between them is a transport and a route. Every rank is looked at: a replica that is wrong,
or added up, shows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from sides import Side, assert_holds, distinct, place, rows_between, submesh_of, the_world

from mmjax import jax_compat
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.boundary import Boundary, boundary_kind
from mmjax.mesh.layout import Layout
from mmjax.mesh.movers import CollectiveMover, DevicePutMover
from mmjax.mesh.routing import LeaderRouting, PeerRouting, SlicedRouting
from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transfer import LocalTransfer, MovedTransfer
from mmjax.mesh.world import World

TRANSPORTS = ("device_put", "collective")
ROUTES = ("leader", "sliced")

Pair = tuple[Side, Side]


def cases(*pairs: Pair) -> list:
    return [pytest.param(*pair, id=f"{pair[0]}->{pair[1]}") for pair in pairs]


def routes_between(source: Side, target: Side) -> tuple[str, ...]:
    """Without replicas on either side there is nothing to slice for; nor where local transfers need no routes."""
    local, dp = source.layout.ranks == target.layout.ranks, sorted((source.dp, target.dp))
    alike = (local and dp[1] % dp[0] == 0) or max(side.layout.size // side.dp for side in (source, target)) == 1
    return ("leader",) if alike else ROUTES


def ways(*pairs: Pair) -> list:
    """Each pair by each transport and route; on one rank set there is nothing to transport."""
    return [
        pytest.param(source, target, transport, route, id=f"{source}->{target}-{transport}-{route}")
        for source, target in pairs
        for transport in (("auto",) if source.layout.ranks == target.layout.ranks else TRANSPORTS)
        for route in routes_between(source, target)
    ]


COLOCATED = (
    (Side(4, 2), Side(4, 2)),  # equal
    (Side(2, 4), Side(2, 2, cp=2)),  # equal dp, other replicas
    (Side(8), Side(4, 2)),  # fan-in: digits_vlm_colocated
    (Side(4, 2), Side(2, 4)),  # fan-in between tensor parallel modules
    (Side(8), Side(1, 8)),
    (Side(2, 4), Side(4, cp=2)),  # fan-out
    (Side(1, 4, at=4), Side(4, at=4)),
    (Side(3, 2), Side(2, 3)),  # dp that do not divide
    (Side(2, 3, at=1), Side(3, cp=2, at=1)),
    (Side(8, instances=4), Side(2, 4)),  # optimizer instances, in which dp is two mesh axes
    (Side(8, instances=2), Side(4, 2)),  # the fine-tuning layout
    (Side(4, 2, instances=2), Side(1, 4, cp=2)),
    (Side(2, 4, instances=2), Side(8, instances=4)),
    (Side(6, instances=3), Side(3, 2, instances=3)),
)
DISJOINT = (
    (Side(2), Side(2, at=2)),  # equal degrees: peers
    (Side(2, 2), Side(2, 2, at=4)),
    (Side(2, at=6), Side(2, 2)),  # equal dp, other replicas
    (Side(2, 2, at=4), Side(2, at=1)),
    (Side(4, at=4), Side(1, 2)),  # fan-in: digits_vlm
    (Side(4), Side(2, cp=2, at=4)),
    (Side(2, 2), Side(4, at=4)),  # fan-out
    (Side(2, 2, instances=2), Side(4, at=4)),
    (Side(1, 3, at=5), Side(4)),
    (Side(1, 2), Side(1, 4, at=3)),  # one interval, other widths
    (Side(1, 3), Side(1, cp=2, at=5)),
    (Side(1, 2, at=5), Side(1, 5)),
    (Side(1, cp=2), Side(2, 3, at=2)),  # fan-out between groups
    (Side(1, 2, cp=2), Side(1, 2, cp=2, at=4)),  # groups of two axes
    (Side(1, 2, cp=2), Side(1, 3, at=4)),
    (Side(2), Side(3, at=2)),  # dp that do not divide
    (Side(3, at=5), Side(2, 2)),
    (Side(2, 2), Side(3, at=5)),
    (Side(4), Side(3, at=4)),
)
OVERLAPPING = (
    (Side(8), Side(2, 2)),  # an encoder on all ranks, the LLM's first stage on some of them
    (Side(8), Side(2, 2, at=4)),
    (Side(2, 4), Side(2, 2, at=2)),
    (Side(1, 2, at=4), Side(4, 2)),
    (Side(6), Side(4)),
    (Side(2, at=3), Side(3, 2)),
    (Side(4), Side(4, at=2)),  # neither holds the other
)
COPIED = (
    (Side(2, copies=2), Side(2, copies=2)),
    (Side(2, copies=2), Side(1, 2, at=2)),  # an encoder in each stage of the LLM, to the LLM's second stage
    (Side(2, copies=2), Side(2, 2, at=4)),  # equal dp and widths, but neighbours do not hold the same rows
)
LONG_WAYS = (("device_put", "sliced"), ("collective", "leader"))
SAMPLE = (
    (Side(8), Side(4, 2)),
    (Side(3, 2), Side(2, 3)),
    (Side(2, 2), Side(2, 2, at=4)),
    (Side(4, at=4), Side(1, 2)),
    (Side(2, 2), Side(3, at=5)),
    (Side(8), Side(2, 2)),
)
"""One of each sort, where the mapping itself is not what is tested."""


def new_boundary(
    source: Side, target: Side, transport: str, route: str, shape: tuple[int, ...], dtype: str = "float32"
) -> Boundary:
    aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return Boundary("a->b", submesh_of(source), submesh_of(target), aval, the_world(), transport, route)


@functools.cache
def boundary_between(
    source: Side, target: Side, transport: str = "auto", route: str = "leader", dtype: str = "float32"
) -> Boundary:
    """Kept for all tests of a pair: compiling is most of their time."""
    return new_boundary(source, target, transport, route, distinct(rows_between(source, target)).shape, dtype)


def check_both_ways(source: Side, target: Side, transport: str, route: str, dtype: str = "float32") -> None:
    rows = rows_between(source, target)
    check_values(boundary_between(source, target, transport, route, dtype), source, target, distinct(rows, 1, dtype))


def check_values(boundary: Boundary, source: Side, target: Side, dense: np.ndarray) -> None:
    gradient = 3 - dense
    out, pull_back = jax.vjp(boundary, place(dense, boundary.forward.source_aval))
    assert_holds(out, target, dense)
    assert out.sharding.is_equivalent_to(boundary.forward.target_aval.sharding, out.ndim)
    (back,) = pull_back(place(gradient, boundary.backward.source_aval))
    assert_holds(back, source, gradient)
    assert back.sharding.is_equivalent_to(boundary.backward.target_aval.sharding, back.ndim)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*COLOCATED))
def test_colocated_both_ways(source, target, transport, route):
    check_both_ways(source, target, transport, route)


# Each pair by both transports and both routes, but not in all combinations in `make test`.
CROSSED = [
    pytest.param(*way.values, id=way.id, marks=pytest.mark.long if way.values[2:] in LONG_WAYS else ())
    for way in ways(*DISJOINT, *OVERLAPPING, *COPIED)
]


@pytest.mark.parametrize(("source", "target", "transport", "route"), CROSSED)
def test_between_devices_both_ways(source, target, transport, route):
    check_both_ways(source, target, transport, route)


@pytest.mark.long
@pytest.mark.parametrize(("source", "target", "transport", "route"), ways((Side(1, 2, copies=2), Side(3, at=1))))
def test_copies_to_other_ranks_both_ways(source, target, transport, route):
    check_both_ways(source, target, transport, route)


def test_copies_on_one_rank_set_are_both_sides_or_none():
    for source, target in ((Side(2, copies=2), Side(2, 2)), (Side(4), Side(2, copies=2))):
        with pytest.raises(ValueError, match=r"^a->b forward: copies=\d to copies=\d: on one rank set both"):
            new_boundary(source, target, "auto", "leader", (4, 2))


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_bfloat16_both_ways(source, target, transport, route):
    check_both_ways(source, target, transport, route, "bfloat16")


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_shape_beyond_the_rows_is_kept(source, target, transport, route):
    rows = rows_between(source, target)
    dense = np.arange(rows * 15, dtype=np.float32).reshape(rows, 5, 1, 3)
    boundary = new_boundary(source, target, transport, route, dense.shape)
    assert_holds(boundary(place(dense, boundary.forward.source_aval)), target, dense)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("elements", [1, 2, 3])
def test_units_smaller_than_their_group_leave_slices_empty(elements, transport):
    source, target = Side(2), Side(1, 4, at=3)
    dense = 7 + np.arange(2 * elements, dtype=np.float32).reshape(2, elements)
    check_values(new_boundary(source, target, transport, "sliced", dense.shape), source, target, dense)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("route", ROUTES)
def test_the_order_of_devices_in_the_world_does_not_matter(transport, route):
    """Ranks are indices into the world, whatever the devices' own numbers."""
    shuffled = [the_world().devices[i] for i in (3, 6, 0, 5, 7, 2, 4, 1)]
    world, (source, target) = World(shuffled), (Side(2, 2), Side(1, 3, at=4))
    dense = distinct(rows_between(source, target))
    one, other = (world.submesh(side.layout, 0) for side in (source, target))
    boundary = Boundary("a->b", one, other, jax.ShapeDtypeStruct(dense.shape, dense.dtype), world, transport, route)
    out, pull_back = jax.vjp(boundary, place(dense, boundary.forward.source_aval))
    (back,) = pull_back(place(-dense, boundary.backward.source_aval))
    assert_holds(out, target, dense, world)
    assert_holds(back, source, -dense, world)


SHAPES = [(dp, tp) for tp in (1, 2, 3, 4, 8) for dp in range(1, 8 // tp + 1)]


def partners(dp: int, tp: int) -> list[Pair]:
    """The stage against every one that is not larger: at the end of its ranks, and behind them where there is room."""
    size, pairs = dp * tp, []
    for dp_, tp_ in SHAPES:
        if dp_ * tp_ <= size:
            ends = [size - dp_ * tp_] + [size] * (size + dp_ * tp_ <= 8)
            pairs += [(Side(dp, tp), Side(dp_, tp_, at=at)) for at in ends]
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("dp", "tp"), SHAPES)
def test_every_pair_of_layouts_both_ways(dp, tp, transport, route):
    for source, target in partners(dp, tp):
        if route in routes_between(source, target):
            check_both_ways(source, target, transport, route)
    boundary_between.cache_clear()


@st.composite
def sides(draw) -> Side:
    """Any stage that eight ranks hold."""
    dp = draw(st.integers(1, 8))
    cp = draw(st.integers(1, 8 // dp))
    tp = draw(st.integers(1, 8 // (dp * cp)))
    return Side(dp, tp, cp, at=draw(st.integers(0, 8 - dp * cp * tp)))


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    sides(),
    sides(),
    st.sampled_from(TRANSPORTS),
    st.sampled_from(ROUTES),
    st.sampled_from(("float32", "bfloat16")),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), max_size=3),
)
def test_any_two_stages_any_way_any_shape(source, target, transport, route, dtype, unit_rows, beyond):
    shape = (np.lcm(source.dp, target.dp) * unit_rows, *beyond)
    values = np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))  # 3 - x stays different too
    check_values(new_boundary(source, target, transport, route, shape, dtype), source, target, values)


# ---- one replica -----------------------------------------------------------------------------------------------------


def with_replicas(dense: np.ndarray, side: Side, change: Callable[[np.ndarray, int], np.ndarray]) -> jax.Array:
    """`dense` laid out on a stage, its rows changed by replica."""
    submesh, width, per = submesh_of(side), side.layout.replica_size, len(dense) // side.dp
    pieces = []
    for i, rank in enumerate(submesh.ranks):
        rows = dense[i // width * per : i // width * per + per]
        pieces.append(jax.device_put(change(rows, i % width), the_world().devices[rank]))
    return jax.make_array_from_single_device_arrays(dense.shape, submesh.sharding(submesh.spread.whole_rows), pieces)


def with_spoilt_replicas(dense: np.ndarray, side: Side) -> jax.Array:
    """`dense` laid out on a stage, with NaN on every rank that is not a leader."""
    return with_replicas(dense, side, lambda rows, i: rows if i == 0 else rows * np.nan)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("source", "target"),
    cases((Side(2, 2), Side(4, at=4)), (Side(2, 4), Side(2, 2, at=2)), (Side(2, 2), Side(3, at=5))),
)
def test_what_crosses_devices_is_the_leader_s_copy_alone(source, target, transport):
    boundary, dense = boundary_between(source, target, transport), distinct(rows_between(source, target))
    assert_holds(boundary.forward(with_spoilt_replicas(dense, source)), target, dense)
    opposite = boundary_between(target, source, transport)
    assert_holds(opposite.backward(with_spoilt_replicas(dense, source)), target, dense)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source", "target"), cases((Side(4), Side(2, 2, at=4)), (Side(2), Side(2, cp=3, at=2))))
def test_what_other_ranks_hold_before_the_broadcast_does_not_matter(source, target, transport):
    transfer, dense = boundary_between(source, target, transport).forward, distinct(rows_between(source, target))
    moved, width = transfer.move(transfer.pack(place(dense, transfer.source_aval))), target.tp * target.cp
    spoilt = []
    for array in moved:
        shards = [s.data if i % width == 0 else s.data + np.nan for i, s in enumerate(array.addressable_shards)]
        spoilt.append(jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards))
    assert_holds(transfer.unpack(tuple(spoilt)), target, dense)


# ---- every rail ------------------------------------------------------------------------------------------------------


SLICED = (
    (Side(2, 2), Side(2, 2, at=4)),
    (Side(1, 2), Side(1, 4, at=4)),
    (Side(1, 4), Side(1, 2, at=4)),
    (Side(1, 3), Side(1, 2, at=5)),
    (Side(1, 2), Side(2, 3, at=2)),
    (Side(2), Side(3, 2, at=2)),
    (Side(2, 2), Side(1, cp=2, tp=2, at=2)),
    (Side(1, 4), Side(2, at=4)),  # to ranks without a group: each joins what four send
    (Side(1, 2, at=5), Side(1, 5)),  # five slices of 25 elements: nothing to pad
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source", "target"), cases(*SLICED))
def test_every_rank_of_a_group_receives_its_slice_and_the_senders_take_turns(source, target, transport):
    """Source replica `i` holds the rows plus `1000 i`, so that what arrives tells who sent it."""
    transfer, dense = (
        boundary_between(source, target, transport, "sliced").forward,
        distinct(rows_between(source, target)),
    )
    widths = source.layout.replica_size, target.layout.replica_size
    moved = transfer.move(transfer.pack(with_replicas(dense, source, lambda rows, i: rows + 1000 * i)))
    found = [{shard.device: np.asarray(shard.data) for shard in array.addressable_shards} for array in moved]
    units = dense.reshape(np.lcm(source.dp, target.dp), -1)
    per, kept = len(units) // target.dp, -(-widths[0] // widths[1])
    size = -(-units.shape[1] // (widths[1] * kept))
    assert len(found) == per * kept
    for unit, elements in enumerate(units):
        for j in range(widths[1] * kept):
            device = the_world().devices[target.at + unit // per * widths[1] + j // kept]
            own = elements[j * size : (j + 1) * size] + 1000 * (j % widths[0])
            arrived = found[unit % per * kept + j % kept][device]
            np.testing.assert_array_equal(arrived[: len(own)], own, err_msg=f"unit {unit} slice {j}")


@pytest.mark.parametrize(("source", "target"), cases(*SLICED))
def test_a_sliced_piece_is_a_fair_share(source, target):
    transfer = boundary_between(source, target, "device_put", "sliced").forward
    unit = math.prod(transfer.source_aval.shape) // np.lcm(source.dp, target.dp)
    widths = source.layout.replica_size, target.layout.replica_size
    slices = -(-widths[0] // widths[1]) * widths[1]
    packed = transfer.pack(place(distinct(rows_between(source, target)), transfer.source_aval))
    pieces = {shard.data.shape for array in packed for shard in array.addressable_shards}
    assert pieces == {(-(-unit // slices),)}
    assert len(packed) == np.lcm(source.dp, target.dp) // source.dp * -(-slices // widths[0])


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_a_routing_says_how_many_pieces_travel(source, target, transport, route):
    transfer = boundary_between(source, target, transport, route).forward
    if isinstance(transfer, MovedTransfer):
        packed = transfer.pack(place(distinct(rows_between(source, target)), transfer.source_aval))
        assert (len(packed), len(transfer.move(packed))) == (
            transfer.routing.source_pieces,
            transfer.routing.target_pieces,
        )


# ---- halves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_steps_called_apart_equal_the_whole(source, target, transport, route):
    boundary, dense = boundary_between(source, target, transport, route), distinct(rows_between(source, target))
    for transfer, arrival in ((boundary.forward, target), (boundary.backward, source)):
        x = place(dense, transfer.source_aval)
        assert_holds(transfer.unpack(transfer.move(transfer.pack(x))), arrival, dense)
        assert_holds(x, source if arrival == target else target, dense)  # what was sent is still there


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_several_microbatches_may_travel_at_once(source, target, transport, route):
    transfer, rows = boundary_between(source, target, transport, route).forward, rows_between(source, target)
    dense = [distinct(rows, start) for start in (1, 30, 70)]
    packed = [transfer.pack(place(x, transfer.source_aval)) for x in dense]
    moved = [transfer.move(x) for x in packed]
    for x, arrived in zip(dense, [transfer.unpack(x) for x in moved], strict=True):
        assert_holds(arrived, target, x)


def test_empty_buffers_are_made_once(monkeypatch):
    """What stands in for pieces that nobody sends is the same in every move."""
    transfer = boundary_between(Side(4, at=4), Side(1, 2), "collective").forward
    packed = transfer.pack(place(distinct(rows_between(Side(4), Side(1))), transfer.source_aval))
    transfer.move(packed)
    monkeypatch.setattr(jax, "device_put", lambda *args: pytest.fail("another buffer"))
    transfer.move(packed)


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*COLOCATED[:4], *SAMPLE))
def test_what_arrives_fits_a_program_compiled_for_the_promised_layout(source, target, transport, route):
    transfer, dense = boundary_between(source, target, transport, route).forward, distinct(rows_between(source, target))
    receiver = jax.jit(lambda x: x * 2).lower(transfer.target_aval).compile()
    assert_holds(receiver(transfer(place(dense, transfer.source_aval))), target, dense * 2)


@pytest.mark.parametrize(("source", "target", "transport", "route"), ways(*SAMPLE))
def test_the_listed_programs_are_all_that_a_transfer_runs(source, target, transport, route, monkeypatch):
    rows, run = rows_between(source, target), []
    boundary = boundary_between(source, target, transport, route)
    call = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *args: run.append(self) or call(self, *args))
    for transfer in (boundary.forward, boundary.backward):
        run.clear()
        transfer(place(distinct(rows), transfer.source_aval))
        assert run == transfer.programs()
        assert all(aval.sharding is not None for program in run for aval in jax.tree.leaves(program.avals))


def test_a_routing_is_itself_alone_and_cannot_be_changed():
    one, other = (new_boundary(Side(2), Side(3, at=2), "auto", "leader", (12, 1)).forward.routing for _ in range(2))
    assert one != other and len({one, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "another"  # pyright: ignore[reportAttributeAccessIssue]


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "route", "expected"),
    [
        (Side(2, 2), Side(2, 2, at=4), "leader", (PeerRouting, PeerRouting)),
        (Side(2, 2), Side(2, cp=2, at=4), "leader", (PeerRouting, PeerRouting)),
        (Side(2, 2), Side(2, 2, at=4), "sliced", (SlicedRouting, SlicedRouting)),
        (Side(4), Side(4, at=4), "sliced", (PeerRouting, PeerRouting)),
        (Side(2, 2), Side(2, 1, at=4), "leader", (LeaderRouting, LeaderRouting)),
        (Side(2, 2), Side(2, 1, at=4), "sliced", (SlicedRouting, SlicedRouting)),
        (Side(2, 2), Side(1, 2, at=4), "leader", (LeaderRouting, LeaderRouting)),
        (Side(4), Side(3, at=4), "sliced", (LeaderRouting, LeaderRouting)),
        (Side(8), Side(2, 2), "sliced", (SlicedRouting, SlicedRouting)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("transport", "mover"), [("device_put", DevicePutMover), ("collective", CollectiveMover)])
def test_route_and_transport_go_together_in_any_combination(source, target, route, expected, transport, mover):
    boundary = boundary_between(source, target, transport, route)
    for transfer, routing in zip((boundary.forward, boundary.backward), expected, strict=True):
        assert isinstance(transfer, MovedTransfer)
        assert (type(transfer.routing), type(transfer.mover)) == (routing, mover)
    check_kind(source, target, transport, "async" if transport == "device_put" else "rendezvous")


@pytest.mark.parametrize(
    ("source", "target", "route", "there", "back"),
    [
        (Side(2, 2), Side(2, 2, at=4), "leader", "", ""),
        (Side(2, 2), Side(2, 2, at=4), "sliced", "pack unpack", "pack unpack"),
        (Side(2, 2), Side(2, at=4), "leader", "", "unpack"),
        (Side(2, 2), Side(2, at=4), "sliced", "pack unpack", "pack unpack"),
        (Side(4), Side(2, at=4), "leader", "unpack", "pack"),
        (Side(4), Side(3, at=4), "leader", "pack unpack", "pack unpack"),
        (Side(2, 4), Side(2, 2, cp=2), "sliced", "", ""),
        (Side(8), Side(2, 4), "sliced", "unpack", "unpack"),
    ],
    ids=str,
)
def test_nothing_is_cut_or_joined_that_travels_whole(source, target, route, there, back):
    boundary = boundary_between(source, target, "device_put", route)
    for transfer, direction, expected in ((boundary.forward, "forward", there), (boundary.backward, "backward", back)):
        names = [program.name for program in transfer.programs()]
        assert names == [f"a->b {direction} {step}" for step in expected.split()]


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_on_one_rank_set_nothing_moves(transport):
    boundary = boundary_between(Side(4, 2), Side(8), transport)
    assert isinstance(boundary.forward, LocalTransfer) and isinstance(boundary.backward, LocalTransfer)
    check_kind(Side(4, 2), Side(8), transport, "local")


def check_kind(source: Side, target: Side, transport: str, kind: str) -> None:
    boundary = boundary_between(source, target, transport)
    assert boundary.kind == boundary.forward.kind == boundary.backward.kind == kind
    assert boundary_kind(submesh_of(source), submesh_of(target), transport) == kind
    assert boundary_kind(submesh_of(target), submesh_of(source), transport) == kind


@pytest.mark.parametrize(("platform", "between"), [("cpu", "async"), ("gpu", "rendezvous")])
def test_who_copies_directly_unless_told_otherwise(platform, between):
    assert boundary_kind(submesh_of(Side(2)), submesh_of(Side(3, at=2))) == "async"
    # Ranks 0-3 are process 0's, 4-7 process 1's; every process has to come to the same answer, this one is number 0.
    world = World([PlannedDevice(rank, platform, process_index=rank // 4) for rank in range(8)])
    one, other, both = (world.submesh(Layout(dp=2, rank_offset=at), 0) for at in (0, 4, 3))
    for mine in (one, other):
        inside = world.submesh(Layout(dp=2, rank_offset=mine.ranks[0] + 2), 0)
        assert boundary_kind(mine, inside) == "async"
        assert boundary_kind(mine, inside, "collective") == "rendezvous"
    for pair in itertools.permutations((one, other, both), 2):
        assert boundary_kind(*pair) == between
        assert boundary_kind(*pair, "device_put") == "async"
        assert boundary_kind(*pair, "collective") == "rendezvous"


def test_a_process_compiles_the_collectives_that_it_has_a_part_in():
    """Even ranks are process 0's, which this one is, odd ones are process 1's."""
    world = World([PlannedDevice(rank, process_index=rank % 2) for rank in range(4)])
    one, other = (world.submesh(Layout(dp=2, rank_offset=at), 0) for at in (0, 2))
    boundary = Boundary("a->b", one, other, jax.ShapeDtypeStruct((2, 3), jnp.float32), world, "collective")
    assert [program.name for program in boundary.forward.programs()] == ["a->b forward move 0-2"]
    assert [program.name for program in boundary.backward.programs()] == ["a->b backward move 0-2"]


def test_leaders_cross_unless_told_otherwise():
    one, other = submesh_of(Side(2)), submesh_of(Side(1, 2, at=2))
    boundary = Boundary("a->b", one, other, jax.ShapeDtypeStruct((2, 3), jnp.float32), the_world())
    assert isinstance(boundary.forward, MovedTransfer)
    assert (type(boundary.forward.routing), type(boundary.forward.mover)) == (LeaderRouting, DevicePutMover)


def spans(transfer) -> list[set[int]]:
    """The ranks of each of the mover's programs."""
    ranks = {device: rank for rank, device in enumerate(the_world().devices)}
    avals = [jax.tree.leaves(program.avals)[0] for program in transfer.mover.programs()]
    return [{ranks[device] for device in aval.sharding.device_set} for aval in avals]


@pytest.mark.parametrize(
    ("source", "target", "route", "there", "back"),
    [
        (Side(4), Side(2, 2, at=4), "leader", [{0, 1, 4}, {2, 3, 6}], [{0, 1, 4}, {2, 3, 6}]),
        (Side(4), Side(2, 2, at=4), "sliced", [{0, 1, 4, 5}, {2, 3, 6, 7}], [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (Side(2, 2), Side(2, 2, at=4), "leader", [{0, 1, 4, 5}, {2, 3, 6, 7}], [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (Side(1, 4), Side(1, 2, at=4), "sliced", [{0, 1, 2, 3, 4, 5}], [{0, 1, 2, 3, 4, 5}]),
    ],
    ids=str,
)
def test_a_collective_spans_only_ranks_that_routes_connect(source, target, route, there, back):
    boundary = boundary_between(source, target, "collective", route)
    assert (spans(boundary.forward), spans(boundary.backward)) == (there, back)


@pytest.mark.parametrize(
    ("source", "target", "route", "expected"),
    [
        (Side(8), Side(2, 4), "leader", ["all-gather"]),
        (Side(2, 4), Side(8), "leader", []),
        (Side(4, 2), Side(8), "sliced", []),
        (Side(1, 8), Side(4, 2), "leader", []),
        (Side(3, 2), Side(2, 3), "leader", ["all-reduce", "collective-permute"]),
        (Side(3, 2), Side(2, 3), "sliced", ["all-gather", "collective-permute"]),
    ],
    ids=str,
)
def test_a_local_transfer_communicates_no_more_than_its_pair_needs(source, target, route, expected):
    (program,) = boundary_between(source, target, "auto", route).forward.programs()
    found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program.compiled.as_text())
    assert sorted(set(found)) == expected


def test_an_unknown_transport_or_route_is_refused():
    message = r"^transport='pigeon': not a transport; use one of auto, device_put, collective$"
    with pytest.raises(ValueError, match=message):
        new_boundary(Side(2), Side(1, at=2), "pigeon", "leader", (4, 1))
    with pytest.raises(ValueError, match=message):
        new_boundary(Side(2), Side(1, at=2), "pigeon", "scenic", (4, 1))
    with pytest.raises(ValueError, match=r"^route='scenic': not a route; use one of leader, sliced$"):
        new_boundary(Side(2), Side(1, at=2), "auto", "scenic", (4, 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_do_not_divide_are_refused(transport):
    message = r"^a->b forward: 8 rows do not divide into 6 equal intervals; pad the rows$"
    with pytest.raises(ValueError, match=message):
        new_boundary(Side(2), Side(3, at=2), transport, "leader", (8, 1))


# ---- inside a step ---------------------------------------------------------------------------------------------------


# Programs of degrees that do not divide take seconds to compile.
TRACED = [
    pytest.param(*way.values, id=way.id, marks=pytest.mark.long if re.match("dp3tp2|dp2tp3", str(way.id)) else ())
    for way in ways(*COLOCATED)
]


@pytest.mark.parametrize(("source", "target", "_", "route"), TRACED)
def test_a_local_transfer_traces_into_one_program(source, target, _, route):
    """There and back within one `jit`, between functions of either layout."""
    boundary, dense = boundary_between(source, target, "auto", route), distinct(rows_between(source, target))
    there, back = boundary.forward, boundary.backward
    assert isinstance(there, LocalTransfer) and isinstance(back, LocalTransfer)

    @partial(jax.jit, out_shardings=(there.target_aval.sharding, back.target_aval.sharding))
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrived = numbered(there.target, there.trace(x))
        return arrived, back.trace(arrived)

    arrived, returned = step(place(dense, there.source_aval))
    assert [program.outputs for program in (*there.programs(), *back.programs())] == (
        [there.target_aval, back.target_aval] if source.dp != target.dp else []
    )
    assert (there.trace(returned) is returned) == (source.dp == target.dp), "equal dp is a relabelling"
    per = len(dense) // target.dp
    expected = dense + 1000 * (np.arange(len(dense)) // per)[:, None].astype(np.float32)
    assert_holds(arrived, target, expected)
    assert_holds(returned, source, expected)


def numbered(submesh: Submesh, x: jax.Array) -> jax.Array:
    """Adds 1000 times the dp index: what a rank does to the rows that it believes are its own."""
    body = lambda x: x + 1000 * jax.lax.axis_index(submesh.axes.dp)  # noqa: E731
    return Spmd(body, submesh.mesh, submesh.spread.whole_rows, submesh.spread.whole_rows, check_vma=False)(x)


def _encoder(submesh: Submesh) -> Spmd:
    """Rows over dp, outputs over tp and gathered."""
    axes, rows = submesh.axes, submesh.spread.whole_rows

    def body(x_RI: jax.Array, w_IO: jax.Array) -> jax.Array:
        return jax_compat.all_gather_invariant(jnp.tanh(x_RI @ w_IO), axes.tp, 1)

    return Spmd(body, submesh.mesh, (rows, PartitionSpec(None, axes.tp)), rows)


def _head(submesh: Submesh) -> Spmd:
    """A loss that weighs every row differently; its product is split over tp."""
    axes, columns = submesh.axes, PartitionSpec(None, submesh.axes.tp)

    def body(y_RO: jax.Array, v_OP: jax.Array, weights_R: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.sin(y_RO @ v_OP) * weights_R[:, None]), (*axes.dp, *axes.tp))

    rows = submesh.spread.whole_rows
    return Spmd(body, submesh.mesh, (rows, columns, rows), PartitionSpec())


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "transport", "route"),
    [
        (Side(4, 2), Side(2, 4), "auto", "leader"),
        (Side(4, at=4), Side(1, 4), "device_put", "leader"),
        (Side(4, at=4), Side(1, 4), "collective", "sliced"),
        (Side(2, 2), Side(2, 2, at=4), "device_put", "leader"),
        (Side(2, 2), Side(3, at=5), "collective", "leader"),
        (Side(8), Side(2, 2), "device_put", "sliced"),
    ],
    ids=str,
)
def test_encoder_boundary_loss_has_the_gradients_of_one_device(source, target, transport, route):
    rows, rng = rows_between(source, target), np.random.default_rng(0)
    ends = submesh_of(source), submesh_of(target)
    boundary = new_boundary(source, target, transport, route, (rows, 4))
    x_RI, w_IO, v_OP = (rng.normal(size=size).astype(np.float32) for size in ((rows, 5), (5, 4), (4, 4)))
    weights_R = 1 + np.arange(rows, dtype=np.float32)
    encode, head = jax.jit(_encoder(ends[0])), jax.jit(_head(ends[1]))
    x = jax.device_put(x_RI, boundary.forward.source_aval.sharding)
    weights = jax.device_put(weights_R, boundary.forward.target_aval.sharding)
    w, v = (
        jax.device_put(a, end.sharding(PartitionSpec(None, "tp"))) for a, end in zip((w_IO, v_OP), ends, strict=True)
    )

    def distributed(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return head(boundary(encode(x, w)), v, weights)

    def dense(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ v) * weights_R[:, None])

    loss, grads = jax.value_and_grad(distributed, (0, 1, 2))(x, w, v)
    expected, expected_grads = jax.value_and_grad(dense, (0, 1, 2))(x_RI, w_IO, v_OP)
    np.testing.assert_allclose(np.asarray(loss), np.asarray(expected), rtol=1e-5)
    for grad, one in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(np.asarray(grad), np.asarray(one), rtol=1e-4, atol=1e-4)
