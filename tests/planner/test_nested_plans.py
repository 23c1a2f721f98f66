"""Plans with lanes: estimates are what the nested schedule says, and memory and weight decide where they win."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, clock, model, module

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import NESTED, Candidate, nested
from mmjax.planner.choose import choose, proportional
from mmjax.planner.estimate import Estimate
from mmjax.planner.variants import interleaved, rescheduled
from mmjax.planner.work import Held, Shares, Work

VISION = module("vision", 4, 0.5)
LLM = module("llm", 8, 1.0, after=("vision",))
PAINTER = module("painter", 2, 0.25, after=("llm",))
THREE = model(VISION, LLM, PAINTER, global_batch=48)


def estimate(work: Work, layouts: dict[str, Layout], microbatches: int, **others: Any) -> Estimate:
    about: dict[str, Any] = {"mode": NESTED, "schedule": "nested", **others}
    candidate = Candidate(layouts=layouts, microbatches=microbatches, **about)
    return Estimate(work=work, clock=clock(work), candidate=candidate, rows=proportional(work)(candidate))


@settings(max_examples=15, deadline=None)
@given(
    pp=st.sampled_from([2, 3, 4]),
    parts=st.sampled_from([1, 1, 2]),
    inner=st.sampled_from(["1f1b", "interleaved", "zb-h1", "eager-1f1b"]),
    microbatches=st.sampled_from([1, 2, 4, 12, 16, 24, 48]),
    light=st.floats(0.05, 4.0),
    frozen=st.booleans(),
    draws=st.booleans(),
    process=st.sampled_from([0, 2]),
)
def test_a_long_nested_step_is_what_the_whole_simulation_says(
    pp: int, parts: int, inner: str, microbatches: int, light: float, frozen: bool, draws: bool, process: int
) -> None:
    still: dict = {"backward": Shares(), "trained": Shares()} if frozen else {}
    work = model(module("vision", 4, light, **still), LLM, *([PAINTER] if draws else []), global_batch=48)
    chunks = 2 if inner == "interleaved" else 1
    laned = Layout(lanes=pp * parts, tp=2 // parts)
    layouts = {name: Layout(tp=2, pp=pp, chunks=chunks) if name == "llm" else laned for name in work.modules}
    one = estimate(work, layouts, microbatches, inner=inner)
    one = replace(one, clock=replace(clock(work, replace(PLAIN, node=4)), process=process))
    whole = one.timeline()
    assert one.seconds == pytest.approx(whole.makespan, rel=1e-9)
    assert one.least <= one.most
    for name in work.modules:
        lanes = layouts[name].lanes
        for index in range(layouts[name].stages):
            held = one.in_flight(one.graph.stage(f"{name}.{index}"))
            promised = math.ceil(whole.schedule.bound(f"{name}.{index}") / lanes)
            assert held == promised or (inner == "zb-h1" and held <= promised)
