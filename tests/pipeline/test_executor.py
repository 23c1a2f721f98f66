"""The executors during and between steps: buffers in flight, determinism, steps that are skipped, compute dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from parity import Case, Leaves, Session

from mmjax.data.types import StepBatch
from mmjax.mesh.layout import Layout
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.watch import measured_in_flight
from mmjax.schedule.ops import Op

pytestmark = pytest.mark.long

# The shapes of test_parity, so that nothing new is compiled.
FAN_IN = Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2), microbatches=4, samples=25)
ONE_PROGRAM = Case()
TIED = replace(FAN_IN, model="tied", clip_norm=0.7)


def assert_same(got: Leaves, want: Leaves) -> None:
    """Bit for bit."""
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


# ---- buffers in flight -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.long)])
def test_microbatches_in_flight_are_the_distance_to_the_sink_plus_one(schedule: str) -> None:
    session = Session(replace(FAN_IN, schedule=schedule)).start()
    assert isinstance(session.executor, Executor)
    with measured_in_flight(session.executor) as most:
        session.step(0)
    distances = {"vision.0": 2, "llm.0": 1, "llm.1": 0}
    assert FAN_IN.microbatches > max(distances.values()) + 1
    expected = {stage: d + 1 if schedule == "1f1b" else FAN_IN.microbatches for stage, d in distances.items()}
    assert most == expected


@pytest.mark.parametrize(
    "case",
    [FAN_IN, replace(FAN_IN, frozen=("vision", "vision_projector", "llm")), pytest.param(TIED, marks=pytest.mark.long)],
    ids=["trained", "frozen", "tied"],
)
def test_nothing_is_left_after_a_step(case: Case) -> None:
    session = Session(case).start()
    executor = session.executor
    assert isinstance(executor, Executor)
    session.step(0)
    run, held = executor._run, {}
    for name in (
        "inputs",
        "carry",
        "cotangents",
        "in_transit",
        "residuals",
        "reduced",
        "rows",
        "params",
        "states",
        "borrowed",
        "returned",
        "totals",
        "losses",
    ):
        held[name] = getattr(run, name)
    assert held == {name: {} for name in held}
    assert executor.sums == {}, "the next step's first backward makes zeros"


def test_a_stage_without_backward_drops_its_inputs_at_once() -> None:
    session = Session(replace(FAN_IN, frozen=("vision", "vision_projector"))).start()
    executor, seen = session.executor, []
    assert isinstance(executor, Executor)
    run = executor._run
    forward = run.handlers["F"]

    def watched(op: Op) -> None:
        forward(op)
        seen.append((op.stage, (op.stage, op.microbatch) in run.inputs, (op.stage, op.microbatch) in run.residuals))

    run.handlers["F"] = watched
    session.step(0)
    assert set(seen) == {("vision.0", False, False), ("llm.0", True, True), ("llm.1", True, True)}


# ---- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [FAN_IN, pytest.param(ONE_PROGRAM, marks=pytest.mark.long)],
    ids=["program per op", "one program"],
)
def test_two_runs_are_bitwise_the_same(case: Case) -> None:
    first, second = parity.run(case), parity.run(case)
    assert first.losses == second.losses
    assert first.norms == second.norms
    for got, want in zip(second.leaves, first.leaves, strict=True):
        assert_same(got, want)


# ---- steps that are skipped ------------------------------------------------------------------------------------------


def spoilt(batch: StepBatch, module: str, name: str, value: float) -> StepBatch:
    """The batch with one number of the last microbatch's input replaced."""
    *others, last = batch.microbatches
    array = last.inputs[module][name].copy()
    where = tuple(axis[0] for axis in np.nonzero(array))
    array[where] = value
    inputs = {**last.inputs, module: {**last.inputs[module], name: array}}
    return replace(batch, microbatches=(*others, replace(last, inputs=inputs)))


def counts(states: Mapping[str, Any]) -> set[int]:
    """All counters of the optimizers' states."""
    leaves = [x for state in states.values() for x in jax.tree.leaves(state["opt"]) if x.dtype == jnp.int32]
    return {int(x) for x in leaves}


@pytest.mark.parametrize(
    "case",
    [pytest.param(FAN_IN, id="program per op"), pytest.param(ONE_PROGRAM, id="one program", marks=pytest.mark.long)],
)
def test_a_step_that_is_not_finite_changes_nothing(case: Case) -> None:
    session = Session(case).start()
    session.step(0)
    before, good = session.leaves(), session.batches[1]
    assert counts(session.executor.states) == {1}
    # The last one's loss and gradients are finite; their squares are not.
    for module, name, value in (("vision", "patches", np.inf), ("llm", "weights", np.nan), ("llm", "weights", 1e24)):
        session.batches[1] = spoilt(good, module, name, value)
        _, norms = session.step(1)
        assert not all(np.isfinite(n) for n in norms.values())
        assert_same(session.leaves(), before)
        assert counts(session.executor.states) == {1}
    session.batches[1] = good
    loss, norms = session.step(1)
    assert np.isfinite(loss) and all(np.isfinite(n) for n in norms.values())
    assert counts(session.executor.states) == {2}

    straight_on = Session(case).start()
    straight_on.step(0)
    assert straight_on.step(1) == (loss, norms)
    assert_same(session.leaves(), straight_on.leaves())


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [(FAN_IN, "3 microbatches for a schedule of 4"), (ONE_PROGRAM, "one program takes 2 in one bucket")],
    ids=["program per op", "one program"],
)
def test_another_number_of_microbatches_is_refused(case: Case, message: str) -> None:
    session = Session(case)
    batch = session.batches[0]
    with pytest.raises(ValueError, match=message):
        session.executor.step([parity.signed(part) for part in batch.microbatches[:-1]], batch.denominators)


def test_microbatches_of_different_buckets_are_refused_by_the_one_program() -> None:
    session = Session(ONE_PROGRAM)
    batch = session.batches[0]
    first, second = (parity.signed(part) for part in batch.microbatches)
    other = ((("vision", 1),), second[1])
    with pytest.raises(ValueError, match="2 microbatches in 2 buckets"):
        session.executor.step([first, other], batch.denominators)


def test_stages_on_different_devices_are_no_straight_line() -> None:
    session = Session(FAN_IN)
    with pytest.raises(ValueError, match="use Executor"):
        StraightExecutor(session.placed, session.schedule, {})


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one_program",
    [pytest.param(True, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.slow)],
    ids=["one program", "program per op"],
)
def test_bf16_compute_trains_fp32_masters(one_program: bool) -> None:
    wide = Case(vision=Layout(dp=2), llm=Layout(tp=2), dtype="bfloat16", lowering="ops")
    case = Case(dtype="bfloat16") if one_program else wide
    session, plain = Session(case).start(), Session(Case()).start()
    before, (want, _) = parity.of_kind(plain.leaves(), "params"), plain.step(0)
    losses = [session.step(0)[0] for _ in range(12)]
    assert losses[0] == pytest.approx(want, rel=2e-2)
    assert losses[0] != pytest.approx(want, rel=1e-6), "computed in fp32"
    assert losses[-1] < losses[0] - 0.1
    for name, stage in session.placed.stages.items():
        assert {a.dtype for a in jax.tree.leaves(stage.state.param_avals)} == {jnp.dtype("bfloat16")}
        arrays = jax.tree.leaves(session.executor.states[name])
        assert {a.dtype for a in arrays} == {jnp.dtype("float32"), jnp.dtype("int32")}
    moved = parity.difference(parity.of_kind(session.leaves(), "params"), before)
    assert max(float(np.abs(x).max()) for x in moved.values()) < 0.1
    head = parity.of_kind(session.leaves(), "params")["llm/head"]
    assert (head != np.asarray(jnp.asarray(head, jnp.bfloat16), np.float32)).any(), "masters are rounded to bf16"
