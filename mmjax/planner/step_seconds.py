"""The seconds of a candidate: its stage graph, costs of its ops, a simulated step.

A run uses the same graph, schedule and simulator, and the simulator's times are checked against real processes. Only
the seconds of ops come from elsewhere (`Clock`). Long steps are not simulated to their end: once a pipeline is full,
every further `period` microbatches take equally long, so two short simulations and a straight line give the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.state_bytes import StateBytes
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clocks, Pass, group_gather
from mmjax.planner.stage_graph import stage_graph
from mmjax.planner.traffic import edge_costs, exchange_seconds, whole_rows_seconds
from mmjax.planner.work import Held, Part, Work
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.ops import STASH_COPIES
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import CostKey, Costs, Timeline, simulate


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeconds:
    """A candidate in seconds.

    Attributes:
      work: the work of all modules.
      clock: the times.
      candidate: the candidate that is estimated.
      rows: by module, rows of a microbatch and their width, padding included.
    """

    work: Work
    clock: Clocks
    candidate: Candidate
    rows: Mapping[str, tuple[float, int]]

    # ---- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The part of its module that each stage has, by stage name."""
        return {
            f"{name}.{index}": part
            for name, module in self.work.modules.items()
            for index, part in enumerate(module.parts(self.candidate.layouts[name]))
        }

    @cached_property
    def graph(self) -> StageGraph:
        """The stage graph of the candidate, as a run has it."""
        return stage_graph(self.work, self.candidate, self.clock, self.parts)

    # ---- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every op."""
        seconds: dict[CostKey, float] = {}
        for node in self.graph.stages:
            part = self.parts[node.name]
            took = self._pass(node.module, part)
            seconds["F", node.name, False] = took.forward
            seconds["B", node.name, False] = took.backward
            if "W" in self._kinds(node):
                later = self.later(node.module, part) * (took.backward - self.clock.op)
                seconds["W", node.name, False] = later + self.clock.op
                seconds["B", node.name, False] -= later
            once = self._once(node.module, node.index, part)
            seconds |= {(kind, node.name, False): cost for kind, cost in once.items()}
            if node.stashes:
                copy = self.clock.of(node.module).copy(self._kept(node))
                seconds |= {(kind, node.name, False): copy for kind in STASH_COPIES}
        carried, by_microbatch = edge_costs(self.graph, self.candidate, self.clock, self._crossing)
        return Costs(seconds=seconds | carried, overrides=by_microbatch)

    def _kinds(self, node: StageNode) -> str:
        """The kinds of op that a stage runs for each microbatch."""
        return "FBW"[: 1 + node.backward + (node.trainable and self.candidate.traits.splits)]

    def later(self, name: str, part: Part) -> float:
        """The share of W in a backward that is split, by FLOPs."""
        module = self.work.modules[name]
        whole = module.backward.of(part)
        return module.later.of(part) / whole if whole else 0.0

    def _pass(self, name: str, part: Part) -> Pass:
        """Seconds of a microbatch in a stage of module `name`, with what its cp ranks exchange and the host's part."""
        layout, clock, (rows, width) = self.candidate.layouts[name], self.clock.of(name), self._shape(name)
        took = clock.stage(name, part, rows=rows, width=width, tp=layout.tp)
        exchanged = (*self._exchange(name, part, took), *self._whole_rows(name, part)) if layout.cp > 1 else (0.0,) * 4
        ahead, back = exchanged[0] + exchanged[2], exchanged[1] + exchanged[3]
        return Pass(forward=took.forward + ahead + self.clock.op, backward=took.backward + back + self.clock.op)

    def _exchange(self, name: str, part: Part, took: Pass) -> tuple[float, float]:
        """Seconds, in forward and backward, by which a stage's cp ranks exchange longer than the attention beside it.

        took: seconds of the stage without the exchange.
        """
        layout, clock, wider = self.candidate.layouts[name], self.clock.of(name), self.work.gradient / self.work.item
        return exchange_seconds(self.work.modules[name], layout, clock, self.rows[name], part, took, wider)

    def _whole_rows(self, name: str, part: Part) -> tuple[float, float]:
        """Seconds, in forward and backward, in which a stage's cp ranks make whole rows between modules."""
        modules, layout = self.work.modules, self.candidate.layouts[name]
        given = part.last and any(name in other.after for other in modules.values())
        sources = [one for one in modules[name].after if modules[one].has_backward] if part.first else []
        return whole_rows_seconds(
            layout,
            self.clock.of(name),
            modules[name].context(layout),
            given=self._sent(name) / layout.dp if given else 0.0,
            entered=sum(self._summed(one, name) for one in sources) / layout.dp,
        )

    def _summed(self, source: str, target: str) -> float:
        """Bytes of gradients of a module's tokens that its reader's cp ranks sum, for all dp ranks together.

        Those of lists lie side by side. Where both modules are on the same ranks they are gathered, half of a sum.
        """
        share, ends = self.listed(source, target), [self.candidate.layouts[name] for name in (source, target)]
        if share == 1:
            return self._sent(source)
        gathered = ends[0].ranks == ends[1].ranks and ends[0].dp == ends[1].dp
        return self._sent(source) * share * self._context(target) / 2 if gathered else 0.0

    def _once(self, name: str, index: int, part: Part) -> dict[str, float]:
        """Seconds of a stage's ops that run once a step, by kind: gather parameters, reduce gradients, update.

        With optimizer instances, gradients are reduced within each, and then their shards between all of them.
        Offloaded states come back while gradients are reduced; those of a frozen stage come back before its parameters
        are gathered. Where parameters are offloaded, "offload" and "reload" are their copies.
        """
        layout, states, clock = self.candidate.layouts[name].spanned, self._states(name, part), self.clock.of(name)
        shards, instances, sums = self._shards(layout), layout.optimizer_instances, states.sums
        first, apart = layout.first_rank(index), layout.replica_size * layout.dp // shards // instances
        seconds = partial(group_gather, clock, first=first - self.candidate.block(name))
        gathered = seconds(states.copies, ranks=shards, apart=apart)
        reduced = seconds(sums, ranks=shards, apart=apart)
        reduced += 2 * seconds(sums / shards, ranks=instances, apart=apart * shards)
        op, away = self.clock.op, {}
        if name in self.candidate.offloads:
            states_away, copies = states.away(self.candidate.offload(name))
            back = clock.copy(states_away)
            gathered, reduced = gathered + (0.0 if sums else back), max(reduced, back)
            away = dict.fromkeys(("offload", "reload"), clock.copy(copies)) if copies else {}
        return {"prepare": gathered + op, "reduce": reduced + op, "update": op, **away}

    def _states(self, name: str, part: Part) -> StateBytes[float]:
        """Bytes of a stage's states on a device."""
        layout = self.candidate.layouts[name]
        return self.work.states(name, part, tp=layout.tp, shards=self._shards(layout))

    def _shards(self, layout: Layout) -> int:
        """Number of ranks among which masters and moments are sharded."""
        return layout.optimizer_shards

    def _crossing(self, edge: EdgeNode) -> float:
        """Bytes of a microbatch's activation that an edge carries, for all dp ranks together.

        Between modules these are whole rows, which every rank of cp and tp has, or all lists; inside of one it is a
        rank's part.
        """
        source, target = (self.graph.stage(name).module for name in (edge.src, edge.dst))
        if source != target:
            share = self.listed(source, target)
            return self._sent(source) * (share * self._context(target) if share < 1 else 1)
        module, (rows, width), layout = self.work.modules[source], self.rows[source], self.candidate.layouts[source]
        parts = module.context(layout) * (layout.tp if layout.shares_tokens else 1)
        return rows * width / module.width * module.carried / parts

    def _arriving(self, edge: EdgeNode) -> float:
        """Bytes of what an edge carries at a rank of its end, for all dp ranks together."""
        source, target = (self.graph.stage(name).module for name in (edge.src, edge.dst))
        if source != target:
            return self._sent(source) * self.listed(source, target)
        return self._crossing(edge)

    def listed(self, source: str, target: str) -> float:
        """The length of a rank's list of the tokens that it reads of another module, over all tokens; 1 where ranks
        take whole rows. See `mmjax.data.send_lists`."""
        one, other = self.work.modules[source], self.work.modules[target]
        if not one.together or sum(source in reader.after for reader in self.work.modules.values()) > 1:
            return 1.0
        (rows, width), (rows_read, width_read) = self.rows[source], self.rows[target]
        tokens = rows * width / one.together
        places = rows_read * width_read / max(1, other.together) / self._context(target)
        return min(1.0, one.blended * places / tokens)

    def _context(self, name: str) -> int:
        """Ranks of cp that share the positions of a module's rows."""
        return self.work.modules[name].context(self.candidate.layouts[name])

    def _sent(self, name: str) -> float:
        """Bytes of a microbatch's activation on the way out of a module."""
        module, (rows, width) = self.work.modules[name], self.rows[name]
        return rows * width / module.width * module.sent

    @cached_property
    def quick(self) -> float:
        """Seconds of a step in closed form: the first microbatch passes all stages, others follow at the worst pace.

        Stages on the same ranks take turns; encoders of a three-phase schedule and modules with lanes take turns with
        everything else, lanes side by side. Ops that run once a step count for the slowest stage only. Moves are left
        out.
        """
        phased, count = self.candidate.phases(self.work), self.candidate.microbatches
        loads: dict[int, float] = {}
        first = turns = ends = 0.0
        for name, module in self.work.modules.items():
            layout, parts = self.candidate.layouts[name], module.parts(self.candidate.layouts[name])
            passes = {part: self._pass(name, part) for part in set(parts)}
            ends = max(ends, self.ends(name))
            for index, part in enumerate(parts):
                took = passes[part].forward + passes[part].backward
                if name in phased or layout.lanes > 1:
                    turns += took * -(-count // layout.lanes)
                    continue
                start = layout.first_rank(index)
                loads[start] = loads.get(start, 0.0) + took
                first += took
        windows = -(-count // self.candidate.span)
        return windows * first + (count - windows) * max(loads.values(), default=0.0) + turns + ends

    def ends(self, name: str) -> float:
        """Seconds of prepare, reduce and update in the slowest stage of a module."""
        parts = self.work.modules[name].parts(self.candidate.layouts[name])
        once = (self._once(name, parts.index(part), part) for part in set(parts))
        return max(one["prepare"] + one["reduce"] + one["update"] for one in once)

    def stage_seconds(self, stage: str) -> float:
        """Seconds of forward and backward of a microbatch in a stage."""
        return sum(self.costs.seconds[kind, stage, False] for kind in self._kinds(self.graph.stage(stage)))

    # ---- the simulated step ------------------------------------------------------------------------------------------

    @cached_property
    def depth(self) -> int:
        """The most microbatches that are in the pipeline at once."""
        return 1 + max(self.graph.distance(node.name) for node in self.graph.stages)

    def timeline(self, microbatches: int = 0, graph: StageGraph | None = None) -> Timeline:
        """A simulated step of `microbatches` microbatches; of all of them where that is 0."""
        count = microbatches or self.candidate.microbatches
        window = self.candidate.window if count > self.candidate.window else 0
        about: Any = {"window": window, "inner": self.candidate.inner}
        schedule = make_schedule(self.candidate.schedule, graph or self.graph, count, self.costs, **about)
        return simulate(schedule, self.costs)

    @cached_property
    def _enough(self) -> tuple[int, int]:
        """Microbatches that fill the pipeline, or all, and of how many one round of further ones is; 0 without any."""
        count, traits = self.candidate.microbatches, self.candidate.traits
        unit, ahead = max(node.lanes for node in self.graph.stages), self._ahead
        period = lcm(self.candidate.layouts[LLM].pp if traits.chunks else 1, unit)
        enough = (traits.settles * (self.depth + ahead) + 1) // period * period
        # Among lanes, deferred W's settle late: a unit takes longer until as many wait as may.
        enough += (2 + (unit > 1) * (1 + 4 * traits.splits) + (ahead > 0)) * period
        enough += (count - enough) % period
        if self.candidate.window:
            period = enough = self.candidate.window
        return (count, 0) if count <= enough + period else (enough + period, period)

    @cached_property
    def _short(self) -> Timeline:
        """A simulated step that fills the pipeline; the whole step where it is short."""
        return self.timeline(self._enough[0], self.graph.with_few_ranks())

    @property
    def _pace(self) -> float:
        """Seconds that each further microbatch adds to `_short`."""
        count, period = self._enough
        if not period:
            return 0.0
        shorter = self.timeline(count - period, self.graph.with_few_ranks())
        return (self._short.makespan - shorter.makespan) / period

    @property
    def _ahead(self) -> int:
        """Microbatches that the LLM is ahead of generators in lanes: a unit, but for one."""
        layouts = (self.candidate.layouts[name] for name in self.work.generators)
        return max((layout.lanes for layout in layouts), default=1) - 1

    @property
    def shown(self) -> Timeline:
        """The simulated step, cut to as many microbatches as it takes to show a full pipeline."""
        return self.timeline(self._enough[0])

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, simulated; at least `crowded` where devices share processors."""
        alone = self._short.makespan + self._pace * (self.candidate.microbatches - self._enough[0])
        return max(alone, self.crowded) if self.clock.shared else alone

    @cached_property
    def crowded(self) -> float:
        """Seconds that the shared processors of the devices, and the host, need for all ops of a step.

        An op's seconds count for each device that works on it, except the host's part, which counts once.
        """

        def spent(key: CostKey, devices: int) -> float:
            return (self.costs.seconds[key] - self.clock.op) * devices + self.clock.op

        each = once = 0.0
        for node in self.graph.stages:
            devices = len(node.ranks)
            each += sum(spent((kind, node.name, False), devices // node.lanes) for kind in self._kinds(node))
            kinds = ("prepare", "reduce", "update")[: 1 + 2 * node.trainable]
            once += sum(spent((kind, node.name, False), devices) for kind in kinds)
        for edge in self.graph.edges:
            kind = "unpack" if edge.kind == "local" else "move"
            ends = [self.candidate.layouts[self.graph.stage(name).module].dp for name in (edge.src, edge.dst)]
            each += sum(spent((kind, edge.name, way), min(ends)) for way in (False, True)[: 1 + edge.gradient])
        return (each * self.candidate.microbatches + once) / self.clock.shared

    @cached_property
    def busy(self) -> float:
        """Seconds of work on microbatches, summed over all devices."""
        per = sum(self.stage_seconds(node.name) * len(node.ranks) / node.lanes for node in self.graph.stages)
        return per * self.candidate.microbatches

    @property
    def bubble(self) -> float:
        """Share of the step in which the devices in use do not work on microbatches."""
        return max(0.0, 1 - self.busy / (self.seconds * self.candidate.devices))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak of the devices in use, as in a run's metrics: real positions, no recompute.

        None where a peak is not known.
        """
        owners = {rank: name for name, layout in self.candidate.layouts.items() for rank in layout.ranks}
        peaks = {name: self.clock.of(name).peak * count for name, count in Counter(owners.values()).items()}
        return self.work.flops / (self.seconds * sum(peaks.values())) if all(peaks.values()) else None

    @property
    def padding(self) -> float:
        """Share of padding in the positions of a step, all modules together, with the planned rows."""
        computed = self.candidate.microbatches * sum(rows * width for rows, width in self.rows.values())
        return max(0.0, 1 - self.work.positions / computed)

    @property
    def recompute(self) -> float:
        """Share of recompute in the FLOPs of a step."""
        again = whole = 0.0
        for name, module in self.work.modules.items():
            rows, width = self.rows[name]
            again += rows * width / module.width * module.recompute.of(module.whole)
            whole += rows * width / module.width * module.computed
        return again / whole

    @cached_property
    def bottleneck(self) -> str:
        """The longest stage on the ranks that have most to do for a microbatch."""
        return max(self.graph.stages, key=lambda n: (self.loads[n.ranks], self.stage_seconds(n.name))).name

    @cached_property
    def loads(self) -> dict[tuple[int, ...], float]:
        """Seconds of forward and backward of a microbatch in all stages on the same ranks, by these ranks.

        Of stages with lanes it is the mean over microbatches, each of which runs on one lane.
        """
        loads: dict[tuple[int, ...], float] = {}
        for node in self.graph.stages:
            loads[node.ranks] = loads.get(node.ranks, 0.0) + self.stage_seconds(node.name) / node.lanes
        return loads

    # ---- rows, and what is kept of them ------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[float, int]:
        """Rows of a microbatch on a rank of a module, and their width."""
        rows, width = self.rows[name]
        return rows / self._sharers(name), width

    def _sharers(self, name: str) -> int:
        """Ranks among which the rows of a module's microbatch are divided."""
        layout = self.candidate.layouts[name]
        return layout.dp * self.work.modules[name].context(layout)

    def _scale(self, name: str) -> float:
        """Rows of a microbatch on a rank of a module, counted in rows of the module's `width`."""
        rows, width = self._shape(name)
        return rows * width / self.work.modules[name].width

    def _held(self, name: str) -> Held:
        """Bytes that a device of a module needs for rows and programs."""
        return self.work.modules[name].held[self.candidate.layouts[name].tp]

    def _kept(self, node: StageNode) -> float:
        """Bytes of residuals that a device keeps of a microbatch from a stage's F to its B."""
        return self._scale(node.module) * self._held(node.module).kept.of(self.parts[node.name])
