"""Figure 8 of NVIDIA's paper: the bytes that cross the boundary of 3B + 70B in a step, and their share of its time.

Karnati et al., A.4: in C the encoder has DP 32 and the LLM DP 16, so that two ranks gather each other's rows; in NC the
encoder has TP 1, and the LLM's ranks get by broadcast what their leader has received. The figure's numbers are not in
the text, which says that C's communicator adds less than 1 % (§3.2), and that NC's forward takes longer.

Bytes are those of the boundary's own routes. Seconds follow from the collectives of its programs, as compiled for H100s
that are not here, at assumed rates (`mmjax.compile.rates`); moves between nodes are a program too, which both ends run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from mmjax.bench.rows import Row
from mmjax.compile.executables import Compiler
from mmjax.compile.rates import H100
from mmjax.compile.roofline import Work, work_of
from mmjax.compile.targets import TARGETS, has_compiler
from mmjax.mesh.boundary import Boundary
from mmjax.mesh.layout import Layout
from mmjax.mesh.transfer import Transfer
from mmjax.mesh.world import World

BATCH, PICTURES, PATCHES, WIDTH = 256, 4, 1024, 8192
"""Samples of a step; pictures of a sample and their patches, a token each; width of the LLM."""
DIRECTIONS = ("forward", "backward")
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """The boundary of one mode.

    Attributes:
      name: its name in rows and tables.
      mode: "C" or "NC".
      encoder: the encoder's layout.
      llm: the LLM's layout; its first stage reads what the encoder makes.
      step: measured seconds of a step (Tables A2 and A5).
      once_a_step: whether the encoder runs once a step, for all microbatches.
    """

    name: str
    mode: str
    encoder: Layout
    llm: Layout
    step: float
    once_a_step: bool = False

    @property
    def transfers_a_step(self) -> int:
        """Transfers of a step: one for each microbatch, which is a sample of each replica of the LLM, or one in all."""
        return 1 if self.once_a_step else BATCH // self.llm.dp

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The features of a transfer."""
        return jax.ShapeDtypeStruct((BATCH // self.transfers_a_step * PICTURES, PATCHES, WIDTH), jnp.bfloat16)

    @property
    def ranks(self) -> int:
        """Devices from the first to the last in use."""
        return max(layout.rank_offset + layout.size for layout in (self.encoder, self.llm))

    def boundary(self, world: World) -> Boundary:
        """The boundary between the encoder and the LLM's first stage."""
        ends = world.submesh(self.encoder, 0), world.submesh(self.llm, 0)
        return Boundary("vision.0->llm.0", *ends, self.aval, world, transport="collective")

    @cached_property
    def transfers(self) -> dict[str, Transfer]:
        """Both directions, on devices that are not here."""
        boundary = self.boundary(World.planned(self.ranks))
        return {"forward": boundary.forward, "backward": boundary.backward}

    def payload(self, direction: str) -> float:
        """Bytes of a step that a rank has after the transfer: its rows of the features, or of their gradient."""
        aval = self.transfers[direction].target_aval
        return self.transfers_a_step * _bytes(aval.sharding.shard_shape(aval.shape))

    def arriving(self, direction: str) -> float:
        """Bytes of these that were not on the rank before, on the rank with the most."""
        routing = self.transfers[direction].routing
        unit, fullest = _bytes(routing.unit), 0
        rows = routing.units.rows
        before = _rows_by_rank(routing.source.ranks, routing.source.layout.dp, rows)
        for rank, needed in _rows_by_rank(routing.target.ranks, routing.target.layout.dp, rows).items():
            fullest = max(fullest, len(needed - before.get(rank, set())))
        return self.transfers_a_step * unit * fullest

    def busiest(self, direction: str, *, across: bool = True) -> float:
        """Bytes of a step on the busiest link between two ranks' ends, in one direction.

        0 where the modules share their ranks. across: links of the network between nodes; else those within nodes.
        """
        routing = self.transfers[direction].routing
        links = Counter[tuple[str, int]]()
        if routing.source.ranks != routing.target.ranks:
            for route in routing.routes:
                apart = route.source // H100.node != route.target // H100.node
                if route.source != route.target and apart == across:
                    links.update([("out", route.source), ("in", route.target)])
        return self.transfers_a_step * _bytes(routing.piece) * max(links.values(), default=0)

    def by_routes(self, direction: str) -> float:
        """Seconds of a step on the busiest links, and those in which a tp group hears from its leader or siblings."""
        target = self.transfers[direction].routing.target
        moved = self.busiest(direction), self.busiest(direction, across=False)
        heard = self.arriving(direction) if target.layout.tp > 1 or not any(moved) else 0.0
        seconds = moved[0] / H100.network + (moved[1] + heard) / H100.link
        return seconds + H100.latency * self.transfers_a_step if seconds else 0.0

    def compiled(self, direction: str) -> list[Work]:
        """The work of pack, move and unpack of a transfer, compiled for H100s; needs JAX's compiler for CUDA.

        Routes that share no rank are programs of their own, which run at the same time: the longest counts.
        """
        target = TARGETS["h100"]
        world = World(target.devices(self.ranks))
        boundary = self.boundary(world)
        programs = {"forward": boundary.forward, "backward": boundary.backward}[direction].programs()
        number = {device: rank for rank, device in enumerate(world.devices)}
        longest: dict[str, Work] = {}
        for program, executable in zip(programs, Compiler(target).all(programs), strict=True):
            mesh = jax.tree.leaves(program.avals)[0].sharding.mesh
            ranks = tuple(number[device] for device in mesh.devices.flat)
            work, kind = work_of(executable.module, H100, ranks=ranks), _kind(program.name)
            if kind not in longest or work.total > longest[kind].total:
                longest[kind] = work
        return list(longest.values())


def _kind(name: str) -> str:
    """The kind of a transfer's program: pack, move or unpack."""
    return next(word for word in name.split() if word in ("pack", "move", "unpack"))


def _rows_by_rank(ranks: tuple[int, ...], dp: int, rows: int) -> dict[int, set[int]]:
    """The intervals of rows that each rank has, of `rows` in all."""
    width, each = len(ranks) // dp, rows // dp
    return {rank: set(range(n // width * each, (n // width + 1) * each)) for n, rank in enumerate(ranks)}


def _bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * jnp.dtype(jnp.bfloat16).itemsize


LLM_LAYOUT = Layout(tp=8, pp=2, dp=16)
C_STEP, NC_STEP = 7.434, 8.471 / 1.093
BRIDGES = (
    Bridge(name="C", mode="C", encoder=Layout(tp=4, dp=32), llm=LLM_LAYOUT, step=C_STEP),
    Bridge(name="C, DP 256", mode="C", encoder=Layout(dp=256), llm=LLM_LAYOUT, step=C_STEP, once_a_step=True),
    Bridge(name="NC", mode="NC", encoder=Layout(dp=8, rank_offset=256), llm=LLM_LAYOUT, step=NC_STEP),
)
"""C with DP 32 and 16 on the ranks of the LLM's first stage, as the text's groups of two have them; C with the encoder
of Table A2, on the ranks of both stages; and NC's island of eight (Table A5) before an LLM of the same layout."""


def rows(predicted: Mapping[str, float]) -> Iterator[Row]:
    """Bytes and seconds of both directions of both modes, and their share of a step.

    predicted: seconds of a step as estimated, by mode.
    """
    for bridge in BRIDGES:
        for direction in DIRECTIONS:
            case = f"Figure 8, 3B+70B, {bridge.name}, {direction}"
            yield _row(f"{case}: payload of a rank", bridge.payload(direction) / GIGA, "GB")
            yield _row(f"{case}: arriving at a rank", bridge.arriving(direction) / GIGA, "GB")
            yield _row(f"{case}: over the network, on the busiest link", bridge.busiest(direction) / GIGA, "GB")
            yield from _timed(f"{case}, by routes", bridge, bridge.by_routes(direction), predicted)
            if has_compiler():
                works = bridge.compiled(direction)
                for kind, size in _collectives(bridge, works).items():
                    yield _row(f"{case}, compiled: {kind}", size / GIGA, "GB")
                yield from _timed(f"{case}, compiled", bridge, _seconds(bridge, works), predicted)


def _timed(case: str, bridge: Bridge, seconds: float, predicted: Mapping[str, float]) -> Iterator[Row]:
    yield _row(f"{case}: of a step", seconds * 1e3, "ms")
    yield _row(f"{case}: share of the measured step", 100 * seconds / bridge.step, "%")
    yield _row(f"{case}: share of the predicted step", 100 * seconds / predicted[bridge.mode], "%")


def _row(case: str, value: float, unit: str) -> Row:
    return Row(bench="workloads", case=case, value=float(value), unit=unit)


def _collectives(bridge: Bridge, works: list[Work]) -> dict[str, float]:
    """Bytes of a step on a rank, by kind of collective."""
    sizes = Counter[str]()
    for work in works:
        sizes.update({kind: round(each.bytes * bridge.transfers_a_step) for kind, each in work.collectives.items()})
    return dict(sizes)


def _seconds(bridge: Bridge, works: list[Work]) -> float:
    """Seconds of a step, as if no transfer lay beside anything."""
    return bridge.transfers_a_step * sum(work.total for work in works)


def table(predicted: Mapping[str, float]) -> Iterator[str]:
    """The lines of the table of Figure 8; cells of compiled programs are empty without a compiler.

    Args:
      predicted: as for `rows`.
    """
    heads = ("mode, direction", "payload, GB", "arriving, GB", "over the network, GB", "by routes, ms", "of the step")
    yield f"| {' | '.join((*heads, 'collectives, compiled', 'programs, ms', 'of the step'))} |"
    yield "|" + "---|" * 9
    for bridge in BRIDGES:
        for direction in DIRECTIONS:
            bytes_of = (bridge.payload(direction), bridge.arriving(direction), bridge.busiest(direction))
            cells = [f"{bridge.name}, {direction}", *(f"{size / GIGA:.2f}" for size in bytes_of)]
            cells += _shares(bridge, bridge.by_routes(direction), predicted)
            if has_compiler():
                works = bridge.compiled(direction)
                kinds = (f"{kind} {size / GIGA:.2f} GB" for kind, size in _collectives(bridge, works).items())
                cells += [", ".join(kinds) or "none", *_shares(bridge, _seconds(bridge, works), predicted)]
            else:
                cells += [""] * 3
            yield f"| {' | '.join(cells)} |"


def _shares(bridge: Bridge, seconds: float, predicted: Mapping[str, float]) -> list[str]:
    """Milliseconds, and the share of the measured and of the predicted step."""
    return [f"{seconds * 1e3:.1f}", f"{seconds / bridge.step:.2%}, {seconds / predicted[bridge.mode]:.2%}"]
