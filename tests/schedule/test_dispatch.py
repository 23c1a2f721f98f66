"""Dispatch tables: the paper's, cell by cell, and those of other schedules and placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage_graphs import chain, colocated, connect, frozen_encoder, stage, two_encoders

from mmjax.schedule.dispatch import dispatch_table
from mmjax.schedule.schedules import SCHEDULES, forward_only, make_schedule
from mmjax.schedule.simulate import Costs

FIGURE_14 = """
warm     | recv_fwd          |     | p2p |     | NC  | p2p | p2p
warm     | send_fwd          | p2p | NC  | NC  | p2p | p2p |
warm end | recv_fwd          |     | p2p |     | NC  | p2p | p2p
steady   | send_fwd recv_bwd | p2p | NC  | NC  | p2p | p2p |
steady   | send_bwd recv_fwd |     | p2p |     | NC  | p2p | p2p
cool     | recv_bwd          | p2p | NC  | NC  | p2p | p2p |
cool     | send_bwd          |     | p2p |     | NC  | p2p | p2p
"""
"""Karnati et al., figure 14; columns E1P0, E1P1, E2P0, L0, L1, L2."""


def _rows(graph, name: str = "1f1b", microbatches: int = 8) -> dict[tuple[str, str], tuple[str, ...]]:
    table = dispatch_table(make_schedule(name, graph, microbatches, Costs.nominal(graph)))
    return {(row.phase, row.call): row.cells for row in table.rows}


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1", "interleaved"])
def test_the_paper_s_topology_has_the_paper_s_table(name):
    expected = {}
    for line in FIGURE_14.strip().splitlines():
        phase, call, *cells = (cell.strip() for cell in line.split("|"))
        expected[phase, call] = tuple(cells)
    table = dispatch_table(make_schedule(name, two_encoders(), 8, Costs.nominal(two_encoders())))
    assert table.stages == ("one.0", "one.1", "two.0", "llm.0", "llm.1", "llm.2")
    assert table.ranks == ("0", "1", "2", "3", "4", "5")
    rows = _rows(two_encoders(), name)
    assert list(rows) == list(expected)
    for call, cells in expected.items():
        for stage_name, cell, right in zip(table.stages, rows[call], cells, strict=True):
            assert cell == right, f"{call} of {stage_name}"


def test_it_prints():
    graph = frozen_encoder()
    text = str(dispatch_table(make_schedule("1f1b", graph, 6, Costs.nominal(graph))))
    assert text.splitlines()[:4] == [
        "phase     schedule call      vision.0  llm.0  llm.1",
        "          ranks              8\u20139       0      1",
        "warm      recv_fwd                     NC     p2p",
        "warm      send_fwd           NC        p2p",
    ]


def test_nothing_comes_back_to_a_frozen_encoder():
    rows = _rows(frozen_encoder())
    assert rows["cool", "recv_bwd"] == ("", "p2p", "") and rows["cool", "send_bwd"] == ("", "", "p2p")
    assert rows["steady", "send_fwd recv_bwd"][0] == "" and rows["warm", "send_fwd"][0] == "NC"


def test_shared_ranks_are_local_and_a_stage_may_have_edges_of_both_kinds():
    assert set().union(*_rows(colocated(2)).values()) == {"", "local"}
    nodes = [stage("vision.0", (0, 1)), stage("audio.0", (7,)), stage("llm.0", (0,)), stage("llm.1", (1,))]
    pairs = [("vision.0", "llm.0"), ("audio.0", "llm.1"), ("llm.0", "llm.1")]
    rows = _rows(connect(nodes, pairs, "async"), "three-phase")
    assert rows["warm", "recv_fwd"] == ("", "", "local", "NC+p2p")
    assert rows["cool", "send_bwd"] == ("", "", "local", "NC+p2p")


def test_rows_are_those_of_the_schedule():
    graph = chain(3)
    assert ("steady", "send_bwd recv_fwd") not in _rows(graph, "gpipe")
    once = ["recv_fwd", "send_fwd recv_bwd", "recv_bwd", "send_bwd"]  # the last stage's only B is cool for its receiver
    assert [call for _, call in _rows(graph, microbatches=1)] == once
    forward = dispatch_table(forward_only(graph, 4, Costs.nominal(graph)))
    assert [(row.phase, row.call) for row in forward.rows] == [("warm", "recv_fwd"), ("warm", "send_fwd")]
    alone = dispatch_table(make_schedule("1f1b", chain(1), 4, Costs.nominal(chain(1))))
    assert alone.rows == ()


def test_every_schedule_has_a_table():
    for name in SCHEDULES:
        graph = replace(two_encoders(), ties=())
        assert _rows(graph, name)
