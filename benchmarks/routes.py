"""Traffic of boundaries: number of routes, and bytes on the busiest link, for the leader and the sliced route.

Counted from the routes and pieces of one activation, forward and backward. A link is one direction of a rank's NIC, of
which each rank has its own. Traffic within a tp·cp group is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mmjax.bench.rows import Row, at_least, at_most
from mmjax.mesh.layout import Layout
from mmjax.mesh.routing import Routing, make_routing
from mmjax.mesh.world import World

ROWS, TOKENS, WIDTH = 24, 576, 4096
"""Shape of the activation: LLaVA-1.5's images, in bfloat16."""
PAIRS = (
    (Layout(tp=4), Layout(tp=4, rank_offset=4)),
    (Layout(tp=2, dp=2), Layout(tp=4, rank_offset=4)),
    (Layout(tp=4), Layout(tp=2, dp=2, rank_offset=4)),
    (Layout(dp=4), Layout(tp=4, rank_offset=4)),
    (Layout(tp=4), Layout(dp=4, rank_offset=4)),
    (Layout(tp=2, dp=3), Layout(tp=4, dp=2, rank_offset=6)),
    (Layout(dp=8), Layout(tp=8, rank_offset=8)),
)
MIB = 2**20


def bench_routes(rounds: int) -> Iterator[Row]:
    """Yields routes and bytes of the boundaries between the pairs. ``rounds`` is not used: nothing is timed."""
    del rounds
    world = World.planned(16)
    for first, second in PAIRS:
        case = f"{_short(first)} → {_short(second)}"
        busiest = {}
        for route in ("leader", "sliced"):
            routings = [_routing(world, route, *pair) for pair in ((first, second), (second, first))]
            busiest[route] = max(_busiest(way) for way in routings)
            least = min(len(way.routes) for way in routings)
            yield Row(
                bench="routes",
                case=f"{case}, {route}: routes",
                value=least,
                unit="",
                target=at_least(math.gcd(first.dp, second.dp)),
            )
            yield Row(bench="routes", case=f"{case}, {route}: busiest link", value=busiest[route] / MIB, unit="MiB")
        ratio = busiest["sliced"] / busiest["leader"]
        yield Row(
            bench="routes", case=f"{case}: busiest link, sliced / leader", value=ratio, unit="ratio", target=at_most(1)
        )


def _routing(world: World, route: str, source: Layout, target: Layout) -> Routing:
    aval = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.bfloat16)
    stages = world.submesh(source, 0), world.submesh(target, 0)
    return make_routing(route, name="bench", source=stages[0], target=stages[1], aval=aval)


def _busiest(routing: Routing) -> int:
    """Bytes on the busiest link."""
    size = math.prod(routing.piece) * routing.aval.dtype.itemsize
    links = Counter(("out", r.source) for r in routing.routes) + Counter(("in", r.target) for r in routing.routes)
    return size * max(links.values())


def _short(layout: Layout) -> str:
    return " ".join(f"{name}{getattr(layout, name)}" for name in ("dp", "tp") if getattr(layout, name) > 1)
