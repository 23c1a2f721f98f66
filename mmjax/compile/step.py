"""A step of compiled programs: its seconds by the schedule, its MFU, and the fullest device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from mmjax.assembly.samples import open_source
from mmjax.compile.buffers import KINDS as BUFFER_KINDS
from mmjax.compile.buffers import Buffer
from mmjax.compile.model_flops import ModelFlops, step_flops
from mmjax.compile.programs import STEP, Programs, Use
from mmjax.compile.rates import Rates
from mmjax.data.source import Source
from mmjax.data.types import SampleMeta
from mmjax.mesh import gpu
from mmjax.mesh.transfer import MovedTransfer
from mmjax.mesh.world import Device, World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.last_backward import REDUCING, kind_of_op
from mmjax.pipeline.memory import count_state_bytes, memory_by_stage, shard_bytes
from mmjax.pipeline.peak import fullest
from mmjax.pipeline.walker import Signature
from mmjax.schedule.ops import Op
from mmjax.schedule.simulate import CostKey, Costs, Timeline, simulate

KINDS = ("parameters", "optimizer", "gradients", "residuals", "received", "inputs", "boundaries", "temporaries")
_ROLES = {"residuals": ("F", "result"), "received": ("F", "argument"), "temporaries": ("", "temporary")}


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The buffer that takes most of the fullest device.

    Attributes:
      kind: one of `KINDS`, of which the device holds most.
      bytes: of that kind on the device.
      program: the program whose buffer it is.
      buffer: the largest of that kind in the program; None if the compiler does not tell.
    """

    kind: str
    bytes: int
    program: str
    buffer: Buffer | None

    def __str__(self) -> str:
        largest = f", the largest of {self.program}: {self.buffer}" if self.buffer else f", of {self.program}"
        return f"{self.kind} of {self.bytes / 2**30:.1f} GiB{largest}"


@dataclass(frozen=True, kw_only=True)
class Fullest:
    """The fullest device of a step.

    Attributes:
      rank: its rank.
      op: the op during which it holds most.
      bytes: what it holds then.
      limit: what a run may take.
      kinds: bytes by kind, each at its own peak.
      blame: what takes most of it.
    """

    rank: int
    op: str
    bytes: int
    limit: int
    kinds: Mapping[str, int]
    blame: Blame

    @property
    def fits(self) -> bool:
        """Whether a run may take as much."""
        return self.bytes <= self.limit


class Step:
    """A step of compiled programs.

    Attributes:
      programs: the programs.
    """

    def __init__(self, programs: Programs, source: Source | None = None):
        """``source``: the training samples of the configuration, whose first step counts; opened here if not given."""
        self.programs, self._source = programs, source
        self._parts = programs.assembly

    # ---- seconds -----------------------------------------------------------------------------------------------------

    def timeline(self, rates: Rates, *, hidden: bool = False) -> Timeline | None:
        """The schedule with predicted seconds; None for a step that is one program.

        Args:
          rates: of the devices.
          hidden: whether all collectives lie beside computations, and not those alone that programs have there.
        """
        if not isinstance(self._parts.executor, Executor):
            return None
        return simulate(self._parts.schedule, self._costs(rates, hidden=hidden))

    def seconds(self, rates: Rates, *, hidden: bool = False) -> float:
        """Predicted seconds of a step; arguments as for ``timeline``."""
        if timeline := self.timeline(rates, hidden=hidden):
            return timeline.makespan
        uses = {use.signature: use for use in self.programs.uses if use.kind == STEP}
        return max(self._seconds(uses[known], rates, hidden=hidden) for known in self._signatures)

    def _seconds(self, use: Use, rates: Rates, *, hidden: bool) -> float:
        work = self.programs.work(use, rates)
        return work.hidden if hidden else work.ordered

    def _costs(self, rates: Rates, *, hidden: bool) -> Costs:
        by_signature: dict[tuple[CostKey, Signature | None], float] = defaultdict(float)
        for use in self.programs.uses:
            key = (use.kind, use.name, use.backward), use.signature
            took = self._seconds(use, rates, hidden=hidden)
            by_signature[key] = max(by_signature[key], took)
        for key, took in self._moves(rates).items():
            by_signature[key] += took
        seconds: dict[CostKey, float] = defaultdict(float)
        for (key, signature), took in by_signature.items():
            if signature is None or signature in self._signatures:
                seconds[key] = max(seconds[key], took)
        chosen = enumerate(self._signatures if len(set(self._signatures)) > 1 else ())
        overrides = {
            (*key, microbatch): by_signature[key, signature]
            for microbatch, signature in chosen
            for key, known in by_signature
            if known == signature
        }
        for use in self.programs.uses:
            if use.kind not in REDUCING.values():
                continue
            last = self._last_op(use)
            if self._signatures[last.microbatch] == use.signature:
                overrides[last.kind, use.name, False, last.microbatch] = self._seconds(use, rates, hidden=hidden)
        return Costs(seconds=seconds, overrides=overrides)

    def _last_op(self, use: Use) -> Op:
        """The op of a step that runs a program which reduces gradients too."""
        executor = self._parts.executor
        assert isinstance(executor, Executor)
        return executor.walker.last_ops[use.name]

    def _moves(self, rates: Rates) -> dict[tuple[CostKey, Signature | None], float]:
        """Seconds of ops without a program: direct copies between devices, and copies to the host."""
        executor, graph = self._parts.executor, self._parts.schedule.graph
        assert isinstance(executor, Executor)
        result: dict[tuple[CostKey, Signature | None], float] = defaultdict(float)
        nodes = {place: node.name for node in graph.stages for place in node.lane_names}
        for (name, signature), boundary in executor.boundaries.items():
            edge = "->".join(nodes[place] for place in name.split("->"))
            for backward, transfer in ((False, boundary.of_op.forward), (True, boundary.of_op.backward)):
                if isinstance(transfer, MovedTransfer) and not transfer.mover.programs():
                    key = ("move", edge, backward), signature
                    result[key] = max(result[key], _copy_seconds(transfer, rates))
        for name, tie in self._parts.placed.ties.items():
            for backward, transfer in ((False, tie.forward.blocks), (True, tie.backward.blocks)):
                if isinstance(transfer, MovedTransfer) and not transfer.mover.programs():
                    result[("move", name, backward), None] = _copy_seconds(transfer, rates)
        for name, gather in self._parts.placed.lane_gathers.items():
            if graph.stage(name).gather == "pull":
                took = _pull_seconds(gather.pulled_bytes(name), self._parts.world, rates)
                result |= {(("gather", name, backward), None): took for backward in (False, True)}
        host = 0.8 * self.programs.target.datasheet.host
        for node in graph.stages:
            state = self._parts.placed.stages[node.name].state
            if node.offload:
                took = count_state_bytes(state).parameters / host
                result |= {((kind, node.name, False), None): took for kind in ("offload", "reload")}
            if node.stashes:
                for (place, signature), programs in executor.stage_programs.items():
                    took = shard_bytes(programs.functions.residual_avals) / host
                    if nodes[place] == node.name:
                        result |= {((kind, node.name, False), signature): took for kind in ("stash", "unstash")}
        return result

    # ---- the data ----------------------------------------------------------------------------------------------------

    @cached_property
    def _metas(self) -> list[SampleMeta]:
        recipe = self.programs.recipe
        source = self._source or open_source(recipe, split="train")
        return self._parts.packer.completed([source.meta(index) for index in range(recipe.train.global_batch)])

    @cached_property
    def _signatures(self) -> list[Signature]:
        """The signature of each microbatch of the first step; its rows have as many runs as most rows have."""
        return [
            next(known for known in self._parts.shapes if chosen.items() <= dict(known).items())
            for chosen in self._parts.packer.buckets(self._metas)
        ]

    @cached_property
    def flops(self) -> ModelFlops:
        """Model FLOPs of the first step on all devices, without padding."""
        return step_flops(self.programs.recipe, self._parts.placed.model, self._metas)

    def mfu(self, seconds: float) -> ModelFlops:
        """MFU of a step that takes so many seconds, by both rules, in [0, 1]."""
        peak = self.programs.target.datasheet.flops * self._parts.world.size
        return self.flops.times(1 / seconds / peak)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def fullest(self) -> Fullest:
        """The fullest device: arrays as they are counted, temporaries as they are compiled."""
        limit = round(gpu.memory_share() * self.programs.target.memory)
        if not isinstance(self._parts.executor, Executor):
            return self._one_program(limit)
        temporaries: dict[tuple[str, str], int] = defaultdict(int)
        for use in self.programs.uses:
            key = kind_of_op(use.kind), use.name
            temporaries[key] = max(temporaries[key], self.programs.executable(use).temporaries)
        placed, schedule, shapes = self._parts.placed, self._parts.schedule, list(self._parts.shapes.values())
        peak = fullest(placed, schedule, shapes, temporaries)
        kinds = Counter[str]()
        for name, memory in memory_by_stage(placed, schedule, shapes).items():
            if peak.rank in placed.stages[name].submesh.ranks:
                kinds.update({kind: size for kind, size in asdict(memory).items() if kind != "host"})
        kinds["temporaries"] = temporaries[peak.op.kind, peak.op.stage]
        counted = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
        blame = self._blame(max(counted, key=lambda kind: counted[kind]), counted, peak.op.kind, peak.rank)
        return Fullest(rank=peak.rank, op=str(peak.op), bytes=peak.bytes, limit=limit, kinds=counted, blame=blame)

    def _blame(self, kind: str, counted: Mapping[str, int], op_kind: str, rank: int) -> Blame:
        """The largest buffer of a kind in the programs on a rank."""
        letter, role = _ROLES.get(kind, ("", "argument"))
        letter = letter or (op_kind if kind == "temporaries" else {"parameters": "F"}.get(kind, "update"))
        stages = self._parts.placed.stages
        buffers_by_program: list[tuple[str, Buffer]] = []
        for use in self.programs.uses:
            if kind_of_op(use.kind) == letter and use.name in stages and rank in stages[use.name].submesh.ranks:
                buffers = self.programs.executable(use).buffers
                buffers_by_program += [(use.program.name, buffer) for buffer in buffers if buffer.kind == role]
        program, buffer = max(
            buffers_by_program, key=lambda pair: pair[1].bytes, default=(f"{letter} on rank {rank}", None)
        )
        return Blame(kind=kind, bytes=counted[kind], program=program, buffer=buffer)

    def _one_program(self, limit: int) -> Fullest:
        """The fullest device of a step in one program; all its devices hold equally much."""
        use = max(self.programs.uses, key=lambda use: self.programs.executable(use).bytes)
        executable = self.programs.executable(use)
        kinds = {
            "arguments": executable.arguments,
            "results": executable.results - executable.aliased,
            "temporaries": executable.temporaries,
        }
        kind = max(kinds, key=lambda kind: kinds[kind])
        role = dict(zip(kinds, BUFFER_KINDS, strict=True))[kind]
        buffer = next((buffer for buffer in executable.buffers if buffer.kind == role), None)
        blame = Blame(kind=kind, bytes=kinds[kind], program=use.program.name, buffer=buffer)
        return Fullest(rank=0, op=STEP, bytes=executable.bytes, limit=limit, kinds=kinds, blame=blame)


def _pull_seconds(sizes: Mapping[tuple[Device, Device], int], world: World, rates: Rates) -> float:
    """Seconds in which a device of a lane copies the shards that it lacks; ``sizes`` by owner and receiver."""
    ranks, received = {device: rank for rank, device in enumerate(world.devices)}, Counter[tuple[int, bool]]()
    for (owner, target), size in sizes.items():
        received[ranks[target], ranks[owner] // rates.node != ranks[target] // rates.node] += size
    return max((size / (rates.network if far else rates.link) for (_, far), size in received.items()), default=0.0)


def _copy_seconds(transfer: MovedTransfer, rates: Rates) -> float:
    """Seconds of direct copies: those of the rank that sends most."""
    routing, bytes_sent = transfer.routing, Counter[tuple[int, bool]]()
    piece = int(np.prod(routing.piece)) * routing.aval.dtype.itemsize
    for route in routing.routes:
        bytes_sent[route.source, route.source // rates.node != route.target // rates.node] += piece
    return max((size / (rates.network if far else rates.link) for (_, far), size in bytes_sent.items()), default=0.0)
