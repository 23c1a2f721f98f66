"""Rows of an op of several microbatches: their order, empty rows, and the cells that a process reads."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray
from mmjax.data.together import JoinedRows, Together, joined
from mmjax.data.types import EncoderSpec, SampleMeta


def numbered(microbatch: int, cells: int, rows: int) -> np.ndarray:
    """[rows, 2]: 1000 m + 100 c + r, and the same again."""
    values = [1000 * (microbatch + 1) + 100 * c + r for c in range(cells) for r in range(rows)]
    return np.repeat(np.array(values)[:, None], 2, axis=1)


@pytest.mark.parametrize(("dp", "size", "rows"), [(2, 3, 2), (4, 2, 3), (8, 3, 1), (8, 1, 2), (1, 2, 2), (3, 2, 2)])
def test_rows_lie_by_cell_then_by_microbatch(dp: int, size: int, rows: int) -> None:
    cells, together = 2, Together(microbatches=size, dp=dp)
    parts = [{"patches": numbered(m, cells, rows)} for m in range(size)]
    whole = joined(parts, cells, together)["patches"]
    per_cell = together.rows(rows, cells, size)
    assert whole.shape == (cells * size * per_cell, 2) and len(whole) % dp == 0
    assert per_cell == rows or (cells * size * rows) % dp, "no empty rows where dp divides"
    by_part = whole.reshape(cells, size, per_cell, 2)
    for m in range(size):
        for c in range(cells):
            assert np.array_equal(by_part[c, m, :rows], parts[m]["patches"][c * rows : (c + 1) * rows])
    assert not by_part[:, :, rows:].any()
    lines = JoinedRows([part["patches"] for part in parts], cells, per_cell)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            assert np.array_equal(lines[start:stop], whole[start:stop])
    assert np.array_equal(lines[1:3, 1:], whole[1:3, 1:])


@pytest.mark.parametrize(("dp", "count"), [(2, 3), (4, 3), (8, 5), (3, 4)])
def test_a_shard_reads_the_cells_that_it_needs(dp: int, count: int) -> None:
    """Arrays that hold only these cells give every shard its rows; without any one of them it has none."""
    cells, rows, together = 2, 2, Together(microbatches=2, dp=dp)
    for span in together.spans(count):
        per_cell = together.rows(rows, cells, len(span))
        whole = JoinedRows([numbered(m, cells, rows) for m in span], cells, per_cell)[:]
        size = len(whole) // dp
        for shard in range(dp):
            read = {m: together.cells_of(shard, cells, span, m) for m in span}
            here = slice(shard * size, (shard + 1) * size)

            def partial(wanted: dict[int, tuple[int, ...]], span: range = span, per_cell: int = per_cell) -> JoinedRows:
                arrays = []
                for m in span:
                    array = PartialArray.full(wanted[m], (cells * rows, 2), cells)
                    array.local_rows[:] = numbered(m, cells, rows)[array.rows]
                    arrays.append(array)
                return JoinedRows(arrays, cells, per_cell)

            assert np.array_equal(partial(read)[here], whole[here])
            if per_cell == rows:  # otherwise it may have nothing but empty rows of a cell
                for m in (m for m in span if read[m]):
                    with pytest.raises(IndexError):
                        partial({**read, m: read[m][1:]})[here]


def test_microbatches_of_an_op_share_a_bucket() -> None:
    spec = EncoderSpec(patch=1, buckets=((1, 4), (2, 4), (4, 4)))
    packer = Packer(encoders={"vision": spec}, sequence_length=16, microbatches=5, cells=1, pad=0)
    counts = (1, 2, 1, 1, 4)
    metas = [SampleMeta(tokens=8, weight=1.0, grids={"vision": ((2, 2),) * count}) for count in counts]
    assert [bucket["vision"] for bucket in packer.buckets(metas)] == [0, 1, 0, 0, 2]
    shared = Packer(**{**vars(packer), "together": {"vision": Together(microbatches=2, dp=4)}})
    assert [bucket["vision"] for bucket in shared.buckets(metas)] == [1, 1, 0, 0, 2]
    assert [part.bucket["vision"] for part in shared.plan(0, metas).microbatches] == [1, 1, 0, 0, 2]
    # Two, then 1 to 2 for the four ranks of dp, and 4 rows of 4 patches.
    assert shared.plan(0, metas).counts["vision_patches_padded"] == 4 * (2 * 2 + 2 * 2 + 4)
    assert shared.plan(0, metas).counts["llm_tokens_padded"] == 5 * 16, "no LLM row is added"
