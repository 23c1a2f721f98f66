"""Shards of sums and parameters in plans: seconds and bytes by hand, and where a plan has them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from planner.models import GIGA, PLAIN, clock, model, module

from mmjax.mesh.layout import SHARDS, Layout
from mmjax.planner.candidates import HOMOGENEOUS, NON_COLOCATED, Candidate
from mmjax.planner.choose import choose
from mmjax.planner.clock import PassSeconds
from mmjax.planner.estimate import Estimate
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.problem import ANY, NEEDED
from mmjax.planner.sharding import beside_layers, shared_states
from mmjax.planner.state_layouts import more_shards, most_shards, shard_values
from mmjax.planner.work import Shares, StageMemory, StagePart, Work

SLOW = replace(PLAIN, link=GIGA, host=1.0)
"""A device sends a gigabyte a second, and nothing may be offloaded within a step's time."""
SMALL = {tp: StageMemory(residuals=Shares(layer=1e3)) for tp in (1, 2)}


def states_of(size: float) -> dict[str, Any]:
    return {name: Shares(layer=size) for name in ("parameters", "trained")}


def estimated(work: Work, **layouts: Layout) -> Estimate:
    candidate = Candidate(mode="any", layouts=layouts, microbatches=4)
    samples = work.global_batch // 4
    rows = {name: (samples * module.rows, module.width) for name, module in work.modules.items()}
    return Estimate(work=work, clock=clock(work, SLOW), candidate=candidate, rows=rows)


@pytest.mark.parametrize("shard", SHARDS)
def test_gathers_and_scatters_lie_beside_products_but_for_a_layer(shard: str) -> None:
    """Four layers of 1e9 parameters in bf16 on four ranks: a gather takes 6 s, and a scatter of gradients too."""
    work, layout = model(module("llm", 4, 1.0, **states_of(GIGA))), Layout(dp=4, shard=shard)
    groups = shared_states(work, "llm", StagePart(layers=4), layout)

    def passes(forward: float, backward: float) -> tuple[float, float]:
        seconds = beside_layers(
            PassSeconds(forward=forward, backward=backward),
            groups,
            layout,
            clock(work, SLOW),
            layers=4,
            ratio=0.5,
            first=0,
        )
        return seconds.forward, seconds.backward

    gathers, scatters = 6 * (shard == "parameters"), 6 * (shard != "states")
    for forward, backward in ((10, 20), (1, 2)):
        expected = (max(forward, gathers) + gathers / 4, max(backward, gathers + scatters) + (gathers + scatters) / 4)
        assert passes(forward, backward) == pytest.approx(expected)
    assert passes(10, 0)[1] == 0


def test_what_is_gathered_each_microbatch_is_not_gathered_once_a_step() -> None:
    work = model(module("llm", 4, 1.0, **states_of(GIGA)))
    once = {
        shard: [estimated(work, llm=Layout(dp=4, shard=shard)).costs.seconds[kind, "llm.0", False] for kind in kinds]
        for kinds in [("prepare", "reduce")]
        for shard in SHARDS
    }
    assert once["states"] == pytest.approx([6, 12]) and once["gradients"] == pytest.approx([6, 0])
    assert once["parameters"] == pytest.approx([0, 0])
    stepwise = estimated(work, llm=Layout(dp=4, shard="parameters", gather="step"))
    assert stepwise.seconds == estimated(work, llm=Layout(dp=4)).seconds


def test_a_program_holds_a_layer_and_gives_shards_of_gradients() -> None:
    memory = {1: StageMemory(residuals=Shares(layer=1e3), fixed=Shares(layer=100.0), fixed_layer=2e9)}
    work = model(module("llm", 4, 1.0, memory=memory, **states_of(GIGA)))
    needs = {shard: estimated(work, llm=Layout(dp=4, shard=shard)).device_bytes["llm.0"] for shard in SHARDS}
    assert needs["states"].temporaries == 100 + 4 * 2e9
    assert needs["gradients"].temporaries == pytest.approx(100 + 4 * 2e9 / 4 + 2e9)
    assert needs["parameters"].temporaries == pytest.approx(100 + 4 * 2e9 / 4 + 2 * 2e9)
    assert needs["parameters"].weights == pytest.approx(4e9 * (2 + 12) / 4)


def test_every_combination_of_shards_is_reached_once() -> None:
    frozen = module("vision", 2, 1.0, trained=Shares(), backward=Shares())
    work = model(frozen, module("llm", 2, 1.0, after=("vision",)), module("painter", 2, 1.0, after=("llm",)))
    assert shard_values(frozen, Layout(dp=2)) == ("states", "parameters")
    assert shard_values(work.modules["llm"], Layout()) == shard_values(work.modules["llm"], Layout(dp=2, lanes=2))
    layouts = {"vision": Layout(dp=2), "llm": Layout(dp=2), "painter": Layout(dp=2)}
    reached, queue = [], [estimated(work, **layouts)]
    while queue:
        estimate = queue.pop()
        reached.append(tuple(layout.shard for layout in estimate.candidate.layouts.values()))
        queue += [replace(estimate, candidate=candidate) for candidate in more_shards(estimate)]
    assert sorted(reached) == sorted(itertools.product(("states", "parameters"), SHARDS, SHARDS))
    most = most_shards(estimated(work, **layouts))
    assert {layout.shard for layout in most.layouts.values()} == {"parameters"}


@pytest.mark.parametrize("mode", [HOMOGENEOUS, NON_COLOCATED])
def test_a_plan_has_shards_where_nothing_fits_without(mode: str) -> None:
    """An LLM of one layer, which no stages cut: of 1e9 parameters 6 GB are copies and sums, and 4 states of four ranks.

    Sums in shards save 3 GB of sums and 1 of reduced gradients, parameters 1.5 GB; a layer in transfer takes 0.2.
    """
    states = {name: Shares(first=0.9 * GIGA, layer=0.1 * GIGA) for name in ("parameters", "trained")}
    work = model(module("llm", 1, 1.0, memory={1: SMALL[1]}, **states), global_batch=16)
    for memory, shard in ((10.5, "states"), (6.5, "gradients"), (5.5, "parameters")):
        best = choose(work, clock(work, SLOW), 4, memory=memory * GIGA, modes=[mode]).best
        assert best.candidate.layouts["llm"] == Layout(dp=4, shard=shard) and best.most <= memory * GIGA
    with pytest.raises(DoesNotFit, match="llm misses by" if mode == HOMOGENEOUS else "there is none"):
        choose(work, clock(work, SLOW), 4, memory=GIGA, modes=[mode])


def test_a_plan_may_have_shards_where_they_are_faster() -> None:
    """Of 1e9 parameters a gather takes 1.5 s and a reduction of sums 3; 96 s of products hide both."""
    work = model(module("llm", 4, 8.0, memory={1: SMALL[1]}, **states_of(GIGA / 4)), global_batch=4)
    plans = {
        shards: choose(work, clock(work, SLOW), 4, memory=80 * GIGA, modes=[HOMOGENEOUS], shards=shards).best
        for shards in (NEEDED, ANY)
    }
    shard = {shards: plan.candidate.layouts["llm"].shard for shards, plan in plans.items()}
    assert shard == {NEEDED: "states", ANY: "parameters"}
    # Each rank has one of four samples. Two gathers and a scatter, of 1.5 s each, are hidden but for one layer of four.
    assert plans[NEEDED].seconds == pytest.approx(96 + 1.5 + 3, rel=1e-3)
    assert plans[ANY].seconds == pytest.approx(96 + 3 * 1.5 / 4, rel=1e-3)
