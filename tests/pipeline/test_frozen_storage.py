"""Frozen modules are held once, in the compute dtype or another: bytes fall, and no number that is computed changes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from parity import Case, Run, Session

from mmjax.mesh.layout import Layout
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import count_state_bytes, memory_by_stage
from mmjax.pipeline.offload import DEVICE
from mmjax.pipeline.place import Stage
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.trees import by_name
from mmjax.pipeline.watch import _live_bytes, measured_memory
from mmjax.schedule.ops import Op

# The encoder is sharded over dp, beside a projector that is trained; the LLM is whole on every rank.
APART = Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2), dtype="bfloat16", clip_norm=0.7)
CASES = {
    "apart, encoder": replace(APART, frozen=("vision",)),
    "apart, tied llm, zb-h1": replace(APART, frozen=("llm",), model="tied", schedule="zb-h1"),
    "apart, projector alone, unrolled": replace(APART, frozen=("vision", "llm"), unroll=True),
    "colocated, sharded llm": Case(vision=Layout(dp=8), llm=Layout(tp=2, dp=4), dtype="bfloat16", frozen=("llm",)),
    "one device, encoder": Case(dtype="bfloat16", frozen=("vision",)),
    "single, encoder beside the first lane": Case(
        vision=Layout(dp=2), llm=Layout(pp=2), lowering="single", dtype="bfloat16", frozen=("vision",)
    ),
    "single, tied llm": Case(
        vision=Layout(pp=2), llm=Layout(pp=2), lowering="single", dtype="bfloat16", frozen=("llm",), model="tied"
    ),
}
LONG = ("one device, encoder", "apart, tied llm, zb-h1")
MASTERS = replace(APART, frozen=("vision", "llm"))


# In fp32, and held in bfloat16: widened where a weight is used.
NARROW = {
    "apart, tied llm, unrolled, zb-h1": replace(
        APART, dtype="float32", frozen=("llm",), model="tied", schedule="zb-h1", unroll=True
    ),
    "colocated, sharded encoder, adapters": Case(
        vision=Layout(dp=8), llm=Layout(tp=2, dp=4), frozen=("vision", "llm"), model="adapted"
    ),
    "single, encoder and tied llm": Case(
        vision=Layout(pp=2), llm=Layout(pp=2), lowering="single", frozen=("vision", "llm"), model="tied"
    ),
    "drawing": Case(
        vision=Layout(dp=2), llm=Layout(tp=2), painter=Layout(dp=2), frozen=("painter", "vision"), model="drawing"
    ),
}


def with_masters(case: Case) -> Case:
    """The case with frozen modules that are held in fp32."""
    return replace(case, frozen_dtype="float32")


def rounded(case: Case, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves, those of frozen modules rounded to bfloat16."""
    frozen = {name for name in leaves if name.split("/")[1] in case.frozen}
    return {n: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) if n in frozen else x for n, x in leaves.items()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=pytest.mark.long if n in LONG else pytest.mark.slow) for n, c in CASES.items()],
)
def test_training_has_the_bits_that_it_has_with_fp32_masters(case: Case) -> None:
    got: Run = parity.run(case)
    kinds = {"single": SingleExecutor, "auto": (StraightExecutor, Executor)}
    assert isinstance(Session(case).executor, kinds[case.lowering])
    want: Run = parity.run(with_masters(case))
    assert got.losses == want.losses and len(set(got.losses)) == parity.STEPS
    assert got.norms == want.norms
    for step, (have, wanted) in enumerate(zip(got.leaves, want.leaves, strict=True)):
        expected = rounded(case, wanted)
        assert have.keys() == expected.keys()
        assert any((expected[name] != wanted[name]).any() for name in expected), "nothing was rounded"
        for name, leaf in expected.items():
            np.testing.assert_array_equal(have[name], leaf, err_msg=f"{name} after step {step}")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=n, marks=pytest.mark.slow if "adapters" not in n else pytest.mark.long)
        for n, c in NARROW.items()
    ],
)
def test_what_is_held_in_less_is_computed_with_as_if_it_were_wide(case: Case) -> None:
    """Against a run that holds the rounded numbers in fp32."""
    narrow = Session(replace(case, frozen_dtype="bfloat16")).start()
    got: Run = narrow.run()
    for name, state in narrow.executor.states.items() if case.lowering == "auto" else ():
        own, frozen = narrow.placed.stages[name].state, state["master"].keys() & set(case.frozen)
        (held,) = set(held_bytes(state).values())
        assert count_state_bytes(own).optimizer == held
        assert own.direct_modules >= frozen if own.has_whole_masters else own.prepared_avals.keys() >= frozen
        given = [x for m in frozen for x in jax.tree.leaves(own.param_avals[m])]
        assert {str(x.dtype) for x in given} <= {"bfloat16"}
    session = Session(case).start()
    for state in session.executor.states.values():
        for module in state["master"].keys() & set(case.frozen):
            narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state["master"][module])
            state["master"][module] = narrow
    want: Run = session.run()
    assert got.losses == want.losses and len(set(got.losses)) == parity.STEPS
    for have, wanted in zip(got.norms, want.norms, strict=True):
        assert have == pytest.approx(wanted, rel=1e-6)
    for step, (have, wanted) in enumerate(zip(got.leaves, want.leaves, strict=True)):
        assert have.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_allclose(have[name], leaf, rtol=0, atol=1e-6, err_msg=f"{name} after step {step}")


def elements(stage: Stage, module: str) -> int:
    """How many numbers of the module's compute parameters a device of the stage has."""
    avals = jax.tree.leaves(stage.state.param_avals[module])
    return sum(int(np.prod(aval.sharding.shard_shape(aval.shape))) for aval in avals)


def held_bytes(tree: Any) -> dict[Any, int]:
    """Bytes of live arrays by device."""
    result: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            result[shard.device] = result.get(shard.device, 0) + shard.data.nbytes
    return result


@pytest.mark.long
def test_a_frozen_module_takes_two_bytes_a_parameter() -> None:
    """Whole on every rank it is computed with as it lies; sharded, two bytes are divided among the ranks."""
    session = Session(MASTERS)
    session.executor.initialise(parity.SEED)
    memory = memory_by_stage(session.placed, session.schedule, session.parts.shapes.values())
    for name in ("llm.0", "llm.1"):
        assert memory[name].parameters == 2 * elements(session.placed.stages[name], "llm")
        assert (memory[name].optimizer, memory[name].gradients) == (0, 0)
    for name, stage in session.placed.stages.items():
        state, masters = stage.state, session.executor.states[name]["master"]
        module, shards = stage.model.module, stage.submesh.layout.optimizer_shards
        (most, *rest) = set(held_bytes(masters[module]).values())
        assert not rest and elements(stage, module) * 2 / shards <= most < elements(stage, module) * 2 / shards * 1.2
        assert {x.dtype for x in jax.tree.leaves(masters[module])} == {jnp.dtype("bfloat16")}
        assert {str(x.dtype) for n, x in by_name(masters).items() if not n.startswith(f"{module}/")} <= {"float32"}
        params = state.compute_params(masters, {})
        assert jax.tree.structure(params) == jax.tree.structure(state.param_avals)
        shared = {id(x) for x in jax.tree.leaves(masters)} & {id(x) for x in jax.tree.leaves(params)}
        assert len(shared) == (len(jax.tree.leaves(masters)) if module == "llm" else 0)
        counted = count_state_bytes(state)
        (held,) = set(held_bytes(session.executor.states[name]).values())
        made = {id(x): x for x in jax.tree.leaves(params) if id(x) not in shared}
        assert (counted.optimizer, counted.copies) == (held, max(held_bytes(made).values(), default=0))


def measured(case: Case) -> tuple[dict[Op, dict[int, int]], dict[str, int]]:
    """Bytes of a second step's arrays on each rank, by op; and those counted for masters and compute copies."""
    gc.collect()
    others = _live_bytes({device: rank for rank, device in enumerate(parity.world().devices)})[DEVICE]
    session = Session(case).start()
    assert isinstance(session.executor, Executor)
    session.step(0)
    with measured_memory(session.executor) as seen:
        session.step(1)
    held = {op: {rank: size - others[rank] for rank, size in found[DEVICE].items()} for op, found in seen}
    counted = {name: count_state_bytes(stage.state) for name, stage in session.placed.stages.items()}
    return held, {name: own.optimizer + own.copies for name, own in counted.items()}


@pytest.mark.slow
def test_while_a_step_runs_each_device_holds_less_by_what_masters_took() -> None:
    held, counted = measured(MASTERS)
    before, masters = measured(with_masters(MASTERS))
    for rank, stage in ((4, "vision.0"), (0, "llm.0"), (2, "llm.1")):
        fell, placed = masters[stage] - counted[stage], Session(MASTERS).placed.stages[stage]
        # Of six bytes a parameter two are left; where four ranks share 4 bytes beside a copy of 2, they share 2.
        each = fell / elements(placed, placed.model.module)
        assert each == pytest.approx(0.5, rel=0.2) if stage == "vision.0" else each == 4
        programs = [op for op in held if op.stage == stage and op.kind in ("F", "B")]
        assert programs and {before[op][rank] - held[op][rank] for op in programs} == {fell}


@pytest.mark.long
def test_leaves_are_saved_as_they_are_held_and_taken_in_any_dtype() -> None:
    """Frozen, trained, frozen again: rounded once, then the same numbers; under layouts that shard and that do not."""
    modules = {"vision": "vision.0", "llm": "llm.0"}
    trained, frozen = Session(replace(MASTERS, frozen=())), Session(MASTERS)
    key = jax.random.key(parity.SEED)
    for module, name in modules.items():
        wide, narrow = (one.placed.stages[name].state for one in (trained, frozen))
        first = {n: x for n, x in wide.to_logical(wide.initialise(key)).items() if n.startswith("params/")}
        saved = narrow.to_logical(narrow.from_logical(first, 0))
        own = [n for n in saved if n.startswith(f"params/{module}/")]
        assert own and {n for n, x in saved.items() if x.dtype == jnp.bfloat16} == set(own)
        for avals in (narrow.logical_avals(), saved):
            assert {n: (x.shape, x.dtype) for n, x in avals.items()} == {
                n: (aval.shape, aval.dtype) for n, aval in narrow.logical_avals().items()
            }
        fresh = narrow.to_logical(narrow.initialise(key))
        masters = wide.from_logical(saved, 3, {module: 3})
        assert {str(x.dtype) for x in jax.tree.leaves(masters)} == {"float32", "int32"}
        back = wide.to_logical(masters)
        again = narrow.to_logical(narrow.from_logical({n: back[n] for n in first}, 3))
        for leaf in own:
            want = np.asarray(first[leaf].astype(jnp.bfloat16))
            for values in (saved, fresh, again, back):
                np.testing.assert_array_equal(np.asarray(values[leaf]), want, err_msg=leaf)
        alone = narrow.parameters_from_logical(first)["master"][module]
        for array, aval in zip(jax.tree.leaves(alone), jax.tree.leaves(narrow.master_avals[module]), strict=True):
            assert (array.dtype, array.sharding) == (aval.dtype, aval.sharding)


@pytest.mark.long
def test_in_fp32_nothing_is_held_otherwise() -> None:
    states = [Session(replace(MASTERS, dtype="float32", frozen=f)).placed.stages for f in ((), MASTERS.frozen)]
    for name in states[0]:
        trained, frozen = (one[name].state for one in states)
        assert jax.tree.leaves(trained.master_avals) == jax.tree.leaves(frozen.master_avals)
        assert (
            trained.prepared_avals.keys()
            == frozen.prepared_avals.keys()
            == ({} if name != "vision.0" else trained.leaves).keys()
        )
