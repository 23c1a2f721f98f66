"""Plans on several kinds of device: blocks of ranks, times and bytes of each, and one kind where two gain nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.models import GIGA, PLAIN, SIMPLE, TERA, clock, model, module

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import Accelerator
from mmjax.planner.candidates import NON_COLOCATED, Candidate, apart
from mmjax.planner.choose import choose, choose_on
from mmjax.planner.cost import Degrees, Plan
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import missing, proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.problem import MixedProblem, Problem
from mmjax.planner.work import Work

SLOW = replace(PLAIN, name="slow", flops=TERA / 4, memory=20 * GIGA, node=4)


def fleet(work: Work, **kinds: tuple[int, Accelerator]) -> Fleet:
    """So many devices of each kind."""
    return Fleet(
        kinds={
            name: DeviceKind(clock=clock(work, device), devices=devices, memory=device.memory)
            for name, (devices, device) in kinds.items()
        }
    )


def two(vision: float = 0.1, llm: float = 1.0, **changes: object) -> Work:
    return model(module("vision", 2, vision, **changes), module("llm", 4, llm, after=("vision",)), global_batch=16)


def assert_legal(work: Work, fleet: Fleet, estimate: Estimate) -> None:
    """Every kind has room for its modules, in devices and bytes, in a block of its own with nodes of its own."""
    candidate = estimate.candidate
    assert set(candidate.kinds) == set(work.modules)
    home, begins = candidate.kinds["llm"], 0
    assert candidate.used_kinds[0] == home and candidate.kind_start("llm") == 0
    for kind in candidate.used_kinds:
        ranks, available = candidate.ranks(kind), fleet.kinds[kind]
        assert min(ranks) == begins and len(ranks) <= max(ranks) - begins + 1 <= available.devices
        size = available.clock.node
        for name, layout in candidate.layouts.items():
            if candidate.kinds[name] == kind and layout.tp > 1:
                firsts = range(layout.rank_offset - begins, layout.rank_offset - begins + layout.size, layout.tp)
                assert all(first // size == (first + layout.tp - 1) // size for first in firsts), "tp inside a node"
        begins += len(ranks) if len(ranks) <= size else min(-(-len(ranks) // size) * size, available.devices)
    for rank, size in estimate.memory.items():
        kind = next(kind for kind in candidate.used_kinds if rank in candidate.ranks(kind))
        assert size <= fleet.kinds[kind].memory
    if len(candidate.used_kinds) > 1:
        assert candidate.mode == NON_COLOCATED
        assert len({rank for layout in candidate.layouts.values() for rank in layout.ranks}) == sum(
            layout.size for layout in candidate.layouts.values()
        )


def every(work: Work, there: Fleet) -> list[Estimate]:
    """Every plan with the LLM on one kind and the encoder on the other, by trying all."""
    estimates, rows_of = [], proportional(work)
    for home, second in itertools.permutations(there.kinds):
        most, beside = there.kinds[home].devices, there.kinds[second].devices
        for llm, vision in itertools.product(layouts(most, 4), layouts(beside, 2)):
            for samples in (1, 2, 4, 8, 16):
                if work.global_batch % (llm.dp * samples) or llm.dp * samples % vision.dp:
                    continue
                size, node = llm.size, there.kinds[home].clock.node
                offset = size if size <= node else min(-(-size // node) * node, most)
                candidate = Candidate(
                    mode=NON_COLOCATED,
                    layouts={"vision": replace(vision, rank_offset=offset), "llm": llm},
                    microbatches=work.global_batch // (llm.dp * samples),
                    kinds={"vision": second, "llm": home},
                )
                clocks = there.clocks(candidate.kinds)
                estimates.append(Estimate(work=work, clock=clocks, candidate=candidate, rows=rows_of(candidate)))
    return estimates


def layouts(devices: int, most: int) -> list[Layout]:
    shapes = itertools.product((1, 2, 4), (1, 2, 4, 8), range(1, most + 1))
    return [Layout(tp=tp, dp=dp, pp=pp) for tp, dp, pp in shapes if tp * dp * pp <= devices]


@pytest.mark.long
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    vision=st.sampled_from([0.05, 0.4, 1.5]),
    fast=st.sampled_from([2, 4]),
    slow=st.sampled_from([1, 3]),
    memory=st.sampled_from([80 * GIGA, GIGA / 4]),
)
def test_the_plan_is_as_good_as_trying_every_way(vision: float, fast: int, slow: int, memory: float) -> None:
    work = two(vision)
    there = fleet(work, fast=(fast, replace(PLAIN, memory=memory)), slow=(slow, SLOW))
    choice, alone = choose_on(work, there, modes=SIMPLE), []
    for kind in there.kinds.values():
        with contextlib.suppress(DoesNotFit):
            alone.append(choose(work, kind.clock, kind.devices, modes=SIMPLE).best.seconds)
    tried = [estimate.seconds for estimate in every(work, there) if missing(there, estimate) <= 0]
    assert choice.best.seconds <= min([*alone, *tried]) * 1.02
    assert choice.estimates[0].seconds <= min(alone) * (1 + 1e-9), "a kind alone is among them"
    for estimate in choice.estimates:
        assert_legal(work, there, estimate)


def test_a_light_encoder_goes_to_the_slow_devices_where_that_pays() -> None:
    work = two(0.05)
    there = fleet(work, fast=(4, PLAIN), slow=(4, SLOW))
    choice, alone = choose_on(work, there), choose(work, clock(work), 4)
    best = choice.best
    assert best.candidate.kinds == {"vision": "slow", "llm": "fast"} and best.seconds < alone.best.seconds
    assert choice.by_mode.keys() >= {"homogeneous on fast", "homogeneous on slow", "non-colocated on fast and slow"}
    assert choice.why().startswith("non-colocated on fast and slow; a step takes +") and " on fast" in choice.why()
    assert best.clock.source.count("nothing was measured") == 2
    used = len(best.candidate.ranks("fast")) * TERA + len(best.candidate.ranks("slow")) * TERA / 4
    assert best.mfu == pytest.approx(work.flops / (best.seconds * used))


def test_two_kinds_that_gain_next_to_nothing_are_one() -> None:
    work = two(0.0005)
    there = fleet(work, fast=(4, PLAIN), slow=(1, SLOW))
    choice = choose_on(work, there)
    assert any(len(estimate.candidate.used_kinds) == 2 for estimate in choice.estimates)
    assert choice.best.candidate.used_kinds == ("fast",)
    assert choice.best.seconds <= choice.estimates[0].seconds * 1.005


def test_a_kind_may_be_left_unused_and_another_has_the_memory() -> None:
    work = two(0.2)
    small = replace(PLAIN, memory=GIGA / 50)
    choice = choose_on(work, fleet(work, small=(8, small), slow=(4, SLOW)), modes=SIMPLE)
    assert choice.best.candidate.used_kinds == ("slow",)
    assert choice.misses["homogeneous on small"].startswith(("llm misses by", "vision misses by"))
    with pytest.raises(DoesNotFit, match=r"homogeneous on small: \w+ misses by .*; non-colocated on several kinds: "):
        choose_on(work, fleet(work, small=(2, small), tiny=(2, replace(SLOW, memory=GIGA / 60))), modes=SIMPLE)


def test_one_kind_with_a_name_is_one_kind_without() -> None:
    work = two(0.3)
    named = choose_on(work, fleet(work, fast=(8, PLAIN)))
    plain = choose(work, clock(work), 8)
    assert [estimate.seconds for estimate in named.estimates] == [estimate.seconds for estimate in plain.estimates]
    assert [estimate.candidate.layouts for estimate in named.estimates] == [
        estimate.candidate.layouts for estimate in plain.estimates
    ]
    assert set(named.best.candidate.kinds.values()) == {"fast"} and not plain.best.candidate.kinds


def planned(there: Fleet, degrees: Mapping[str, tuple[str, Degrees]], work: Work) -> Candidate:
    problem = Problem(devices=64, global_batch=16, microbatch=1, memory=1.0, modules={})
    return apart(
        work,
        Plan(
            problem=MixedProblem(names=tuple(degrees), kinds={kind: problem for kind in there.kinds}),
            modules={name: layout for name, (_, layout) in degrees.items()},
            kinds={name: kind for name, (kind, _) in degrees.items()},
        ),
        there,
    )


def test_blocks_of_ranks() -> None:
    """Those of the LLM's kind first, whole nodes where there are several, and no rank left out between tp groups."""
    work = model(
        module("vision", 2, 0.1),
        module("audio", 2, 0.1),
        module("llm", 4, 1.0, after=("vision", "audio")),
        module("painter", 2, 0.1, after=("llm",)),
    )
    there = fleet(work, slow=(16, SLOW), fast=(24, PLAIN))
    candidate = planned(
        there,
        {
            "vision": ("slow", Degrees(tp=1, dp=3, pp=1)),
            "audio": ("slow", Degrees(tp=4, dp=1, pp=2)),
            "llm": ("fast", Degrees(tp=2, dp=3, pp=1)),
            "painter": ("fast", Degrees(tp=4, dp=1, pp=1)),
        },
        work,
    )
    offsets = {name: layout.rank_offset for name, layout in candidate.layouts.items()}
    # The LLM's 6 ranks would leave two out before a tp group of four. 10 ranks are two nodes of 8: the rest is spare.
    assert offsets == {"painter": 0, "llm": 4, "audio": 16, "vision": 24}
    assert candidate.used_kinds == ("fast", "slow") and candidate.world == 27 and candidate.devices == 21
    assert candidate.kind_start("vision") == 16 and candidate.describe().startswith(
        "vision dp=3 on ranks 24-26 (slow); "
    )
    single, three = Degrees(tp=1, dp=1, pp=1), Degrees(tp=1, dp=3, pp=1)
    few = planned(there, {"vision": ("slow", single), "llm": ("fast", three)}, two())
    assert few.layouts["vision"].rank_offset == 3, "less than a node has no spare ranks"


def test_no_rank_is_beyond_the_devices_that_there_are() -> None:
    """An LLM of tp 2 before an encoder of tp 4 leaves two ranks out, which need not be there."""
    wide = module("vision", 2, 3.0, memory={4: module("x", 1, 1.0).memory[4]})
    narrow = module("llm", 1, 1.0, after=("vision",), memory={2: module("x", 1, 1.0).memory[2]})
    work = model(wide, narrow, global_batch=12)
    for devices in (10, 14):
        for estimate in choose(work, clock(work), devices).estimates:
            assert estimate.candidate.world <= devices


def test_moves_between_kinds_take_the_slower_network() -> None:
    fast = replace(PLAIN, network=100 * GIGA)
    slow = replace(SLOW, network=10 * GIGA, link=1000 * GIGA)
    work = model(
        module("vision", 2, 0.1, output_bytes=GIGA),
        module("llm", 2, 1.0, after=("vision",), carried=GIGA),
        global_batch=4,
    )
    there = fleet(work, fast=(4, fast), slow=(4, slow))
    layouts = {"vision": Layout(rank_offset=2), "llm": Layout(pp=2)}
    seconds = {}
    for vision, llm in itertools.product(there.kinds, repeat=2):
        kinds = {"vision": vision, "llm": llm}
        candidate = Candidate(mode=NON_COLOCATED, layouts=layouts, microbatches=4, kinds=kinds)
        estimate = Estimate(
            work=work, clock=there.clocks(kinds), candidate=candidate, rows=dict.fromkeys(work.modules, (1.0, 1))
        )
        costs = estimate.costs.seconds
        seconds[vision, llm] = costs["move", "vision.0->llm.0", False], costs["move", "llm.0->llm.1", False]
        assert costs["F", "vision.0", False] == pytest.approx(0.2 * (4 if vision == "slow" else 1))
    assert seconds["slow", "fast"][0] == seconds["fast", "slow"][0] == pytest.approx(0.1)
    assert seconds["fast", "fast"][0] == pytest.approx(GIGA / fast.link)
    assert seconds["slow", "slow"][0] == pytest.approx(GIGA / slow.link)
    assert seconds["slow", "fast"][1] == pytest.approx(GIGA / fast.link)


def test_nodes_are_counted_from_the_first_rank_of_their_kind() -> None:
    """Ranks 3 to 6 of nodes of four are in one node, where these begin with rank 3."""
    slow = replace(SLOW, network=GIGA, link=100 * GIGA)
    work = model(module("vision", 1, 0.1), module("llm", 1, 1.0, after=("vision",)), global_batch=4)
    there = fleet(work, fast=(3, PLAIN), slow=(4, slow))
    kinds = {"vision": "slow", "llm": "fast"}
    layouts = {"vision": Layout(dp=4, rank_offset=3), "llm": Layout()}
    candidate = Candidate(mode=NON_COLOCATED, layouts=layouts, microbatches=1, kinds=kinds)
    rows = dict.fromkeys(work.modules, (4.0, 1))
    estimate = Estimate(work=work, clock=there.clocks(kinds), candidate=candidate, rows=rows)
    bytes_ = GIGA / 100 * work.gradient
    assert estimate.costs.seconds["reduce", "vision.0", False] == pytest.approx(bytes_ * 3 / 4 / slow.link)


def test_too_many_kinds_are_refused() -> None:
    work = model(*(module(name, 1, 0.1) for name in "abcd"), module("llm", 1, 1.0, after=tuple("abcd")))
    there = fleet(work, **{f"kind{index}": (2, PLAIN) for index in range(4)})
    with pytest.raises(ConfigError, match=r"^kinds: 4 of them for 5 modules are 1024 ways to place these"):
        choose_on(work, there)
