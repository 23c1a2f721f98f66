"""The seconds of a candidate: its stage graph, costs of its ops, a simulated step.

A run uses the same graph, schedule and simulator, and the simulator's times are checked against real processes. Only
the seconds of ops are from a `Clock`. Long steps are not simulated to their end: once a pipeline is full, every further
`period` microbatches take equally long, so two short simulations are extrapolated linearly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm

from mmjax.data.together import Together
from mmjax.mesh.layout import cell_count
from mmjax.models.choices import AUTO
from mmjax.models.config import LLM
from mmjax.pipeline.state_bytes import StateBytes
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clocks, PassSeconds
from mmjax.planner.cost import ROUNDING
from mmjax.planner.experts import expert_sums, with_experts
from mmjax.planner.sharding import beside_backward, beside_layers, once_a_step, shared_states
from mmjax.planner.stage_graph import stage_graph
from mmjax.planner.traffic import edge_costs, exchange_seconds, whole_rows_seconds
from mmjax.planner.work import StageMemory, StagePart, Work
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.ops import STASH_COPIES
from mmjax.schedule.schedules import make_schedule, split_as
from mmjax.schedule.simulate import CostKey, Costs, Timeline, simulate


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeconds:
    """A candidate in seconds.

    Attributes:
      work: the work of all modules.
      clock: the times.
      candidate: the candidate that is estimated.
      rows: by module name, rows of a microbatch on all ranks together, and positions of a row, padding included.
    """

    work: Work
    clock: Clocks
    candidate: Candidate
    rows: Mapping[str, tuple[float, int]]

    # ---- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> dict[str, StagePart]:
        """The part of its module that each stage has, by stage name ("llm.0"): modules in order, then their stages."""
        return {
            f"{name}.{index}": part
            for name, module in self.work.modules.items()
            for index, part in enumerate(module.parts(self.candidate.layouts[name]))
        }

    @cached_property
    def graph(self) -> StageGraph:
        """The stage graph of the candidate, as in a run."""
        return stage_graph(self.work, self.candidate, self.clock, self.parts)

    # ---- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every op of `graph`, with the host's time; ops on lanes may differ by microbatch.

        The last op of several microbatches together counts as much as the others, even if it has fewer.
        """
        seconds: dict[CostKey, float] = {}
        for node in self.graph.stages:
            part = self.parts[node.name]
            stage = self.pass_seconds(node.module, part)
            seconds["F", node.name, False] = stage.forward
            seconds["B", node.name, False] = stage.backward
            if "W" in self._kinds(node):
                w_seconds = self.w_share(node.module, part) * (stage.backward - self.clock.op)
                seconds["W", node.name, False] = w_seconds + self.clock.op
                seconds["B", node.name, False] -= w_seconds
            once = self._once(node.module, node.index, part)
            seconds |= {(kind, node.name, False): cost for kind, cost in once.items()}
            if node.gather:
                gather = self.gather_seconds(node.module, part)
                seconds |= {("gather", node.name, backward): gather for backward in (False, True)}
            if node.stashes:
                copy = self.clock.of(node.module).copy(self._residual_bytes(node))
                seconds |= {(kind, node.name, False): copy for kind in STASH_COPIES}
        by_edge, by_microbatch = edge_costs(self.graph, self.candidate, self.clock, self._crossing)
        return Costs(seconds=seconds | by_edge, overrides=by_microbatch)

    @cached_property
    def _split_graph(self) -> StageGraph:
        """The graph whose stages are split as under the candidate's schedule."""
        return split_as(self.candidate.schedule, self.candidate.inner, self.graph)

    def _splits(self, name: str) -> bool:
        """Whether some stage of module `name` has a split backward."""
        return any(node.split for node in self._split_graph.stages if node.module == name)

    def _kinds(self, node: StageNode) -> str:
        """The kinds of op that a stage runs for each microbatch."""
        return "FBW"[: 1 + node.backward + self._split_graph.stage(node.name).split]

    def w_share(self, name: str, part: StagePart) -> float:
        """The share of W in the FLOPs of a split backward of this part of module `name`; 0 without a backward."""
        module = self.work.modules[name]
        flops = module.backward.of(part)
        return module.weight_gradients.of(part) / flops if flops else 0.0

    def pass_seconds(self, name: str, part: StagePart) -> PassSeconds:
        """Seconds of an op in a stage of module `name`, with its communication and the host's time.

        An op has one microbatch, or several together (`Layout.microbatches`).

        part: the part of the module that the stage has, such as `StagePart(layers=16)`. Gathers of lanes are not in it.
        """
        layout, clock, (rows, width) = self.candidate.layouts[name], self.clock.of(name), self.op_shape(name)
        module, first = self.work.modules[name], layout.first_rank(0) - self.candidate.kind_start(name)
        share = expert_sums(module, layout)
        compute = clock.stage(name, part, rows=rows, width=width, tp=layout.tp, expert_share=share)
        exchange = whole_rows = 0.0, 0.0
        if layout.cp > 1:
            exchange, whole_rows = self._exchange(name, part, compute), self._whole_rows(name, part)
        halves = not self.candidate.traits.splits or not self._splits(name)
        compute = with_experts(
            compute, module, layout, clock, shape=(rows, width), part=part, first=first, halves=halves
        )
        if layout.scatters_gradients:
            groups, ratio = shared_states(self.work, name, part, layout), self.work.item / self.work.gradient
            compute = beside_layers(compute, groups, layout, clock, layers=part.layers, ratio=ratio, first=first)
        return PassSeconds(
            forward=compute.forward + (exchange[0] + whole_rows[0]) + self.clock.op,
            backward=compute.backward + (exchange[1] + whole_rows[1]) + self.clock.op,
        )

    def _exchange(self, name: str, part: StagePart, compute: PassSeconds) -> tuple[float, float]:
        """Seconds, in forward and backward, by which a stage's cp exchange takes longer than its attention.

        compute: seconds of the stage without the exchange.
        """
        rows, width = self.rows[name]
        return exchange_seconds(
            self.work.modules[name],
            self.candidate.layouts[name],
            self.clock.of(name),
            shape=(rows * self.candidate.together(name), width),
            part=part,
            compute=compute,
            gradient_ratio=self.work.gradient / self.work.item,
        )

    def _whole_rows(self, name: str, part: StagePart) -> tuple[float, float]:
        """Seconds, in forward and backward, in which a stage's cp ranks join parts of rows between modules."""
        modules, layout = self.work.modules, self.candidate.layouts[name]
        has_readers = part.last and any(name in module.after for module in modules.values())
        sources = [source for source in modules[name].after if modules[source].has_backward] if part.first else []
        return whole_rows_seconds(
            layout,
            self.clock.of(name),
            modules[name].context(layout),
            output_bytes=self._output_bytes(name) / layout.dp if has_readers else 0.0,
            input_bytes=sum(self._summed_bytes(source, name) for source in sources) / layout.dp,
        )

    def _summed_bytes(self, source: str, target: str) -> float:
        """Bytes of gradients of the tokens of `source` that the cp ranks of `target` sum, for all dp ranks together.

        With send lists each gradient is on one rank, so nothing is summed. If both modules are on the same ranks the
        gradients are gathered, at half the cost of a sum.
        """
        share, ends = self.list_share(source, target), [self.candidate.layouts[name] for name in (source, target)]
        if share == 1:
            return self._output_bytes(source)
        gathered = ends[0].ranks == ends[1].ranks and ends[0].dp == ends[1].dp
        return self._output_bytes(source) * share * self._context(target) / 2 if gathered else 0.0

    def _once(self, name: str, index: int, part: StagePart) -> dict[str, float]:
        """Seconds of a stage's ops that run once a step, by kind: gather parameters, reduce gradients, update.

        Offloaded states are copied back while gradients are reduced; a frozen stage copies them back before its
        parameters are gathered. If parameters are offloaded, "offload" and "reload" are their copies.
        """
        layout, clock = self.candidate.layouts[name].across_lanes, self.clock.of(name)
        first = layout.first_rank(index) - self.candidate.kind_start(name)
        gather, reduce = once_a_step(shared_states(self.work, name, part, layout), layout, clock, first=first)
        if reduce and (backward := self._beside(name, index, part)):
            reduce = beside_backward(reduce, backward, part.layers)
        op, copies = self.clock.op, {}
        if name in self.candidate.offloads:
            states = self._states(name, part)
            state_bytes, parameter_bytes = states.offloaded(self.candidate.offload(name))
            copy_back = clock.copy(state_bytes)
            gather, reduce = gather + (0.0 if states.sums else copy_back), max(reduce, copy_back)
            copies = dict.fromkeys(("offload", "reload"), clock.copy(parameter_bytes)) if parameter_bytes else {}
        return {"prepare": gather + op, "reduce": reduce + op, "update": op, **copies}

    def _beside(self, name: str, index: int, part: StagePart) -> float:
        """Seconds of the op that reduces a stage's gradients too, a B or W; 0 where `reduce` has a program of its own.

        See `mmjax.pipeline.last_backward`.
        """
        layout, setting = self.candidate.layouts[name], self.work.overlap_grad_reduce
        overlaps = self.clock.of(name).platform == "gpu" if setting == AUTO else setting
        is_split = self._splits(name)
        if not overlaps or not part.layers or layout.lanes > 1 or layout.scatters_gradients or (index and not is_split):
            return 0.0
        backward = self.pass_seconds(name, part).backward - self.clock.op
        return backward * self.w_share(name, part) if is_split else backward

    def gather_seconds(self, name: str, part: StagePart) -> float:
        """Seconds in which a lane gathers the parameters of a part of module `name`, with the host's time.

        part: such as `StagePart(layers=16, first=True, last=True)`.
        """
        layout, clock = self.candidate.layouts[name].across_lanes, self.clock.of(name)
        groups, first = shared_states(self.work, name, part, layout), layout.first_rank(0)
        first -= self.candidate.kind_start(name)
        return self.clock.op + sum(group.gather(clock, group.states.parameters, first=first) for group in groups)

    def _states(self, name: str, part: StagePart) -> StateBytes[float]:
        """Bytes of a stage's states on a device."""
        return self.work.states(name, part, self.candidate.layouts[name])

    def _crossing(self, edge: EdgeNode) -> float:
        """Bytes of the activation that an op of an edge carries, for all dp ranks together.

        Between modules an edge carries whole rows, which every rank of cp and tp has, or all send lists; inside a
        module it carries a rank's part.
        """
        source, target = (self.graph.stage(name).module for name in (edge.src, edge.dst))
        if source != target:
            share = self.list_share(source, target)
            output_bytes = self.candidate.together(source) * self._output_bytes(source)
            return output_bytes * (share * self._context(target) if share < 1 else 1)
        module, (rows, width), layout = self.work.modules[source], self.rows[source], self.candidate.layouts[source]
        parts = module.context(layout) * (layout.tp if layout.shares_tokens else 1)
        return rows * width / module.width * module.carried / parts

    def _arriving(self, edge: EdgeNode) -> float:
        """Bytes of a microbatch's activation that a receiving rank of an edge has, for all dp ranks together."""
        source, target = (self.graph.stage(name).module for name in (edge.src, edge.dst))
        if source != target:
            return self._output_bytes(source) * self.list_share(source, target)
        return self._crossing(edge)

    def list_share(self, source: str, target: str) -> float:
        """The share of the tokens of `source` in the send list of a rank of `target`; 1 if ranks take whole rows.

        Both are names of modules. See `mmjax.data.send_lists`.
        """
        sender, reader = self.work.modules[source], self.work.modules[target]
        if not sender.together or sum(source in module.after for module in self.work.modules.values()) > 1:
            return 1.0
        (rows, width), (reader_rows, reader_width) = self.rows[source], self.rows[target]
        tokens = rows * width / sender.together
        positions = reader_rows * reader_width / max(1, reader.together) / self._context(target)
        return min(1.0, sender.blended * positions / tokens)

    def _context(self, name: str) -> int:
        """Ranks of cp that share the positions of a module's rows."""
        return self.work.modules[name].context(self.candidate.layouts[name])

    def _output_bytes(self, name: str) -> float:
        """Bytes of the activation of a microbatch that a module sends to other modules."""
        module, (rows, width) = self.work.modules[name], self.rows[name]
        return rows * width / module.width * module.output_bytes

    @cached_property
    def quick(self) -> float:
        """Seconds of a step in closed form: the first microbatch passes all stages, others follow at the worst pace.

        Stages on the same ranks run in turn. Encoders of a three-phase schedule and modules with lanes run in turn with
        all other stages, and the lanes of a module run at the same time. Ops that run once a step count for the slowest
        stage only. Moves are left out.
        """
        phased, count = self.candidate.phases(self.work), self.candidate.microbatches
        loads: dict[int, float] = {}
        first = exclusive = once = 0.0
        for name, module in self.work.modules.items():
            layout, parts = self.candidate.layouts[name], module.parts(self.candidate.layouts[name])
            passes = {part: self.pass_seconds(name, part) for part in set(parts)}
            once = max(once, self.once_seconds(name))
            for index, part in enumerate(parts):
                seconds = passes[part].forward + passes[part].backward
                if name in phased or layout.lanes > 1:
                    exclusive += seconds * -(-count // (layout.lanes * self.candidate.together(name)))
                    continue
                start = layout.first_rank(index)
                loads[start] = loads.get(start, 0.0) + seconds
                first += seconds
        windows = -(-count // self.candidate.span)
        return windows * first + (count - windows) * max(loads.values(), default=0.0) + exclusive + once

    def once_seconds(self, name: str) -> float:
        """Seconds of prepare, reduce and update together in the slowest stage of the module of this name."""
        parts = self.work.modules[name].parts(self.candidate.layouts[name])
        costs = (self._once(name, parts.index(part), part) for part in set(parts))
        return max(cost["prepare"] + cost["reduce"] + cost["update"] for cost in costs)

    def stage_seconds(self, stage: str) -> float:
        """Seconds of forward and backward (B and W) of a microbatch in the stage of this name, such as "llm.0"."""
        node = self.graph.stage(stage)
        return sum(self.costs.seconds[kind, stage, False] for kind in self._kinds(node)) / node.microbatches

    # ---- the simulated step ------------------------------------------------------------------------------------------

    @cached_property
    def depth(self) -> int:
        """The most microbatches that are in the pipeline at once."""
        return 1 + max(self.graph.distance(node.name) for node in self.graph.stages)

    def timeline(self, microbatches: int = 0, graph: StageGraph | None = None) -> Timeline:
        """A simulated step of `microbatches` microbatches; 0 means all microbatches of a step.

        graph: takes the place of the candidate's stage graph, with the same stages and edges.
        """
        count = microbatches or self.candidate.microbatches
        window = self.candidate.window if count > self.candidate.window else 0
        schedule = make_schedule(
            self.candidate.schedule,
            graph or self.graph,
            count,
            self.costs,
            window=window,
            inner=self.candidate.inner,
        )
        return simulate(schedule, self.costs)

    @cached_property
    def _enough(self) -> tuple[int, int]:
        """Microbatches that fill the pipeline, or all of a short step; and the period of further ones, or 0."""
        count, traits = self.candidate.microbatches, self.candidate.traits
        unit, ahead = max(node.lanes for node in self.graph.stages), self._ahead
        period = lcm(self.candidate.layouts[LLM].pp if traits.chunks else 1, unit)
        enough = (traits.settles * (self.depth + ahead) + 1) // period * period
        # With lanes, deferred W settle late: a unit takes longer until the most W are waiting.
        enough += (2 + (unit > 1) * (1 + 4 * traits.splits) + (ahead > 0)) * period
        enough += (count - enough) % period
        if self.candidate.window:
            period = enough = self.candidate.window
        elif any(node.microbatches > 1 for node in self.graph.stages):
            return count, 0
        return (count, 0) if count <= enough + period else (enough + period, period)

    @cached_property
    def _short(self) -> Timeline:
        """A simulated step that fills the pipeline; a short step is simulated to its end."""
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
        """The lead of the LLM over generators in lanes, in microbatches: one less than a unit."""
        layouts = (self.candidate.layouts[name] for name in self.work.generators)
        return max((layout.lanes for layout in layouts), default=1) - 1

    @property
    def shown(self) -> Timeline:
        """The simulated step, cut to the fewest microbatches that show a full pipeline."""
        return self.timeline(self._enough[0])

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, simulated; at least `crowded` if devices share processors."""
        alone = self._short.makespan + self._pace * (self.candidate.microbatches - self._enough[0])
        return max(alone, self.crowded) if self.clock.shared else alone

    @cached_property
    def crowded(self) -> float:
        """Seconds that the shared processors of the devices, and the host, need for all ops of a step.

        An op's seconds count for each device that works on it, except the host's part, which counts once.
        """

        def processor_seconds(key: CostKey, devices: int) -> float:
            return (self.costs.seconds[key] - self.clock.op) * devices + self.clock.op

        microbatch = once = 0.0
        for node in self.graph.stages:
            devices, lane_devices = len(node.ranks), len(node.ranks) // node.lanes
            kinds = self._kinds(node)
            op = sum(processor_seconds((kind, node.name, False), lane_devices) for kind in kinds)
            microbatch += op / node.microbatches
            kinds = ("prepare", "reduce", "update")[: 1 + 2 * node.trainable]
            once += sum(processor_seconds((kind, node.name, False), devices) for kind in kinds)
        for edge in self.graph.edges:
            kind = "unpack" if edge.kind == "local" else "move"
            dp = min(self.candidate.layouts[self.graph.stage(name).module].dp for name in (edge.src, edge.dst))
            directions, together = (False, True)[: 1 + edge.gradient], self.graph.stage(edge.src).microbatches
            op = sum(processor_seconds((kind, edge.name, backward), dp) for backward in directions)
            microbatch += op / together
        return (microbatch * self.candidate.microbatches + once) / self.clock.shared

    @cached_property
    def busy(self) -> float:
        """Seconds of work on microbatches, summed over all devices."""
        microbatch = sum(self.stage_seconds(node.name) * len(node.ranks) / node.lanes for node in self.graph.stages)
        return microbatch * self.candidate.microbatches

    @property
    def bubble(self) -> float:
        """Share of the step in which the devices in use do not work on microbatches."""
        return max(0.0, 1 - self.busy / (self.seconds * self.candidate.devices))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second over the peak of the devices in use: real positions, without recompute.

        None if a peak is not known.
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
        """Share of recompute in the FLOPs of a step, padding included."""
        recompute = total = 0.0
        for name, module in self.work.modules.items():
            rows, width = self.rows[name]
            recompute += rows * width / module.width * module.recompute.of(module.whole)
            total += rows * width / module.width * module.computed
        return recompute / total

    @cached_property
    def bottleneck(self) -> str:
        """Name of the longest stage on the ranks with the most seconds for a microbatch, such as "llm.0"."""
        return max(self.graph.stages, key=lambda n: (self.loads[n.ranks], self.stage_seconds(n.name))).name

    @cached_property
    def loads(self) -> dict[tuple[int, ...], float]:
        """Seconds of forward and backward of a microbatch in all stages on the same ranks, by these ranks.

        A stage with lanes counts with the mean over microbatches, since each microbatch runs on one lane.
        """
        loads: dict[tuple[int, ...], float] = {}
        for node in self.graph.stages:
            loads[node.ranks] = loads.get(node.ranks, 0.0) + self.stage_seconds(node.name) / node.lanes
        return loads

    # ---- rows and residuals ------------------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[float, int]:
        """Rows of a microbatch on a rank of a module, and their width."""
        rows, width = self.rows[name]
        return rows / self._sharers(name), width

    def op_shape(self, name: str) -> tuple[float, int]:
        """Rows of an op on a rank of module `name`, and their width; an op may take several microbatches together."""
        (rows, width), count = self._shape(name), self.candidate.together(name)
        if count == 1:
            return rows, width
        layouts, sharers = self.candidate.layouts, self._sharers(name)
        cells, dp = cell_count(layouts.values()), layouts[name].dp
        in_cell = ceil(self.rows[name][0] / cells * (1 - ROUNDING))
        return cells * count * Together(microbatches=count, dp=dp).rows(in_cell, cells, count) / sharers, width

    def _sharers(self, name: str) -> int:
        """Ranks among which the rows of a module's microbatch are divided."""
        layout = self.candidate.layouts[name]
        return layout.dp * self.work.modules[name].context(layout)

    def scale(self, name: str) -> float:
        """Rows of a microbatch on a rank of module `name`, counted in rows of the module's `width`."""
        rows, width = self._shape(name)
        return rows * width / self.work.modules[name].width

    def stage_memory(self, name: str) -> StageMemory:
        """Bytes that a device of module `name` needs for rows and programs."""
        return self.work.modules[name].stage_memory(self.candidate.layouts[name])

    def _residual_bytes(self, node: StageNode) -> float:
        """Bytes of residuals that a device keeps of a microbatch from a stage's F to its B."""
        return self.scale(node.module) * self.stage_memory(node.module).residuals.of(self.parts[node.name])
