"""Three phases and encoders first: order, windows, and parameters that are offloaded meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from stage_graphs import chain, connect, stage, two_encoders

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import PARAMETER_COPIES, Op, Schedule
from mmjax.schedule.phased import encoders, encoders_first, three_phase
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import ScheduleError, validate


def spanning(depth: int = 3, *, backward: bool = True, offload: bool = False) -> StageGraph:
    """An encoder on all ranks of an LLM of `depth` stages, a rank each."""
    vision = replace(stage("vision.0", range(depth), backward=backward), offload=offload)
    pairs = [("vision.0", "llm.0"), *pairwise(f"llm.{i}" for i in range(depth))]
    return connect([vision, *chain(depth).stages], pairs, "async")


def _costs(graph: StageGraph, **copies: float) -> Costs:
    """Nominal ones with moves; seconds of offload and reload."""
    nominal = Costs.nominal(graph, move=0.2)
    seconds = {(kind, node.name, False): s for kind, s in copies.items() for node in graph.stages if node.offload}
    return Costs(seconds={**nominal.seconds, **seconds})


def _phases(schedule: Schedule, rank: int) -> str:
    """A letter for each F and B of a rank in order: the encoder's lower case, everything else upper case."""
    ops = [op for op in schedule.for_rank(rank) if op.kind in ("F", "B")]
    llm = {node.name for node in schedule.graph.stages if node.module == "llm"}
    return "".join(op.kind if op.stage in llm else op.kind.lower() for op in ops)


def test_encoders_run_before_and_after_the_llm():
    graph = spanning(2)
    schedule = three_phase(graph, 4, _costs(graph))
    assert _phases(schedule, 0) == "ffffFFBFBFBBbbbb"
    assert _phases(schedule, 1) == "ffffFBFBFBFBbbbb"
    assert schedule.in_flight == {"vision.0": 4, "llm.0": 2, "llm.1": 1}


@pytest.mark.parametrize(
    ("window", "phases"),
    [(3, "fffFFBFBBbbb" + "ffFFBBbb"), (1, "fFBb" * 5), (5, "fffffFFBFBFBFBBbbbbb"), (9, "fffffFFBFBFBFBBbbbbb")],
)
def test_windows_follow_one_another_and_the_last_may_be_smaller(window, phases):
    graph = spanning(2)
    schedule = three_phase(graph, 5, _costs(graph), window=window)
    assert _phases(schedule, 0) == phases
    assert schedule.bound("vision.0") == min(window, 5)


def test_a_frozen_encoder_waits_for_the_window_before_to_drain():
    graph = spanning(2, backward=False)
    schedule = three_phase(graph, 4, _costs(graph), window=2)
    assert _phases(schedule, 0) == "ffFFBB" * 2 and _phases(schedule, 1) == "ffFBFB" * 2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("window", "microbatches"), [(1, 5), (2, 5), (3, 4), (4, 9), (5, 9), (6, 13), (7, 9)])
def test_windows_need_not_divide_into_lanes(window, microbatches, backward):
    """Lanes without a microbatch in a window, or with one more than others, begin the next window no earlier."""
    plain = spanning(4, backward=backward)
    graph = replace(plain, stages=tuple(replace(n, lanes=4) if n.module == "vision" else n for n in plain.stages))
    schedule = three_phase(graph, microbatches, _costs(graph), window=window)
    report, timeline = validate(schedule), simulate(schedule, _costs(graph))
    lane = -(-min(window, microbatches) // 4)
    assert schedule.bound("vision.0") == min(4 * lane, microbatches) >= report.in_flight["vision.0"]
    for m in range(window, microbatches):
        start, _ = timeline.span(Op("F", "vision.0", m))
        previous = m // window * window - 1
        assert all(timeline.span(Op("B", f"llm.{i}", previous))[1] <= start for i in range(4))


def test_what_takes_all_of_the_encoders_ranks_keeps_out_of_the_llms_phase():
    graph = spanning(3)
    timeline = simulate(three_phase(graph, 4, _costs(graph)), _costs(graph))
    llm = [timeline.span(op) for op in timeline.schedule.ops if op.stage != "vision.0" and op.kind in ("F", "B")]
    first, last = min(start for start, _ in llm), max(end for _, end in llm)
    spanning_ops = [op for op in timeline.schedule.ops if op.stage == "vision.0" and op.microbatch >= 0]
    for op in (op for op in spanning_ops if op.kind in ("F", "B", "pack", "unpack")):
        start, end = timeline.span(op)
        assert end <= first or start >= last, str(op)
    moves = [op for op in spanning_ops if op.kind == "move"]
    assert moves and all(timeline.span(op)[0] < last for op in moves[:-1])  # they occupy nobody and may be early


def test_an_encoder_on_a_single_llm_stage_and_one_on_its_own_ranks():
    """The first has phases with its LLM stage alone; the second runs 1F1B beside them."""
    nodes = [stage("vision.0", (0,)), stage("audio.0", (9,)), *chain(3).stages]
    pairs = [("vision.0", "llm.0"), ("audio.0", "llm.0"), *pairwise(f"llm.{i}" for i in range(3))]
    graph = connect(nodes, pairs, "async")
    schedule = three_phase(graph, 6, _costs(graph))
    assert _phases(schedule, 0) == "ffffffFFFBFBFBFBBBbbbbbb"
    assert _phases(schedule, 9) == "ffffbfbfbbbb"
    assert schedule.bound("audio.0") == 4


def test_an_encoder_with_a_stage_on_each_llm_stage():
    nodes = [stage("vision.0", (0,)), stage("vision.1", (1,)), *chain(2).stages]
    pairs = [("vision.0", "vision.1"), ("vision.1", "llm.0"), ("llm.0", "llm.1")]
    graph = connect(nodes, pairs, "async")
    schedule = three_phase(graph, 3, _costs(graph))
    assert [_phases(schedule, rank) for rank in (0, 1)] == ["fffFFBFBBbbb", "fffFBFBFBbbb"]


def test_encoders_are_the_modules_that_nothing_feeds():
    assert encoders(two_encoders()) == ("one", "two")
    assert encoders(chain(3)) == ()
    names = ["vision.0", "llm.0", "image.0"]
    assert encoders(connect([stage(n, (i,)) for i, n in enumerate(names)], list(pairwise(names)), "async")) == (
        "vision",
    )


def test_without_encoders_on_its_ranks_the_llm_runs_1f1b_and_has_no_windows():
    graph = two_encoders()
    schedule = three_phase(graph, 6, _costs(graph), window=2)
    assert _phases(schedule, 5) == "FB" * 6 and _phases(schedule, 3).startswith("FFFBFB")


def test_encoders_first_keeps_others_waiting_wherever_they_are():
    graph = two_encoders()
    costs = _costs(graph)
    timeline = simulate(encoders_first(graph, 4, costs), costs)
    spans = {op: span for op, span in timeline.spans.items() if op.kind in ("F", "B")}
    llm = [span for op, span in spans.items() if op.stage.startswith("llm")]
    first, last = min(start for start, _ in llm), max(end for _, end in llm)
    assert all(end <= first for op, (_, end) in spans.items() if op.kind == "F" and not op.stage.startswith("llm"))
    assert all(start >= last for op, (start, _) in spans.items() if op.kind == "B" and not op.stage.startswith("llm"))


# ---- parameters that leave -------------------------------------------------------------------------------------------


def _away(timeline: Timeline, first: int = 0) -> tuple[float, float]:
    """From when to when the encoder's parameters are away: the end of the offload and the start of the reload."""
    return timeline.span(Op("offload", "vision.0", first))[1], timeline.span(Op("reload", "vision.0", first))[0]


def test_parameters_leave_with_the_last_forward_and_are_back_before_the_first_backward():
    graph = spanning(3, offload=True)
    costs = _costs(graph, offload=1.0, reload=1.5)
    schedule = three_phase(graph, 6, costs)
    timeline = simulate(schedule, costs)
    plain = spanning(3)
    assert timeline.makespan == simulate(three_phase(plain, 6, _costs(plain)), _costs(plain)).makespan  # all hidden
    gone, back = _away(timeline)
    assert gone == timeline.span(Op("F", "vision.0", 5))[1] + 1.0
    assert back >= timeline.span(Op("F", "llm.2", 5))[1]  # the LLM's cooldown
    assert back + 1.5 <= timeline.span(Op("B", "vision.0", 0))[0]
    assert validate(schedule)
    assert schedule.awaits(Op("reload", "vision.0", 0)) == schedule.waits[Op("reload", "vision.0", 0)] != ()


def test_a_long_reload_begins_before_the_cooldown_so_that_it_is_hidden():
    graph = spanning(3, offload=True)
    starts = []
    for seconds in (1.0, 6.0, 9.0, 12.0):
        costs = _costs(graph, offload=1.0, reload=seconds)
        timeline = simulate(three_phase(graph, 6, costs), costs)
        starts.append(_away(timeline)[1])
        assert starts[-1] + seconds <= timeline.span(Op("B", "vision.0", 0))[0] + 1e-9
        assert timeline.makespan == simulate(three_phase(graph, 6, _costs(graph)), _costs(graph)).makespan
    assert starts[1] > starts[2] > starts[3]


def test_every_window_has_an_offload_and_a_frozen_encoder_too():
    for backward in (True, False):
        graph = spanning(2, backward=backward, offload=True)
        costs = _costs(graph, offload=0.5, reload=0.5)
        schedule = three_phase(graph, 5, costs, window=2)
        timeline = simulate(schedule, costs)
        assert [str(op) for op in schedule.ops if op.kind in PARAMETER_COPIES] == [
            f"{kind} vision.0 microbatch {first}" for first in (0, 2, 4) for kind in PARAMETER_COPIES
        ]
        for first in (0, 2, 4):
            gone, back = _away(timeline, first)
            assert back - gone > 1.0
        assert timeline.span(Op("reload", "vision.0", 0))[1] <= timeline.span(Op("F", "vision.0", 2))[0]
        plain = replace(graph, stages=tuple(replace(node, offload=False) for node in graph.stages))
        assert timeline.makespan == simulate(three_phase(plain, 5, costs, window=2), costs).makespan


@pytest.mark.parametrize("backward", [True, False])
def test_a_stage_on_ranks_of_its_own_is_away_while_the_llm_runs(backward):
    """The encoder has two stages. The second shares the LLM's ranks, the first does not."""
    encoder = [stage("vision.0", (2, 3), backward=backward), stage("vision.1", (0, 1), backward=backward)]
    nodes = [*(replace(node, offload=True) for node in encoder), *chain(2).stages]
    pairs = [("vision.0", "vision.1"), ("vision.1", "llm.0"), ("llm.0", "llm.1")]
    graph = connect(nodes, pairs, "async")
    costs = _costs(graph, offload=0.1, reload=0.1)
    schedule = three_phase(graph, 5, costs, window=2)
    timeline = simulate(schedule, costs)
    assert validate(schedule)
    for first, last in ((0, 1), (2, 3)):
        gone, back = (timeline.span(Op(kind, "vision.0", first)) for kind in PARAMETER_COPIES)
        assert gone[0] >= timeline.span(Op("F", "vision.0", last))[1]
        if backward:  # else nothing keeps it from the next window
            assert back[0] >= timeline.span(Op("F", "llm.1", last))[1], "as soon as it has left"
            assert schedule.awaits(Op("reload", "vision.0", first))
        again = Op("B", "vision.0", first) if backward else Op("F", "vision.0", last + 1)
        assert back[1] <= timeline.span(again)[0]


def test_two_encoders_share_the_copy_engines():
    nodes = [replace(stage(f"{name}.0", range(2)), offload=True) for name in ("audio", "vision")]
    graph = connect(
        [*nodes, *chain(2).stages], [("audio.0", "llm.0"), ("vision.0", "llm.0"), ("llm.0", "llm.1")], "async"
    )
    costs = _costs(graph, offload=1.0, reload=2.0)
    timeline = simulate(three_phase(graph, 5, costs), costs)
    (a, b), (c, d) = sorted(timeline.span(Op("reload", name, 0)) for name in ("audio.0", "vision.0"))
    first = min(timeline.span(Op("B", name, 0))[0] for name in ("audio.0", "vision.0"))
    assert b <= c and d <= first and a < b and c < d


def test_only_encoders_with_phases_are_offloaded():
    apart = [replace(stage("vision.0", (9,)), offload=True), *chain(2).stages]
    graph = connect(apart, [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")
    with pytest.raises(ScheduleError, match=r"three-phase: 'vision.0' is no encoder with phases of its own"):
        three_phase(graph, 3, Costs.nominal(graph))
    assert validate(encoders_first(graph, 3, Costs.nominal(graph)))
    llm = replace(graph, stages=tuple(replace(node, offload=node.module == "llm") for node in graph.stages))
    with pytest.raises(ScheduleError, match=r"encoders-first: 'llm.0' is no encoder"):
        encoders_first(llm, 3, Costs.nominal(llm))
