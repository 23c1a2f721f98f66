"""What a target with ranks of cp receives of another module's tokens: its lists, and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import parity
import pytest

from mmjax.mesh.layout import Layout
from mmjax.mesh.routing import Routing
from mmjax.mesh.world import World
from mmjax.pipeline.memory import shard_bytes
from mmjax.pipeline.place import PlacedModel, Settings, TracedStages

TOKENS, CP = 64, 4
"""Tokens of a row of the LLM, nearly all of them an image's; and ranks that share them."""


def placed(route: str) -> PlacedModel:
    layouts = {"vision": Layout(tp=2, rank_offset=CP), "llm": Layout(cp=CP)}
    optimizers = parity.optimizers(parity.Case())
    settings = Settings(optimizers=optimizers, total_steps=1, route=route, transport="device_put")
    return PlacedModel(parity.MODELS["plain"], layouts, World.planned(6), settings)


def traced(model: PlacedModel, *, lists: bool) -> TracedStages:
    """Stages for one row of each module, with lists of as many tokens as a rank has places, or without."""

    def of(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    patches = 4 * TOKENS
    inputs = {
        "vision": {"patches": of(1, patches, 4, dtype=np.float32), "segments": of(1, patches)},
        "llm": {
            name: of(1, TOKENS) for name in ("tokens", "targets", "segments", "positions", "vision_index", "order")
        },
    }
    inputs["vision"]["positions"] = of(1, patches, 2)
    inputs["llm"]["weights"] = of(1, TOKENS, dtype=np.float32)
    if lists:
        inputs["vision"]["send_llm"] = of(1, CP * (TOKENS // CP))
    return model.trace(inputs)


def arriving(routing: Routing) -> Counter[int]:
    """Bytes that links bring each rank."""
    size = math.prod(routing.piece) * routing.aval.dtype.itemsize
    return Counter(route.target for route in routing.routes for _ in range(size))


@pytest.mark.long
@pytest.mark.parametrize("route", ["leader", "sliced"])
def test_a_rank_receives_its_share_of_the_tokens(route: str) -> None:
    model = placed(route)
    listed, whole = (traced(model, lists=lists) for lists in (True, False))
    ways = [shapes.boundaries["vision.0->llm.0"] for shapes in (listed, whole)]
    held, before = (shard_bytes(way.forward.target_aval) for way in ways)
    assert held * CP == before == shard_bytes(ways[1].forward.source_aval)
    # Its gradients are of the same tokens, and come home once.
    assert shard_bytes(ways[0].backward.source_aval) == held
    assert shard_bytes(ways[0].backward.target_aval) == before
    routings = ways[0].forward.routing, ways[0].backward.routing
    assert arriving(routings[0]) == dict.fromkeys(range(CP), held)
    assert sum(arriving(routings[1]).values()) == before


def test_lists_that_no_stage_sends_by_are_refused() -> None:
    """What points through them would read other tokens."""
    inputs = {"vision": {"send_painter": np.zeros((1, 4), np.int32)}}
    with pytest.raises(ValueError, match=r"^vision/send_painter: its tokens go to other modules in whole rows"):
        placed("leader").trace(inputs)


@pytest.mark.long
def test_the_stage_that_reads_them_sums_no_gradients() -> None:
    """Whole rows have gradients on every rank, which are summed; of listed tokens each rank has those of its own."""
    model = placed("leader")
    for lists in (True, False):
        functions = traced(model, lists=lists).stages["llm.0"]
        text = str(jax.make_jaxpr(functions.backward)(*functions.backward_avals))
        found = [line for line in text.splitlines() if "psum" in line and f"[1,{TOKENS},24]" in line]
        assert bool(found) is not lists, found
