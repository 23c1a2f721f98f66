"""Optimizer instances: what a device holds, which ranks talk, and checkpoints in which no instance shows.

That steps are those of one device is in ``test_toy_steps`` and ``test_parity``.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import parity
import pytest
import toy

from mmjax.checkpoint import CheckpointConfig, Checkpointer
from mmjax.compile.hlo import replica_groups
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program
from mmjax.models.graph import multimodal
from mmjax.models.projector.config import ProjectorConfig
from mmjax.pipeline import zero
from mmjax.pipeline.memory import shard_bytes
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.stage_state import StageState

# Every leaf has a dimension that divides by eight, so that nothing is padded or repeated.
EVEN = multimodal({"vision": parity.VIT}, parity.DECODER, projectors={"vision": ProjectorConfig(hidden=24)})


def encoder(dp: int, instances: int, tp: int = 1) -> StageState:
    """Encoder and projector, which share a submesh; its dp is cut into instances."""
    layouts = {"vision": Layout(dp=dp, tp=tp, optimizer_instances=instances), "llm": Layout()}
    settings = Settings(optimizers=parity.optimizers(parity.Case()), total_steps=1)
    return PlacedModel(EVEN, layouts, parity.world(), settings).stages["vision.0"].state


# ---- memory ----------------------------------------------------------------------------------------------------------


def held_by_device(state: StageState) -> dict[Any, int]:
    """Bytes of masters and moments, from the shards of real arrays; counters aside."""
    held: dict[Any, int] = {}
    for aval in jax.tree.leaves(state.state_avals):
        array = jax.device_put(np.zeros(aval.shape, aval.dtype), aval.sharding)
        for shard in array.addressable_shards if array.ndim else ():
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_optimizer_bytes_per_device_are_the_total_times_instances_over_dp(dp: int) -> None:
    for instances in (n for n in (1, 2, 4, 8) if dp % n == 0):
        state = encoder(dp, instances)
        total = 3 * 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.leaves))
        held = held_by_device(state)
        assert set(held) == set(parity.world().devices[:dp])
        assert set(held.values()) == {total * instances // dp}
        counters = shard_bytes([a for a in jax.tree.leaves(state.state_avals) if not a.shape])
        assert shard_bytes(state.state_avals) == total * instances // dp + counters  # what a dry run shows
        assert state.prepare_is_identity == (instances == dp)


def test_under_tp_too() -> None:
    """Every tp rank's part is that of one instance, as often as there are instances."""
    one, two, four = (set(held_by_device(encoder(4, instances, tp=2)).values()) for instances in (1, 2, 4))
    assert len(one) == 1 and two == {2 * one.copy().pop()} and four == {4 * one.copy().pop()}


# ---- who talks to whom -----------------------------------------------------------------------------------------------

GROUPS = {  # of an encoder on ranks 0-7: (dp, tp, instances), its groups, and the ranks that hold the same shard
    "dp=8": ((8, 1, 1), "0,1,2,3,4,5,6,7", None),
    "dp=8 in 2": ((8, 1, 2), "0,1,2,3 4,5,6,7", "0,4 1,5 2,6 3,7"),
    "dp=8 in 4": ((8, 1, 4), "0,1 2,3 4,5 6,7", "0,2,4,6 1,3,5,7"),
    "dp=4 tp=2 in 2": ((4, 2, 2), "0,2 1,3 4,6 5,7", "0,4 1,5 2,6 3,7"),
}


def collectives(program: Program) -> set[tuple[str, str]]:
    """Every collective of a compiled program with its groups of devices, as above."""
    found = set()
    for line in program.compiled.as_text().splitlines():
        if match := re.search(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", line):
            groups = replica_groups(line)
            found.add((match[1], " ".join(",".join(map(str, group)) for group in groups)))
    return found


@pytest.mark.parametrize(("sizes", "groups", "across"), GROUPS.values(), ids=GROUPS)
def test_shards_are_scattered_and_gathered_in_a_group_and_summed_across_groups(
    sizes: tuple[int, int, int], groups: str, across: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "SMALL", 1)  # nothing is repeated, which would be summed over all of dp
    dp, tp, instances = sizes
    eye = Layout(dp=dp, tp=tp, optimizer_instances=instances)
    placed = toy.placed({"eye": eye, "ear": Layout(), "llm": Layout()}, toy.optimizers())
    state = placed.stages["eye.0"].state
    assert all(len(group.split(",")) == dp // instances for group in groups.split())
    assert state.prepare_program is not None
    assert collectives(state.prepare_program) == {("all-gather", groups)}
    summed = {("all-reduce", across)} if across else set()
    reduce = Program.of("reduce", state.reduce, state.reduce_avals)
    assert collectives(reduce) == {("reduce-scatter", groups), *summed}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_show_how_many_instances_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and moments, padded ones too, bit for bit from any number to any other."""
    monkeypatch.setattr(zero, "SMALL", 1)
    states = {n: eye(n) for n in (1, 2, 4)}
    avals = {n: state.logical_avals() for n, state in states.items()}
    rng = np.random.default_rng(3)
    leaves = {name: rng.normal(size=aval.shape).astype(np.float32) for name, aval in avals[1].items()}
    assert {name.partition("/")[0] for name in leaves} == {"params", "adam_m", "adam_v"}
    for written, state in states.items():
        held = state.from_logical(
            {name: jax.device_put(x, avals[written][name].sharding) for name, x in leaves.items()}, 5
        )
        with Checkpointer(tmp_path / str(written), CheckpointConfig()) as checkpointer:
            checkpointer.save(1, state.to_logical(held), seed=0, config="")
            checkpointer.wait()
            for read, other in states.items():
                again = other.from_logical(checkpointer.restore(1, avals[read]), 5)
                assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(
                    lambda a: a.sharding, other.state_avals
                )
                for name, x in other.to_logical(again).items():
                    np.testing.assert_array_equal(x, leaves[name], err_msg=f"{name} from {written} to {read}")


def eye(instances: int) -> StageState:
    """A stage of four dp ranks whose leaves are padded by another amount for every number of instances."""
    layout = Layout(dp=4, optimizer_instances=instances)
    return toy.placed({"eye": layout, "ear": Layout(), "llm": Layout()}, toy.optimizers()).stages["eye.0"].state
