"""Cells, routes and rounds: every row is carried once, between leaders, and the way back is the way there."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.mesh.routes import Cell, Placement, Route, cells, leader_routes, rounds, units

steady = settings(derandomize=True, deadline=None)

DEGREES = range(1, 9)
PAIRS = list(itertools.product(DEGREES, DEGREES))


@st.composite
def placements(draw, first: int):
    """Any stage with up to 8·3 ranks, scattered over a hundred from `first` on, so that ranks are no positions."""
    dp, width = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(first, first + 100)))[: dp * width]
    return Placement(tuple(ranks), dp)


def held(placement: Placement, total: int) -> dict[int, range]:
    """Units by rank, written down independently of `cells`."""
    per, width = total // placement.dp, len(placement.ranks) // placement.dp
    return {rank: range(i // width * per, i // width * per + per) for i, rank in enumerate(placement.ranks)}


def test_groups_are_neighbours_and_start_with_their_leader():
    placement = Placement((4, 5, 6, 7, 8, 9), 2)
    assert placement.width == 3
    assert placement.groups == ((4, 5, 6), (7, 8, 9))
    assert [placement.group(i) for i in range(2)] == list(placement.groups)
    assert [placement.leader(i) for i in range(2)] == [4, 7]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_cells_refine_both_splits_once(source, target):
    total, refinement = units(source, target), cells(source, target)
    assert total % source == total % target == 0
    assert [unit for cell in refinement for unit in range(cell.start, cell.stop)] == list(range(total))
    for cell in refinement:
        assert cell.start < cell.stop
        for unit in (cell.start, cell.stop - 1):
            assert unit * source // total == cell.source
            assert unit * target // total == cell.target
    pairs = [(cell.source, cell.target) for cell in refinement]
    assert len(set(pairs)) == len(pairs), "two cells of one pair are one cell"


def test_cells_of_known_cases():
    assert cells(4, 2) == (Cell(0, 1, 0, 0), Cell(1, 2, 1, 0), Cell(2, 3, 2, 1), Cell(3, 4, 3, 1))
    assert cells(2, 3) == (Cell(0, 2, 0, 0), Cell(2, 3, 0, 1), Cell(3, 4, 1, 1), Cell(4, 6, 1, 2))
    assert cells(3, 3) == (Cell(0, 1, 0, 0), Cell(1, 2, 1, 1), Cell(2, 3, 2, 2))


@steady
@given(placements(first=0), placements(first=200))
def test_every_unit_is_carried_once_by_somebody_who_holds_it_to_somebody_who_wants_it(source, target):
    total = units(source.dp, target.dp)
    has, wants = held(source, total), held(target, total)
    routes = leader_routes(source, target)
    for route in routes:
        assert set(range(route.start, route.stop)) <= set(has[route.source]) & set(wants[route.target])
    assert [unit for route in routes for unit in range(route.start, route.stop)] == list(range(total))


@steady
@given(placements(first=0), placements(first=200))
def test_only_leaders_send_and_receive(source, target):
    routes = leader_routes(source, target)
    width = len(source.ranks) // source.dp, len(target.ranks) // target.dp
    assert {route.source for route in routes} == set(source.ranks[:: width[0]])
    assert {route.target for route in routes} == set(target.ranks[:: width[1]])


@steady
@given(placements(first=0), placements(first=200))
def test_the_way_back_is_the_plan_of_the_opposite_boundary(source, target):
    routes = leader_routes(source, target)
    assert tuple(route.reversed() for route in routes) == leader_routes(target, source)
    assert tuple(route.reversed().reversed() for route in routes) == routes


@steady
@given(placements(first=0), placements(first=200))
def test_rounds_carry_the_same_units_and_are_partial_permutations(source, target):
    routes = leader_routes(source, target)
    expected = [(r.source, r.target, unit, unit + 1) for r in routes for unit in range(r.start, r.stop)]
    batches = rounds(routes)
    carried = [(r.source, r.target, r.start, r.stop) for batch in batches for r in batch]
    assert sorted(carried) == sorted(expected)
    for batch in batches:
        assert max(Counter(route.source for route in batch).values()) == 1
        assert max(Counter(route.target for route in batch).values()) == 1


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_rounds_are_as_few_as_the_busiest_rank_allows(source, target):
    """Fan-in or fan-out of k takes k rounds, equal dp one; one rank cannot carry two units in a round."""
    routes = leader_routes(Placement(tuple(range(source)), source), Placement(tuple(range(target)), target))
    total = units(source, target)
    assert len(rounds(routes)) == max(total // source, total // target)


def test_rounds_of_nothing_are_none():
    assert rounds(()) == ()
    assert rounds((Route(3, 3, 0, 2),)) == ((Route(3, 3, 0, 1),), (Route(3, 3, 1, 2),))
