"""Lanes whose parameters are shards, pulled or gathered together, against the dense reference in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import parity
import pytest
from parity import Case
from test_nested import CHUNKED, DRAWING, NESTED
from test_parity import assert_equal_to_reference

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout, ModuleSizes
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.gathered_bytes import GATHERED
from mmjax.pipeline.memory import _replay, count_state_bytes, largest_microbatch, shard_bytes
from mmjax.pipeline.trees import by_name
from mmjax.pipeline.watch import watched
from mmjax.schedule.ops import Op

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
pytestmark = pytest.mark.usefixtures("small_leaves_are_sharded")
CASES = [
    pytest.param(PULLED, id="pulled"),
    *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


def gathered_peak(case: Case) -> tuple[int, int, int]:
    """Of the vision encoder's first lane: counted and measured bytes of gathered parameters, and those of one copy."""
    session = parity.Session(case).start()
    executor, placed = session.executor, session.placed
    assert isinstance(executor, Executor), "a program per op"
    peaks, _ = _replay(session.schedule, largest_microbatch(placed, session.schedule, session.parts.shapes.values()))
    most = 0

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        nonlocal most
        yield
        gathered = executor.walker.gathered
        copies = [params for (place, _), params in gathered._params.items() if place == "vision.0"]
        flats = [pulled.flats for (place, _), pulled in gathered._pulled.items() if place == "vision.0"]
        most = max(most, len(copies) + len(flats))

    with watched(executor.walker, around, in_order=True):
        session.step(0)
    one = shard_bytes(placed.places["vision.0"].state.param_avals)
    published = placed.lane_gathers["vision.0"].published_bytes if case.transport == "auto" else 0
    return peaks["vision.0", GATHERED] - published, most * one, one


@pytest.mark.long
def test_a_lane_has_the_parameters_once_and_only_while_it_needs_them() -> None:
    counted, measured, one = gathered_peak(PULLED)
    assert counted == measured == one


@pytest.mark.long
def test_memory_of_pulled_parameters() -> None:
    """Shards and published shards, and one whole copy; sums are whole, masters are those of ZeRO."""
    case = replace(PULLED, dtype="bfloat16")
    states = {}
    for shard, gather in (("parameters", "pull"), ("parameters", "step")):
        layout = Layout(dp=2, lanes=2, shard=shard, gather=gather)
        placed = parity.Session(replace(case, vision=layout)).placed
        states[gather] = count_state_bytes(placed.stages["vision.0"].state)
    assert states["step"].copies == pytest.approx(4 * states["pull"].copies, rel=0.1)
    assert states["step"].sums == states["pull"].sums and states["step"].masters == states["pull"].masters


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_masters_are_counted_as_copies(dtype: str) -> None:
    placed = parity.Session(replace(PULLED, dtype=dtype)).placed
    gather, state = placed.lane_gathers["vision.0"], placed.stages["vision.0"].state
    sharded = sum(bucket.bytes for bucket in gather.buckets)
    assert gather.published_bytes == (sharded if dtype == "float32" else 0)
    assert sharded == shard_bytes(state.param_avals) - shard_bytes(
        [aval for name, aval in by_name(state.param_avals).items() if name not in gather._zeros]
    )


def test_only_lanes_pull() -> None:
    sizes = ModuleSizes(layers=4)
    for layout in (Layout(dp=2, gather="pull"), Layout(**PULL), Layout(lanes=2, **PULL)):
        layout.check("vision", sizes)
    with pytest.raises(ConfigError, match=r"vision/Layout.gather='pull': .*Layout.lanes=1.*set it to 'layer'"):
        Layout(dp=2, **PULL).check("vision", sizes)
    assert Layout(lanes=2, **PULL).pulls and not Layout(lanes=2, **PULL).lane(1).pulls
    assert not Layout(lanes=2, optimizer_instances=2, **PULL).pulls, "masters are whole"
