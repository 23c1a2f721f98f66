"""The estimate of a candidate: its seconds (`StepSeconds`), and the bytes of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from operator import add

from mmjax.models.config import LLM
from mmjax.pipeline.state_bytes import MASTER
from mmjax.planner.needs import DeviceBytes, bytes_by_rank, fullest_split
from mmjax.planner.sharding import transferred_bytes
from mmjax.planner.step_seconds import StepSeconds
from mmjax.planner.traffic import exchanged_bytes
from mmjax.planner.work import StagePart
from mmjax.schedule.graph import StageNode
from mmjax.schedule.ops import MOST_UNSTASHED


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate(StepSeconds):
    """A candidate in seconds and bytes; the attributes are those of `StepSeconds`."""

    @cached_property
    def device_bytes(self) -> dict[str, DeviceBytes]:
        """Bytes of one device of each stage, by stage name ("llm.0")."""
        return {name: self._device_bytes(name) for name in self.parts}

    def _device_bytes(self, stage: str) -> DeviceBytes:
        node, part, split = self.graph.stage(stage), self.parts[stage], self._split.get(stage)
        name = node.module
        memory, states, scale, residuals = self.stage_memory(name), self._states(name, part), self.scale(name), 0.0
        if node.backward:
            on_device = min(self.in_flight(node), MOST_UNSTASHED) if node.stashes else self.in_flight(node)
            residuals = memory.residuals.of(part) * on_device
            residuals += memory.split().deferred.of(part) * split[1] if split else 0.0
        inputs = scale * 2 * -(-self.candidate.microbatches // node.lanes) * memory.inputs.of(part)
        states_away, parameters_away = states.offloaded(self.candidate.offload(name))
        return DeviceBytes(
            weights=self.weight_bytes(name, part),
            gradients=states.sums + states.reduced,
            activations=scale * residuals + self._edge_bytes(node) + inputs,
            temporaries=self.program_bytes(name, part, split=split is not None),
            reduced=states.reduced,
            inputs=inputs,
            states_away=states_away,
            parameters_away=parameters_away,
            activations_away=self._residual_bytes(node) * self.in_flight(node) if node.stashes else 0.0,
        )

    def weight_bytes(self, name: str, part: StagePart) -> float:
        """Bytes of parameters, masters and moments of a part of module `name` on a device, with a lane's gathered ones.

        part: such as `estimate.parts["llm.0"]`.
        """
        states = self._states(name, part)
        published = states.direct if self.candidate.layouts[name].pulls else 0.0  # a copy of masters
        return states.copies + states.optimizer + published + self.gathered_bytes(name, part)

    def program_bytes(self, name: str, part: StagePart, *, split: bool) -> float:
        """Bytes of temporaries of the largest program of a part of module `name` on a device.

        Args:
          name: the module's name, such as "llm".
          part: such as `estimate.parts["llm.0"]`.
          split: whether its backward is split into B and W.
        """
        temporaries = self._temporaries(name, part) * (self.stage_memory(name).split().temporaries if split else 1.0)
        return max(temporaries, self.gathered_bytes(name, part))

    def gathered_bytes(self, name: str, part: StagePart) -> float:
        """Bytes of the whole parameters that a lane gathers; as many are there in shards when it joins them."""
        layout, states = self.candidate.layouts[name], self._states(name, part)
        return states.parameters * layout.optimizer_shards if layout.pulls else 0.0

    def _temporaries(self, name: str, part: StagePart) -> float:
        """Bytes of a stage's largest program, with the bytes that cp ranks exchange while its layers run."""
        module, layout = self.work.modules[name], self.candidate.layouts[name]
        transferred = transferred_bytes(module, layout, self.work.item)
        if layout.scatters_gradients:  # the gradients of other layers are shards already
            transferred -= self.stage_memory(name).fixed_layer * part.layers * (1 - 1 / layout.optimizer_shards)
        if layout.ep > 1:  # a clock has those of all experts on each rank
            transferred += self.stage_memory(name).running(part, self.scale(name))
            transferred -= module.memory[layout.tp].running(part, self.scale(name))
        return max(0.0, self._of_programs(name, part) + transferred)

    def _of_programs(self, name: str, part: StagePart) -> float:
        """`_temporaries` of whole parameters and sums."""
        layout, (rows, width) = self.candidate.layouts[name], self.op_shape(name)
        temporaries = partial(self.clock.of(name).temporaries, name, rows=rows, width=width, tp=layout.tp)
        if layout.cp == 1:
            return temporaries(part)
        return max(temporaries(part), temporaries(StagePart(layers=part.layers)) + self._exchanged(name))

    def _edge_bytes(self, node: StageNode) -> float:
        """Bytes of activations and gradients that have arrived at a device of a stage or are about to leave it.

        An activation that has arrived stays as long as the stage keeps its microbatch. Activations of encoders with a
        phase of their own stay for all microbatches of the phase, activations of lanes as long as a lane keeps their
        microbatch. An activation and a gradient in transfer are added.
        """
        phased, in_flight = self.candidate.phases(self.work), self.in_flight(node)
        dp = self.candidate.layouts[node.module].dp
        arriving = {edge: self._arriving(edge) / dp for edge in self.graph.in_edges(node.name)}
        leaving = [self._crossing(edge) / dp for edge in self.graph.out_edges(node.name)]
        waiting = 0.0
        for edge, size in arriving.items():
            source = self.graph.stage(edge.src)
            if source.module in phased and node.module not in phased:
                waiting += size * self.candidate.span
            else:
                waiting += size * max(in_flight, source.lanes * self.in_flight(source) if source.lanes > 1 else 0)
        return waiting + 2 * max(sum(arriving.values()), sum(leaving))

    def _exchanged(self, name: str) -> float:
        """Bytes of keys and values of other cp ranks, and of their gradients, that a running program holds."""
        layout, gradient_ratio = self.candidate.layouts[name], self.work.gradient / self.work.item
        return exchanged_bytes(self.work.modules[name], layout, self.rows[name], gradient_ratio)

    def in_flight(self, node: StageNode) -> int:
        """The most microbatches that a device of a stage of `graph` keeps at once; with lanes, those of its lane."""
        count, lead = self.candidate.span, self.candidate.traits.lead
        if node.module in self.candidate.phases(self.work):
            return -(-count // node.lanes)
        if lead:
            return min(count, lead * self.graph.distance(node.name) + 1)
        if split := self._split.get(node.name):
            return split[0]
        short = self._short.schedule  # a stage that keeps all microbatches of it also keeps all of a longer step
        bound = short.bound(node.name)
        return -(-(bound if bound < short.microbatches else count) // node.lanes)

    @cached_property
    def _split(self) -> dict[str, tuple[int, int]]:
        """For each stage with a split backward, its microbatches between F and B, and between B and W, at the peak.

        For a stage with lanes, the microbatches of its fullest lane.
        """
        kinds: dict[str, dict[int, list[str]]] = {}
        for op in self._short.schedule.ops if self.candidate.traits.splits else ():
            if op.kind in "FBW":
                lane = self.graph.stage(op.stage).lane(op.microbatch)
                kinds.setdefault(op.stage, {}).setdefault(lane, []).append(op.kind)
        peaks = {}
        for stage, lanes in kinds.items():
            if "W" in lanes[0]:
                memory, part = self.stage_memory(self.graph.stage(stage).module), self.parts[stage]
                peaks[stage] = fullest_split(
                    lanes.values(), residuals=memory.residuals.of(part), deferred=memory.split().deferred.of(part)
                )
        return peaks

    @cached_property
    def memory(self) -> dict[int, float]:
        """Bytes that a device holds, by rank, for the first rank of each stage (`bytes_by_rank`)."""
        return bytes_by_rank(self.graph, self.device_bytes, self.candidate.phases(self.work))

    @property
    def least(self) -> float:
        """A lower bound on the bytes of the fullest device, without offload."""
        return self._least[0]

    @property
    def lightest(self) -> float:
        """A lower bound on the bytes of the fullest device, with all possible offload."""
        return max(self._least[1:])

    @cached_property
    def _least(self) -> tuple[float, ...]:
        """Three bounds: during microbatches without offload, during microbatches with all offload, at the step's end.

        Each is summed over the modules that begin on the same rank, and the largest of these sums is the bound. A stage
        counts without its module's ends. If a step computes in float32 it counts without copies, since masters that are
        used as compute parameters may be offloaded too.
        """
        by_rank = dict[int, tuple[float, ...]]()
        for name, module in self.work.modules.items():
            layout, phased = self.candidate.layouts[name], name in self.candidate.phases(self.work)
            ahead = self._ahead if name == LLM else int(layout.lanes > 1 and name in self.work.encoders)
            most = -(-self.candidate.span // layout.lanes)
            in_flight = most if phased else min(most, layout.pp + ahead)
            part = StagePart(layers=min(len(run) for run in layout.runs(module.layers)))
            row = self.stage_memory(name).residuals.of(part) * self.scale(name)
            residuals = row * in_flight if module.has_backward else 0.0
            states = self._states(name, part)
            copies = 0.0 if self.work.item == MASTER else states.copies
            ends = copies + states.optimizer + states.sums
            bounds = (ends + residuals, ends + residuals - states.optimizer - copies * phased, ends)
            by_rank[layout.rank_offset] = tuple(map(add, by_rank.get(layout.rank_offset, (0.0, 0.0, 0.0)), bounds))
        return tuple(map(max, zip(*by_rank.values(), strict=True)))

    @property
    def most(self) -> float:
        """Bytes of the fullest device."""
        return max(self.memory.values())
