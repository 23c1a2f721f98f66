"""Bytes of stages whose ranks have different experts: what they share, reduce and gather."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import pytest

from mmjax.assembly.assembly import plan
from mmjax.config import load_config
from mmjax.mesh.spread import EXPERTS
from mmjax.pipeline.memory import reduce_temporaries
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.zero import ZeroLeaf

CONFIG = Path(__file__).parents[2] / "configs" / "digits_moe.gin"
FOUR = ("Data.workers=0", "llm/Layout.dp=4", "llm/Layout.pp=1", "Train.dtype='bfloat16'")


def state_of(*bindings: str) -> StageState:
    return plan(load_config((str(CONFIG),), (*FOUR, *bindings))).placed.stages["llm.0"].state


def leaves(state: StageState) -> list[ZeroLeaf]:
    return jax.tree.leaves(state.zero["llm"])


@pytest.mark.long
@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_what_a_reduction_copies_is_shared_by_the_ranks_that_are_left(ep: int) -> None:
    state = state_of(f"llm/Layout.ep={ep}")
    sharers = {EXPERTS in zero.leaf.dims: state.sharers(zero) for zero in leaves(state)}
    assert sharers == {False: 4, True: 4 // ep}
    # The two largest arrays that are not scattered along their first dimension are copied, the larger one's shard made.
    sizes = {
        zero.leaf.path: math.prod(zero.leaf.shape) * 4 // (ep if EXPERTS in zero.leaf.dims else 1)
        for zero in leaves(state)
        if zero.dimension and math.prod(zero.shape[: zero.dimension]) > 1
    }
    second, first = sorted(sizes.values())[-2:]
    largest = next(zero for zero in leaves(state) if sizes.get(zero.leaf.path) == first)
    assert reduce_temporaries(state) == first + second + first // state.sharers(largest)


@pytest.mark.long
def test_a_gathered_layer_has_the_experts_of_a_rank() -> None:
    whole, half, own = (state_of(f"llm/Layout.ep={ep}", "llm/Layout.shard='parameters'") for ep in (1, 2, 4))
    experts = sum(
        math.prod(zero.leaf.shape) * 2 for zero in leaves(whole) if EXPERTS in zero.leaf.dims and zero.leaf.layer == 0
    )
    assert experts > 0 and whole.layer_bytes - half.layer_bytes == experts // 2
    assert whole.layer_bytes - own.layer_bytes == experts, "with as much ep as ranks no rank gathers experts"
