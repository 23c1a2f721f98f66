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
    """Routes and bytes of boundaries between the pairs; ``rounds`` changes nothing, since nothing is timed."""
    del rounds
    world = World.planned(16)
    for one, other in PAIRS:
        case = f"{_short(one)} → {_short(other)}"
        most = {}
        for route in ("leader", "sliced"):
            ways = [_routing(world, route, *pair) for pair in ((one, other), (other, one))]
            most[route] = max(_busiest(way) for way in ways)
            least = min(len(way.routes) for way in ways)
            yield Row(
                bench="routes",
                case=f"{case}, {route}: routes",
                value=least,
                unit="",
                target=at_least(math.gcd(one.dp, other.dp)),
            )
            yield Row(bench="routes", case=f"{case}, {route}: busiest link", value=most[route] / MIB, unit="MiB")
        ratio = most["sliced"] / most["leader"]
        yield Row(
            bench="routes", case=f"{case}: busiest link, sliced / leader", value=ratio, unit="ratio", target=at_most(1)
        )


def _routing(world: World, route: str, source: Layout, target: Layout) -> Routing:
    aval = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.bfloat16)
    return make_routing(route, "bench", world.submesh(source, 0), world.submesh(target, 0), aval)


def _busiest(routing: Routing) -> int:
    """Bytes that the busiest link carries."""
    size = math.prod(routing.piece) * routing.aval.dtype.itemsize
    links = Counter(("out", r.source) for r in routing.routes) + Counter(("in", r.target) for r in routing.routes)
    return size * max(links.values())


def _short(layout: Layout) -> str:
    return " ".join(f"{name}{getattr(layout, name)}" for name in ("dp", "tp") if getattr(layout, name) > 1)
