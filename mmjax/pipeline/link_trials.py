"""Trials of a step's communication: every boundary in both directions and every collective, by the step's programs.

A run tries them before the first step, as the initializer of Zhang et al., "DistTrain", §3. If a collective has no
program of its own, such as the sums over tp inside a forward, a sum of as many bytes replaces it. Trials change no
state: gradient sums are zeros before and after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.spmd import Program, Spmd, local_shards
from mmjax.mesh.transfer import Transfer
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import shard_bytes
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.place import Stage
from mmjax.pipeline.stage import StageFunctions

MOST_BYTES = 1 << 26
"""Largest sum that replaces other collectives, in bytes: enough to measure a bandwidth."""
_ROWS = 128
"""Rows are filled with their numbers modulo this: whole numbers that bfloat16 holds."""


@dataclass(frozen=True, kw_only=True)
class LinkTrial:
    """A transfer or collective to try once.

    Attributes:
      name: such as ``llm.0->llm.1 forward`` or ``llm.0 reduce``.
      kind: the class of comparable trials: ``local``, ``async`` or ``rendezvous`` boundaries, ``gather``, ``reduce``,
        ``tp`` or ``dp`` sums, or the ``norm``.
      bytes: bytes of the tensor that crosses a boundary, or of each rank's share in a collective.
      ends: ranks of the sender and of the receiver, or ranks of a collective alone.
      make: creates the argument of ``send`` for one trial, on the devices of this process.
      send: dispatches the trial; its result, a tree of arrays, is ready when all data have arrived.
      arrived: whether the result of ``send`` is correct.
      programs: programs that have to be compiled.
    """

    name: str
    kind: str
    bytes: int
    ends: tuple[tuple[int, ...], ...]
    make: Callable[[], Any]
    send: Callable[[Any], Any]
    arrived: Callable[[Any], bool] = lambda _: True
    programs: tuple[Program, ...] = ()

    @property
    def is_boundary(self) -> bool:
        """Whether it crosses a boundary; otherwise it is a collective."""
        return self.kind in ("local", "async", "rendezvous")

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part."""
        return tuple(sorted({rank for end in self.ends for rank in end}))


def link_trials(executor: Executor | OneProgramExecutor) -> tuple[LinkTrial, ...]:
    """Trials of all communication in an executor's steps, in the same order in every process; names are unique.

    ``executor`` is such as ``Trainer.executor``. A trial is named such as "vision.0->llm.0 forward" or "llm.0 reduce".

    A boundary is tried in its largest bucket. A transfer that stays on its device is not tried.
    """
    boundaries, functions = _largest_boundaries(executor), _functions(executor)
    trials = [*_boundary_trials(executor, boundaries), *_tie_trials(executor)]
    for name, stage in executor.placed.stages.items():
        trials += _stage_trials(executor, stage, functions[name])
    if isinstance(executor, Executor):
        trials += _norm_trial(executor)
    return tuple({trial.name: trial for trial in trials}.values())


# ---- boundaries ------------------------------------------------------------------------------------------------------


def _largest_boundaries(executor: Executor | OneProgramExecutor) -> dict[str, Boundary]:
    """The boundary of each edge's largest tensor, by edge."""
    if isinstance(executor, Executor):
        boundaries = [(edge, boundary.of_op) for (edge, _), boundary in executor.boundaries.items()]
    else:
        traced = (pair for of_step in executor.traced for pair in of_step.boundaries.items())
        boundaries = [(edge, boundary.of_op) for edge, boundary in traced]
    return dict(sorted(boundaries, key=lambda pair: _bytes(pair[1].forward.source_aval)))


def _boundary_trials(
    executor: Executor | OneProgramExecutor, boundaries: Mapping[str, Boundary]
) -> Iterator[LinkTrial]:
    for edge in executor.placed.graph.edges:
        boundary = boundaries[edge.name]
        yield from _direction_trials(edge.name, boundary.forward, boundary.backward if edge.gradient else None)


def _tie_trials(executor: Executor | OneProgramExecutor) -> Iterator[LinkTrial]:
    for edge in executor.placed.graph.ties:
        tie = executor.placed.ties[edge.name]
        yield from _direction_trials(edge.name, tie.forward.blocks, tie.backward.blocks if edge.gradient else None)


def _direction_trials(name: str, forward: Transfer, backward: Transfer | None) -> Iterator[LinkTrial]:
    for direction, transfer in (("forward", forward), ("backward", backward)):
        if transfer and (transfer.kind != "local" or transfer.programs()):
            yield boundary_trial(f"{name} {direction}", transfer)


def boundary_trial(name: str, transfer: Transfer) -> LinkTrial:
    """The trial ``name`` of all three steps of a transfer: pack, move and unpack of rows filled with their numbers.

    ``name`` is such as "vision.0->llm.0 forward"; ``transfer`` is one direction of a ``Boundary``, its ``forward`` or
    ``backward``.
    """
    source, target = transfer.source_aval, transfer.target_aval

    def make() -> Any:
        return local_shards(_numbered(source.shape, source.dtype), source.sharding) if transfer.source.local else ()

    def send(rows: Any) -> Any:
        packed = transfer.pack(rows) if transfer.source.local else ()
        carried = transfer.move(packed)
        return transfer.unpack(carried) if transfer.target.local else packed

    def arrived(rows: Any) -> bool:
        if not transfer.target.local:
            return True
        want = _numbered(target.shape, target.dtype)
        return all(np.array_equal(np.asarray(shard.data), want[shard.index]) for shard in rows.addressable_shards)

    return LinkTrial(
        name=name,
        kind=transfer.kind,
        bytes=_bytes(source),
        ends=(transfer.source.ranks, transfer.target.ranks),
        make=make,
        send=send,
        arrived=arrived,
        programs=tuple(transfer.programs()),
    )


def _numbered(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Rows filled with their numbers, as a broadcast view with one stored number per row."""
    numbers = (np.arange(shape[0]) % _ROWS).astype(dtype)
    return np.broadcast_to(numbers.reshape(-1, *[1] * (len(shape) - 1)), shape)


# ---- collectives -----------------------------------------------------------------------------------------------------


def _functions(executor: Executor | OneProgramExecutor) -> dict[str, StageFunctions]:
    """The functions of each stage for the last bucket combination, by stage."""
    if isinstance(executor, Executor):
        return {name: programs.functions for (name, _), programs in executor.stage_programs.items()}
    return dict(executor.traced[-1].stages)


def _stage_trials(
    executor: Executor | OneProgramExecutor, stage: Stage, functions: StageFunctions
) -> Iterator[LinkTrial]:
    layout, spread, trainable = stage.submesh.layout, stage.submesh.spread, stage.state.trainable
    by_ops = isinstance(executor, Executor)
    if by_ops and stage.state.prepare_program and layout.optimizer_shards > 1:
        yield _gather(executor, stage, stage.state.prepare_program)
    if by_ops and trainable and layout.dp > 1 and stage.name not in executor.reducing:
        yield _reduce(executor, stage)
    elif trainable and layout.dp > 1:  # gradients are reduced inside a program with other work
        yield _sum("dp", stage, (*spread.rows, *spread.positions), shard_bytes(stage.state.sums_avals))
    if layout.replica_size > 1:
        carried = [functions.out.activation, *jax.tree.leaves(functions.forward_avals[2])]
        axes = spread.axes.cp + spread.axes.tp  # copies work separately
        yield _sum("tp", stage, axes, max(shard_bytes(array) for array in carried if array is not None))


def _gather(executor: Executor, stage: Stage, program: Program) -> LinkTrial:
    """The trial of gathering the parameters from the masters over dp."""
    state = stage.state

    def make() -> Any:
        masters = moved(executor.states[stage.name]["master"], DEVICE)
        return state.prepare_inputs(masters, _zeros(state.shared_avals(state.borrowed)))

    return LinkTrial(
        name=f"{stage.name} gather",
        kind="gather",
        bytes=shard_bytes(state.prepared_avals),
        ends=(stage.submesh.ranks,),
        make=make,
        send=lambda arguments: program(*arguments),
        programs=(program,),
    )


def _reduce(executor: Executor, stage: Stage) -> LinkTrial:
    """The trial of reducing gradient sums over dp: zeros."""
    name, state, program = stage.name, stage.state, executor.reduce_programs[stage.name]
    return LinkTrial(
        name=f"{name} reduce",
        kind="reduce",
        bytes=shard_bytes(state.sums_avals),
        ends=(stage.submesh.ranks,),
        make=lambda: (executor.take_stage_sums(name), _zeros(state.reduce_avals[1])),
        send=lambda arguments: program(*arguments),
        programs=(program,),
    )


def _norm_trial(executor: Executor) -> Iterator[LinkTrial]:
    """The trial of the sum over the world, where something is trained."""
    norm = executor.world_norm
    if norm and norm.world.size > 1:
        local = [name for name, submesh in norm.submeshes.items() if submesh.local]
        stages = executor.placed.stages
        yield LinkTrial(
            name="world norm",
            kind="norm",
            bytes=norm.modules * 4,
            ends=(tuple(range(norm.world.size)),),
            make=lambda: _zeros({name: stages[name].state.rows_aval for name in local}),
            send=norm,
            programs=(norm.program,),
        )


def _sum(kind: str, stage: Stage, axes: tuple[str, ...], size: int) -> LinkTrial:
    """The trial of a sum over axes of a stage submesh, of about ``size`` bytes per rank, one for all stages there."""
    submesh, count = stage.submesh, max(1, min(size, MOST_BYTES) // 4)
    every = submesh.spread.per_rank
    sharding = NamedSharding(submesh.mesh, every)
    aval = jax.ShapeDtypeStruct((len(submesh.ranks) * count,), jnp.float32, sharding=sharding)
    ranks = f"{submesh.ranks[0]}-{submesh.ranks[-1]}"
    name = f"{stage.model.module} {kind} {ranks}"
    spmd = Spmd(lambda x: lax.psum(x, axes), submesh.mesh, every, every, check_vma=False)
    program = Program.of(f"trial {name}", spmd, [aval])
    groups = math.prod(submesh.mesh.shape[axis] for axis in axes)

    def arrived(sums: jax.Array) -> bool:
        return all(bool((np.asarray(shard.data) == groups).all()) for shard in sums.addressable_shards)

    return LinkTrial(
        name=name,
        kind=kind,
        bytes=count * 4,
        ends=(submesh.ranks,),
        make=lambda: local_shards(np.broadcast_to(np.float32(1), aval.shape), sharding),
        send=program,
        arrived=arrived,
        programs=(program,),
    )


def programs_of(trials: Iterable[LinkTrial]) -> list[Program]:
    """The programs of these results of ``link_trials`` that this process has to compile; they may repeat."""
    return [program for trial in trials for program in trial.programs if program.local]


def _zeros(avals: Any) -> Any:
    return jax.tree.map(lambda a: local_shards(np.broadcast_to(np.zeros((), a.dtype), a.shape), a.sharding), avals)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
