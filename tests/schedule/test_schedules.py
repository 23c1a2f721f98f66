"""GPipe, 1F1B and forward-only over chains and random module graphs."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_graphs import (
    TIE,
    chain,
    colocated,
    connect,
    costs_of,
    frozen_encoder,
    offloaded,
    stage,
    stage_graphs,
    steady,
    two_encoders,
)

from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import ONCE, Op, Schedule
from mmjax.schedule.schedules import (
    OFFLOADING,
    SCHEDULES,
    WINDOWED,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    zb_h1,
)
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate

MAKERS = (gpipe, one_f_one_b, forward_only)


def _turns(schedule: Schedule, name: str, kinds: str = "FB") -> str:
    return " ".join(f"{op.kind}{op.microbatch}" for op in schedule.for_stage(name) if op.kind in kinds)


def _computes(schedule: Schedule) -> list[str]:
    return [f"{op.kind} {op.stage} {op.microbatch}" for op in schedule.ops if op.kind in "FB"]


def test_the_registry_has_the_schedules_of_training():
    names = ["1f1b", "gpipe", "interleaved", "eager-1f1b", "zb-h1", "three-phase", "encoders-first", "nested"]
    assert list(SCHEDULES) == names
    assert [traits.make(chain(1), 1, Costs.nominal(chain(1))).name for traits in SCHEDULES.values()] == names


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_does_what_its_traits_say(name):
    traits, graph, away = SCHEDULES[name], chain(4), offloaded()
    schedule = make_schedule(name, graph, 16, Costs.nominal(graph))
    assert {node.split for node in schedule.graph.stages} == {traits.splits}
    if traits.lead:
        assert all(schedule.bound(node.name) == traits.lead * graph.distance(node.name) + 1 for node in graph.stages)
    with contextlib.nullcontext() if traits.windows else pytest.raises(ScheduleError, match="has no windows"):
        make_schedule(name, graph, 4, Costs.nominal(graph), window=2)
    with contextlib.nullcontext() if traits.phases else pytest.raises(ScheduleError, match="no time to offload"):
        make_schedule(name, away, 4, Costs.nominal(away))
    assert (name in WINDOWED, name in OFFLOADING) == (traits.windows, traits.phases)


def test_1f1b_of_a_chain_is_the_known_one():
    schedule = one_f_one_b(chain(3), 5, Costs.nominal(chain(3)))
    assert _turns(schedule, "llm.0") == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert _turns(schedule, "llm.1") == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert _turns(schedule, "llm.2") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_1f1b_with_fewer_microbatches_than_stages_is_all_warm_up():
    schedule = one_f_one_b(chain(4), 2, Costs.nominal(chain(4)))
    assert [_turns(schedule, f"llm.{i}") for i in range(4)] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_1f1b_warm_up_of_unequal_encoders_follows_their_distance():
    schedule = one_f_one_b(two_encoders(), 7, Costs.nominal(two_encoders()))
    assert _turns(schedule, "one.0").startswith("F0 F1 F2 F3 F4 B0 F5 B1")
    assert _turns(schedule, "one.1").startswith("F0 F1 F2 F3 B0 F4 B1")
    assert _turns(schedule, "two.0").startswith("F0 F1 F2 F3 B0 F4 B1")
    assert _turns(schedule, "llm.0").startswith("F0 F1 F2 B0 F3 B1")


def test_eager_1f1b_is_as_far_ahead_again():
    schedule = eager_one_f_one_b(chain(3), 6, Costs.nominal(chain(3)))
    assert _turns(schedule, "llm.0") == "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5"
    assert _turns(schedule, "llm.1") == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert _turns(schedule, "llm.2") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_zb_h1_puts_off_the_weight_gradients_that_nobody_waits_for():
    schedule = zb_h1(chain(3), 5, Costs.nominal(chain(3)))
    assert schedule.graph == chain(3).with_split()
    assert _turns(schedule, "llm.0", "FBW") == "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4"
    assert _turns(schedule, "llm.2", "FBW") == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4"
    assert {node.name: schedule.bound(node.name) for node in schedule.graph.stages} == dict.fromkeys(
        ("llm.0", "llm.1", "llm.2"), 3
    )


def test_zb_h1_bounds_a_module_by_its_own_first_stage():
    """And a stage that only passes gradients on has no W, and 1F1B's bound."""
    graph = two_encoders()
    stages = [replace(node, trainable=node.name not in ("one.1", "llm.1")) for node in graph.stages]
    schedule = zb_h1(replace(graph, stages=tuple(stages)), 9, Costs.nominal(graph))
    assert [schedule.bound(node.name) for node in graph.stages] == [5, 4, 4, 3, 2, 3]
    assert {op.stage for op in schedule.ops if op.kind == "W"} == {"one.0", "two.0", "llm.0", "llm.2"}


@steady
@given(st.data(), stage_graphs(), st.integers(1, 9))
def test_zb_h1_is_never_longer_than_1f1b_of_even_stages(data, graph, microbatches):
    depth = data.draw(st.integers(1, 6))
    costs = Costs.nominal(chain(depth), backward=data.draw(st.sampled_from([1.0, 2.0, 3.0])))
    split, unsplit = (make(chain(depth), microbatches, costs) for make in (zb_h1, one_f_one_b))
    assert simulate(split, costs).makespan <= simulate(unsplit, costs).makespan + 1e-9


def test_gpipe_runs_all_forwards_first():
    schedule = gpipe(two_encoders(), 3, Costs.nominal(two_encoders()))
    assert {_turns(schedule, node.name) for node in schedule.graph.stages} == {"F0 F1 F2 B0 B1 B2"}


def test_forward_only_has_nothing_else():
    schedule = forward_only(two_encoders(), 3, Costs.nominal(two_encoders()))
    assert schedule.name == "forward"
    assert {op.kind for op in schedule.ops} == {"prepare", "F", "pack", "move", "unpack"}
    assert {_turns(schedule, node.name) for node in schedule.graph.stages} == {"F0 F1 F2"}
    assert not any(op.backward for op in schedule.ops)


@pytest.mark.parametrize("llm", [1, 3])
@pytest.mark.parametrize("encoders", [1, 2, 3])
def test_stages_on_the_same_ranks_run_one_microbatch_after_another(encoders, llm):
    graph = colocated(encoders, frozen=encoders // 2, llm=llm)
    costs = Costs.nominal(graph)
    schedule = one_f_one_b(graph, 3, costs)
    forward = [node.name for node in graph.topological]
    backward = [node.name for node in reversed(graph.topological) if node.backward]
    expected = [f"{kind} {name} {m}" for m in range(3) for kind, n in (("F", forward), ("B", backward)) for name in n]
    computes = _computes(schedule)
    per_microbatch = len(forward) + len(backward)
    assert [c.split()[2] for c in computes] == [c.split()[2] for c in expected]
    for start in range(0, len(computes), per_microbatch):
        kinds = "".join(c[0] for c in computes[start : start + per_microbatch])
        assert kinds == "F" * len(forward) + "B" * len(backward)
        assert sorted(computes[start : start + per_microbatch]) == sorted(expected[start : start + per_microbatch])
    assert set(simulate(schedule, costs).in_flight.values()) == {1}
    assert not any(op.kind in ("pack", "move") for op in schedule.ops)
    once = [op.kind for op in schedule.ops if op.microbatch < 0]
    assert once[: len(forward)] == ["prepare"] * len(forward)
    trained = sum(node.trainable for node in graph.stages)
    assert [op.kind for op in schedule.ops[-2 * trained - 1 :]] == once[len(forward) :]  # no reduce amid the backward


def test_prepare_comes_first_and_norm_between_reductions_and_updates():
    kinds = [op.kind for op in one_f_one_b(two_encoders(), 4, Costs.nominal(two_encoders(), once=0.5)).ops]
    assert kinds[:6] == ["prepare"] * 6
    assert kinds[-8:] == ["reduce", "norm"] + ["update"] * 6


def test_a_reduction_overlaps_the_drain_of_others():
    graph = chain(3)
    costs = Costs.nominal(graph, once=0.5)
    schedule = one_f_one_b(graph, 4, costs)
    timeline = simulate(schedule, costs)
    for node in graph.stages:
        mine = [op.kind for op in schedule.for_stage(node.name) if op.kind in ("F", "B", "reduce")]
        assert mine[-2:] == ["B", "reduce"]
        last = timeline.span(Op("B", node.name, 3))[1]
        assert timeline.span(Op("reduce", node.name)) == (last, last + 0.5)
    # llm.2 and llm.1 have reduced before llm.0 ends its last backward.
    assert timeline.span(Op("reduce", "llm.1"))[1] < timeline.span(Op("B", "llm.0", 3))[1]


def test_a_tie_hides_in_warm_up_and_drain():
    """The borrower is idle before its first forward and after its last backward: the weight comes and goes then."""
    tied, plain = chain(3, tied=True), chain(3)
    costs = Costs.nominal(tied, move=0.5)
    schedule = one_f_one_b(tied, 4, costs)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == simulate(one_f_one_b(plain, 4, costs), costs).makespan
    assert timeline.span(Op("move", "llm.2", ONCE, TIE)) == (0, 0.5)
    assert timeline.span(Op("F", "llm.2", 0))[0] == 3.0  # two forwards and two moves of activations
    returned = timeline.span(Op("move", "llm.0", ONCE, TIE, True))
    assert returned[0] == timeline.span(Op("B", "llm.2", 3))[1] and returned[1] < timeline.span(Op("B", "llm.0", 3))[0]
    slow = replace(costs, overrides={("move", TIE, False, ONCE): 4.0, ("move", TIE, True, ONCE): 20.0})
    late = simulate(one_f_one_b(tied, 4, slow), slow)
    assert late.span(Op("F", "llm.2", 0))[0] == 4.0
    assert late.makespan == late.span(Op("reduce", "llm.0"))[1] == late.span(Op("B", "llm.2", 3))[1] + 20.0


def test_a_frozen_encoder_does_not_run_ahead():
    graph = frozen_encoder()
    costs = Costs.nominal(graph, forward={"vision.0": 0.1, "llm.0": 1.0, "llm.1": 1.0})
    timeline = simulate(one_f_one_b(graph, 8, costs), costs)
    assert timeline.in_flight == {"vision.0": 3, "llm.0": 2, "llm.1": 1}
    assert timeline.span(Op("F", "vision.0", 7))[0] == timeline.span(Op("F", "llm.0", 4))[1]
    assert simulate(gpipe(graph, 8, costs), costs).in_flight == {"vision.0": 8, "llm.0": 8, "llm.1": 8}


def test_ready_backward_goes_before_ready_forward():
    """A frozen encoder on the LLM's first submesh: at 5 both its F3 and the LLM's B0 could start, and B0 does."""
    nodes = [stage("vision.0", (0,), backward=False), stage("llm.0", (0,)), stage("llm.1", (1,))]
    graph = connect(nodes, [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")
    costs = Costs.nominal(graph)
    order = [c for c in _computes(one_f_one_b(graph, 4, costs)) if not c[2:].startswith("llm.1")]
    assert order[:5] == ["F vision.0 0", "F llm.0 0", "F vision.0 1", "F llm.0 1", "F vision.0 2"]
    assert order[5:8] == ["B llm.0 0", "F llm.0 2", "B llm.0 1"]  # and then downstream before upstream


def test_a_rendezvous_is_not_starved_by_work_on_one_side():
    """Encoder a has another forward to run when its send finds the LLM busy, but waits and sends first."""
    nodes = [stage("a.0", (0,)), stage("b.0", (1,)), stage("llm.0", (2,))]
    graph = connect(nodes, [("a.0", "llm.0"), ("b.0", "llm.0")], "rendezvous")
    costs = Costs.nominal(graph, forward={"a.0": 0.8, "b.0": 0.4, "llm.0": 1.0}, move=0.5)
    timeline = simulate(gpipe(graph, 4, costs), costs)
    assert timeline.span(Op("F", "a.0", 0))[1] == pytest.approx(0.8)
    assert timeline.span(Op("move", "llm.0", 0, "b.0->llm.0")) == pytest.approx((0.4, 0.9))
    assert timeline.span(Op("move", "llm.0", 0, "a.0->llm.0")) == pytest.approx((0.9, 1.4))
    assert timeline.span(Op("F", "a.0", 1))[0] == pytest.approx(1.4)


def test_wanted_orders_that_contradict_each_other_are_refused():
    graph = chain(2)
    turns = {"llm.0": "F0 B0 F1 B1", "llm.1": "F0 F1 B0 B1"}
    orders = {name: [Op(t[0], name, int(t[1])) for t in text.split()] for name, text in turns.items()}
    with pytest.raises(ScheduleError, match=r"mine: B llm.1 microbatch 0 can never start"):
        list_schedule(graph, 2, Costs.nominal(graph), orders=orders, in_flight={}, name="mine")


@steady
@given(st.data(), stage_graphs(), st.integers(1, 9), st.sampled_from(MAKERS))
def test_every_schedule_is_valid_and_keeps_its_promise(data, graph, microbatches, make):
    costs = data.draw(costs_of(graph))
    schedule = make(graph, microbatches, costs)
    report = validate(schedule)
    timeline = simulate(schedule, costs)
    for node in schedule.graph.stages:
        allowed = microbatches if make is gpipe else min(microbatches, graph.distance(node.name) + 1)
        assert schedule.bound(node.name) == allowed
        assert report.in_flight[node.name] <= allowed
        assert timeline.in_flight[node.name] <= allowed
        if node.backward:  # a stage with a backward warms up all the way
            assert report.in_flight[node.name] == allowed


def test_windows_and_offloads_are_refused_where_there_are_none():
    graph, costs = offloaded(), Costs.nominal(offloaded())
    with pytest.raises(ScheduleError, match=r"1f1b has no windows: use three-phase, or a window of 0"):
        make_schedule("1f1b", chain(2), 4, Costs.nominal(chain(2)), window=2)
    with pytest.raises(ScheduleError, match=r"gpipe leaves no time to offload 'e0.0': use three-phase"):
        make_schedule("gpipe", graph, 4, costs)
    assert validate(make_schedule("three-phase", graph, 4, costs, window=3))
