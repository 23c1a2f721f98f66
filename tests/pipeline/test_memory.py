"""Memory by shapes against live arrays during real steps, and against what compiled programs say of themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import parity
import pytest
from parity import Case, Session

from mmjax import jaxprs
from mmjax.assembly.assembly import assemble
from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import (
    Memory,
    MicrobatchBytes,
    _replay,
    memory_by_stage,
    most_loaded,
    residual_bytes,
    shard_bytes,
)
from mmjax.pipeline.place import InputShapes
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.watch import measured_residuals
from mmjax.schedule.validate import ScheduleReport, validate

# The shapes of test_parity, so that nothing new is compiled.
NON_COLOCATED = Case(vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, pp=2), microbatches=4, samples=25)
COLOCATED = Case(vision=Layout(dp=8), llm=Layout(tp=2, dp=4), lowering="ops")
HOMOGENEOUS = Case(vision=Layout(tp=2), llm=Layout(tp=2, pp=2), microbatches=4, samples=25)
FROZEN_ENCODER = replace(NON_COLOCATED, frozen=("vision", "vision_projector"))
TIED = replace(NON_COLOCATED, model="tied", clip_norm=0.7)
FROZEN_LLM = replace(NON_COLOCATED, frozen=("vision", "llm"))


def shapes_of(session: Session) -> list[InputShapes]:
    """Input shapes of every bucket that a session's batches have."""
    return list(dict(parity.signed(part) for batch in session.batches for part in batch.microbatches).values())


def promise(session: Session) -> ScheduleReport:
    """What validate says with the residual bytes of the session's stages."""
    return validate(session.schedule, residual_bytes(session.placed, shapes_of(session)))


FAST = {"NC": NON_COLOCATED}
SLOW = {
    "frozen encoder": FROZEN_ENCODER,
    "NC, gpipe": replace(NON_COLOCATED, schedule="gpipe"),
    "frozen encoder, gpipe": replace(FROZEN_ENCODER, schedule="gpipe"),
    "frozen llm": FROZEN_LLM,
    "frozen llm, gpipe": replace(FROZEN_LLM, schedule="gpipe"),
    "C": COLOCATED,
    "C, gpipe": replace(COLOCATED, schedule="gpipe"),
    "H": HOMOGENEOUS,
    "H, gpipe": replace(HOMOGENEOUS, schedule="gpipe"),
    "collective": replace(NON_COLOCATED, transport="collective"),
    "remat": replace(NON_COLOCATED, remat="full"),
    "tied": TIED,
    "chunks": replace(TIED, vision=Layout(), llm=Layout(pp=2, chunks=2), model="chunked and tied"),
}
CASES = [
    *(pytest.param(case, id=name) for name, case in FAST.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_live_residuals_are_what_validate_promises(case: Case) -> None:
    session = Session(case).start()
    assert isinstance(session.executor, Executor)
    with measured_residuals(session.executor) as most:
        session.step(0)
    promised = promise(session)
    for name, stage in session.placed.stages.items():
        expected = dict.fromkeys(stage.submesh.ranks, promised.residual_bytes[name])
        assert dict(most.get(name, dict.fromkeys(stage.submesh.ranks, 0))) == expected, name
    frozen = {name for name, stage in session.placed.stages.items() if not session.placed.graph.stage(name).backward}
    assert frozen == ({"vision.0"} if case.frozen == FROZEN_ENCODER.frozen else set())
    assert {name for name, size in promised.residual_bytes.items() if size == 0} == frozen


@pytest.mark.slow
def test_smaller_buckets_keep_less_than_promised() -> None:
    case = replace(NON_COLOCATED, buckets=((1, 32), (3, 32)), text_only=7, schedule="gpipe")
    session = Session(case).start()
    assert isinstance(session.executor, Executor)
    assert {part.bucket["vision"] for part in session.batches[0].microbatches} == {0, 1}
    with measured_residuals(session.executor) as most:
        session.step(0)
    promised = promise(session).residual_bytes
    measured = {name: max(sizes.values()) for name, sizes in most.items()}
    assert 0 < measured["vision.0"] < promised["vision.0"]
    assert measured["llm.1"] == promised["llm.1"]


def test_shard_bytes_are_what_a_device_holds() -> None:
    session = Session(NON_COLOCATED)
    session.executor.initialise(parity.SEED)
    rank = session.placed.world.devices.index
    for name, stage in session.placed.stages.items():
        held: dict[int, int] = {}
        for array in jax.tree.leaves(session.executor.states[name]):
            for shard in array.addressable_shards:
                held[rank(shard.device)] = held.get(rank(shard.device), 0) + shard.data.nbytes
        assert held == dict.fromkeys(stage.submesh.ranks, shard_bytes(stage.state.state_avals))


def test_memory_by_stage_by_hand() -> None:
    """The figures of the last LLM stage, whose one microbatch in flight makes them easy to count."""
    session = Session(NON_COLOCATED)
    shapes = shapes_of(session)
    memory = memory_by_stage(session.placed, session.schedule, shapes)
    stage, functions = session.placed.stages["llm.1"], session.placed.trace(shapes[0]).stages["llm.1"]
    half = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(stage.state.param_avals))
    rows, length, width = 7 + 1, 20, 24  # 25 samples in 4 microbatches, filled up to a multiple of 4 cells
    count = 4  # the optimizer's update counter, int32
    assert functions.out.activation is None and functions.out.result.shape == (1, 1)
    assert memory["llm.1"].parameters == 0  # fp32 and dp=1: the masters serve
    assert memory["llm.1"].optimizer - 3 * 4 * half in (count, 2 * count)
    assert memory["llm.1"].gradients == 4 * half  # reduced in place
    assert memory["llm.1"].residuals == shard_bytes(functions.residual_avals)
    assert memory["llm.1"].received == 4 * rows * length * width // 2  # ranks of tp share the tokens
    assert memory["llm.1"].inputs == 2 * 4 * (4 * 4 * rows * length)  # twice four microbatches of four arrays
    assert memory["llm.0"].residuals == 2 * shard_bytes(session.placed.trace(shapes[0]).stages["llm.0"].residual_avals)


@pytest.mark.long
def test_a_borrowed_weight_is_a_parameter_of_its_borrower() -> None:
    session, plain = Session(TIED), Session(NON_COLOCATED)
    tied, untied = (memory_by_stage(s.placed, s.schedule, shapes_of(s))["llm.1"] for s in (session, plain))
    embedding = 4 * (parity.VOCAB + 1) * parity.DECODER.width // 2  # fp32, padded and cut over tp=2
    assert (tied.parameters, untied.parameters) == (embedding, 0)
    assert untied.optimizer - tied.optimizer == 3 * embedding


@pytest.mark.parametrize("case", [*CASES, pytest.param(replace(TIED, frozen=("llm",)), marks=pytest.mark.slow)])
def test_nothing_is_left_when_a_step_has_been_counted(case: Case) -> None:
    """What an op is counted to allocate, another is counted to drop; only the next step's inputs are there."""
    session = Session(case)
    flow = MicrobatchBytes(session.placed, shapes_of(session)[0], session.schedule.graph)
    peaks, left = _replay(session.schedule, flow)
    inputs = {(name, "inputs"): case.microbatches * size for name, size in flow.inputs.items()}
    assert {key: size for key, size in left.items() if size} == inputs
    assert all(size >= 0 for size in peaks.values())


@pytest.mark.long
def test_the_most_loaded_rank_adds_up_its_stages() -> None:
    session = Session(HOMOGENEOUS)
    shapes = shapes_of(session)
    memory = memory_by_stage(session.placed, session.schedule, shapes)
    rank, most = most_loaded(session.placed, memory)
    assert rank == 0 and most == memory["vision.0"] + memory["llm.0"]
    both = (memory["vision.0"], memory["llm.0"])
    assert most.total == sum(m.total - m.temporaries for m in both) + max(m.temporaries for m in both)
    assert most_loaded(session.placed, memory | {"llm.1": Memory(residuals=1 << 40)}) == (2, Memory(residuals=1 << 40))


# ---- against compiled programs ---------------------------------------------------------------------------------------

DIGITS = Path(__file__).parents[2] / "configs"


def _used(program: Program) -> tuple[int, int]:
    """Bytes that a compiled program says it takes on a device: arguments and results, and temporaries."""
    said = program.compiled.memory_analysis()
    held = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
    return held, said.temp_size_in_bytes


@pytest.mark.long
@pytest.mark.parametrize("case", [NON_COLOCATED, TIED], ids=["NC", "tied"])
def test_whole_gradients_take_the_memory_of_the_sums_and_give_it_back(case: Case) -> None:
    """With dp=1 whatever reduce and update give overwrites what they read, but for what a borrower sends to the owner.

    Temporaries are left out: XLA:CPU copies what XLA for a GPU does in place.
    """
    session = Session(case)
    assert isinstance(session.executor, Executor)
    for name in ("llm.0", "llm.1"):
        state = session.placed.stages[name].state
        sent = shard_bytes(state.shared_avals(state.borrowed))
        assert state.has_whole_masters and bool(sent) == (case == TIED and name == "llm.1")
        for table in (session.executor.reduce_programs, session.executor.update_programs):
            said = table[name].compiled.memory_analysis()
            allocated = said.output_size_in_bytes - said.alias_size_in_bytes
            assert allocated - sent < 1000 < shard_bytes(state.sums_avals), table[name].name  # tables of pointers
    assert not session.placed.stages["vision.0"].state.has_whole_masters  # dp=4


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "config", ["digits_vlm", "digits_vlm_colocated", "digits_vlm_one_device", "digits_vlm_homogeneous"]
)
def test_the_table_is_near_what_compiled_programs_take(config: str, remat: str) -> None:
    """Within 0.7 and 1.25 times the table: what docs/guide/before.md says of the dry run.

    Temporaries are an estimate; everything else of a program per op is counted to the byte but for XLA's tables of
    pointers. Arguments that a program does not read take no part in it.
    """
    lowering = "single" if config == "digits_vlm_homogeneous" else "auto"
    settings = [f"Decoder.remat={remat}", f"ViT.remat={remat}", f"Train.lowering={lowering}"]
    parts = assemble(load_config([DIGITS / f"{config}.gin"], settings))
    memory = memory_by_stage(parts.placed, parts.schedule, parts.shapes.values())
    parts.executor.compile()
    if not isinstance(parts.executor, Executor):
        _, most = most_loaded(parts.placed, memory)
        if isinstance(parts.executor, SingleExecutor):
            most = parts.executor.memory()
        compiled = max(sum(_used(program)) for program in parts.executor.programs())
        assert 0.7 < compiled / most.total < 1.25
        return
    for name, held in memory.items():
        programs = [
            p for (stage, _), own in parts.executor.stage_programs.items() if stage == name for p in own.programs
        ]
        for program in programs:
            avals = jax.tree.leaves(program.avals)
            read = jaxprs.used_inputs(program._fn, program.avals)
            counted = shard_bytes([aval for aval, is_read in zip(avals, read, strict=True) if is_read])
            aliased = program.compiled.memory_analysis().alias_size_in_bytes
            used = _used(program)[0]
            assert counted + shard_bytes(program.outputs) - aliased == pytest.approx(used, rel=0.01), program.name
        temporaries = max(_used(program)[1] for program in programs)
        assert 0.7 < (held.total - held.temporaries + temporaries) / held.total < 1.25, name
