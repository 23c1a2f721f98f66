"""Tokens of rows over ranks of context parallelism: which go where, and what points at them afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.attention.distribution import METHODS
from mmjax.attention.mask import Mask
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows
from mmjax.data.split import (
    BLOCK,
    FEWEST,
    UNSPLIT,
    Pointers,
    Split,
    busiest_over_mean,
    put_in_order,
    restored,
)
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import CP_TOKENS

CAUSAL, FULL = (1, Mask("causal")), (1, Mask("full"))
SEGMENTS = np.array([[1] * 11 + [2] * 20 + [0] * 5, [1] * 3 + [2] * 2 + [3] * 31], np.int32)


def test_work_is_that_of_all_layers() -> None:
    (row,) = SEGMENTS[:1]
    each = [Split(ranks=2, masks=(mask,)).pairs({"segments": row}) for mask in (CAUSAL, FULL)]
    both = Split(ranks=2, masks=(CAUSAL, (3, FULL[1]))).pairs({"segments": row})
    np.testing.assert_array_equal(each[0][:11], np.arange(1, 12))
    np.testing.assert_array_equal(each[1], np.where(row > 0, np.bincount(row)[row], 0))
    np.testing.assert_array_equal(both, each[0] + 3 * each[1])


def test_layouts_name_distributions_of_equal_tokens() -> None:
    assert set(CP_TOKENS) == set(METHODS) - {"lpt-by-work", "exact"} | {
        "segments"
    }  # one gives ranks unequal numbers, one takes long


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4000), st.integers(1, 7), st.sampled_from([1, 4, 6]), st.sampled_from(sorted(CP_TOKENS)), st.data()
)
def test_ranks_have_equally_many_tokens_in_whole_blocks(
    width: int, ranks: int, unit: int, method: str, data: Any
) -> None:
    split = Split(ranks=ranks, unit=unit, token=unit, method=method, masks=(CAUSAL,))
    wide = split.rounded(width)
    assert width <= wide < width + ranks * max(unit, BLOCK) and wide % (ranks * unit) == 0
    assert split.rounded(wide) == wide
    if not split.permutes:
        return
    assert wide % (ranks * split.block(wide)) == 0 and split.block(wide) % unit == 0
    segments = np.sort(np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 4, (1, wide)), axis=1)
    order = split.order_of_row({"segments": segments[0]})
    np.testing.assert_array_equal(np.sort(order), np.arange(wide))
    starts = order.reshape(-1, unit)
    np.testing.assert_array_equal(starts - starts[:, :1], np.broadcast_to(np.arange(unit), starts.shape))
    np.testing.assert_array_equal(starts[:, 0] % unit, 0)


@pytest.mark.parametrize(
    ("split", "width", "rounded"),
    [
        (Split(), 577, 584),  # CLIP-L at 336 pixels, with its class token
        (Split(), 584, 584),
        (Split(), 127, 127),  # a short row
        (Split(), 129, 136),
        (Split(ranks=2), 577, 592),
        (Split(unit=4, token=4), 572, 576),
        (Split(unit=9, token=9), 577, 585),  # multiples of 72 would be too much padding
        (Split(unit=9, token=9), 1200, 1224),
    ],
)
def test_long_rows_suit_products(split: Split, width: int, rounded: int) -> None:
    assert split.rounded(width) == rounded


def test_work_is_balanced_where_blocks_are_many() -> None:
    split = Split(ranks=4, method="lpt", masks=(CAUSAL,))
    row = {"segments": np.ones(4 * FEWEST * BLOCK, np.int32)}
    load = split.pairs(row)[split.order_of_row(row)].reshape(4, -1).sum(axis=1)
    runs = split.pairs(row).reshape(4, -1).sum(axis=1)
    assert load.max() / load.mean() < 1.001 < 1.7 < runs.max() / runs.mean()


def media(sizes: list[int], width: int) -> dict[str, np.ndarray]:
    """A row of media of these sizes, with padding behind them."""
    segments = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return {"segments": np.pad(segments, (0, width - len(segments))).astype(np.int32)}


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.sampled_from([1, 4]), st.data())
def test_whole_media_stay_on_a_rank_where_they_fit(ranks: int, token: int, data: Any) -> None:
    split = Split(ranks=ranks, unit=token, token=token, method="segments", masks=(FULL,))
    sizes = [token * size for size in data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))]
    width = split.rounded(data.draw(st.integers(sum(sizes), 2 * sum(sizes))))
    row = media(sizes, width)
    order = split.order_of_row(row)
    np.testing.assert_array_equal(np.sort(order), np.arange(width))
    np.testing.assert_array_equal(order[::token] % token, 0)
    parts = row["segments"][order].reshape(ranks, -1)
    where = [set(np.flatnonzero((parts == number).any(axis=1))) for number in range(1, len(sizes) + 1)]
    if max(map(len, where)) > 1:  # they do not fit: by blocks, as lpt does
        plain = Split(ranks=ranks, unit=token, method="lpt", masks=(FULL,))
        np.testing.assert_array_equal(order, plain.order_of_row(row))
        return
    assert all((np.diff(order.reshape(ranks, -1)[rank][part > 0]) > 0).all() for rank, part in enumerate(parts))
    load = split.pairs(row)[order].reshape(ranks, -1).sum(axis=1)
    inputs = {"segments": PartialArray((0,), (1, width), 1, row["segments"][None])}
    np.testing.assert_array_equal(split.work(inputs)[0], load)


@pytest.mark.parametrize(
    ("sizes", "width", "work"),
    [
        ([4] * 8, 32, [32] * 4),  # equal ones in turn
        ([8, 4, 4, 8, 4, 4], 32, [64, 64, 32, 32]),
        ([4, 8, 4, 8], 32, [64, 64, 16, 16]),  # the least loaded rank, and padding fills it up
        ([16, 4, 4], 32, None),  # a medium that no rank has room for
        ([5, 5, 5, 5, 5], 32, None),  # five of them on four ranks of eight positions
    ],
)
def test_the_largest_medium_first_to_the_least_loaded_rank(sizes: list[int], width: int, work: Any) -> None:
    row, masks = media(sizes, width), (FULL,)
    segments, blocks = (Split(ranks=4, method=method, masks=masks) for method in ("segments", "lpt"))
    load = segments.pairs(row)[segments.order_of_row(row)].reshape(4, -1).sum(axis=1)
    wanted = work or segments.pairs(row)[blocks.order_of_row(row)].reshape(4, -1).sum(axis=1)
    np.testing.assert_array_equal(np.sort(load), np.sort(wanted))


def test_media_of_broken_tokens_are_given_by_blocks() -> None:
    row = media([6, 8, 8, 6], 32)
    by_segments, by_blocks = (
        Split(ranks=2, unit=4, token=4, method=method, masks=(FULL,)) for method in ("segments", "lpt")
    )
    np.testing.assert_array_equal(by_segments.order_of_row(row), by_blocks.order_of_row(row))


def test_many_media_are_balanced_and_few_are_not() -> None:
    sizes = np.random.default_rng(0).integers(60, 260, 48)
    split = Split(ranks=4, method="segments", masks=(FULL,))
    for count, least, most in ((48, 1, 1.05), (5, 1.2, 2)):
        row = media(sizes[:count].tolist(), split.rounded(2 * int(sizes[:count].sum())))
        work = split.work({"segments": PartialArray((0,), (1, len(row["segments"])), 1, row["segments"][None])})
        assert least <= busiest_over_mean(work) < most


SPEC = EncoderSpec(patch=2, merge=2, buckets=((2, 16),))
CELLS = 2


def arrays(cells: tuple[int, ...] = (0, 1)) -> dict[str, dict[str, PartialArray]]:
    """Inputs of two cells, of which some rows are held, with numbers that tell where a token stood."""
    rng = np.random.default_rng(0)
    # One LLM row of 12 tokens a cell, two encoder rows of 16 patches, which are 4 tokens each.
    rows = {"llm": (1, 12), "vision": (2, 16)}
    numbered = lambda n, w, *trailing: np.arange(CELLS * n * w).reshape(CELLS * n, w)  # noqa: E731
    index = np.full((2, 12), -1)
    index[0, [1, 2, 7]], index[1, [0, 11]] = (0, 7, 3), (4, 5)
    index[1, 4] = -2
    named = {
        "llm": {"segments": 1 + rng.integers(0, 2, (2, 12)).cumsum(axis=1) // 6, "tokens": numbered(1, 12)},
        "vision": {"segments": np.sort(rng.integers(0, 3, (4, 16)), axis=1), "patches": numbered(2, 16)},
    }
    named["llm"]["vision_index"] = index
    by_module: dict[str, dict[str, PartialArray]] = {}
    for module, by_name in named.items():
        per_cell = rows[module][0]
        by_module[module] = {}
        for name, values in by_name.items():
            present = (0, 1) if name == "segments" else cells
            rows_of_cells = np.concatenate([values[cell * per_cell : (cell + 1) * per_cell] for cell in present])
            by_module[module][name] = PartialArray(present, values.shape, CELLS, rows_of_cells.astype(np.int32))
    return by_module


SPLITS = {
    "llm": Split(ranks=3, method="random", masks=(CAUSAL,)),
    "vision": Split(ranks=2, unit=4, method="striped", masks=(FULL,)),
}
POINTERS = (Pointers(module="llm", name="vision_index", source="vision", together=4),)


@pytest.mark.parametrize("cells", [(0, 1), (1,)])
def test_tokens_keep_what_belongs_to_them(cells: tuple[int, ...]) -> None:
    before, after = arrays(cells), put_in_order(arrays(cells), SPLITS, POINTERS, CELLS, None)
    order, patches = np.asarray(after["llm"]["order"]), np.asarray(after["vision"]["patches"])
    moved = 0
    for row in (0, 1):
        assert (order[row] != np.arange(12)).any()
        if row not in cells:
            continue
        for place, stood in enumerate(order[row]):
            assert after["llm"]["tokens"][row : row + 1][0, place] == before["llm"]["tokens"][row : row + 1][0, stood]
            old, new = (
                np.asarray(inputs["llm"]["vision_index"])[row, at] for inputs, at in ((before, stood), (after, place))
            )
            if old < 0:
                assert new == old
                continue
            # The same four patches, wherever the token is now.
            (old_row, old_at), (new_row, new_at) = divmod(old, 4), divmod(new, 4)
            was = np.asarray(before["vision"]["patches"])[2 * row + old_row, 4 * old_at : 4 * old_at + 4]
            now = patches[2 * row + new_row, 4 * new_at : 4 * new_at + 4]
            np.testing.assert_array_equal(now, was)
            moved += old != new
    assert moved


def test_a_module_may_stay_whole_and_has_an_order_all_the_same() -> None:
    after = put_in_order(arrays(), SPLITS, POINTERS, CELLS, None, frozenset({"llm"}))
    np.testing.assert_array_equal(np.asarray(after["llm"]["order"]), np.tile(np.arange(12), (2, 1)))
    np.testing.assert_array_equal(np.asarray(after["llm"]["tokens"]), np.asarray(arrays()["llm"]["tokens"]))
    assert (np.asarray(after["llm"]["vision_index"]) != np.asarray(arrays()["llm"]["vision_index"])).any()


def test_only_the_wanted_rows_have_an_order() -> None:
    process_rows = ProcessRows(cells={"llm": {"order": (1,)}})
    after = put_in_order(arrays((1,)), SPLITS, POINTERS, CELLS, process_rows)
    assert after["llm"]["order"].cells == (1,) and after["vision"]["order"].cells == ()


def test_each_rank_has_a_run_of_a_condition_and_of_a_picture() -> None:
    """Arrays of all places are put in that order; those of one kind of place lie so already."""
    split = Split(ranks=2, front=4, masks=((1, Mask("full")),))
    assert not split.permutes and split.rounded(13) == 14
    values = {"segments": np.ones((1, 12), int), "positions": np.arange(12)[None], "index": np.arange(4)[None]}
    values |= {"patches": np.arange(8)[None], "times": np.arange(8.0)[None]}
    values["segments"][0, 10:] = 0
    inputs = {"painter": {name: PartialArray((0,), array.shape, 1, array) for name, array in values.items()}}
    after = put_in_order(inputs, {"painter": split}, (), 1, None)["painter"]
    assert after.keys() == values.keys()
    np.testing.assert_array_equal(after["positions"].local_rows, [[0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]])
    np.testing.assert_array_equal(after["segments"].local_rows, [[1] * 10 + [0] * 2])
    for name in ("index", "patches", "times"):
        np.testing.assert_array_equal(after[name].local_rows, values[name])
    np.testing.assert_array_equal(split.work({"segments": inputs["painter"]["segments"]}), [[60, 40]])


def test_values_come_back_to_where_their_tokens_stood() -> None:
    rng = np.random.default_rng(0)
    values, order = rng.normal(size=(3, 6, 2)), np.argsort(rng.random((3, 6)), axis=1)
    np.testing.assert_array_equal(restored(np.take_along_axis(values, order[..., None], axis=1), order), values)


def test_a_packer_widens_its_rows() -> None:
    packer = Packer(
        encoders={"vision": SPEC}, sequence_length=20, microbatches=1, cells=1, pad=0, text=((2, 20), (1, 40))
    )
    wide = packer.split_over({"llm": Split(ranks=3, method="lpt", masks=(CAUSAL,))})
    assert wide.text == ((2, 21), (1, 42)) and wide.encoders == packer.encoders
    assert packer.split_over({"vision": Split(ranks=3, unit=4)}).encoders["vision"].buckets == ((2, 24),)
    assert replace_text(wide).plan_microbatch([], 1).llm.width == 21


def replace_text(packer: Packer) -> Packer:
    """The packer with a row for each sample."""
    return Packer(**{**vars(packer), "text": ()})


@pytest.mark.parametrize("method", sorted(CP_TOKENS))
def test_work_of_ranks_is_that_of_their_tokens(method: str) -> None:
    split = Split(ranks=4, method=method, masks=(CAUSAL,))
    segments = np.repeat([[1, 2, 2, 3], [1, 1, 1, 0]], 64, axis=1)
    rows = {"segments": PartialArray((0,), segments.shape, 1, segments)}
    work, order = split.work(rows), np.tile(np.arange(256), (2, 1))
    if split.permutes:
        order = split.order(rows)
    for row, segments_T in enumerate(segments):
        keys = np.array(
            [(segments_T[: at + 1] == segment).sum() if segment else 0 for at, segment in enumerate(segments_T)]
        )[order[row]]
        np.testing.assert_array_equal(work[row], keys.reshape(4, -1).sum(axis=1))
    assert busiest_over_mean(work) == pytest.approx(work.max(axis=1).sum() / (work.sum() / 4))


def test_imbalance_of_a_causal_row() -> None:
    """Of n runs the last sees (2n - 1)/n of the mean; where work is balanced there is nearly none."""
    runs, balanced = (Split(ranks=4, method=method, masks=(CAUSAL,)) for method in ("contiguous", "lpt"))
    assert runs.imbalance(4096) == pytest.approx(7 / 4, rel=1e-3) and 1 <= balanced.imbalance(4096) < 1.01
    assert Split(ranks=4, masks=(FULL,)).imbalance(4096) == UNSPLIT.imbalance(4096) == 1
