"""Lanes whose parameters are shards, pulled or gathered together, against the dense reference in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import parity
import pytest
from parity import Case
from test_nested import CHUNKED, DRAWING, NESTED
from test_parity import assert_equal_to_reference

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout, ModuleSizes
from mmjax.pipeline import zero
from mmjax.pipeline.lane_gathers import LaneGather
from mmjax.pipeline.memory import memory_by_stage, shard_bytes
from mmjax.pipeline.watch import watched

PULL: dict[str, Any] = {"shard": "parameters", "gather": "pull"}
PULLED = replace(NESTED, vision=Layout(dp=2, lanes=2, **PULL))
DRAWN = replace(DRAWING, vision=Layout(dp=2, lanes=2, **PULL), painter=Layout(tp=2, lanes=2, **PULL))

LONG = {
    "together": replace(PULLED, transport="collective"),
    "generator, zb-h1": replace(DRAWN, inner="zb-h1"),
    "vision frozen": replace(PULLED, frozen=("vision",)),
}
SLOW = {
    "four lanes, two for each stage": replace(NESTED, vision=Layout(lanes=4, **PULL), llm=Layout(pp=2, dp=2)),
    "four stages": replace(
        NESTED, model="deep", vision=Layout(dp=2, lanes=4, **PULL), llm=Layout(pp=4, tp=2), microbatches=6, samples=35
    ),
    "four stages, together": replace(
        NESTED,
        model="deep",
        vision=Layout(dp=2, lanes=4, **PULL),
        llm=Layout(pp=4, tp=2),
        microbatches=6,
        samples=35,
        transport="collective",
    ),
    "two optimizer instances": replace(PULLED, vision=Layout(dp=2, lanes=2, optimizer_instances=2, **PULL)),
    "cp": replace(PULLED, vision=Layout(cp=2, lanes=2, **PULL)),
    "tp, sliced": replace(PULLED, route="sliced", vision=Layout(tp=2, lanes=2, **PULL), llm=Layout(pp=2, dp=2)),
    "dp 3": replace(PULLED, vision=Layout(dp=3, lanes=2, **PULL), llm=Layout(pp=2, dp=3)),
    "vision and projector frozen": replace(PULLED, frozen=("vision", "vision_projector")),
    "projector alone": replace(PULLED, frozen=("vision", "llm")),
    "adapters, zb-h1": replace(PULLED, model="adapted", frozen=("vision", "llm"), inner="zb-h1"),
    "eager, seven microbatches": replace(PULLED, inner="eager-1f1b", microbatches=7, samples=41),
    "one microbatch": replace(PULLED, microbatches=1, samples=7),
    "no images": replace(PULLED, text_only=29),
    "beside a sharded llm": replace(PULLED, llm=Layout(pp=2, dp=2, shard="parameters")),
    "chunks, interleaved, tied": replace(CHUNKED, vision=Layout(dp=2, lanes=2, **PULL)),
    "encoders first": replace(DRAWN, schedule="encoders-first"),
    "encoders first, together": replace(DRAWN, schedule="encoders-first", transport="collective"),
    "gpipe, lanes on ranks of their own": replace(
        NESTED, schedule="gpipe", vision=Layout(tp=2, lanes=2, rank_offset=4, **PULL), frozen=("vision",)
    ),
    "gpipe, together": replace(
        NESTED, schedule="gpipe", vision=Layout(tp=2, lanes=2, rank_offset=4, **PULL), transport="collective"
    ),
    "three-phase in windows": replace(PULLED, schedule="three-phase"),
    "generator, together": replace(DRAWN, transport="collective"),
    "generator, frozen": replace(DRAWN, frozen=("painter", "painter_projector", "vision")),
}
CASES = [
    pytest.param(PULLED, id="pulled"),
    *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.fixture(autouse=True)
def small_leaves_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "SMALL", 1)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)
