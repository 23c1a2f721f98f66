"""The one-program lowering beside the program per op: the same values, one ``shard_map``, and nothing held twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import toy

from mmjax import jaxprs
from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import shard_bytes
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.schedule.ops import Op

# The eye spans both lanes in degrees of its own; the ear is on the first.
ON_LANES = {"eye": Layout(dp=4, tp=2), "ear": Layout(dp=2, tp=2), "llm": Layout(dp=2, tp=2, pp=2)}
ALL_IN_LANES = {"eye": Layout(tp=2), "ear": Layout(tp=2), "llm": Layout(tp=2, pp=2)}
BUCKETS = (2, 2, 2)


def run_of(cls: type[toy.Run], layouts: dict[str, Layout] = ON_LANES) -> Any:
    # No clipping: norms sum ranks in another order, and the scale would be rounded otherwise.
    model = toy.placed(layouts, toy.optimizers(decay=0.1))
    return toy.executor(model, len(BUCKETS), run=cls)


def step(executor: toy.Run, index: int) -> tuple[float, dict[str, float]]:
    parts = toy.batch(index, BUCKETS)
    return executor.step(parts, toy.denominators(executor.placed, parts)).fetch()


def assert_same(got: toy.Leaves, want: toy.Leaves) -> None:
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def assert_close(got: toy.Leaves, want: toy.Leaves) -> None:
    """To the last digit or so: a compiler may fuse products in one program otherwise than in many."""
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=1e-6 * np.max(np.abs(leaf)), err_msg=name)


@pytest.mark.long
def test_one_program_equals_a_program_per_op_and_itself_and_takes_over_states() -> None:
    one, many = run_of(SingleExecutor), run_of(Executor)
    for index in range(2):
        got, want = step(one, index), step(many, index)
        assert got[0] == pytest.approx(want[0], rel=1e-6) and got[1] == pytest.approx(want[1], rel=1e-6)
        leaves = toy.logical(many.placed, many.states)
        assert_close(toy.logical(one.placed, one.states), leaves)
    first = toy.logical(one.placed, one.states)
    one.initialise(toy.SEED)
    for index in range(2):
        step(one, index)
    assert_same(toy.logical(one.placed, one.states), first)
    # From a checkpoint's leaves, as a run continues.
    logical = {k: v for name, s in many.placed.stages.items() for k, v in s.state.to_logical(many.states[name]).items()}
    one.states = {name: stage.state.from_logical(logical, 2) for name, stage in one.placed.stages.items()}
    assert_same(toy.logical(one.placed, one.states), leaves)
    assert step(one, 2)[0] == pytest.approx(step(many, 2)[0], rel=1e-6)
    assert_close(toy.logical(one.placed, one.states), toy.logical(many.placed, many.states))
    assert_memory_is_foretold(one)


def assert_memory_is_foretold(executor: SingleExecutor) -> None:
    """What the compiled program takes is what was estimated of its trace, but for temporaries: they are estimated as on
    GPUs, and CPUs keep more of so small a program."""
    program = executor.programs()[-1]  # of the larger bucket
    said, told = program.compiled.memory_analysis(), executor.memory()
    held = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    tables = held - told.optimizer - told.inputs // 2  # of pointers
    assert 0 <= tables < 1000
    assert 1 < said.temp_size_in_bytes / told.temporaries < 4


@pytest.fixture(scope="module")
def traced() -> tuple[SingleExecutor, Any]:
    """An executor all of whose stages are on lanes, and the trace of its step."""
    executor = run_of(SingleExecutor, ALL_IN_LANES)
    program = executor.programs()[0]
    return executor, jax.make_jaxpr(program._jitted)(*program.avals).jaxpr


def equations(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every equation with the names of those around it."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from equations(inner, (*inside, eqn.primitive.name))


@pytest.mark.long
def test_a_pipeline_is_one_shard_map_and_no_branch_waits_for_another(traced: Any) -> None:
    executor, jaxpr = traced
    found = list(equations(jaxpr))
    names = Counter(eqn.primitive.name for eqn, _ in found)
    # The norm and the update after it are apart: between them lies a sum over all lanes.
    assert names["shard_map"] == 3
    slots = [
        slot for part in executor.ops(executor.traced[0]).plan.parts if hasattr(part, "slots") for slot in part.slots
    ]
    assert names["cond"] == len(slots)
    assert names["ppermute"] == sum(len(slot.hops) for slot in slots)
    assert not [around for eqn, around in found if eqn.primitive.name == "ppermute" and "cond" in around]
    summed = [e for e, around in found if "psum" in e.primitive.name and "cond" in around]
    assert summed and not [e for e in summed if "pp" in e.params["axes"]]


@pytest.mark.long
def test_a_device_holds_its_own_states_and_the_padding_of_the_union(traced: Any) -> None:
    executor, _ = traced
    held = shard_bytes(executor.programs()[0].avals[0])
    own: list[Counter[Any]] = [Counter(), Counter()]
    for name, stage in executor.placed.stages.items():
        for aval in jax.tree.leaves(stage.state.state_avals):
            shape = aval.sharding.shard_shape(aval.shape)
            own[executor.lanes.of(stage.submesh)][shape, aval.dtype, str(name and "")] += 1
    size = lambda key: int(np.prod(key[0])) * key[1].itemsize  # noqa: E731
    union = sum(size(key) * count for key, count in (own[0] | own[1]).items())
    everything = sum(size(key) * count for key, count in (own[0] + own[1]).items())
    assert held == union < everything


def test_registers_hold_the_microbatches_that_the_schedule_promises(traced: Any) -> None:
    executor, _ = traced
    ops = executor.ops(executor.traced[0])
    functions = executor.traced[0].stages
    most: Counter[Any] = Counter()
    for lane in range(2):
        mine: Counter[Any] = Counter()
        for name, functions_ in functions.items():
            if ops.lane[name] == lane:
                for aval in functions_.residual_avals:
                    kind = (aval.sharding.shard_shape(aval.shape), aval.dtype)
                    mine[kind] += executor.schedule.bound(name)
        most |= mine
    held: Counter[Any] = Counter()
    for block, count in ops.plan.registers.items():
        held[block.shape, block.dtype] += count
    # Activations on their way and gradients have blocks of the same kinds, but residuals have two dimensions more.
    for (shape, dtype), count in most.items():
        assert held[tuple(shape), dtype] >= count or len(shape) < 3


@pytest.mark.long
def test_ops_that_one_program_does_not_have_are_named() -> None:
    executor = run_of(SingleExecutor, ALL_IN_LANES)
    first = next(op for op in executor.schedule.ops if op.kind == "F")
    ops = (*executor.schedule.ops, Op("offload", first.stage, 0))
    with pytest.raises(ValueError, match=r"offload eye.0 microbatch 0: one program has no such op; use Executor"):
        SingleExecutor(executor.placed, replace(executor.schedule, ops=ops), dict(toy.batch(0, (1,))))


@pytest.mark.parametrize(
    ("vision", "llm", "message"),
    [
        (Layout(rank_offset=2), Layout(pp=2), "vision/Layout.rank_offset=2: .* on ranks 0-1 .*; set it to 0, or"),
        (Layout(dp=2, tp=2), Layout(pp=2, tp=4), "vision/Layout.dp=2: .* dp=1 cp=1 tp=4; set it to 1, or"),
        (Layout(tp=2), Layout(dp=2, pp=2), "vision/Layout.dp=1: .* dp=2 cp=1 tp=1; set it to 2, or"),
        (Layout(pp=2, dp=2), Layout(pp=4), "vision/Layout.dp=2: .* stages of llm with dp=1"),
        (Layout(pp=2), Layout(rank_offset=2), "llm/Layout.rank_offset=2: .* stages of vision with .*; set it to 0, or"),
    ],
)
def test_a_layout_that_has_no_lanes_is_refused_by_name(vision: Layout, llm: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lane_layout({"vision": vision, "llm": llm})


def test_layouts_with_lanes() -> None:
    eight = Layout(dp=2, tp=2, pp=2)
    for vision, llm, lanes in (
        (Layout(dp=8), eight, eight),
        (Layout(dp=2, tp=2), eight, eight),
        (replace(eight, chunks=2), eight, eight),
        (Layout(dp=2, tp=2, rank_offset=4), eight, eight),
        (Layout(pp=2), Layout(dp=2), Layout(pp=2)),
        (Layout(dp=2), Layout(tp=2), Layout(tp=2)),
    ):
        assert lane_layout({"vision": vision, "llm": llm}) == lanes
