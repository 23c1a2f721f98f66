"""Schedules in which encoders and the rest of the model do not run at the same time, one window after another.

Three phases (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3 and
appendix D): first all encoder F of a window and the moves of their activations; then 1F1B, or another schedule, of
everything behind them; once that has drained, the moves of gradients back and all encoder B. Encoders are the modules
that no other feeds. Their programs are collectives over ranks of several LLM stages; phases keep them apart from the
LLM's ops.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.interleaved import demand
from mmjax.schedule.list_scheduler import Maker, list_schedule
from mmjax.schedule.ops import Op, Schedule, edge_ops, occupied_ranks, windows
from mmjax.schedule.orders import backward_ops, gpipe_order, one_f_one_b_order
from mmjax.schedule.simulate import Costs, Timeline
from mmjax.schedule.stash import stashing
from mmjax.schedule.validate import ScheduleError

_InnerOrders = tuple[dict[str, list[Op]], dict[str, int]]
"""Orders of the ranks of pipelined stages, and by stage the most microbatches in flight."""
Waits = dict[Op, tuple[Op, ...]]


def three_phase(
    graph: StageGraph, microbatches: int, costs: Costs, *, window: int = 0, inner: Maker | None = None
) -> Schedule:
    """Three phases for encoders that share ranks with the rest of the model, in windows of `window` microbatches.

    In each window all F of the encoders come first, then the other modules' F and B, then all B of the encoders.
    Encoders on ranks of their own run 1F1B beside the phases. If all encoders do, there are no phases. An encoder whose
    ops take several microbatches together (`StageNode.microbatches`) runs once for all of them.

    graph: the stages and edges, such as `spanning([vision], llm, 4).graph`.
    microbatches: microbatches of a step.
    costs: seconds of each op, such as `Costs.nominal(graph)`.
    window: 0 is the whole step; the last window may be smaller.
    inner: makes the schedule of the other modules in each window, such as `interleaved`; None is 1F1B. Of stages that
        are split, the weights' gradients end within their window.

    The parameters of a stage with `offload` leave after the window's last F. They come back during the cooldown of the
    stages behind it, once all stages on its ranks have run their last F of the window. If by `costs` the copy takes
    longer than the rest of the cooldown, it starts earlier. It always ends before the first encoder B.

    Raises ScheduleError where a stage other than an encoder with phases offloads, stashes or takes several microbatches
    together, where such microbatches are cut by a window, or where a stage with lanes is among those of `inner`.
    """
    phases = _Phases(
        graph,
        microbatches,
        window=window,
        phased=_sharing(graph),
        everywhere=False,
        name="three-phase",
        inner=inner,
    )
    return phases.schedule(costs)


def encoders_first(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every encoder F before any other F, and every encoder B after any other B, wherever the encoders are.

    graph: the stages and edges, such as `apart([vision], llm, {"vision": 1, "llm": 2}).graph`.
    microbatches: microbatches of a step.
    costs: seconds of each op, such as `Costs.nominal(graph)`.

    This is the simplest way to put an encoder before a pipeline, and papers use it as a baseline. Where ranks are
    shared it equals three phases with one window. Encoders on separate ranks run at the same time.

    Generators with lanes have a phase of their own too. On every rank it comes after all F of the stages that feed them
    and before all B of these stages, which therefore keep all microbatches. With encoders in lanes this schedule is
    Optimus as Zhang et al., "BigMac" (§2.2, §4.1), compare with it.

    Raises ScheduleError where a stage other than an encoder offloads or stashes.
    """
    phases = _Phases(
        graph, microbatches, window=0, phased=frozenset(encoders(graph)), everywhere=True, name="encoders-first"
    )
    return phases.schedule(costs)


def encoders(graph: StageGraph) -> tuple[str, ...]:
    """Names of the modules that no other module feeds and that give no loss, in the order of `graph.modules`.

    Such as ("vision",); () where there is none.

    graph: the stages and edges, such as `apart([vision], llm, {"vision": 1, "llm": 2}).graph`.
    """
    module = {node.name: node.module for node in graph.stages}
    fed = {module[edge.dst] for edge in graph.edges if module[edge.src] != module[edge.dst]}
    with_loss = {node.module for node in graph.losses}
    return tuple(name for name in graph.modules if name not in fed | with_loss)


def _sharing(graph: StageGraph) -> frozenset[str]:
    """The encoders that share a rank with a module that is no encoder."""
    names = encoders(graph)
    ranks = {rank for node in graph.stages if node.module not in names for rank in node.ranks}
    return frozenset(node.module for node in graph.stages if node.module in names and ranks.intersection(node.ranks))


@dataclass(frozen=True)
class _Phases:
    """A step in phases. Here "encoders" are the stages of `phased` modules; other encoders run beside the phases.

    everywhere: whether phases keep stages apart on any ranks, not only on ranks that they share.
    inner: makes the schedule of the pipelined stages in a window; None is 1F1B.
    """

    graph: StageGraph
    microbatches: int
    window: int
    phased: frozenset[str]
    everywhere: bool
    name: str
    inner: Maker | None = None

    @property
    def spans(self) -> tuple[range, ...]:
        return windows(self.microbatches, self.window if self.phased else 0)

    @property
    def encoders(self) -> list[StageNode]:
        return [node for node in self.graph.stages if node.module in self.phased]

    @property
    def generators(self) -> list[StageNode]:
        """The stages with lanes whose phase lies between the F and the B of the stages that feed them."""
        return [node for node in self.pipelined if node.lanes > 1] if self.everywhere else []

    @cached_property
    def feeding(self) -> list[StageNode]:
        """The pipelined stages that lead to `generators`."""
        names = {node.name for node in self.generators}
        for node in reversed(self.graph.topological):
            if any(edge.dst in names for edge in self.graph.out_edges(node.name)):
                names.add(node.name)
        return [node for node in self.pipelined if node.name in names and node.lanes == 1]

    @property
    def pipelined(self) -> list[StageNode]:
        """The stages that run between the encoders' phases, in 1F1B: the stages of all modules but encoders."""
        return [node for node in self.graph.stages if node.module not in encoders(self.graph)]

    def schedule(self, costs: Costs) -> Schedule:
        """The schedule; reloads of offloaded parameters are placed where a first timeline has room for them."""
        if wrong := [node.name for node in self.graph.stages if node.offload and node not in self.encoders]:
            raise ScheduleError(f"{self.name}: {wrong[0]!r} is no encoder with phases of its own: set offload=False")
        if wrong := [node.name for node in self.graph.stages if node.stash and node not in self.encoders]:
            raise ScheduleError(f"{self.name}: {wrong[0]!r} is no encoder with phases of its own: set stash=False")
        if wrong := [node for node in self.graph.stages if node.microbatches > 1 and node not in self.encoders]:
            raise ScheduleError(
                f"{self.name}: {wrong[0].name!r} is no encoder with phases of its own: set microbatches=1"
            )
        if cut := [node for node in self.encoders if self.window % node.microbatches]:
            raise ScheduleError(
                f"{self.name}: a window of {self.window} cuts the {cut[0].microbatches} microbatches of an op of"
                f" {cut[0].name!r}: set microbatches={self.window}"
            )
        if self.inner and (laned := [node.name for node in self.pipelined if node.lanes > 1]):
            raise ScheduleError(
                f"{self.name}: {laned[0]!r} has lanes, for which only '1f1b' has a place: use it inside"
            )
        make = partial(self._timeline, self._inner_orders(costs))  # copies, whose seconds differ, are the encoders'
        return stashing(self.graph, self.microbatches, costs, make).schedule

    def _timeline(self, inner: _InnerOrders, costs: Costs, stash_waits: Mapping[Op, tuple[Op, ...]]) -> Timeline:
        waits = self._waits()
        for op, before in stash_waits.items():
            waits[op] = (*waits.get(op, ()), *before)
        if any(node.offload for node in self.encoders):
            at_once = {key: seconds for key, seconds in costs.seconds.items() if key[0] != "reload"}
            timeline = self._list(inner, replace(costs, seconds=at_once), waits)
            waits |= dict(self._reloads(timeline, costs))
        return self._list(inner, costs, waits)

    def _list(self, inner: _InnerOrders, costs: Costs, waits: Waits) -> Timeline:
        orders, in_flight = dict(inner[0]), dict(inner[1])
        window, inside = len(self.spans[0]), set(in_flight)
        for node in reversed(self.graph.topological):
            if node.name in inside:
                continue
            warmup = (self.graph.distance(node.name) + 1) * node.lanes
            if node in self.encoders or node in self.feeding:
                orders[node.name] = [op for span in self.spans for op in gpipe_order(node, span)]
                in_flight[node.name] = node.lanes * -(-window // node.lanes)
            elif node in self.pipelined:
                orders[node.name] = [op for span in self.spans for op in one_f_one_b_order(node, span, warmup)]
                in_flight[node.name] = min(warmup, window)
            else:
                warmup = max(warmup, node.lanes * demand(self.graph, in_flight, node.name))
                orders[node.name] = one_f_one_b_order(node, self.microbatches, warmup)
                in_flight[node.name] = warmup
        return list_schedule(
            self.graph,
            self.microbatches,
            costs,
            orders=orders,
            in_flight=in_flight,
            name=self.name,
            window=self.window,
            waits=waits,
        )

    def _inner_orders(self, costs: Costs) -> _InnerOrders:
        """Orders of the ranks of pipelined stages, and by stage the most microbatches in flight; empty for 1F1B."""
        if self.inner is None:
            return {}, {}
        graph = self.graph.among([node.name for node in self.pipelined])
        schedules = {size: self.inner(graph, size, costs) for size in {len(span) for span in self.spans}}
        orders: dict[str, list[Op]] = {}
        for stages, rank in {graph.stages_on(rank): rank for rank in graph.ranks}.items():
            names = {name for name, _ in stages}
            orders[f"rank {rank}"] = [
                replace(op, microbatch=span[0] + op.microbatch)
                for span in self.spans
                for op in schedules[len(span)].ops
                if op.kind in ("F", "B", "W") and op.stage in names
            ]
        names = [node.name for node in graph.stages]
        bounds = {name: max(schedule.bound(name) for schedule in schedules.values()) for name in names}
        return orders, bounds

    # ---- the phases --------------------------------------------------------------------------------------------------

    def _waits(self) -> Waits:
        """Waits that keep the phases of each window apart.

        The first F of the pipelined stages waits for the encoders' forward ops (`_forward`), and the encoders' backward
        ops (`_backward`) wait for the last op of the pipelined stages. A lane without backward in a window instead
        starts the next window after the pipelined stages have ended this one.
        """
        waits: dict[Op, list[Op]] = defaultdict(list)
        pairs = [(encoder, node) for encoder in self.encoders for node in self.pipelined if self._apart(encoder, node)]
        for index, span in enumerate(self.spans):
            for encoder, node in pairs:
                waits[Op("F", node.name, span[0])] += self._forward(encoder, span)
                for op in self._backward(encoder, span):
                    waits[op].append(_last(node, span))
                for m in _without_backward(encoder, self.spans[index - 1], span) if index else ():
                    waits[Op("F", encoder.name, m)].append(_last(node, self.spans[index - 1]))
            for generator in self.generators:
                self._add_generator_waits(waits, generator, span)
        return {op: tuple(before) for op, before in waits.items()}

    def _add_generator_waits(self, waits: dict[Op, list[Op]], generator: StageNode, span: range) -> None:
        """Adds waits between a generator and the stages that feed it, for each lane and the stages on its ranks.

        The lane's first F waits for the last F of such a stage, and the stage's first B for the lane's last op.
        """
        lanes = zip(span[: generator.lanes], _by_lane(generator, span), strict=True)
        for (first, last), node in itertools.product(lanes, self.feeding):
            if not set(generator.ranks_of(first)).isdisjoint(node.ranks):
                waits[Op("F", generator.name, first)].append(Op("F", node.name, span[-1]))
                for op in backward_ops(node, span[0])[:1]:
                    waits[op].append(_ops(generator, range(last, last + 1))[-1])

    def _apart(self, encoder: StageNode, node: StageNode) -> bool:
        """Whether the ops of two stages are in separate phases."""
        return self.everywhere or not set(encoder.ranks).isdisjoint(node.ranks)

    def _forward(self, encoder: StageNode, span: range) -> list[Op]:
        """The last F of each lane of a stage in a window, and the ops that send its activations and occupy all ranks of
        a lane."""
        last = [Op("F", encoder.name, m) for m in encoder.last_of_lanes(span)]
        return [*last, *self._edges(encoder, span, backward=False)]

    def _backward(self, encoder: StageNode, span: range) -> list[Op]:
        """The first B of each lane of a stage in a window, and the ops that receive its gradients and occupy all ranks
        of a lane."""
        first = [op for m in span[: encoder.lanes] for op in backward_ops(encoder, m)[:1]]
        return [*first, *self._edges(encoder, span, backward=True)]

    def _edges(self, encoder: StageNode, span: range, *, backward: bool) -> Iterator[Op]:
        for edge in self.graph.out_edges(encoder.name):
            if edge.gradient or not backward:
                firsts = [m for m in span if m == encoder.first_of(m)]
                for op in (op for m in firsts for op in edge_ops(self.graph, edge, m, backward=backward)):
                    if set(encoder.ranks_of(op.microbatch)) <= set(occupied_ranks(self.graph, op)):
                        yield op

    # ---- reloads -----------------------------------------------------------------------------------------------------

    def _reloads(self, timeline: Timeline, costs: Costs) -> Iterator[tuple[Op, tuple[Op, ...]]]:
        """Pairs of a reload and the ops that it waits for, from a timeline in which reloads take no time."""
        for index, span in enumerate(self.spans):
            for encoder in (node for node in self.encoders if node.offload):
                # A stage of a pipelined encoder may be on ranks of its own while its other stages share the LLM's.
                nodes = [node for node in self.pipelined if self._apart(encoder, node)] or self.pipelined
                ops = [op for node in nodes for op in _ops(node, span)]
                cooldown = max(timeline.span(Op("F", node.name, span[-1]))[1] for node in nodes)
                needed = self._next_read(timeline, encoder, index)
                latest = min(cooldown, needed - self._reload_seconds(encoder, costs))
                ended = [(timeline.span(op)[1], i) for i, op in enumerate(ops) if timeline.span(op)[1] <= latest]
                if ended:  # otherwise the reload comes right after the offload
                    yield Op("reload", encoder.name, span[0]), (ops[max(ended)[1]],)

    def _next_read(self, timeline: Timeline, encoder: StageNode, index: int) -> float:
        """The time at which a stage's parameters are read again: at window `index`'s first B or, without a backward, at
        the next window's first F."""
        if encoder.backward:
            return timeline.span(Op("B", encoder.name, self.spans[index][0]))[0]
        if index + 1 < len(self.spans):
            return timeline.span(Op("F", encoder.name, self.spans[index + 1][0]))[0]
        return timeline.makespan

    def _reload_seconds(self, encoder: StageNode, costs: Costs) -> float:
        """Seconds of the reloads of all encoder stages that share ranks with `encoder`: their copies run in turn."""
        nodes = [node for node in self.encoders if node.offload and not set(encoder.ranks).isdisjoint(node.ranks)]
        return sum(costs.of(Op("reload", node.name)) for node in nodes)


def _ops(node: StageNode, span: range) -> list[Op]:
    return [op for m in span for op in (Op("F", node.name, m), *backward_ops(node, m))]


def _by_lane(node: StageNode, span: range) -> list[int]:
    """The last microbatch of each lane in `span`, in the order in which the lanes take their first ones."""
    return sorted(node.last_of_lanes(span), key=lambda m: (m - span[0]) % node.lanes)


def _without_backward(node: StageNode, previous: range, span: range) -> list[int]:
    """The first microbatch of `span` of each lane that runs no backward in the window before it."""
    lanes = {node.lane(m) for m in previous} if node.backward else set()
    return [m for m in span[: node.lanes] if node.lane(m) not in lanes]


def _last(node: StageNode, span: range) -> Op:
    """The last op of a stage in a window."""
    return (Op("F", node.name, span[-1]), *backward_ops(node, span[-1]))[-1]
