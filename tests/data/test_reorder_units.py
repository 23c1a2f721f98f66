"""Reordering where stages have lanes: units by hand, Alg. 2 by the simulator, and what always holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mmjax.data.reorder import METHODS, Effort, Order, Pipeline, rows_of_ranks
from mmjax.data.reorder.units import Units
from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import LANED, make_schedule
from mmjax.schedule.simulate import Costs, simulate

steady = settings(derandomize=True, deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])

EYE, PAINTER = "eye.0", "painter.0"


def spread(
    depth: int, *, lanes: int = 0, generator: bool = False, frozen: bool = False, beside: bool = False
) -> StageGraph:
    """An encoder, and maybe a generator, in lanes over the ranks of an LLM of `depth` stages.

    beside: the encoder has a rank of its own and no lanes.
    """
    names = [EYE, *(f"llm.{stage}" for stage in range(depth)), *([PAINTER] if generator else [])]
    nodes = []
    for name in names:
        module, index = name.split(".")
        alone = (int(index),) if module == "llm" else (depth,) if beside and name == EYE else ()
        fields = {"ranks": alone or tuple(range(depth)), "lanes": 1 if alone else lanes or depth}
        fields |= {"trainable": name != EYE or not frozen, "loss": name in (PAINTER, f"llm.{depth - 1}")}
        nodes.append(StageNode(name=name, module=module, index=int(index), **fields))
    return connected(nodes, list(itertools.pairwise(names)), lambda *_: "async")


def seconds_of(forward: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.outer(forward, (1.0, 2.0))


def pipeline_of(
    schedule: Schedule, rows: Sequence[int], *, llm: float = 1.0, packed: bool = False, **settings
) -> Pipeline:
    """The pipeline of a schedule whose encoders, generators and, if packed, LLM take time by samples."""
    graph = schedule.graph
    seconds = {(kind, n.name, False): w * llm for n in graph.stages for kind, w in (("F", 1), ("B", 2))}
    shares: dict[str, dict[str, tuple[float, float]]] = {}
    for node in graph.stages:
        if packed or node.module != "llm":
            shares.setdefault(node.module, {})[node.name] = (1.0, 1.0)
    return Pipeline(schedule, Costs(seconds=seconds), shares, rows, **settings)


def made(name: str, graph: StageGraph, microbatches: int) -> Schedule:
    return make_schedule(name, graph, microbatches, Costs.nominal(graph))


def loads(order: Order, forward: Sequence[float] | np.ndarray) -> list[float]:
    """Of each microbatch, the forward of its largest cell."""
    return [max(sum(forward[s] for s in rank[m]) for rank in order) for m in range(len(order[0]))]


# ---- units -----------------------------------------------------------------------------------------------------------


def test_microbatches_are_cut_into_units_and_a_short_one_stays_last():
    units = Units(2, 5)
    assert (units.count, units.whole, units.kept) == (3, 2, 1)
    assert [list(units.members(unit)) for unit in range(3)] == [[0, 1], [2, 3], [4]]
    assert units.expand(np.array([[1], [0]]))[:, 0].tolist() == [2, 3, 0, 1, 4]
    table_CMK = np.array([1.0, 4.0, 2.0, 2.0, 9.0])[None, :, None]
    assert units.rising(table_CMK)[:, 0].tolist() == [1, 0]
    assert units.longest(table_CMK[0], 2)[:, 0].tolist() == [4, 2]
    assert units.longest(table_CMK[0], 1)[:, 0].tolist() == [5, 4]


def test_units_are_whole_turns_of_the_lanes_of_every_stage_that_differs():
    graph = spread(4, lanes=2, generator=True)
    assert Units.of(graph, [EYE], 8).size == 2
    assert Units.of(graph, ["llm.0"], 8).size == 1
    assert Units.of(graph, [], 8).size == 1


# ---- sharing samples inside a unit -----------------------------------------------------------------------------------


def test_samples_of_a_unit_are_shared_among_its_lanes_by_hand():
    """Of 8, 7, 6, 5 the lanes get 8 + 5 and 7 + 6, of the others 4 + 1 and 3 + 2; the smaller unit is first."""
    sizes = [4.0, 8.0, 1.0, 6.0, 7.0, 5.0, 3.0, 2.0]
    pipeline = pipeline_of(made("gpipe", spread(2), 4), [2])
    (order,) = pipeline.reorder({"eye": seconds_of(sizes)}, "disttrain")
    assert [[sizes[s] for s in samples] for samples in order] == [[4, 1], [3, 2], [8, 5], [7, 6]]


def test_large_samples_meet_in_one_unit_by_hand():
    """20 + 1 beside 17 + 4, then 1 + 1 twice. Even microbatches cost 21, 18, 5, 2, those of a size 37, 5, 2, 2."""
    sizes = [1.0, 4.0, 1.0, 20.0, 1.0, 17.0, 1.0, 1.0]
    pipeline = pipeline_of(made("gpipe", spread(2), 4), [2], together=True)
    for even, want in ((False, [21, 21, 2, 2]), (True, [21, 18, 5, 2])):
        order = pipeline._order(pipeline._in_step(np.array(sizes), even=even))
        assert sorted(loads(order, sizes), reverse=True) == want
        assert even or loads(order, sizes) == want


def test_cells_of_a_unit_cost_about_the_same():
    """Four lanes of two dp ranks; the last unit is of two microbatches."""
    sizes = np.random.default_rng(3).uniform(1, 8, size=18 * 2 * 6)
    pipeline = pipeline_of(made("gpipe", spread(4), 18), [6, 6], together=True, effort=Effort(rounds=0))
    seconds = {"eye": seconds_of(sizes)}
    assert pipeline.imbalance(seconds, pipeline.reorder(seconds, "none")) > 1.2
    for method in METHODS[1:]:
        order = pipeline.reorder(seconds, method)
        by_microbatch = loads(order, sizes)
        by_unit = [by_microbatch[first : first + 4] for first in range(0, 18, 4)]
        assert all(max(of_unit) < 1.02 * min(of_unit) for of_unit in by_unit)
        cells = np.array([[sum(sizes[s] for s in cell) for cell in rank] for rank in order])
        mean = sum(cells[:, first : first + 4].mean() for first in range(0, 18, 4))
        assert sum(map(max, by_unit)) / mean < 1.02
        assert pipeline.imbalance(seconds, order) == pytest.approx(sum(map(max, by_unit)) / mean)


def test_ranks_in_step_have_samples_of_a_size_in_a_microbatch_of_a_unit():
    """With one row a rank, the largest of a unit's samples meet in one microbatch and the next ones in the next."""
    sizes = [8.0, 1.0, 5.0, 4.0, 4.0, 8.0, 1.0, 5.0]
    pipeline = pipeline_of(made("gpipe", spread(2), 4), [1, 1], together=True, effort=Effort(rounds=0))
    order = pipeline.reorder({"eye": seconds_of(sizes)}, "best")
    assert [sizes[a[0]] == sizes[b[0]] for a, b in zip(*order, strict=True)] == [True] * 4


# ---- the order of units ----------------------------------------------------------------------------------------------


def units_in_order(name: str, graph: StageGraph, forward_M: np.ndarray) -> list[int]:
    """Alg. 2 anew, unit by unit on the first lane, with `simulate` as GETINTERVAL: what has no place takes no time."""
    lanes, count = graph.stage(EYE).lanes, len(forward_M)
    schedule, complete, every = made(name, graph, count), count // lanes, -(-count // lanes)
    ops = [op for op in schedule.for_rank(0) if op.kind in "FB"]
    mine = [op for op in ops if op.stage == EYE]
    ends = [op for op in mine if op.kind == "B"] or [
        op for op in schedule.ops if op.kind == "F" and op.stage == "llm.0" and op.microbatch % lanes == 0
    ]
    where = {op: i for i, op in enumerate(schedule.ops)}
    before = {op.microbatch // lanes: sum(where[o] < where[op] for o in ends) for op in mine if op.kind == "F"}
    largest = [max(forward_M[lanes * unit :][:lanes]) for unit in range(complete)]
    sums = [sum(forward_M[lanes * unit :][:lanes]) for unit in range(complete)]
    rear = max(every - complete, min(every - 1, len(ends) - 1 - max(before.values()))) - (every - complete)

    def volume(placed: list[int], number: int) -> float:
        seconds = {(kind, n.name, False): w for n in graph.stages for kind, w in (("F", 1.0), ("B", 2.0))}
        forwards = [forward_M[lanes * unit + lane] for unit in placed for lane in range(lanes)]
        forwards += [0.0] * (count - len(forwards))
        costs = Costs(
            seconds=seconds,
            overrides={
                (k, EYE, False, m): w * f for m, f in enumerate(forwards) for k, w in zip("FB", (1, 2), strict=True)
            },
        )
        timeline = simulate(schedule, costs)
        opened = timeline.span(ops[0] if number == 0 else ends[number - 1])[1]
        return timeline.span(ends[number])[0 if ends[0].kind == "B" else 1] - opened

    rising = sorted(range(complete), key=lambda unit: (sums[unit], unit))
    placed, last = rising[:1], rising[1 : 1 + rear]
    left = sorted(set(range(complete)) - {*placed, *last})
    while left:
        end = next(
            (p for p in range(len(placed) + 1, complete - rear) if before[p] > before[len(placed)]), complete - rear
        )
        numbers = {min(before[place], len(ends) - 1) for place in range(len(placed), end)}
        room = sum(volume(placed, number) for number in numbers)
        for place in range(len(placed), end):
            picked = min(left, key=lambda unit: (round(abs(largest[unit] - room / (end - place)), 9), unit))
            room -= largest[picked]
            placed.append(picked)
            left.remove(picked)
    return placed + last


@steady
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=14, unique=True),
    st.sampled_from(LANED),
    st.booleans(),
)
@example([25, 39, 1, 34, 36, 37, 4, 38, 5], "nested", True)  # the second lane of a unit makes an interval longer
def test_units_are_ordered_by_the_intervals_of_the_first_lane(forward, name, frozen):
    """Units as drawn: what their lanes cost differs much."""
    graph, sizes = spread(2, frozen=frozen), np.array(forward, float)
    pipeline = pipeline_of(made(name, graph, len(sizes)), [1])
    sizes_CS = pipeline.sizes({"eye": seconds_of(sizes)})
    order = pipeline._by_intervals(sizes_CS, sizes_CS[:, :, None])[:, 0].tolist()
    want = [2 * unit + lane for unit in units_in_order(name, graph, sizes) for lane in range(2)]
    assert order == [*want, *range(len(want), len(sizes))]


# ---- whole orders ----------------------------------------------------------------------------------------------------


# ---- ops of several microbatches -------------------------------------------------------------------------------------


def windowed(size: int) -> StageGraph:
    """An encoder on both ranks of an LLM of two stages, with so many microbatches an op."""
    graph = spread(2, lanes=1)
    stages = (replace(node, microbatches=size) if node.name == EYE else node for node in graph.stages)
    return replace(graph, stages=tuple(stages))


def test_an_op_of_several_microbatches_costs_as_much_as_these_by_hand():
    """Ranks have 3 + 1 and 1 + 3 of an op of two microbatches, so the op is even where its microbatches are not."""
    sizes = [3.0, 1.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    schedule = make_schedule("three-phase", graph := windowed(2), 4, Costs.nominal(graph), window=2)
    pipeline = pipeline_of(schedule, [1, 1], together=True)
    seconds = {"eye": seconds_of(sizes)}
    order = pipeline.reorder(seconds, "none")
    assert pipeline.imbalance(seconds, order) == 1
    assert pipeline.loads(seconds, order).tolist() == [[6.0] * 4] * 2  # three times 2, the mean of 3 and 1
    timeline = pipeline.timeline(seconds, order)
    assert timeline.makespan == pipeline.makespan(seconds, order)
    ops = {(op.kind, op.microbatch): end - start for op, start, end in timeline.for_rank(0) if op.stage == EYE}
    assert {key: cost for key, cost in ops.items() if key[0] in "FB"} == {
        ("F", 0): 6, ("B", 0): 12, ("F", 2): 4, ("B", 2): 8
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_orders_of_windows_are_permutations_and_best_never_loses(size: int, packed: bool):
    schedule = make_schedule("three-phase", graph := windowed(size), 6, Costs.nominal(graph), window=size)
    pipeline = pipeline_of(schedule, [2, 2], together=True, packed=packed, effort=Effort(rounds=3))
    sizes = np.random.default_rng(size).exponential(size=24)
    seconds = {"eye": seconds_of(sizes)} | ({"llm": seconds_of(sizes[::-1] + 0.2)} if packed else {})
    spans = {}
    for method in METHODS:
        order = pipeline.reorder(seconds, method)
        assert sorted(s for rank in order for samples in rank for s in samples) == list(range(24))
        spans[method] = pipeline.makespan(seconds, order)
    assert pipeline.bound(seconds) <= spans["best"] * (1 + 1e-9)
    assert spans["best"] <= min(spans.values())
    assert spans["best"] < 0.99 * spans["none"]


@st.composite
def steps(draw):
    depth, microbatches = draw(st.integers(2, 3)), draw(st.integers(1, 8))
    dp, rows = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator, packed = draw(st.booleans()), draw(st.booleans())
    beside = generator and draw(st.booleans())
    graph = spread(depth, generator=generator, frozen=draw(st.booleans()), beside=beside)
    schedule = made(draw(st.sampled_from(LANED)), graph, microbatches)
    samples = microbatches * rows
    drawn = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5, 6.0, 20.0]), min_size=samples, max_size=samples)
    seconds = {"eye": seconds_of(draw(drawn))} | ({"painter": seconds_of(draw(drawn))} if generator else {})
    seconds |= {"llm": seconds_of(draw(drawn))} if packed else {}
    settings = {"packed": packed, "together": draw(st.booleans()), "effort": Effort(cases=16, rounds=4)}
    llm = draw(st.sampled_from([0.0, 1.0]))
    return pipeline_of(schedule, rows_of_ranks(rows, dp), llm=llm, **settings), seconds, samples


@steady
@given(steps())
def test_every_order_is_a_permutation_and_best_never_loses(step):
    pipeline, seconds, samples = step
    spans = {}
    for method in METHODS:
        order = pipeline.reorder(seconds, method)
        assert order == pipeline.reorder(seconds, method)
        assert [[len(cell) for cell in rank] for rank in order] == [[r] * pipeline.microbatches for r in pipeline.rows]
        assert sorted(s for rank in order for cell in rank for s in cell) == list(range(samples))
        spans[method] = pipeline.makespan(seconds, order)
        assert spans[method] >= pipeline.bound(seconds) * (1 - 1e-9)
    assert spans["best"] <= min(spans["disttrain"], spans["none"])


def test_the_bound_is_met_by_lanes_that_share_all_of_the_work():
    """An LLM of no time: lanes of 4 + 1 and 3 + 2, forward and backward. One that takes 3 of each microbatch on each
    rank, with a fill and a drain of 3 that no bound counts."""
    free, busy = (pipeline_of(made("encoders-first", spread(2), m), [1], llm=llm) for m, llm in ((4, 0.0), (8, 1.0)))
    seconds = {"eye": seconds_of([4.0, 3.0, 2.0, 1.0])}
    assert free.bound(seconds) == free.makespan(seconds, free.reorder(seconds, "best")) == 15
    seconds = {"eye": seconds_of([4.0] * 4 + [1.0] * 4)}
    assert busy.bound(seconds) == 3 * (4 + 4 + 1 + 1) + 8 * 3
    assert busy.makespan(seconds, busy.reorder(seconds, "best")) == busy.bound(seconds) + 3
