"""Assembly: settings of the configuration reach the parts that they are meant for."""

from __future__ import annotations

import pytest
from runs import write_tiny

from mmjax.config import load_config
from mmjax.mesh.routing import LeaderRouting, SlicedRouting
from mmjax.run.assembly import place


@pytest.mark.parametrize(
    ("settings", "kind", "routing"),
    [
        ((), "async", LeaderRouting),
        (("World.transport='collective'", "World.route='sliced'"), "rendezvous", SlicedRouting),
    ],
    ids=str,
)
def test_the_world_s_transport_and_route_reach_every_boundary(tmp_path, settings, kind, routing):
    """Vision, dp=2 on ranks 2-3, hands over to the LLM, tp=2 on ranks 0-1."""
    parts = place(load_config([write_tiny(tmp_path)], settings))
    (boundary,) = parts.placed.shapes(next(iter(parts.shapes.values()))).boundaries.values()
    assert boundary.kind == kind
    assert type(boundary.forward.routing) is routing
    assert {edge.transport for edge in parts.placed.graph.edges} == {kind}
