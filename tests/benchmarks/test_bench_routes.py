"""Bytes on the busiest link: counted as they would be by hand."""

from __future__ import annotations

import pytest

from benchmarks.routes import MIB, PAIRS, ROWS, TOKENS, WIDTH, bench_routes

WHOLE = ROWS * TOKENS * WIDTH * 2 / MIB


@pytest.fixture(scope="module")
def rows() -> dict[str, float]:
    found = list(bench_routes(1))
    assert all(row.ok for row in found)
    return {row.case: row.value for row in found}


def test_every_pair_has_routes_bytes_and_a_ratio(rows):
    assert len(rows) == 5 * len(PAIRS)


def test_leaders_carry_a_group_s_rows_and_slices_a_rank_s(rows):
    assert rows["dp2 tp2 → tp4, leader: busiest link"] == WHOLE  # all rows reach one leader
    assert rows["dp2 tp2 → tp4, sliced: busiest link"] == WHOLE / 4
    assert rows["dp3 tp2 → dp2 tp4, leader: busiest link"] == WHOLE / 2
    assert rows["dp3 tp2 → dp2 tp4, sliced: busiest link"] == WHOLE / 6  # a source rank's share is the larger one
    assert rows["dp8 → tp8: busiest link, sliced / leader"] == 1 / 8


def test_routes_are_all_that_the_cells_allow(rows):
    assert rows["dp3 tp2 → dp2 tp4, leader: routes"] == 6
    assert rows["dp3 tp2 → dp2 tp4, sliced: routes"] == 6 * 4
    assert rows["tp4 → dp4, sliced: routes"] == 4 * 4
