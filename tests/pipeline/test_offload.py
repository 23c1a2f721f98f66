"""Offload: what leaves the devices and when, and that nothing else changes: no bit of a result, no byte elsewhere."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import toy
from jax.sharding import PartitionSpec as P

from mmjax.configurable import ConfigError
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.layout import Layout
from mmjax.pipeline import offload
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, most_loaded, shard_bytes
from mmjax.pipeline.offload import DEVICE, HOST, moved, replaced, require_host_memory
from mmjax.pipeline.peak import bytes_by_op, fullest
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.watch import _live_bytes, measured_memory, watched
from mmjax.schedule.ops import COPY_KINDS, Op

BUCKETS = (1, 2, 2, 1)
# The eye shares the four ranks of two LLM stages. Its parameters are copies, gathered from masters over dp; or they
# are the masters themselves, where every rank is an optimizer instance.
GATHERED = {"eye": Layout(dp=4), "ear": Layout(dp=2), "llm": Layout(tp=2, pp=2)}
MASTERS = {**GATHERED, "eye": Layout(dp=2, tp=2, optimizer_instances=2)}
LANES = {**GATHERED, "eye": Layout(dp=2, lanes=2)}
MASTERS_OF_LANES = {**GATHERED, "eye": Layout(tp=2, lanes=2, optimizer_instances=2)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is offloaded of the eye, and how it runs."""

    layouts: Mapping[str, Layout] = field(default_factory=lambda: GATHERED)
    optimizer: bool = False
    parameters: bool = True
    window: int = 2
    frozen: tuple[str, ...] = ()
    dtype: str = "float32"
    schedule: str = "three-phase"

    def executor(self, offloaded: bool) -> Executor:
        own = OffloadConfig(parameters=self.parameters, optimizer=self.optimizer)
        model = toy.placed(
            self.layouts,
            toy.optimizers(self.frozen),
            dtype=self.dtype,
            clip_norm=0.4,
            offloads={"eye": own} if offloaded else {},
        )
        executor = toy.executor(model, len(BUCKETS), self.schedule, window=self.window)
        assert isinstance(executor, Executor)
        return executor


CASES = {
    "parameters": Case(),
    "masters that serve as parameters": Case(layouts=MASTERS),
    "parameters and optimizer": Case(optimizer=True),
    "masters and optimizer": Case(layouts=MASTERS, optimizer=True, window=0),
    "frozen": Case(frozen=("eye",), optimizer=True),
    "frozen, its masters serve": Case(layouts=MASTERS, frozen=("eye",), optimizer=True, dtype="bfloat16"),
    "frozen, gathered": Case(frozen=("eye",), optimizer=True, dtype="bfloat16"),
    "lanes": Case(layouts=LANES, optimizer=True, schedule="encoders-first", window=0),
    "masters of lanes": Case(layouts=MASTERS_OF_LANES),
    "masters of lanes, frozen": Case(layouts=MASTERS_OF_LANES, frozen=("eye",), optimizer=True, dtype="bfloat16"),
    "optimizer alone": Case(parameters=False, optimizer=True),
}
LONG = {"masters that serve as parameters", "parameters and optimizer"}
EACH = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=n, marks=pytest.mark.long if n in LONG else pytest.mark.slow) for n, case in CASES.items()],
)


@dataclass(frozen=True)
class Measured:
    """Two steps' losses, norms and leaves; and of the second, to which the first has left its sums and what it has
    offloaded at its end: bytes of the executor's arrays on each rank's device and in its host memory, by op.
    """

    results: list[Any]
    leaves: toy.Leaves
    ops: list[Op]
    device: dict[Op, dict[int, int]]
    host: dict[Op, dict[int, int]]


def run(case: Case, offloaded: bool) -> Measured:
    """Two steps of a case."""
    gc.collect()
    ranks = {device: rank for rank, device in enumerate(parity.world().devices)}
    others, executor, results = _live_bytes(ranks), case.executor(offloaded), []
    for step in range(2):
        parts = toy.batch(step, BUCKETS)
        with measured_memory(executor) as seen:
            results.append(executor.step(parts, toy.denominators(executor.placed, parts)).fetch())
    shown = range(4)
    device, host = ({op: {r: b[kind][r] - others[kind][r] for r in shown} for op, b in seen} for kind in (DEVICE, HOST))
    leaves = toy.logical(executor.placed, executor.states)
    return Measured(results, leaves, [op for op, _ in seen], device, host)


@EACH
def test_only_where_bytes_are_changes(case: Case) -> None:
    """Every op leaves as many bytes as without; what is offloaded is not on the devices but, once, on their host.

    Losses, norms, parameters and moments are the same, bit for bit.
    """
    plain, away = run(case, False), run(case, True)
    assert away.results == plain.results
    assert away.leaves.keys() == plain.leaves.keys()
    for name, leaf in plain.leaves.items():
        np.testing.assert_array_equal(away.leaves[name], leaf, err_msg=name)
    assert [op for op in away.ops if op.kind not in COPY_KINDS] == plain.ops
    assert not any(any(held.values()) for held in plain.host.values())
    expected = offloaded_bytes(case, away.ops)
    assert len(set(expected.values())) > 1, "something comes and goes"
    for op in away.ops:
        assert away.host[op] == dict.fromkeys(range(4), expected[op]), op
    for op in plain.ops:
        assert away.device[op] == {rank: size - expected[op] for rank, size in plain.device[op].items()}, op


@EACH
def test_a_dry_run_counts_the_same(case: Case) -> None:
    """What is counted for each op falls by what is away then, and the table says how much host memory that takes."""
    plain, away = case.executor(False), case.executor(True)
    shapes = list(dict(toy.batch(0, (1, 2))).values())
    counted = [dict(bytes_by_op(one.placed, one.schedule, shapes)) for one in (plain, away)]
    expected = offloaded_bytes(case, list(away.schedule.ops))
    for op, ranks in counted[0].items():
        if op.stage != "eye.0" or op.kind not in ("prepare", "update"):  # which hold what they read and what they leave
            assert counted[1][op] == {rank: size - expected[op] for rank, size in ranks.items()}, op
    memory = memory_by_stage(away.placed, away.schedule, shapes)
    assert {name: held.host for name, held in memory.items()} == {"ear.0": 0, "llm.0": 0, "llm.1": 0} | {
        "eye.0": max(expected.values())
    }
    for one in (plain, away):
        peak, (_, most) = fullest(one.placed, one.schedule, shapes), most_loaded(one.placed, memory)
        assert peak.bytes <= most.total
    assert fullest(plain.placed, plain.schedule, shapes).bytes == max(
        max(ranks.values()) for ranks in counted[0].values()
    )


def offloaded_bytes(case: Case, ops: list[Op]) -> dict[Op, int]:
    """What is to be in host memory after each op, by which ops come before and after it."""
    executor = case.executor(True)
    state = executor.placed.stages["eye.0"].state
    masters, moments = (shard_bytes(tree) for tree in (state.master_avals, state.opt_avals))
    parameters = masters if state.prepare_is_identity else shard_bytes(state.param_avals)
    place = {(op.kind, op.microbatch): i for i, op in enumerate(ops) if op.stage == "eye.0"}
    ends = {i: place["reload", first] for (kind, first), i in place.items() if kind == "offload"}
    prepared, reduced = place["prepare", -1], place.get(("reduce", -1), len(ops))
    updated = place.get(("update", -1), len(ops))
    result = {}
    for i, op in enumerate(ops):
        size = parameters * any(start <= i < end for start, end in ends.items())
        if case.optimizer:
            size += moments * (not reduced <= i < updated)
            unread = not state.prepare_is_identity and (prepared <= i < reduced or case.frozen == ("eye",))
            size += masters * unread
        result[op] = size
    return result


@pytest.mark.long
def test_programs_read_from_devices_and_overwrite_nothing_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update donates the state: never an array that is on its way to the host, or one that was kept."""
    executor, copy = Case(layouts=MASTERS, optimizer=True).executor(True), offload._copied
    sources: list[jax.Array] = []
    monkeypatch.setattr(offload, "_copied", lambda x, kind: (sources.append(x), copy(x, kind))[1])
    seen: list[tuple[str, set[str]]] = []

    def kinds() -> set[str]:
        return {str(x.sharding.memory_kind) for x in jax.tree.leaves(executor.walker.params["eye.0"])}

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        if op.stage == "eye.0" and op.kind in "FB":
            seen.append((op.kind, kinds()))
        yield
        if op.stage == "eye.0" and op.kind in COPY_KINDS:
            seen.append((op.kind, kinds()))

    parts = toy.batch(0, BUCKETS)
    with watched(executor.walker, around):
        for _ in range(2):
            executor.step(parts, toy.denominators(executor.placed, parts))
    window = [*[("F", {DEVICE})] * 2, ("offload", {HOST}), ("reload", {DEVICE}), *[("B", {DEVICE})] * 2]
    assert seen == window * 4
    assert {x.sharding.memory_kind for x in sources} == {DEVICE, HOST}
    assert not any(x.is_deleted() for x in sources)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_arrays_move_with_their_shards_and_values() -> None:
    submesh = parity.world().submesh(Layout(dp=2, tp=2, rank_offset=1), 0)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    there = jax.device_put(values, submesh.sharding(P("dp", "tp")))
    tree = {"a": there, "b": jax.device_put(np.int32(7), submesh.sharding(P()))}
    away = moved(tree, HOST)
    assert {x.sharding.memory_kind for x in away.values()} == {HOST}
    assert moved(away, HOST)["a"] is away["a"], "nothing is copied to where it is"
    back = moved(away, DEVICE)
    for name, x in tree.items():
        assert back[name].sharding == x.sharding and back[name].dtype == x.dtype
        np.testing.assert_array_equal(back[name], x)
        for one, other in zip(away[name].addressable_shards, x.addressable_shards, strict=True):
            assert one.device == other.device
            np.testing.assert_array_equal(one.data, other.data)
    assert jnp.sum(back["a"]) == values.sum()


def test_replacing_is_by_array_and_not_by_place() -> None:
    one, two, three, four = (jnp.full(2, i) for i in range(4))
    got = replaced({"x": [two, three], "y": one}, {"p": one, "q": two}, {"p": four, "q": three})
    assert got["y"] is four and got["x"][0] is three and got["x"][1] is three


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "have"), [(("beads", "rods"), "beads, rods"), ((), "none")])
def test_devices_without_such_memory_are_refused(kinds: tuple[str, ...], have: str) -> None:
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    device = SimpleNamespace(process_index=0, platform="abacus", addressable_memories=lambda: memories)
    message = (
        rf"^vision/Offload.parameters=True: abacus devices have no pinned_host memory \({have}\); set it to False$"
    )
    with pytest.raises(ConfigError, match=message):
        require_host_memory("vision/Offload.parameters", [device])
    require_host_memory("vision/Offload.parameters", [*parity.world().devices, PlannedDevice(0)])
    device.process_index = 1  # another process will look at it
    require_host_memory("vision/Offload.parameters", [device])


def test_one_program_does_not_offload() -> None:
    model = toy.placed(
        dict.fromkeys(toy.MODULES, Layout()), toy.optimizers(), offloads={"eye": OffloadConfig(optimizer=True)}
    )
    for run in (StraightExecutor, SingleExecutor):
        with pytest.raises(ValueError, match="one program keeps everything on its devices"):
            toy.executor(model, 1, run=run)
