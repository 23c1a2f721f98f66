"""Buckets that are chosen from the data: the least compute, against all choices; and room for the worst case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.buckets import Cells, cells_of, choose, compute, plan_some_steps, shortest_chain
from mmjax.data.config import PackingConfig
from mmjax.data.first_fit import rows_needed
from mmjax.data.packing import Packer
from mmjax.data.split import Split
from mmjax.data.types import EncoderSpec, SampleMeta

WIDTHS = (4, 6, 12)
drawn_cells = st.lists(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=5), min_size=2, max_size=2), min_size=1, max_size=8
)


def needs(cells, widths) -> np.ndarray:
    """Rows of each width that the fullest cell needs; more than there can be where a segment is wider."""
    largest = [max((n for cell in of_microbatch for n in cell), default=0) for of_microbatch in cells]
    rows = [[max(rows_needed(cell, width) for cell in of_microbatch) for width in widths] for of_microbatch in cells]
    return np.where(np.array(largest)[:, None] <= widths, rows, np.iinfo(np.int64).max)


def total(rows_NW, widths, buckets, pairs) -> float:
    """The total cost of the microbatches, each in the cheapest bucket that holds it."""
    fits = [[row[widths.index(w)] <= r for r, w in buckets] for row in rows_NW.tolist()]
    return sum(min(compute(b, pairs) for b, fit in zip(buckets, holds_row, strict=True) if fit) for holds_row in fits)


def serves(rows_NW, widths, bucket) -> frozenset[int]:
    return frozenset(np.flatnonzero(rows_NW[:, widths.index(bucket[1])] <= bucket[0]).tolist())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cells=drawn_cells, count=st.integers(1, 4), pairs=st.sampled_from([0.0, 0.01, 0.3]), one=st.booleans())
def test_the_choice_costs_what_the_best_of_all_choices_costs(cells, count, pairs, one):
    """Brute force agrees: over all sets of shapes of one width, or over the nested sets of several widths.

    In a nested set each shape holds whatever a cheaper one holds.
    """
    widths = WIDTHS[1:2] if one else WIDTHS
    rows_NW = needs(cells, widths)
    tops = [(-(-5 // (width // 6)), width) for width in widths if width >= 6]
    shapes = [(rows, width) for width in widths for rows in range(1, 6) if (rows, width) not in tops]
    chain = shortest_chain(rows_NW, widths, tops=tops, count=count, pairs=pairs)
    assert chain[-1] in tops and len(chain) <= count
    assert [compute(bucket, pairs) for bucket in chain] == sorted({compute(bucket, pairs) for bucket in chain})
    sets = (
        (*chosen, top)
        for top in tops
        for size in range(count)
        for chosen in itertools.combinations(shapes, size)
        if one or _nested(rows_NW, widths, sorted((*chosen, top), key=lambda b: compute(b, pairs)), top)
    )
    least = min(total(rows_NW, widths, buckets, pairs) for buckets in sets)
    assert total(rows_NW, widths, chain, pairs) == pytest.approx(least, rel=1e-12)


def _nested(rows_NW, widths, buckets, top) -> bool:
    served = [serves(rows_NW, widths, bucket) for bucket in buckets]
    return buckets[-1] == top and all(cheaper <= dearer for cheaper, dearer in itertools.pairwise(served))


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cells=drawn_cells, count=st.integers(1, 5), pairs=st.sampled_from([0.0, 0.05]), unit=st.sampled_from([1, 4]))
def test_more_buckets_never_cost_more_and_all_that_may_come_has_room(cells, count, pairs, unit):
    sizes = [[[unit * n for n in cell] for cell in of_microbatch] for of_microbatch in cells]
    wanted = Cells(sizes=sizes, largest=6 * unit, most=7, split=Split(unit=unit), pairs=pairs)
    fewer, chosen = choose(wanted, count), choose(wanted, count + 1)
    assert chosen == choose(wanted, count + 1)
    assert chosen.padding <= fewer.padding + 1e-12 and fewer.padding <= fewer.alone + 1e-12
    assert len(fewer.buckets) <= count and choose(wanted, 1).padding == choose(wanted, 1).alone
    assert all(width % unit == 0 for _, width in chosen.buckets)
    rows, width = chosen.buckets[-1]
    assert rows_needed([6 * unit] * 7, width) <= rows
    everything = sum(n + pairs * n * n for of_microbatch in sizes for cell in of_microbatch for n in cell)
    padded = 2 * sum(
        min(compute((r, w), pairs) for r, w in chosen.buckets if _holds(of_microbatch, r, w)) for of_microbatch in sizes
    )
    assert chosen.padding == pytest.approx(1 - everything / padded)


def _holds(cells, rows: int, width: int) -> bool:
    return all(max(cell, default=0) <= width and rows_needed(cell, width) <= rows for cell in cells)


def test_attention_decides_between_wide_and_narrow_rows():
    """Eight small images in one long row, or in rows of their own."""
    cells = Cells(sizes=[[[8] * 8]] * 3, largest=64, most=8)
    assert choose(cells, 2).buckets[0] in ((1, 64), (8, 8))
    assert choose(replace(cells, pairs=0.1), 2).buckets[0] == (8, 8)
    # A little attention: one row of 55 has less padding than rows of the three sizes.
    uneven = Cells(sizes=[[[10, 20, 25]]] * 3, largest=64, most=8, pairs=1e-6)
    assert choose(uneven, 2).buckets[0] == (1, 55)


def packer(**changes) -> Packer:
    spec = EncoderSpec(patch=2, buckets=((27, 12),))
    return replace(Packer(encoders={"vision": spec}, sequence_length=64, microbatches=2, cells=2, pad=0), **changes)


def meta(index: int) -> SampleMeta:
    return SampleMeta(tokens=1 + index % 7, weight=1.0, grids={"vision": ((1, 1 + index % 3),)} if index % 2 else {})


def test_steps_are_looked_at_in_the_run_s_own_order():
    """Eight samples a step, two microbatches of two cells: steps 0, 1, 3, 6, … in cells of two."""
    plans = plan_some_steps(packer(), meta, 8)
    assert len(plans) == 64
    for number, first in ((0, 0), (1, 8), (2, 24), (3, 48)):
        metas = [meta(first + i) for i in range(8)]
        want = [[[m.tokens for m in metas[4 * k + 2 * c :][:2]] for c in range(2)] for k in range(2)]
        assert cells_of(plans[number : number + 1], "llm", together=False) == want
        patches = [[n for m in metas[2 * c :][:2] for n in m.patches.get("vision", ())] for c in range(4)]
        media = [patches[:2], patches[2:]]
        assert cells_of(plans[number : number + 1], "vision", together=False) == media
        assert cells_of(plans[number : number + 1], "llm", together=True) == [[*want[0], *want[1]]]
    wide = packer(encoders={"vision": EncoderSpec(patch=2, buckets=((500, 12),))})
    assert [len(plan_some_steps(wide, meta, size)) for size in (200, 2000)] == [40, 16]


def test_wrong_numbers_of_buckets():
    for wrong in (0, -1, 65):
        with pytest.raises(ConfigError, match=rf"Packing\.buckets={wrong}: must be 1 to 64, such as 4"):
            PackingConfig(buckets=wrong)
    assert PackingConfig(buckets=4).given == () and PackingConfig(buckets=((1, 2),)).given == ((1, 2),)
