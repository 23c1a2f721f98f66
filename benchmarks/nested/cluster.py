"""128 H800: layouts of the modules, and the seconds and bytes that the planner counts for them. Nothing was measured.

A *rank* is four GPUs of one node that share the rows of one replica of the LLM (dp). A pipeline of N ranks has 32 / N
replicas, and a microbatch has a row for each of them.

* The LLM splits rows (cp 4) and shares experts over the eight GPUs of a node (ep 8, all-to-all).
* The encoder divides the pictures of a row evenly among the four GPUs (dp), as reordered samples nearly are.
* Encoder and generator have sharded parameters. In lanes each op pulls all of them first (`gather = 'pull'`), so that
  the generator needs tp 4: whole weights and sums of gradients of 20B fit on no GPU. On ranks of their own they are
  gathered layer by layer (`gather = 'layer'`), and the generator has dp alone.
* Times are those of `mmjax.planner`: half of the datasheet's dense peak, 80 % of its links. Rows of equal length are
  assumed to use experts evenly.
* Moves of activations take their bytes over a GPU's InfiniBand; only the receiver waits for them.
* The reductions and the update, once a step, are not counted: they are the same for every system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.nested.models import LLM, PAINTER, TP, VISION, Row, Workload
from mmjax.mesh.layout import Layout
from mmjax.planner.accelerators import H800
from mmjax.planner.candidates import NESTED, NON_COLOCATED, Candidate
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import StagePart
from mmjax.schedule.ops import Schedule
from mmjax.schedule.placements import Placement, TimedModule

DEVICES, GPUS, EP = 128, 4, 8
"""GPUs in all, of a rank, and of a group with different experts."""
RANKS = DEVICES // GPUS


def layouts(workload: Workload, lanes: int, replicas: int) -> dict[str, Layout]:
    """The layout of each module of one stage.

    Args:
      workload: the model.
      lanes: lanes of encoder and generator; 1 where they have ranks of their own.
      replicas: replicas of the LLM.
    """
    gather = "pull" if lanes > 1 else "layer"
    shards = Layout(dp=GPUS * replicas, lanes=lanes, shard="parameters", gather=gather)
    painter = replace(shards, dp=replicas, tp=TP) if lanes > 1 else shards
    llm = Layout(dp=replicas, cp=GPUS, ep=EP, ep_way="all-to-all")
    by_name = {VISION: shards, LLM: llm, PAINTER: painter}
    return {name: by_name[name] for name in workload.modules}


@cache
def estimate(workload: Workload, row: Row, lanes: int, replicas: int) -> Estimate:
    """The planner's estimate of a microbatch of rows like this one; arguments as for `layouts`."""
    modules = {name: workload.module_work(name, row) for name in workload.modules}
    work = replace(workload.work, modules=modules)
    candidate = Candidate(
        mode=NESTED if lanes > 1 else NON_COLOCATED,
        layouts=layouts(workload, lanes, replicas),
        microbatches=1,
    )
    rows = {name: (replicas * workload.rows_of(name, row), module.width) for name, module in modules.items()}
    return Estimate(work=work, clock=AnalyticClock(work=work, accelerator=H800), candidate=candidate, rows=rows)


def move_seconds(workload: Workload) -> float:
    """Seconds of a move of the LLM's activations, or of an encoder's output to it."""
    llm = workload.work.modules[LLM]
    return AnalyticClock(work=workload.work, accelerator=H800).move(llm.carried / GPUS, across=True)


def pull_seconds(workload: Workload, lanes: int) -> dict[str, float]:
    """Seconds in which a lane pulls the parameters of each module that has lanes."""
    made = estimate(workload, workload.rows(1)[0], lanes, RANKS // lanes)
    pulling = [name for name, layout in made.candidate.layouts.items() if layout.pulls]
    return {name: made.gather_seconds(name, made.work.modules[name].whole) for name in pulling}


def timed(workload: Workload, name: str, rows: Sequence[Row], *, lanes: int, even: bool = False) -> TimedModule:
    """A module for placements, with the time of each of `rows`, or the mean time for all if `even`.

    Its layers are the units of stages, so the parts behind the LLM's last layer count as layers; `head_layers` of them.

    Args:
      workload: the model.
      name: the module's name.
      rows: rows of microbatches.
      lanes: lanes of encoder and generator, as many as ranks of a pipeline; 1 where modules have ranks of their own.
      even: whether every row takes as long as the mean.
    """
    estimates = [estimate(workload, row, lanes, _replicas(lanes)) for row in rows]
    part = StagePart(layers=workload.work.modules[name].layers)
    passes = [made.pass_seconds(name, part) for made in estimates]
    forward, backward = (sum(getattr(one, way) for one in passes) for way in ("forward", "backward"))
    mean = forward / len(rows)
    return TimedModule(
        name=name,
        layers=part.layers + head_layers(workload, name),
        seconds=mean / part.layers,
        factors=() if even else tuple(one.forward / mean for one in passes),
        backward=backward / forward,
        weights=estimates[0].w_share(name, part) * backward / forward,
    )


def _replicas(lanes: int) -> int:
    """Replicas of the LLM of a pipeline with so many lanes; those of the shortest pipeline without lanes."""
    return RANKS // lanes if lanes > 1 else RANKS // SHORTEST


SHORTEST = 4
"""Ranks of the shortest pipeline. A longer one has rows of fewer replicas on fewer GPUs, in the same time."""


@cache
def head_layers(workload: Workload, name: str) -> int:
    """The time of what is behind a module's last layer, in layers; 0 for modules other than the LLM."""
    if name != LLM:
        return 0
    made = estimate(workload, workload.rows(1)[0], 1, _replicas(1))

    def seconds(part: StagePart) -> float:
        passes = made.pass_seconds(name, part)
        return passes.forward + passes.backward

    layer = seconds(StagePart(layers=1))
    return round((seconds(StagePart(layers=1, last=True)) - layer) / layer)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest device.

    Attributes:
      states: parameters, gradients, optimizer states, and the parameters that a lane has pulled.
      activations: residuals from F to B, and from B to W, and inputs of a step.
      working: temporaries of the running program.
    """

    states: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.states + self.activations + self.working

    @property
    def fits(self) -> bool:
        """Whether a run may take as many bytes of a device."""
        return self.total <= H800.usable


@dataclass(frozen=True)
class _Devices:
    """The devices of a placement: bytes of its stages. lanes: as for `layouts`."""

    workload: Workload
    placement: Placement
    lanes: int

    def estimate(self, row: Row) -> Estimate:
        return estimate(self.workload, row, self.lanes, RANKS // len(self.placement.graph.ranks))

    def stages(self, rank: int) -> list[str]:
        return [node.name for node in self.placement.graph.stages if rank in node.ranks]

    def parts(self, stage: str) -> dict[str, StagePart]:
        """The part of each module that a stage has; the layers that stand for an LLM's head are left out."""
        parts = {}
        for name, layers in self.placement.loads[stage].items():
            stages = [other for other, load in self.placement.loads.items() if name in load]
            last = stage == stages[-1]
            layers = round(layers) - (head_layers(self.workload, name) if last else 0)
            parts[name] = StagePart(layers=layers, first=stage == stages[0], last=last)
        return parts


def memory(schedule: Schedule, placement: Placement, workload: Workload, rows: Sequence[Row], *, lanes: int) -> Memory:
    """Bytes of the fullest device of a step in this schedule; `lanes` as for `layouts`."""
    devices = _Devices(workload, placement, lanes)
    activations = _activations(schedule, devices, rows)
    by_rank = [
        Memory(
            states=sum(_states(devices, stage) for stage in devices.stages(rank)),
            activations=activations[rank],
            working=max(_working(schedule, devices, stage, rows) for stage in devices.stages(rank)),
        )
        for rank in schedule.graph.ranks
    ]
    return max(by_rank, key=lambda needs: needs.total)


def _states(devices: _Devices, stage: str) -> float:
    """Bytes of a stage's states, as the planner counts them."""
    made, total = devices.estimate(devices.workload.rows(1)[0]), 0.0
    for name, part in devices.parts(stage).items():
        states = made.work.states(name, part, made.candidate.layouts[name])
        total += made.weight_bytes(name, part) + states.sums + states.reduced
    return total


def _working(schedule: Schedule, devices: _Devices, stage: str, rows: Sequence[Row]) -> float:
    """Bytes of the temporaries of a stage's largest program, which has the longest row."""
    split, most = schedule.graph.stage(stage).split, 0.0
    for name, part in devices.parts(stage).items():
        longest = max(set(rows), key=lambda row: sum(devices.workload.lengths(name, row)))
        most = max(most, devices.estimate(longest).program_bytes(name, part, split=split))
    return most


def _activations(schedule: Schedule, devices: _Devices, rows: Sequence[Row]) -> dict[int, float]:
    """By rank, the peak of a device's activations after any op, in order, with its inputs of this step and the next."""
    estimates = [devices.estimate(row) for row in rows]
    parts = {stage: devices.parts(stage) for stage in devices.placement.loads}
    inputs = dict.fromkeys(schedule.graph.ranks, 0.0)
    now, most = dict(inputs), dict(inputs)
    for op in schedule.ops:
        if op.kind not in ("F", "B", "W"):
            continue
        node, made, change = schedule.graph.stage(op.stage), estimates[op.microbatch], 0.0
        for name, part in parts[op.stage].items():
            memory, scale = made.stage_memory(name), made.scale(name)
            kept = scale * memory.residuals.of(part)
            deferred = scale * memory.split().deferred.of(part) if node.split else 0.0
            change += {"F": kept, "B": deferred - kept, "W": -deferred}[op.kind]
            if op.kind == "F":
                for rank in node.ranks_of(op.microbatch):
                    inputs[rank] += 2 * scale * memory.inputs.of(part)
        for rank in node.ranks_of(op.microbatch):
            now[rank] += change
            most[rank] = max(most[rank], now[rank])
    return {rank: most[rank] + inputs[rank] for rank in most}
