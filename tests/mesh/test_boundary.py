"""Boundaries against the dense array, by value on every rank: all elements differ, so that no mapping but one passes.

A `Pair` is two stages and the way between them. Rows on a rank are written down from its layout alone, never read from
a sharding, and every rank is looked at: a replica that is wrong, or added up, shows.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.boundary import Boundary, boundary_kind
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Spmd
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transfer import LocalTransfer
from mmjax.mesh.world import World

UNIT_ROWS, WIDTH = 2, 3
TRANSPORTS = ("device_put", "collective")


@dataclass(frozen=True)
class Side:
    """A stage as tests name it: dp4tp2cp1@0 is dp=4, tp=2, cp=1 from rank 0 on."""

    dp: int
    tp: int = 1
    cp: int = 1
    at: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(dp=self.dp, tp=self.tp, cp=self.cp, rank_offset=self.at)

    def __str__(self) -> str:
        return (
            "".join(f"{n}{v}" for n, v in (("dp", self.dp), ("tp", self.tp), ("cp", self.cp)) if v > 1) + f"@{self.at}"
        )


Pair = tuple[Side, Side]


def cases(*pairs: Pair) -> list:
    return [pytest.param(*pair, id=f"{pair[0]}->{pair[1]}") for pair in pairs]


def ways(*pairs: Pair) -> list:
    """Each pair by each transport; on one rank set there is nothing to transport."""
    return [
        pytest.param(source, target, transport, id=f"{source}->{target}-{transport}")
        for source, target in pairs
        for transport in (("auto",) if source.layout.ranks == target.layout.ranks else TRANSPORTS)
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
)
DISJOINT = (
    (Side(2), Side(2, at=2)),  # equal degrees: peers
    (Side(2, 2), Side(2, 2, at=4)),
    (Side(2, at=6), Side(2, 2)),  # equal dp, other replicas
    (Side(2, 2, at=4), Side(2, at=1)),
    (Side(4, at=4), Side(1, 2)),  # fan-in: digits_vlm
    (Side(4), Side(2, cp=2, at=4)),
    (Side(2, 2), Side(4, at=4)),  # fan-out
    (Side(1, 3, at=5), Side(4)),
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
SAMPLE = (
    (Side(8), Side(4, 2)),
    (Side(3, 2), Side(2, 3)),
    (Side(2, 2), Side(2, 2, at=4)),
    (Side(4, at=4), Side(1, 2)),
    (Side(2, 2), Side(3, at=5)),
    (Side(8), Side(2, 2)),
)
"""One of each sort, where the mapping itself is not what is tested."""


@functools.cache
def the_world() -> World:
    return World(jax.devices())


def submesh_of(side: Side) -> Submesh:
    return the_world().submesh(side.layout, 0)


def new_boundary(
    source: Side, target: Side, transport: str, shape: tuple[int, ...], dtype: str = "float32"
) -> Boundary:
    aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return Boundary("a->b", submesh_of(source), submesh_of(target), aval, the_world(), transport)


@functools.cache
def boundary_between(source: Side, target: Side, transport: str = "auto", dtype: str = "float32") -> Boundary:
    """Kept for all tests of a pair: compiling is most of their time."""
    return new_boundary(source, target, transport, (rows_between(source, target), WIDTH), dtype)


def rows_between(source: Side, target: Side) -> int:
    return math.lcm(source.dp, target.dp) * UNIT_ROWS


def distinct(rows: int, start: int = 1, dtype: str = "float32") -> np.ndarray:
    """Different everywhere, in bfloat16 too."""
    values = np.arange(start, start + rows * WIDTH).reshape(rows, WIDTH).astype(jnp.dtype(dtype))
    assert len(np.unique(values.astype(np.float32))) == values.size
    return values


def place(dense: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(dense, aval.sharding)


def assert_holds(x: jax.Array, side: Side, dense: np.ndarray) -> None:
    """Every rank of `side` holds its rows of `dense`, nothing else holds any."""
    width, per = side.tp * side.cp, len(dense) // side.dp
    wanted = {
        the_world().devices[side.at + i]: dense[i // width * per : i // width * per + per]
        for i in range(side.dp * width)
    }
    found = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    assert x.dtype == dense.dtype
    assert found.keys() == wanted.keys()
    for device, rows in wanted.items():
        np.testing.assert_array_equal(found[device], rows, err_msg=str(device))


def check_both_ways(source: Side, target: Side, transport: str, dtype: str = "float32") -> None:
    boundary = boundary_between(source, target, transport, dtype)
    rows = rows_between(source, target)
    dense, gradient = distinct(rows, 1, dtype), -distinct(rows, 3, dtype)
    out, pull_back = jax.vjp(boundary, place(dense, boundary.forward.source_aval))
    assert_holds(out, target, dense)
    assert out.sharding.is_equivalent_to(boundary.forward.target_aval.sharding, out.ndim)
    (back,) = pull_back(place(gradient, boundary.backward.source_aval))
    assert_holds(back, source, gradient)
    assert back.sharding.is_equivalent_to(boundary.backward.target_aval.sharding, back.ndim)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), cases(*COLOCATED))
def test_colocated_both_ways(source, target):
    check_both_ways(source, target, "auto")


@pytest.mark.parametrize(("source", "target", "transport"), ways(*DISJOINT, *OVERLAPPING))
def test_between_devices_both_ways(source, target, transport):
    check_both_ways(source, target, transport)


@pytest.mark.parametrize(("source", "target", "transport"), ways(*SAMPLE))
def test_bfloat16_both_ways(source, target, transport):
    check_both_ways(source, target, transport, "bfloat16")


@pytest.mark.parametrize(("source", "target", "transport"), ways(*SAMPLE))
def test_shape_beyond_the_rows_is_kept(source, target, transport):
    rows = rows_between(source, target)
    dense = np.arange(rows * 20, dtype=np.float32).reshape(rows, 5, 2, 2)
    boundary = new_boundary(source, target, transport, dense.shape)
    assert_holds(boundary(place(dense, boundary.forward.source_aval)), target, dense)


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
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("dp", "tp"), SHAPES)
def test_every_pair_of_layouts_both_ways(dp, tp, transport):
    for source, target in partners(dp, tp):
        check_both_ways(source, target, transport)
    boundary_between.cache_clear()


# ---- one replica -----------------------------------------------------------------------------------------------------


def with_spoilt_replicas(dense: np.ndarray, side: Side) -> jax.Array:
    """`dense` laid out on a stage, with NaN on every rank that is not a leader."""
    submesh, width, per = submesh_of(side), side.tp * side.cp, len(dense) // side.dp
    pieces = []
    for i, rank in enumerate(submesh.ranks):
        rows = dense[i // width * per : i // width * per + per]
        pieces.append(jax.device_put(rows if i % width == 0 else rows * np.nan, the_world().devices[rank]))
    return jax.make_array_from_single_device_arrays(dense.shape, submesh.sharding(submesh.axes.rows), pieces)


@pytest.mark.parametrize(
    ("source", "target", "transport"),
    ways((Side(2, 2), Side(4, at=4)), (Side(2, 4), Side(2, 2, at=2)), (Side(2, 2), Side(3, at=5))),
)
def test_what_crosses_devices_is_the_leader_s_copy_alone(source, target, transport):
    boundary, dense = boundary_between(source, target, transport), distinct(rows_between(source, target))
    assert_holds(boundary.forward(with_spoilt_replicas(dense, source)), target, dense)
    opposite = boundary_between(target, source, transport)
    assert_holds(opposite.backward(with_spoilt_replicas(dense, source)), target, dense)


@pytest.mark.parametrize(("source", "target"), cases((Side(4), Side(2, 2, at=4)), (Side(2), Side(2, cp=3, at=2))))
def test_what_other_ranks_hold_before_the_broadcast_does_not_matter(source, target):
    transfer, dense = boundary_between(source, target, "device_put").forward, distinct(rows_between(source, target))
    moved, width = transfer.move(transfer.pack(place(dense, transfer.source_aval))), target.tp * target.cp
    spoilt = []
    for array in moved:
        shards = [s.data if i % width == 0 else s.data + np.nan for i, s in enumerate(array.addressable_shards)]
        spoilt.append(jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards))
    assert_holds(transfer.unpack(tuple(spoilt)), target, dense)


# ---- halves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "transport"), ways(*SAMPLE))
def test_steps_called_apart_equal_the_whole(source, target, transport):
    boundary, dense = boundary_between(source, target, transport), distinct(rows_between(source, target))
    for transfer, arrival in ((boundary.forward, target), (boundary.backward, source)):
        x = place(dense, transfer.source_aval)
        assert_holds(transfer.unpack(transfer.move(transfer.pack(x))), arrival, dense)
        assert_holds(x, source if arrival == target else target, dense)  # what was sent is still there


@pytest.mark.parametrize(("source", "target", "transport"), ways(*SAMPLE))
def test_several_microbatches_may_travel_at_once(source, target, transport):
    transfer, rows = boundary_between(source, target, transport).forward, rows_between(source, target)
    dense = [distinct(rows, start) for start in (1, 30, 70)]
    packed = [transfer.pack(place(x, transfer.source_aval)) for x in dense]
    moved = [transfer.move(x) for x in packed]
    for x, arrived in zip(dense, [transfer.unpack(x) for x in moved], strict=True):
        assert_holds(arrived, target, x)


@pytest.mark.parametrize(("source", "target", "transport"), ways(*COLOCATED[:4], *SAMPLE))
def test_what_arrives_fits_a_program_compiled_for_the_promised_layout(source, target, transport):
    transfer, dense = boundary_between(source, target, transport).forward, distinct(rows_between(source, target))
    receiver = jax.jit(lambda x: x * 2).lower(transfer.target_aval).compile()
    assert_holds(receiver(transfer(place(dense, transfer.source_aval))), target, dense * 2)


@pytest.mark.parametrize(("source", "target", "transport"), ways(*SAMPLE))
def test_the_listed_programs_are_all_that_a_transfer_compiles(source, target, transport):
    rows = rows_between(source, target)
    boundary = new_boundary(source, target, transport, (rows, WIDTH))
    for transfer in (boundary.forward, boundary.backward):
        listed = transfer.programs()
        assert not any(program._compiled for program in listed)
        transfer(place(distinct(rows), transfer.source_aval))
        assert all(program._compiled for program in listed)
        own = [value for value in vars(transfer).values() if hasattr(value, "compiled")]
        assert all(program in listed for program in own)


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "transport", "expected"),
    [
        (Side(4, 2), Side(8), "auto", LocalTransfer),
        (Side(4, 2), Side(8), "collective", LocalTransfer),
        (Side(2, 2), Side(2, 2, at=4), "auto", PeerTransfer),
        (Side(2, 2), Side(2, cp=2, at=4), "device_put", PeerTransfer),
        (Side(2, 2), Side(2, 1, at=4), "device_put", LeaderTransfer),
        (Side(4), Side(3, at=4), "auto", LeaderTransfer),
        (Side(8), Side(2, 2), "device_put", LeaderTransfer),
        (Side(8), Side(2, 2), "collective", CollectiveTransfer),
        (Side(2, 2), Side(2, 2, at=4), "collective", CollectiveTransfer),
    ],
    ids=str,
)
def test_the_transfer_fits_the_rank_sets(source, target, transport, expected):
    boundary = boundary_between(source, target, transport)
    assert (type(boundary.forward), type(boundary.backward)) == (expected, expected)
    kind = {LocalTransfer: "local", CollectiveTransfer: "rendezvous"}.get(expected, "async")
    assert boundary.kind == boundary.forward.kind == boundary.backward.kind == kind
    assert boundary_kind(submesh_of(source), submesh_of(target), transport) == kind
    assert boundary_kind(submesh_of(target), submesh_of(source), transport) == kind


def test_a_collective_spans_only_ranks_that_routes_connect():
    """dp=4 on ranks 0-3 to dp=2, tp=2 on ranks 4-7: two unions, of two sources and one target group each."""
    boundary = boundary_between(Side(4), Side(2, 2, at=4), "collective")
    spans = [{shard.id for shard in program.avals[0].sharding.device_set} for program in boundary.forward.programs()]
    ids = [device.id for device in the_world().devices]
    assert spans == [{ids[r] for r in (0, 1, 4, 5)}, {ids[r] for r in (2, 3, 6, 7)}]
    # The way back needs the leaders 4 and 6 alone.
    back = [{d.id for d in program.avals[0].sharding.device_set} for program in boundary.backward.programs()]
    assert back == [{ids[r] for r in (0, 1, 4)}, {ids[r] for r in (2, 3, 6)}]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Side(8), Side(2, 4), {"all-gather"}),
        (Side(2, 4), Side(8), set()),
        (Side(4, 2), Side(8), set()),
        (Side(1, 8), Side(4, 2), set()),
        (Side(3, 2), Side(2, 3), {"collective-permute"}),
    ],
    ids=str,
)
def test_a_local_transfer_communicates_no_more_than_its_pair_needs(source, target, expected):
    (program,) = boundary_between(source, target).forward.programs()
    found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program.compiled.as_text())
    assert set(found) == expected


def test_an_unknown_transport_is_refused():
    message = r"^transport='pigeon': not a transport; use one of auto, device_put, collective$"
    with pytest.raises(ValueError, match=message):
        new_boundary(Side(2), Side(1, at=2), "pigeon", (4, 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_do_not_divide_are_refused(transport):
    message = r"^a->b forward: 8 rows do not divide into 6 equal intervals; pad the rows$"
    with pytest.raises(ValueError, match=message):
        new_boundary(Side(2), Side(3, at=2), transport, (8, 1))


# ---- inside a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), cases(*COLOCATED))
def test_a_local_transfer_traces_into_one_program(source, target):
    """There and back within one `jit`, between functions of either layout."""
    boundary, dense = boundary_between(source, target), distinct(rows_between(source, target))
    there, back = boundary.forward, boundary.backward
    assert isinstance(there, LocalTransfer) and isinstance(back, LocalTransfer)

    @jax.jit
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrived = numbered(there.target, there.trace(x))
        return arrived, back.trace(arrived)

    arrived, returned = step(place(dense, there.source_aval))
    per = len(dense) // target.dp
    expected = dense + 1000 * (np.arange(len(dense)) // per)[:, None].astype(np.float32)
    assert_holds(arrived, target, expected)
    assert_holds(returned, source, expected)


def numbered(submesh: Submesh, x: jax.Array) -> jax.Array:
    """Adds 1000 times the dp index: what a rank does to the rows that it believes are its own."""
    body = lambda x: x + 1000 * jax.lax.axis_index(submesh.axes.dp)  # noqa: E731
    return Spmd(body, submesh.mesh, submesh.axes.rows, submesh.axes.rows, check_vma=False)(x)


def _encoder(submesh: Submesh) -> Spmd:
    """Rows over dp, outputs over tp and gathered."""
    axes, rows = submesh.axes, submesh.axes.rows

    def body(x_RI: jax.Array, w_IO: jax.Array) -> jax.Array:
        return jax_compat.all_gather_invariant(jnp.tanh(x_RI @ w_IO), axes.tp, 1)

    return Spmd(body, submesh.mesh, (rows, PartitionSpec(None, axes.tp)), rows)


def _head(submesh: Submesh) -> Spmd:
    """A loss that weighs every row differently; its product is split over tp."""
    axes, columns = submesh.axes, PartitionSpec(None, submesh.axes.tp)

    def body(y_RO: jax.Array, v_OP: jax.Array, weights_R: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.sin(y_RO @ v_OP) * weights_R[:, None]), (*axes.dp, *axes.tp))

    return Spmd(body, submesh.mesh, (axes.rows, columns, axes.rows), PartitionSpec())


@pytest.mark.parametrize(
    ("source", "target", "transport"),
    [
        (Side(4, 2), Side(2, 4), "auto"),
        (Side(4, at=4), Side(1, 4), "device_put"),
        (Side(2, 2), Side(2, 2, at=4), "device_put"),
        (Side(2, 2), Side(3, at=5), "collective"),
        (Side(8), Side(2, 2), "device_put"),
    ],
    ids=str,
)
def test_encoder_boundary_loss_has_the_gradients_of_one_device(source, target, transport):
    rows, rng = rows_between(source, target), np.random.default_rng(0)
    ends = submesh_of(source), submesh_of(target)
    boundary = new_boundary(source, target, transport, (rows, 4))
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
