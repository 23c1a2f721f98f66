"""The first value that is not finite is found at the op that made it, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from parity import Case, Session

from mmjax.data.types import StepBatch
from mmjax.mesh.layout import Layout
from mmjax.mesh.transfer import MovedTransfer
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.finite import NonFiniteError, finite_ops

# The shapes of test_parity, so that nothing new is compiled.
FAN_IN = Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2))


@pytest.fixture(scope="module")
def session() -> Session:
    """A session that every test sets back to its first state (see `fresh`)."""
    return Session(FAN_IN).start()


def fresh(session: Session) -> Executor:
    """The session's executor in its first state: a step that was cut short leaves arrays behind."""
    executor = session.executor
    assert isinstance(executor, Executor)
    executor._run, executor.sums = type(executor.walker)(executor), {}
    executor.initialise(parity.SEED)
    return executor


def first_error(session: Session) -> str:
    """What a checked step ends with."""
    with finite_ops(fresh(session)), pytest.raises(NonFiniteError) as caught:
        session.step(0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "path", "value", "expected"),
    [
        ("vision.0", ("layers", "mlp", "up"), np.nan, "prepare vision.0: parameter vision/layers/mlp/up is not finite"),
        ("llm.1", ("head",), np.inf, "prepare llm.1: parameter llm/head is not finite (inf at [0, 0]; 1 of"),
        # Finite, but the products are not: the first op that multiplies by it.
        ("llm.0", ("layers", "mlp", "down"), 3e38, "F llm.0 microbatch 0: activation is not finite"),
        ("llm.1", ("head",), 3e38, "F llm.1 microbatch 0: loss is not finite"),
    ],
)
def test_a_spoilt_weight(session: Session, stage: str, path: tuple[str, ...], value: float, expected: str) -> None:
    executor = fresh(session)
    tree: Any = executor.states[stage]["master"][stage.split(".")[0]]
    *parents, last = path
    for name in parents:
        tree = tree[name]
    weights = np.asarray(tree[last]).copy()
    weights[(0,) * weights.ndim] = value
    tree[last] = jax.device_put(weights, tree[last].sharding)
    with finite_ops(executor), pytest.raises(NonFiniteError) as caught:
        session.step(0)
    assert str(caught.value).startswith(expected), caught.value


def spoilt(batch: StepBatch, module: str, name: str, value: float, microbatch: int) -> StepBatch:
    """The batch with one number of a microbatch's input replaced."""
    parts = list(batch.microbatches)
    array = parts[microbatch].inputs[module][name].copy()
    array[tuple(axis[0] for axis in np.nonzero(array))] = value
    inputs = {**parts[microbatch].inputs, module: {**parts[microbatch].inputs[module], name: array}}
    parts[microbatch] = replace(parts[microbatch], inputs=inputs)
    return replace(batch, microbatches=tuple(parts))


@pytest.mark.parametrize("microbatch", [0, 1])
@pytest.mark.parametrize(
    ("module", "name", "value", "expected"),
    [
        ("vision", "patches", np.inf, "F vision.0 microbatch {m}: activation is not finite (nan at"),
        ("llm", "weights", np.nan, "F llm.1 microbatch {m}: loss is not finite (nan at"),
    ],
)
def test_a_spoilt_input(session: Session, microbatch: int, module: str, name: str, value: float, expected: str) -> None:
    good = session.batches[0]
    session.batches[0] = spoilt(good, module, name, value, microbatch)
    try:
        message = first_error(session)
    finally:
        session.batches[0] = good
    assert message.startswith(expected.format(m=microbatch)), message
    assert f"; its host input {module}/{name} is not finite ({value:g} at" in message


def test_a_gradient_that_overflows_is_found_in_the_backward(session: Session) -> None:
    """Every loss is finite, and so is every activation; the cotangent is not."""
    good = session.batches[0]
    session.batches[0] = replace(good, denominators={"llm": 3e-39})
    try:
        message = first_error(session)
    finally:
        session.batches[0] = good
    assert message.startswith("B llm.1 microbatch 0: gradient of llm/"), message


def test_squares_that_overflow_are_found_in_the_reduction(session: Session) -> None:
    good = session.batches[0]
    session.batches[0] = replace(good, denominators={"llm": good.denominators["llm"] * 1e-24})
    try:
        message = first_error(session)
    finally:
        session.batches[0] = good
    assert message.startswith("reduce ") and ": squared gradient norm of " in message, message


def test_a_wrong_transfer_is_found_where_it_arrives(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MovedTransfer.unpack
    monkeypatch.setattr(MovedTransfer, "unpack", lambda self, moved: plain(self, moved) * jnp.nan)
    message = first_error(session)
    assert message.startswith(
        "unpack vision.0->llm.0 microbatch 0: received activation of vision.0 is not finite (nan at [0, 0"
    )


def test_a_checked_step_is_the_same_step(session: Session) -> None:
    plain = [fresh(session), session.step(0), session.step(1)][1:]
    executor = fresh(session)
    handlers = executor.walker.handlers
    with finite_ops(executor):
        assert [session.step(0), session.step(1)] == plain
    assert executor.walker.handlers == handlers


@pytest.mark.slow
def test_tied_weights_and_their_gradients_are_checked_where_they_arrive() -> None:
    session = Session(replace(FAN_IN, model="tied", clip_norm=0.7)).start()
    executor = fresh(session)
    with finite_ops(executor):
        session.step(0)
    executor = fresh(session)
    embedding = executor.states["llm.0"]["master"]["llm"]["embed"]
    spoilt = np.asarray(embedding).copy()
    spoilt[0, 0] = np.nan
    executor.states["llm.0"]["master"]["llm"]["embed"] = jax.device_put(spoilt, embedding.sharding)
    with finite_ops(executor), pytest.raises(NonFiniteError) as caught:
        session.step(0)
    assert str(caught.value).startswith(("prepare llm.0: parameter llm/embed", "unpack llm/embed")), caught.value
