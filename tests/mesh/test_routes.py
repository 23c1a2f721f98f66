"""Routes, rounds and components: every row is carried once, by who holds it to who wants it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.mesh.routes import (
    Route,
    RowSharding,
    UnitGrid,
    components,
    leader_routes,
    peer_routes,
    rounds,
    sliced_routes,
    slices_received,
    slices_sent,
)

steady = settings(derandomize=True, deadline=None)

DEGREES = range(1, 9)
PAIRS = list(itertools.product(DEGREES, DEGREES))


@st.composite
def shardings(draw, first: int):
    """Any stage with up to 8·3 ranks, scattered over a hundred from `first` on, so that ranks are no positions."""
    dp, width = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(first, first + 100)))[: dp * width]
    return RowSharding(tuple(ranks), dp)


def replica(sharding: RowSharding, rank: int) -> tuple[int, int]:
    """Interval and number within the group of a rank."""
    return divmod(sharding.ranks.index(rank), len(sharding.ranks) // sharding.dp)


@pytest.mark.parametrize("record", [RowSharding((0, 1), 2), Route(0, 1, 0, 1)])
def test_plans_cannot_be_changed(record):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, 9)


def test_groups_are_neighbours_and_start_with_their_leader():
    sharding = RowSharding((4, 5, 6, 7, 8, 9), 2)
    assert sharding.width == 3
    assert sharding.groups == ((4, 5, 6), (7, 8, 9))
    assert [sharding.group(i) for i in range(2)] == list(sharding.groups)
    assert [sharding.leader(i) for i in range(2)] == [4, 7]


def test_a_group_has_the_ranks_of_every_copy():
    sharding = RowSharding((3, 4, 5, 6, 7, 8, 9, 10), 2, 2)
    assert sharding.width == 4
    assert sharding.groups == ((3, 4, 7, 8), (5, 6, 9, 10))
    assert sharding.leader(1) == 5
    peers = peer_routes(sharding, RowSharding((11, 12, 13, 14, 15, 16, 17, 18), 2))
    assert [(r.source, r.target) for r in peers[:3]] == [(3, 11), (4, 12), (7, 13)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_units_are_the_fewest_intervals_that_make_up_both_splits(source, target):
    counts = [n for n in range(1, source * target + 1) if n % source == n % target == 0]
    ends = RowSharding(tuple(range(source)), source), RowSharding(tuple(range(target)), target)
    assert UnitGrid.between(*ends) == UnitGrid(counts[0], 1)


# ---- who sends what to whom ------------------------------------------------------------------------------------------


def unit_sent(route: Route, source: RowSharding, total: int, share: int = 1) -> int:
    """The unit that a route's piece is cut from."""
    per = total // source.dp
    assert route.source_piece in range(per * share)
    return replica(source, route.source)[0] * per + route.source_piece // share


def unit_kept(route: Route, target: RowSharding, total: int, share: int = 1) -> int:
    """The unit that a route's piece is joined into."""
    per = total // target.dp
    assert route.target_piece in range(per * share)
    return replica(target, route.target)[0] * per + route.target_piece // share


@steady
@given(shardings(first=0), shardings(first=200))
def test_leaders_hand_every_unit_once_to_leaders_in_row_order(source, target):
    total, routes = math.lcm(source.dp, target.dp), leader_routes(source, target)
    assert [unit_sent(route, source, total) for route in routes] == list(range(total))
    assert [unit_kept(route, target, total) for route in routes] == list(range(total))
    assert {replica(source, route.source)[1] for route in routes} == {0}
    assert {replica(target, route.target)[1] for route in routes} == {0}


def test_leader_routes_of_known_cases():
    assert leader_routes(RowSharding((0, 1, 2, 3), 2), RowSharding((4, 5, 6), 3)) == (
        Route(0, 0, 4, 0),
        Route(0, 1, 4, 1),
        Route(0, 2, 5, 0),
        Route(2, 0, 5, 1),
        Route(2, 1, 6, 0),
        Route(2, 2, 6, 1),
    )


def test_a_copy_serves_the_leaders_in_it_and_the_first_one_all_others():
    copies, stage = RowSharding((3, 4, 5, 6, 7, 8, 9, 10), 2, 2), RowSharding((7, 8, 9, 10), 1)
    assert leader_routes(copies, stage) == (Route(7, 0, 7, 0), Route(9, 0, 7, 1))
    assert leader_routes(stage, copies) == (Route(7, 0, 3, 0), Route(7, 1, 5, 0))
    assert leader_routes(copies, RowSharding((0, 6), 2)) == (Route(3, 0, 0, 0), Route(5, 0, 6, 0))
    assert [copies.copy_of(rank) for rank in (2, 3, 6, 7, 10, 11)] == [0, 0, 0, 1, 1, 0]


@steady
@given(shardings(first=0), shardings(first=200))
def test_the_leaders_way_back_is_the_plan_of_the_opposite_boundary(source, target):
    back = [
        Route(route.target, route.target_piece, route.source, route.source_piece)
        for route in leader_routes(source, target)
    ]
    assert tuple(back) == leader_routes(target, source)


@steady
@given(shardings(first=0), shardings(first=200))
def test_every_slice_of_every_unit_reaches_its_rank_once_and_senders_take_turns(source, target):
    total, sent, kept = math.lcm(source.dp, target.dp), slices_sent(source, target), slices_received(source, target)
    found = Counter()
    for route in sliced_routes(source, target):
        unit, (_, sender), (_, receiver) = (
            unit_sent(route, source, total, sent),
            replica(source, route.source),
            replica(target, route.target),
        )
        assert unit_kept(route, target, total, kept) == unit
        number = route.source_piece % sent * source.width + sender  # of the slice, as senders number theirs
        assert number == receiver * kept + route.target_piece % kept  # and as receivers do
        found[unit, number] += 1
    assert found == Counter({(unit, j): 1 for unit in range(total) for j in range(target.width * kept)})


@steady
@given(shardings(first=0), shardings(first=200))
def test_every_rail_works_in_the_sliced_route(source, target):
    routes = sliced_routes(source, target)
    assert {route.source for route in routes} == set(source.ranks)
    assert {route.target for route in routes} == set(target.ranks)
    for load in (
        Counter((r.source, r.source_piece) for r in routes),
        Counter((r.target, r.target_piece) for r in routes),
    ):
        assert set(load.values()) == {1}


def test_sliced_routes_of_known_cases():
    assert sliced_routes(RowSharding((0, 1), 1), RowSharding((4, 5, 6), 1)) == (
        Route(0, 0, 4, 0),
        Route(1, 0, 5, 0),
        Route(0, 1, 6, 0),
    )
    assert sliced_routes(RowSharding((0, 1, 2, 3), 2), RowSharding((4, 5), 1)) == (
        Route(0, 0, 4, 0),
        Route(1, 0, 5, 0),
        Route(2, 0, 4, 1),
        Route(3, 0, 5, 1),
    )
    assert sliced_routes(RowSharding((0, 1, 2), 1), RowSharding((4, 5), 1)) == (
        Route(0, 0, 4, 0),
        Route(1, 0, 4, 1),
        Route(2, 0, 5, 0),
        Route(0, 1, 5, 1),
    )


def test_slices_of_a_rank_are_its_share_rounded_up():
    pairs = {(1, 1): (1, 1), (1, 4): (4, 1), (4, 1): (1, 4), (2, 4): (2, 1), (4, 2): (1, 2), (2, 3): (2, 1)}
    pairs |= {(3, 7): (3, 1), (3, 2): (2, 2), (7, 3): (2, 3)}
    for (source, target), expected in pairs.items():
        ends = RowSharding(tuple(range(source)), 1), RowSharding(tuple(range(target)), 1)
        assert (slices_sent(*ends), slices_received(*ends)) == expected


def test_peers_pair_up_in_rank_order():
    peers = peer_routes(RowSharding((0, 1, 2, 3), 2), RowSharding((7, 4, 5, 6), 2))
    assert peers == (Route(0, 0, 7, 0), Route(1, 0, 4, 0), Route(2, 0, 5, 0), Route(3, 0, 6, 0))
    with pytest.raises(ValueError):
        peer_routes(RowSharding((0, 1, 2, 3), 2), RowSharding((4, 5), 2))


# ---- rounds ----------------------------------------------------------------------------------------------------------


def busiest(routes) -> int:
    """Most routes that one rank sends or receives by."""
    ends = Counter(("from", route.source) for route in routes) + Counter(("to", route.target) for route in routes)
    return max(ends.values(), default=0)


def check_rounds(routes) -> None:
    """All routes once; no rank twice in a round; as few rounds as one rank, which cannot do two things, allows."""
    batches = rounds(routes)
    assert Counter(route for batch in batches for route in batch) == Counter(routes)
    assert all(busiest(batch) == 1 for batch in batches)
    assert len(batches) == busiest(routes)


@steady
@given(shardings(first=0), shardings(first=200), st.sampled_from((leader_routes, sliced_routes)))
def test_rounds_of_boundaries(source, target, make):
    check_rounds(make(source, target))


@steady
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(4, 10)), max_size=40))
def test_rounds_of_any_routes(pairs):
    check_rounds([Route(source, i, target, i) for i, (source, target) in enumerate(pairs)])


def test_rounds_of_nothing_are_none():
    assert rounds(()) == ()
    stays = Route(3, 0, 3, 0), Route(3, 1, 3, 1)
    assert rounds(stays) == tuple((route,) for route in stays)


def test_a_round_is_in_the_order_in_which_its_senders_first_appear():
    """Every process makes the same program of it."""
    first, second, third, last = Route(5, 0, 2, 0), Route(1, 0, 0, 0), Route(1, 1, 2, 1), Route(5, 1, 0, 1)
    assert rounds((first, second, third, last)) == ((first, second), (last, third))


# ---- components ------------------------------------------------------------------------------------------------------


@steady
@given(shardings(first=0), shardings(first=50), st.sampled_from((leader_routes, sliced_routes)))
def test_components_are_what_cannot_be_told_apart(source, target, make):
    """Ranks 50 to 99 may be on both sides."""
    routes = make(source, target)
    parts = components(routes, target)
    assert Counter(route for part in parts for route in part) == Counter(routes)
    ranks = [{rank for route in part for rank in (route.source, route.target)} for part in parts]
    assert sum(len(part) for part in ranks) == len(set().union(*ranks)), "two share a rank"
    assert [min(part) for part in ranks] == sorted(min(part) for part in ranks)
    receives = {route.target for route in routes}
    for one, other in itertools.combinations(ranks, 2):
        for group in target.groups:
            assert not (one & receives & set(group) and other & receives & set(group)), "two share a group"


@steady
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_disjoint_stages_fall_apart_where_both_splits_have_an_edge(source_dp, target_dp, width, other):
    """Both splits of the rows have an edge in common at multiples of 1 / gcd."""
    source = RowSharding(tuple(range(source_dp * width)), source_dp)
    target = RowSharding(tuple(range(100, 100 + target_dp * other)), target_dp)
    for make in (leader_routes, sliced_routes):
        parts = components(make(source, target), target)
        assert len(parts) == math.gcd(source_dp, target_dp)
        assert len({len(part) for part in parts}) == 1


def test_components_of_known_cases():
    source, target = RowSharding((0, 1, 2, 3), 2), RowSharding((4, 5, 6, 7), 2)
    peers = peer_routes(source, target)
    assert components(peers, target) == (peers[:2], peers[2:])
    assert components(peers[::-1], target) == (peers[1::-1], peers[:1:-1])
    assert components((), target) == ()
    # Rank 1 sends to 7, and is an idle replica in the first target group: nothing joins the two routes.
    target = RowSharding((6, 1, 7, 5), 2)
    apart = Route(0, 0, 6, 0), Route(1, 0, 7, 0)
    assert components(apart, target) == ((apart[0],), (apart[1],))
    # Three routes of which the last joins the others.
    chain = Route(0, 0, 8, 0), Route(1, 0, 9, 0), Route(0, 1, 9, 1)
    assert components(chain, RowSharding((8, 9), 2)) == (chain,)
