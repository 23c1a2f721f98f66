"""Reordering: the paper's algorithms by hand and against the simulator, and what every method keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmjax.data.reorder import METHODS, Effort, Pipeline, balanced, greedy, least_load, rows_of_ranks
from mmjax.data.reorder.chain import Chain
from mmjax.data.reorder.intervals import Intervals
from mmjax.data.reorder.partition import similar
from mmjax.data.reorder.search import Draws
from mmjax.schedule.ops import Op
from mmjax.schedule.schedules import one_f_one_b
from mmjax.schedule.simulate import Costs, simulate

steady = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
sizes_of = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 20.0]), min_size=1, max_size=14)


def seconds_of(forward, *, backward: float = 2.0, generator=None) -> dict[str, np.ndarray]:
    table = {"encoder": np.stack([np.array(forward), backward * np.array(forward)], axis=1)}
    if generator is not None:
        table["generator"] = np.stack([np.array(generator), backward * np.array(generator)], axis=1)
    return table


# ---- sharing among ranks ---------------------------------------------------------------------------------------------


def test_algorithm_1_makes_1_3_2_4_of_two_large_and_two_small_samples():
    """Figure 11 of the paper, where the first rank had both large samples."""
    assert greedy(np.array([2.0, 2.0, 1.0, 1.0]), [2, 2]) == [[0, 2], [1, 3]]


def test_algorithm_1_by_hand():
    """8 → rank 0; 7 → 1; 6 → 1 (7 < 8) = 13; 5 → 0 = 13; 4 → 0 (equal, by index) = 17; 1 → 1, which alone has room."""
    sizes = np.array([4.0, 8.0, 1.0, 6.0, 7.0, 5.0])
    assert greedy(sizes, [3, 3]) == [[1, 5, 0], [4, 3, 2]]


def test_a_full_rank_gets_no_more():
    sizes = np.array([9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert greedy(sizes, [3, 3]) == [[0, 4, 5], [1, 2, 3]]
    assert greedy(sizes, [4, 2]) == [[0, 3, 4, 5], [1, 2]]
    assert greedy(sizes[:4], [2, 2, 0]) == [[0, 3], [1, 2], []]


@st.composite
def shared(draw):
    rows = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    sizes = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.5, 20.0]), min_size=sum(rows), max_size=sum(rows)))
    return np.array(sizes), rows


@steady
@given(shared())
def test_ranks_get_their_rows_and_exchanges_never_raise_the_load(case):
    sizes, rows = case
    loads = {}
    for share in (greedy, balanced):
        groups = share(sizes, rows)
        assert [len(group) for group in groups] == rows
        assert sorted(itertools.chain(*groups)) == list(range(len(sizes)))
        loads[share] = max(sizes[group].sum() for group in groups)
    assert least_load(sizes, rows) <= loads[balanced] + 1e-9
    assert loads[balanced] <= loads[greedy] + 1e-9


def test_no_way_to_share_is_below_the_bound_and_it_can_be_met():
    for seed in range(6):
        sizes = np.random.default_rng(seed).lognormal(size=8)
        best = min(
            max(sizes[list(chosen)].sum(), sizes.sum() - sizes[list(chosen)].sum())
            for chosen in itertools.combinations(range(8), 4)
        )
        assert least_load(sizes, [4, 4]) <= best * (1 + 1e-12)
    assert least_load(np.array([10.0, 1, 1, 1]), [2, 2]) == 11
    assert least_load(np.array([5.0, 5, 5, 0]), [2, 2]) == 10


def test_balanced_comes_within_a_thousandth_of_the_bound_where_greedy_is_off():
    sizes = np.random.default_rng(1).lognormal(size=1920)
    for dp in (30, 60):
        rows = [1920 // dp] * dp
        off = {
            share: max(sizes[g].sum() for g in share(sizes, rows)) / least_load(sizes, rows)
            for share in (greedy, balanced)
        }
        assert off[balanced] < 1.001 and off[balanced] < off[greedy]


def test_a_sample_as_large_as_the_mean_rank_has_the_smallest_for_company():
    """20 + 1 is more than 9 + 8; then 7 + 4 is less than 6 + 5 and these four are shared by Alg. 1."""
    sizes = np.array([9.0, 20.0, 8.0, 7.0, 6.0, 1.0, 5.0, 4.0])
    assert similar(sizes, [[2, 2], [2, 2]]) == [[[1, 5], [0, 2]], [[3, 7], [4, 6]]]
    # Alone in their rows, samples go by size.
    assert similar(sizes, [[1, 1]] * 4) == [[[1], [0]], [[2], [3]], [[4], [6]], [[7], [5]]]
    # Of ranks with three rows, none and two, the large sample takes that with two: 30 + 1 is more than 9 + 8 + 7.
    sizes[1] = 30.0
    assert similar(sizes, [[3, 0, 2], [3, 0, 0]]) == [[[0, 2, 3], [], [1, 5]], [[4, 6, 7], [], []]]


@steady
@given(shared(), st.integers(1, 3))
def test_groups_of_similar_samples_have_their_rows_and_the_largest_first(case, count):
    sizes, rows = case
    sizes = np.concatenate([sizes] * count)
    groups = similar(sizes, [rows] * count)
    assert [[len(group) for group in of_group] for of_group in groups] == [rows] * count
    assert sorted(sample for of_group in groups for group in of_group for sample in group) == list(range(len(sizes)))
    largest = [max(sizes[sample] for group in of_group for sample in group) for of_group in groups]
    assert largest == sorted(largest, reverse=True)


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_algorithm_2_by_hand():
    """Encoder F of 1 to 7 and B of 0, then two LLM stages (p = 3) with F and B of 1.

    First comes 1, last 2 and 3. Interval 1 lasts 4, the first microbatch's way through the LLM and back, and takes two:
    4 is closest to half of it, then 5 to what is left. The encoder has run them at 10, and its backward of the first.
    The LLM's first stage does its F of the third from 10 to 11 and its B of the second to 12: interval 2 lasts 2 and
    takes 6; 7 is left.
    """
    pipeline = Chain(llm=2, forward=1.0, backward=1.0).pipeline(samples=7, microbatches=7, dp=1)
    order = pipeline.reorder(seconds_of([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], backward=0.0), "disttrain")
    assert [samples[0] for samples in order[0]] == [6, 3, 2, 1, 0, 5, 4]


def paper_order(chain: Chain, sizes_SX2: np.ndarray) -> list[int]:
    """Alg. 2 anew, with `simulate` as GETINTERVAL: unplaced microbatches take no time in the encoder."""
    count = len(sizes_SX2)
    pipeline = chain.pipeline(samples=count, microbatches=count, dp=1)
    schedule = pipeline.recurrence.schedule
    rank_ops = [op for op in schedule.for_rank(0) if op.kind in "FB"]
    chunks = len({op.stage for op in rank_ops})
    stages = sum(node.module == "encoder" for node in schedule.graph.stages)
    backwards = [op for op in rank_ops if op.kind == "B"]
    interval = {op: sum(o.kind == "B" for o in rank_ops[: rank_ops.index(op)]) for op in rank_ops if op.kind == "F"}
    rear = -(-(len(backwards) - 1 - max(interval.values())) // chunks)

    def volume(placed: list[int], number: int) -> float:
        seconds = dict(Costs.nominal(schedule.graph).seconds)
        for node in schedule.graph.stages:
            costs = (0.0, 0.0) if node.module == "encoder" else (chain.forward, chain.backward)
            seconds["F", node.name, False], seconds["B", node.name, False] = (
                value / chain._chunks("llm") for value in costs
            )
        overrides = {
            (kind, f"encoder.{stage}", False, place): sizes_SX2[sample][column] / stages
            for stage in range(stages)
            for place, sample in enumerate(placed)
            for column, kind in enumerate("FB")
        }
        overrides |= {key: 0.0 for key in overrides if key[3] >= len(placed)}
        timeline = simulate(
            schedule, Costs(seconds={k: v for k, v in seconds.items() if k[0] in "FB"}, overrides=overrides)
        )
        opens = rank_ops[0] if number == 0 else backwards[number - 1]
        return timeline.span(backwards[number])[0] - timeline.span(opens)[1]

    def mine(place: int) -> list[int]:
        return [number for op, number in interval.items() if op.microbatch == place]

    rising = sorted(range(count), key=lambda s: (sum(sizes_SX2[s]), s))
    placed, last = rising[:1], rising[1 : 1 + rear]
    left = sorted(set(range(count)) - {*placed, *last})
    while left:
        place = len(placed)
        end = place + 1
        while end < count - rear and min(mine(end)) <= min(mine(place)):
            end += 1
        numbers = {n for p in range(place, end) for n in mine(p)}
        room = sum(volume(placed, n) for n in numbers)
        for p in range(place, end):
            forward = chunks / stages
            picked = min(
                left, key=lambda s: (round(abs(sizes_SX2[s][0] * forward - room / (end - p)), 9), -sizes_SX2[s][0])
            )
            room -= sizes_SX2[picked][0] * forward
            placed.append(picked)
            left.remove(picked)
    return placed + last


@steady
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
    st.sampled_from([(1, 1, 1), (1, 3, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (2, 3, 2)]),
    st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]),
)
def test_algorithm_2_is_that_of_the_paper_by_the_simulator(forward, shape, schedule):
    encoder, llm, chunks = shape
    name = "interleaved" if chunks > 1 else schedule
    chain = Chain(encoder=encoder, llm=llm, chunks=chunks, schedule=name, forward=4.0, backward=8.0)
    sizes = np.stack([np.array(forward, float), 2.0 * np.array(forward)], axis=1)
    pipeline = chain.pipeline(samples=len(forward), microbatches=len(forward), dp=1)
    (order,) = pipeline.reorder({"encoder": sizes}, "disttrain")
    # Microbatches reach Alg. 2 from the largest to the smallest: of two that are as close, the larger is taken.
    assert [samples[0] for samples in order] == paper_order(chain, sizes)


def test_a_frozen_encoder_is_ordered_by_the_forwards_that_it_awaits():
    chain = Chain(llm=2)
    graph = chain.pipeline(samples=6, microbatches=6, dp=1).recurrence.schedule.graph
    stages = tuple(replace(n, backward=n.module == "llm", trainable=n.module == "llm") for n in graph.stages)
    edges = tuple(replace(edge, gradient=edge.src.startswith("llm")) for edge in graph.edges)
    frozen = replace(graph, stages=stages, edges=edges)
    costs = Costs.nominal(frozen)
    pipeline = Pipeline(one_f_one_b(frozen, 6, costs), costs, {"encoder": {"encoder.0": (1.0, 1.0)}}, [1])
    assert pipeline.recurrence.keys == (("F", "encoder.0"),)
    seconds = seconds_of([5.0, 1.0, 2.0, 3.0, 4.0, 0.5])
    spans = {method: pipeline.makespan(seconds, pipeline.reorder(seconds, method)) for method in METHODS}
    (order,) = pipeline.reorder(seconds, "disttrain")
    assert order[0] == (5,)
    every = np.array(list(itertools.permutations(range(6)))).T
    best = pipeline.recurrence.makespans(pipeline.sizes(seconds)[:, every]).min()
    assert best <= spans["best"] <= 1.01 * best and spans["best"] < spans["none"]


def test_the_lead_and_the_microbatches_kept_for_the_end():
    pipeline = Chain(llm=3).pipeline(samples=6, microbatches=6, dp=1)
    intervals = Intervals(pipeline.recurrence, "encoder.0", pipeline.units)
    assert (intervals.lead, intervals.rear) == ("encoder.0", 3)  # p - 1 of figure 12
    assert Op("F", "encoder.0", 0) in pipeline.recurrence.ops


# ---- whole orders ----------------------------------------------------------------------------------------------------


@st.composite
def steps(draw):
    dp, microbatches, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    encoder, chunks = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    chain = Chain(
        encoder=encoder,
        llm=draw(st.integers(2, 3)),
        generator=draw(st.integers(0, 1)),
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "eager-1f1b"])),
        forward=draw(st.sampled_from([0.0, 1.0, 3.0])),
        backward=draw(st.sampled_from([0.0, 2.0])),
    )
    samples = microbatches * rows
    drawn = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5, 6.0, 20.0]), min_size=samples, max_size=samples)
    seconds = seconds_of(draw(drawn), generator=draw(drawn) if chain.generator else None)
    pipeline = chain.pipeline(
        samples=samples,
        microbatches=microbatches,
        dp=dp,
        together=draw(st.booleans()),
        effort=Effort(cases=16, rounds=4),
    )
    return pipeline, seconds, (microbatches, rows, dp)


@steady
@given(steps())
def test_every_order_is_a_permutation_with_the_same_rows_and_best_never_loses(step):
    pipeline, seconds, (microbatches, rows, dp) = step
    spans = {}
    for method in METHODS:
        order = pipeline.reorder(seconds, method)
        assert order == pipeline.reorder(seconds, method)
        assert [[len(samples) for samples in rank] for rank in order] == [
            [rank_rows] * microbatches for rank_rows in rows_of_ranks(rows, dp)
        ]
        assert sorted(s for rank in order for samples in rank for s in samples) == list(range(microbatches * rows))
        spans[method] = pipeline.makespan(seconds, order)
        assert spans[method] >= pipeline.bound(seconds) * (1 - 1e-9)
        assert pipeline.loads(seconds, order).sum(axis=1).max() >= pipeline.least_load(seconds) * (1 - 1e-9)
    assert spans["best"] <= min(spans["disttrain"], spans["none"])


def test_a_makespan_is_that_of_the_simulator():
    """The simulator runs each rank by itself, or one pipeline whose microbatches cost as much as the largest rank's."""
    sizes = np.random.default_rng(0).lognormal(size=24)
    seconds = seconds_of(sizes)
    for together in (False, True):
        pipeline = Chain(llm=2).pipeline(samples=24, microbatches=4, dp=3, together=together)
        order = pipeline.reorder(seconds, "best")
        loads = np.array([[sum(sizes[s] for s in samples) for samples in rank] for rank in order])
        graph = pipeline.recurrence.schedule.graph
        base = {(k, n.name, False): s for n in graph.stages for k, s in (("F", 1.0), ("B", 2.0))}
        spans = []
        for load in [loads.max(axis=0)] if together else loads:
            overrides = {(k, "encoder.0", False, m): w * load[m] for k, w in (("F", 1), ("B", 2)) for m in range(4)}
            spans.append(simulate(pipeline.recurrence.schedule, Costs(seconds=base, overrides=overrides)).makespan)
        assert pipeline.makespan(seconds, order) == pytest.approx(max(spans), rel=1e-12)
        assert pipeline.loads(seconds, order) == pytest.approx(3 * loads)


def test_few_microbatches_are_ordered_within_a_percent_of_the_best_order_there_is():
    gaps = []
    for stages, microbatches in ((1, 7), (3, 6), (3, 7)):
        pipeline = Chain(llm=stages).pipeline(samples=microbatches, microbatches=microbatches, dp=1)
        every = np.array(list(itertools.permutations(range(microbatches)))).T
        for seed in range(6):
            sizes = np.random.default_rng(seed).lognormal(size=microbatches)
            seconds = seconds_of(sizes / sizes.mean())
            least = pipeline.recurrence.makespans(pipeline.sizes(seconds)[:, every]).min()
            gaps.append(pipeline.makespan(seconds, pipeline.reorder(seconds, "best")) / least - 1)
    assert min(gaps) > -1e-12
    assert np.mean(gaps) < 0.01


def test_a_skewed_batch_gains_what_is_promised():
    sizes = np.random.default_rng(1).lognormal(size=1920)
    pipeline = Chain(llm=11).pipeline(samples=1920, microbatches=64, dp=30)
    seconds = seconds_of(sizes / sizes.mean())
    spans = {method: pipeline.makespan(seconds, pipeline.reorder(seconds, method)) for method in METHODS}
    assert spans["none"] / spans["best"] > 1.15
    assert spans["disttrain"] / spans["best"] > 1.02
    assert pipeline.reorder(seconds, "best") == Chain(llm=11).pipeline(samples=1920, microbatches=64, dp=30).reorder(
        seconds, "best"
    )


def test_ranks_in_step_have_samples_of_a_size_in_one_microbatch():
    """Microbatches of one sample a rank: with the four sizes apart nobody waits; mixed, every microbatch costs 8."""
    sizes = [8.0, 1.0, 2.0, 4.0, 4.0, 8.0, 1.0, 2.0]
    pipeline = Chain(llm=1).pipeline(samples=8, microbatches=4, dp=2, together=True)
    order = pipeline.reorder(seconds_of(sizes), "best")
    assert [sizes[a[0]] == sizes[b[0]] for a, b in zip(*order, strict=True)] == [True] * 4


def test_draws_are_those_of_splitmix64():
    """The first numbers of the reference implementation for seed 0."""
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert Draws().below(1 << 62, 3).tolist() == [number % (1 << 62) for number in reference]


def test_rows_are_cut_as_the_packer_cuts_them_into_cells():
    assert rows_of_ranks(8, 4) == (2, 2, 2, 2)
    assert rows_of_ranks(5, 4) == (2, 2, 1, 0)
    assert rows_of_ranks(1, 2) == (1, 0)
