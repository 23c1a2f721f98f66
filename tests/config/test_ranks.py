"""Which layouts may share ranks, against sets of ranks; and degrees beyond every cluster, refused at once."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from trial_runs import REPOSITORY

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.recipe.ranks import compatible, free_offset


def may_share(one: Layout, other: Layout) -> bool:
    """By sets: equal or disjoint, or one a union of whole stages of the other."""
    mine, theirs = set(one.ranks), set(other.ranks)
    if mine == theirs or not mine & theirs:
        return True
    for ranks, layout in ((mine, other), (theirs, one)):
        stages = [set(layout.stage_ranks(stage)) for stage in range(layout.pp)]
        if ranks == set().union(*(stage for stage in stages if stage <= ranks)):
            return True
    return False


def drawn(rng: random.Random) -> Layout:
    pp, lanes = rng.choice(((1, 1), (1, 3), (2, 1), (3, 1)))
    return Layout(dp=rng.choice((1, 2, 3)), pp=pp, lanes=lanes, tp=rng.choice((1, 2)), rank_offset=rng.randrange(9))


def test_rank_sets_and_the_nearest_offset_that_fits() -> None:
    rng = random.Random(5)
    for _ in range(150):
        layout, *others = (drawn(rng) for _ in range(rng.choice((2, 3))))
        assert [compatible(layout, other) for other in others] == [may_share(layout, other) for other in others]
        end = max(other.end for other in others)
        moved = [replace(layout, rank_offset=at) for at in range(end + 1)]
        legal = [m.rank_offset for m in moved if all(may_share(m, other) for other in others)]
        cost = {at: (max(end, at + layout.size), abs(at - layout.rank_offset)) for at in legal}
        if layout.rank_offset not in legal:  # else nobody asks
            assert cost[free_offset(layout, others)] == min(cost.values())


ABSURD = {
    "llm/Layout.cp": "needs 1000000 devices, more than 65536; use less",
    "llm/Layout.dp": "needs 1000000 devices",
    "vision/Layout.lanes": "needs 1000000 devices",
    "vision/Layout.copies": "needs 1000000 devices",
    "llm/Layout.rank_offset": "needs 1000001 devices",
    "llm/Layout.tp": "must divide llm/Decoder.heads",
    "llm/Layout.pp": "a stage needs a layer",
    "llm/Layout.chunks": "chunks interleave the stages",
    "llm/Layout.ep": "must divide dp",
    "llm/Layout.optimizer_instances": "must divide Layout.dp",
}


@pytest.mark.parametrize("field", ABSURD)
def test_a_million_is_refused_at_once(field: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=rf"^{field}=1000000: .*{ABSURD[field]}"):
        load_config([REPOSITORY / "configs/digits_vlm_one_device.gin"], [f"{field}=1000000"])
    assert time.process_time() - began < 5


def test_many_ranks_of_others_cost_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^vision/Layout.rank_offset=1: .* use 60000"):
        load_config(
            [REPOSITORY / "configs/digits_vlm_one_device.gin"], ["llm/Layout.cp=60000", "vision/Layout.rank_offset=1"]
        )


def test_lanes_of_the_llm_are_its_own_mistake() -> None:
    for name in ("lanes", "copies"):
        with pytest.raises(ConfigError, match=rf"^llm/Layout.{name}=2: .* set it to 1"):
            load_config([REPOSITORY / "configs/digits_vlm_one_device.gin"], [f"llm/Layout.{name}=2"])
