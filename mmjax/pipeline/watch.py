"""Watches ops: enters a context around every op that a walker dispatches; measurements of memory."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from mmjax.mesh.world import Device
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.walker import Walker
from mmjax.schedule.ops import EDGE_KINDS, ONCE, STASH_COPIES, Op


@contextlib.contextmanager
def watched(
    walker: Walker, around: Callable[[Op], AbstractContextManager[None]], *, in_order: bool = False
) -> Iterator[None]:
    """A context in which every op is dispatched inside ``around(op)``; its results may not be ready there.

    ``walker`` is such as ``Trainer.executor.walker``; ``around`` makes a context for an op.

    ``in_order``: no op is deferred because it awaits another, so that every run has the same order.
    """
    plain, before = dict(walker.handlers), walker.in_order

    def wrapped(handler: Callable[[Op], None]) -> Callable[[Op], None]:
        def handle(op: Op) -> None:
            with around(op):
                handler(op)

        return handle

    walker.handlers, walker.in_order = {kind: wrapped(handler) for kind, handler in plain.items()}, in_order or before
    try:
        yield
    finally:
        walker.handlers, walker.in_order = plain, before


Bytes = dict[str, dict[int, int]]
"""Bytes by kind of memory (``device``, ``pinned_host``), then by rank."""


@contextlib.contextmanager
def measured_memory(executor: Executor) -> Iterator[list[tuple[Op, Bytes]]]:
    """Records, after every op, the bytes of all live arrays on this process's ranks.

    The list of (op, bytes) grows in the context's body, which runs steps with ``executor``. Bytes are by kind of
    memory, then by rank: {"device": {0: 4096}, "pinned_host": {}}. Arrays of other owners count too, so only
    differences are meaningful. A buffer of several arrays counts once. Waits for every op.
    """
    records: list[tuple[Op, Bytes]] = []
    ranks = {device: rank for rank, device in enumerate(executor.placed.world.devices)}

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        yield
        records.append((op, _live_bytes(ranks)))

    with watched(executor.walker, around, in_order=True):
        yield records


def _live_bytes(ranks: dict[Device, int]) -> Bytes:
    sizes: Bytes = defaultdict(lambda: defaultdict(int))
    buffers = set()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffer = (shard.device, shard.data.unsafe_buffer_pointer())
            if shard.device in ranks and shard.data.nbytes and buffer not in buffers:
                buffers.add(buffer)
                sizes[str(array.sharding.memory_kind)][ranks[shard.device]] += shard.data.nbytes
    return sizes


@contextlib.contextmanager
def measured_residuals(executor: Executor) -> Iterator[dict[str, dict[int, int]]]:
    """Measures ``ScheduleReport.residual_bytes`` of ``validate`` on live arrays.

    Gives a dict that is filled in the context's body, which runs steps with ``executor``: by stage, such as "llm.0",
    and then by rank, the largest number of live bytes at any op: residuals, received activations that backward reads,
    and deferred values of a split backward. An array is live while it is referenced. A stage without residuals is
    absent.
    """
    most: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    alive: list[tuple[str, weakref.ref[jax.Array], dict[int, int]]] = []
    walker, ranks = executor.walker, {device: rank for rank, device in enumerate(executor.placed.world.devices)}

    def count() -> None:
        alive[:] = [entry for entry in alive if entry[1]() is not None]
        now: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for stage, _, sizes in alive:
            for rank, size in sizes.items():
                now[stage][rank] += size
        for stage, sizes in now.items():
            for rank, size in sizes.items():
                most[stage][rank] = max(most[stage][rank], size)

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        yield
        key = (op.stage, op.microbatch)
        residuals = walker.residuals.get(key), walker.carry.get(key, {})
        arrays = {"F": residuals, "unstash": residuals, "B": walker.deferred.get(key)}
        if key in (walker.deferred if op.kind == "B" else walker.residuals):
            for array in jax.tree.leaves(arrays.get(op.kind)):
                sizes = {ranks[shard.device]: shard.data.nbytes for shard in array.addressable_shards}
                alive.append((op.stage, weakref.ref(array), sizes))
        count()

    with watched(walker, around, in_order=True):
        yield most


@contextlib.contextmanager
def measured_in_flight(executor: Executor) -> Iterator[dict[str, int]]:
    """Measures ``ScheduleReport.in_flight`` of ``validate`` on live arrays.

    Gives a dict that is filled in the context's body, which runs steps with ``executor``: by stage, such as "llm.0",
    the largest number of microbatches with a live array at any op. For a stage with backward these arrays are its
    residuals, on devices or hosts, and deferred values of a split backward; for a stage without, the activations in
    transit to other stages. An array is live while it is referenced. A stage without such arrays is absent.
    """
    walker, most = executor.walker, defaultdict[str, int](int)
    alive: list[tuple[str, int, str, weakref.ref[jax.Array]]] = []

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        yield
        if op.kind == "F":  # received arrays that the stage keeps count for the stage from now on
            received = {id(array) for array in jax.tree.leaves(walker.carry.get((op.stage, op.microbatch), {}))}
            into = {edge.name for edge in walker.graph.in_edges(op.stage)}
            alive[:] = [entry for entry in alive if not (entry[2] in into and id(entry[3]()) in received)]
        for stage, edge, tree in _put_in_flight(walker, op):
            alive.extend((stage, op.microbatch, edge, weakref.ref(array)) for array in jax.tree.leaves(tree))
        alive[:] = [entry for entry in alive if entry[3]() is not None]
        for stage, count in Counter(stage for stage, _ in {entry[:2] for entry in alive}).items():
            most[stage] = max(most[stage], count)

    with watched(walker, around, in_order=True):
        yield most


def _put_in_flight(walker: Any, op: Op) -> Iterator[tuple[str, str, Any]]:
    """The arrays of an op that put a microbatch in flight: stage, edge or "", and the arrays."""
    key = (op.stage, op.microbatch)
    if op.kind in STASH_COPIES or (op.kind == "F" and walker.graph.stage(op.stage).backward):
        yield op.stage, "", (walker.residuals[key], walker.carry.get(key, {}))
    elif op.kind == "F":
        for edge in walker.graph.out_edges(op.stage):
            yield op.stage, edge.name, walker.in_transit[edge.name, op.microbatch, False]
    elif op.kind == "B":
        yield op.stage, "", walker.deferred.get(key)
    elif op.kind in EDGE_KINDS and op.microbatch != ONCE and not op.backward:
        edge = walker.graph.edge(op.edge)
        if not walker.graph.stage(edge.src).backward:
            arrived = (
                walker.carry[key][edge.src] if op.kind == "unpack" else walker.in_transit[op.edge, op.microbatch, False]
            )
            yield edge.src, edge.name, arrived
