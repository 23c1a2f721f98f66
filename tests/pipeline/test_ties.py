"""Ties: a weight on two stages, its shards on the way there and back, what each stage holds of it, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from parity import Case, Session

from mmjax.checkpoint import CheckpointConfig, Checkpointer
from mmjax.mesh.layout import Layout
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.ties import Tie
from mmjax.pipeline.trees import by_name
from mmjax.schedule.ops import Op

TABLE = "llm/embed"
FAN_IN = {"vision": Layout(dp=4, rank_offset=4), "llm": Layout(tp=2, pp=2)}
TIED = Case(model="tied", vision=FAN_IN["vision"], llm=FAN_IN["llm"], clip_norm=0.7)  # as in test_parity


def place(layouts: Mapping[str, Layout], *, model: str = "tied", transport: str = "auto", **case: Any) -> PlacedModel:
    settings = Settings(optimizers=parity.optimizers(Case(model=model, **case)), total_steps=1, transport=transport)
    return PlacedModel(parity.MODELS[model], layouts, parity.world(), settings)


# ---- the way there and back ------------------------------------------------------------------------------------------


def numbered(aval: Any) -> jax.Array:
    """All elements different."""
    return jax.device_put(np.arange(1, aval.size + 1, dtype=np.float32).reshape(aval.shape), aval.sharding)


@pytest.mark.parametrize("transport", ["device_put", "collective"])
@pytest.mark.parametrize(
    "llm", [Layout(pp=2), Layout(tp=2, pp=3), Layout(dp=2, tp=2, pp=2)], ids=["one rank", "tp", "dp and tp"]
)
def test_every_shard_goes_to_its_counterpart_and_back(llm: Layout, transport: str) -> None:
    placed = place({"vision": Layout(rank_offset=7), "llm": llm}, transport=transport)
    ((name, tie),) = placed.ties.items()
    assert name == TABLE
    (node,) = placed.graph.ties
    assert (node.src, node.dst, node.gradient) == ("llm.0", f"llm.{llm.pp - 1}", True)
    assert node.kind == {"device_put": "async", "collective": "rendezvous"}[transport]
    ends = [placed.stages[stage].state for stage in (node.src, node.dst)]
    owned, borrowed = ends[0].shared_avals(ends[0].lent)[TABLE], ends[1].shared_avals(ends[1].borrowed)[TABLE]
    assert owned.shape == borrowed.shape == (-(-parity.VOCAB // llm.tp) * llm.tp, 24)
    assert (
        owned.sharding.shard_shape(owned.shape)[0] * llm.tp == owned.shape[0]
    )  # the vocabulary over tp, width over dp
    for transfer, source, target in ((tie.forward, owned, borrowed), (tie.backward, borrowed, owned)):
        sent = numbered(source)
        arrived = transfer.unpack(transfer.move(transfer.pack(sent)))
        assert arrived.sharding == target.sharding
        np.testing.assert_array_equal(arrived, sent)
        if transport == "device_put":
            assert not transfer.programs()
        else:
            assert len(transfer.programs()) == llm.stage_size  # rank to rank: no component joins two pairs


def test_a_shard_that_comes_back_is_a_copy() -> None:
    """The owner's update overwrites its shards while the borrower may still read the copy."""
    placed = place(FAN_IN)
    tie: Tie = placed.ties[TABLE]
    lent = placed.stages["llm.0"].state
    # Two arrays: jax 0.11 does not donate one that NumPy has looked at.
    sent, before = (numbered(lent.shared_avals(lent.lent)[TABLE]) for _ in range(2))
    arrived = tie.forward.unpack(tie.forward.move(tie.forward.pack(sent)))
    overwritten = jax.jit(lambda x: x * 0, donate_argnums=0)(sent)
    assert not np.asarray(overwritten).any() and sent.is_deleted()
    np.testing.assert_array_equal(arrived, before)


def test_a_shard_that_another_process_reads_later_is_a_copy() -> None:
    """It pulls the shard when it comes to it, which may be after the owner's update; JAX knows nothing of that."""
    placed = place(FAN_IN)
    lent = placed.stages["llm.0"].state
    sent, before = (numbered(lent.shared_avals(lent.lent)[TABLE]) for _ in range(2))
    transfer = placed.ties[TABLE].forward
    transfer.blocks.reads_later = True  # as a mover between two processes says
    (packed,) = transfer.pack(sent)
    overwritten = jax.jit(lambda x: x * 0, donate_argnums=0)(sent)
    assert not np.asarray(overwritten).any() and sent.is_deleted()
    read = {shard.device: np.asarray(shard.data) for shard in packed.addressable_shards}
    for shard in before.addressable_shards:
        np.testing.assert_array_equal(read[shard.device], shard.data)


# ---- what each stage holds -------------------------------------------------------------------------------------------


def test_one_stage_alone_holds_master_and_moments() -> None:
    placed = place({"vision": Layout(rank_offset=7), "llm": Layout(tp=2, pp=3)})
    states = {name: placed.stages[name].state for name in ("llm.0", "llm.1", "llm.2")}
    holders = {name: TABLE in by_name(state.master_avals) for name, state in states.items()}
    assert holders == {"llm.0": True, "llm.1": False, "llm.2": False}
    users = {name: TABLE in by_name(state.param_avals) for name, state in states.items()}
    assert users == {name: TABLE in by_name(state.sums_avals) for name, state in states.items()}
    assert users == {"llm.0": True, "llm.1": False, "llm.2": True}
    assert [name for name, state in states.items() if f"adam_m/{TABLE}" in state.logical_avals()] == ["llm.0"]
    for state in states.values():
        counts = {len(jax.tree.leaves(tree)) for tree in (state.master_avals["llm"], state.grad_specs["llm"])}
        assert counts == {len(by_name(state.owned))}
    assert "llm/head" not in by_name(states["llm.2"].param_avals)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_table_is_shared_only_between_two_stages(pp: int) -> None:
    placed = place({"vision": Layout(rank_offset=7), "llm": Layout(pp=pp)})
    shared = [leaf for stage in placed.stages.values() for leaf in (*stage.state.lent, *stage.state.borrowed)]
    assert shared == [TABLE] * (2 * (pp - 1)) and len(placed.graph.ties) == len(placed.ties) == pp - 1
    untied = place({"vision": Layout(rank_offset=7), "llm": Layout(pp=pp)}, model="plain")
    assert not untied.graph.ties and not any(stage.state.lent for stage in untied.stages.values())


def test_a_frozen_table_is_lent_and_has_no_gradient() -> None:
    placed = place(FAN_IN, frozen=("llm",))
    (node,) = placed.graph.ties
    assert not node.gradient
    state = placed.stages["llm.0"].state
    assert not state.trainable and state.reduce_avals == ({}, {})


# ---- during steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        TIED,
        pytest.param(
            replace(TIED, vision=Layout(dp=8), llm=Layout(dp=2, tp=2, pp=2), dtype="bfloat16"), marks=pytest.mark.slow
        ),
        pytest.param(replace(TIED, transport="collective"), marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16, dp", "collective"],
)
def test_both_stages_use_the_same_bits_in_every_step(case: Case) -> None:
    session, tables = Session(case).start(), []
    executor = session.executor
    assert isinstance(executor, Executor)
    run = executor._run
    backward = run.handlers["B"]

    def watched(op: Op) -> None:
        backward(op)
        if op.stage == "llm.0":
            used = [by_name(run.params[stage])[TABLE] for stage in ("llm.0", "llm.1")]
            assert {table.dtype for table in used} == {jnp.dtype(case.dtype)}
            tables.append([np.asarray(table.astype(jnp.float32)) for table in used])

    run.handlers["B"] = watched
    held = [parity.of_kind(session.leaves(), "params")[TABLE]]
    for step in range(parity.STEPS):
        session.step(step)
        held.append(parity.of_kind(session.leaves(), "params")[TABLE])
    for (mine, theirs), master in zip(tables[:: case.microbatches], held, strict=False):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(mine[: parity.VOCAB], np.asarray(jnp.asarray(master, case.dtype), np.float32))
        assert not mine[parity.VOCAB :].any()
    assert len(tables) == parity.STEPS * case.microbatches
    assert not np.array_equal(tables[0][0], tables[-1][0])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


CHUNKED = replace(TIED, model="chunked and tied", vision=Layout(pp=2, chunks=2), llm=Layout(pp=2, chunks=2))


@pytest.mark.slow
@pytest.mark.parametrize("case", [TIED, CHUNKED], ids=["stages", "chunks"])
def test_a_checkpoint_does_not_show_on_how_many_stages_the_table_was(case: Case, tmp_path: Path) -> None:
    """Trained on one stage, saved, and trained on under several; then the other way round."""
    one, two = Session(replace(case, vision=FAN_IN["vision"], llm=Layout(tp=2, dp=2))), Session(case)
    want = parity.expected(case)
    for number, (first, second) in enumerate(((one, two), (two, one))):
        first.start()
        assert [first.step(i)[0] for i in range(1)] == pytest.approx(want.losses[:1], rel=1e-5)
        arrays = {
            name: leaf
            for stage, placed in first.placed.stages.items()
            for name, leaf in placed.state.to_logical(first.executor.states[stage]).items()
        }
        with Checkpointer(tmp_path / str(number), CheckpointConfig()) as checkpointer:
            checkpointer.save(1, arrays, seed=0, config="")
            checkpointer.wait()
            stages = second.placed.stages
            avals = [aval for stage in stages.values() for aval in stage.state.logical_avals().items()]
            assert len(avals) == len(dict(avals)), "a leaf is restored onto two stages"
            leaves = checkpointer.restore(1, dict(avals))
        second.executor.states = {name: stage.state.from_logical(leaves, 1) for name, stage in stages.items()}
        parity.assert_close(second.leaves(), want.leaves[1], 1e-4, "restored")
        losses = [second.step(i)[0] for i in range(1, parity.STEPS)]
        assert losses == pytest.approx(want.losses[1:], rel=1e-5)
