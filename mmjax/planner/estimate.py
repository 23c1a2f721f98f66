"""The estimate of a candidate: its seconds (`StepSeconds`), and the bytes of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any

from mmjax.models.config import LLM
from mmjax.pipeline.state_bytes import MASTER
from mmjax.planner.needs import Need, fullest_split, held_by_rank
from mmjax.planner.step_seconds import StepSeconds
from mmjax.planner.traffic import exchanged_bytes
from mmjax.planner.work import Part
from mmjax.schedule.graph import StageNode
from mmjax.schedule.ops import MOST_UNSTASHED


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate(StepSeconds):
    """A candidate in seconds and bytes; attributes as of `StepSeconds`."""

    @cached_property
    def needs(self) -> dict[str, Need]:
        """Bytes of each device of a stage, by stage."""
        return {name: self._need(name) for name in self.parts}

    def _need(self, stage: str) -> Need:
        node, part, split = self.graph.stage(stage), self.parts[stage], self._split.get(stage)
        name = node.module
        held, states, scale, kept = self._held(name), self._states(name, part), self._scale(name), 0.0
        if node.backward:
            there = min(self.in_flight(node), MOST_UNSTASHED) if node.stashes else self.in_flight(node)
            kept = held.kept.of(part) * there + held.deferred.of(part) * (split[1] if split else 0)
        inputs = scale * 2 * -(-self.candidate.microbatches // node.lanes) * held.inputs.of(part)
        temporaries = self._temporaries(name, part)
        states_away, parameters_away = states.away(self.candidate.offload(name))
        return Need(
            weights=states.copies + states.optimizer,
            gradients=states.sums + states.reduced,
            activations=scale * kept + self._passing(node) + inputs,
            temporaries=temporaries * (held.split if split else 1.0),
            reduced=states.reduced,
            inputs=inputs,
            states_away=states_away,
            parameters_away=parameters_away,
            activations_away=self._kept(node) * self.in_flight(node) if node.stashes else 0.0,
        )

    def _temporaries(self, name: str, part: Part) -> float:
        """Bytes of a stage's largest program; those that cp ranks exchange are there while its layers run."""
        layout, (rows, width) = self.candidate.layouts[name], self._shape(name)
        shape: Any = {"rows": rows, "width": width, "tp": layout.tp}
        needed = self.clock.of(name).temporaries(name, part, **shape)
        if layout.cp == 1:
            return needed
        inner = self.clock.of(name).temporaries(name, Part(layers=part.layers), **shape)
        return max(needed, inner + self._exchanged(name))

    def _passing(self, node: StageNode) -> float:
        """Bytes of activations and gradients that have arrived at a device of a stage or are about to leave it.

        An activation that arrived stays as long as the stage keeps its microbatch; those of encoders in a phase of
        their own stay for all microbatches of the phase, those of lanes as long as a lane keeps their microbatch. To
        these come an activation and a gradient on their way.
        """
        phased, in_flight = self.candidate.phases(self.work), self.in_flight(node)
        dp = self.candidate.layouts[node.module].dp
        arriving = {edge: self._arriving(edge) / dp for edge in self.graph.in_edges(node.name)}
        leaving = [self._crossing(edge) / dp for edge in self.graph.out_edges(node.name)]
        kept = 0.0
        for edge, size in arriving.items():
            source = self.graph.stage(edge.src)
            if source.module in phased and node.module not in phased:
                kept += size * self.candidate.span
            else:
                kept += size * max(in_flight, source.lanes * self.in_flight(source) if source.lanes > 1 else 0)
        return kept + 2 * max(sum(arriving.values()), sum(leaving))

    def _exchanged(self, name: str) -> float:
        """Bytes of keys and values of other cp ranks, and of their gradients, that a running program holds."""
        layout, wider = self.candidate.layouts[name], self.work.gradient / self.work.item
        return exchanged_bytes(self.work.modules[name], layout, self.rows[name], wider)

    def in_flight(self, node: StageNode) -> int:
        """The most microbatches that a device of a stage keeps at once: of a stage with lanes, those of one lane."""
        count, lead = self.candidate.span, self.candidate.traits.lead
        if node.module in self.candidate.phases(self.work):
            return -(-count // node.lanes)
        if lead:
            return min(count, lead * self.graph.distance(node.name) + 1)
        if split := self._split.get(node.name):
            return split[0]
        short = self._short.schedule  # what keeps all of its microbatches keeps all of a longer step's
        bound = short.bound(node.name)
        return -(-(bound if bound < short.microbatches else count) // node.lanes)

    @cached_property
    def _split(self) -> dict[str, tuple[int, int]]:
        """For each stage with a split backward, its microbatches between F and B, and between B and W, at the peak.

        Of a stage with lanes they are those of its fullest lane.
        """
        kinds: dict[str, dict[int, list[str]]] = {}
        for op in self._short.schedule.ops if self.candidate.traits.splits else ():
            if op.kind in "FBW":
                lane = self.graph.stage(op.stage).lane(op.microbatch)
                kinds.setdefault(op.stage, {}).setdefault(lane, []).append(op.kind)
        found = {}
        for stage, own in ((stage, own) for stage, own in kinds.items() if "W" in own[0]):
            held, part = self._held(self.graph.stage(stage).module), self.parts[stage]
            found[stage] = fullest_split(own.values(), held.kept.of(part), held.deferred.of(part))
        return found

    @cached_property
    def memory(self) -> dict[int, float]:
        """Bytes that a device holds, by rank, for the first rank of each stage (`held_by_rank`)."""
        return held_by_rank(self.graph, self.needs, self.candidate.phases(self.work))

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
        """Three bounds: while microbatches go through, without offload; then, with all of it; when a step ends.

        They are summed over modules that begin on the same rank; of these sums each is the largest. A stage counts
        without ends, and where a step computes in float32 without copies: masters that serve may be away, too.
        """
        held = dict[int, tuple[float, ...]]()
        for name, module in self.work.modules.items():
            layout, phased = self.candidate.layouts[name], name in self.candidate.phases(self.work)
            ahead = self._ahead if name == LLM else int(layout.lanes > 1 and name in self.work.encoders)
            most = -(-self.candidate.span // layout.lanes)
            in_flight = most if phased else min(most, layout.pp + ahead)
            part = Part(layers=min(len(run) for run in layout.runs(module.layers)))
            kept = self._held(name).kept.of(part) * self._scale(name) * in_flight if module.has_backward else 0.0
            states = self._states(name, part)
            copies = 0.0 if self.work.item == MASTER else states.copies
            ends = copies + states.optimizer + states.sums
            each = (ends + kept, ends + kept - states.optimizer - copies * phased, ends)
            held[layout.rank_offset] = tuple(map(add, held.get(layout.rank_offset, (0.0, 0.0, 0.0)), each))
        return tuple(map(max, zip(*held.values(), strict=True)))

    @property
    def most(self) -> float:
        """Bytes of the fullest device."""
        return max(self.memory.values())
