"""The executor: walks a schedule and dispatches one program per op. Dispatch returns at once, so submeshes overlap.

Every buffer has one owner and is dropped at the op that reads it last: residuals and host inputs at B, deferred values
of a split backward at W, activations at the forward of their receiver. Nothing is fetched to the host during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.shared_out import SharedOut
from mmjax.mesh.spmd import Program, to_devices
from mmjax.models.module import Loss
from mmjax.pipeline.awaiting import Awaiting, completion_marker
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.ends import Ends
from mmjax.pipeline.gathered_params import GatheredParams
from mmjax.pipeline.lane_views import over_lanes
from mmjax.pipeline.last_backward import last_ops, reducing_program, reducing_stages
from mmjax.pipeline.offload import DEVICE, HOST, in_memory, moved, replaced
from mmjax.pipeline.overwriting import owned, reduce_program, update_program
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.stage import Output, StageFunctions
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import OpKeys, Signature, Walker
from mmjax.pipeline.world_norm import WorldNorm
from mmjax.schedule.graph import WORLD
from mmjax.schedule.ops import ONCE, Op, Schedule

LossKinds = Mapping[str, Mapping[str, Loss]]
"""Losses by module and name, of the modules with losses."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step, on the devices; ``fetch`` waits for them.

    Attributes:
      losses: by module, arrays ``[..., losses]``: their sum over arrays and all other dimensions is each loss before
        its division. Losses are in the order of ``kinds``. Every process has them.
      totals: squared gradient norms by module, one row per rank; ``None`` when nothing is trained.
      denominators: the counts of this step that divide the losses, by name.
      kinds: the losses by module and name.
      modules: modules of the columns of ``totals``.
    """

    losses: Mapping[str, Sequence[jax.Array]]
    totals: jax.Array | None
    denominators: Mapping[str, float]
    kinds: LossKinds
    modules: tuple[str, ...]

    def fetch(self) -> tuple[float, dict[str, float]]:
        """The optimised loss, a weighted sum, and gradient norms before clipping, by module. Waits for the step.

        The norms are {} when nothing is trained, and 0 for a frozen module.
        """
        values = self.fetch_losses()
        kinds = [(f"{module}/{name}", kind) for module, losses in self.kinds.items() for name, kind in losses.items()]
        loss = sum(kind.weight * values[name] for name, kind in kinds if kind.weight)
        if self.totals is None:
            return loss, {}
        row = np.asarray(self.totals.addressable_shards[0].data)[0]
        return loss, {m: float(np.sqrt(v)) for m, v in zip(self.modules, row, strict=True)}

    def fetch_losses(self) -> dict[str, float]:
        """Each loss and metric over its denominator, such as "llm/loss"; 0 where that is 0. Waits for the step."""
        result = {}
        for module, kinds in self.kinds.items():
            arrays = [np.asarray(jax.device_get(array)).reshape(-1, len(kinds)) for array in self.losses[module]]
            for number, (name, kind) in enumerate(kinds.items()):
                value = sum(float(np.sum(array[:, number], dtype=np.float64)) for array in arrays)
                denominator = self.denominators[kind.count(module)]
                result[f"{module}/{name}"] = value / denominator if denominator else 0.0
        return result


def model_losses(placed: PlacedModel) -> LossKinds:
    """The losses of the model on its devices, by module and then by name; a module without losses is absent."""
    return {node.module: placed.stages[node.name].model.losses for node in placed.graph.losses}


def loss_seeds(placed: PlacedModel, denominators: Mapping[str, float]) -> dict[str, Float[np.ndarray, " losses"]]:
    """Cotangents of the losses, float32, by stage, such as "llm.1": weight over denominator, 0 for a denominator of 0.

    In the order of ``model_losses``. Rounded once, on the host, so that the fp32 cotangent of a loss is the same under
    every layout.

    Args:
      placed: the model on its devices, such as ``Trainer.executor.placed``.
      denominators: counts of the step by ``Loss.count``, such as "llm" or "samples".

    Raises:
      ValueError: a denominator is missing, or the denominators of all optimised losses are 0.
    """
    seeds, optimised = {}, list[float]()
    for node in placed.graph.losses:
        kinds = placed.stages[node.name].model.losses
        counts = [kind.count(node.module) for kind in kinds.values()]
        if missing := [count for count in counts if count not in denominators]:
            raise ValueError(f"{node.module}: a loss is divided by {missing[0]!r}; use one of {sorted(denominators)}")
        weights = [
            (kind.weight, float(denominators[count])) for kind, count in zip(kinds.values(), counts, strict=True)
        ]
        seeds[node.name] = np.array(
            [weight / denominator if denominator else 0.0 for weight, denominator in weights], np.float32
        )
        optimised += [denominator for weight, denominator in weights if weight]
    if not any(optimised):
        raise ValueError("every denominator is 0: a step needs something with a loss")
    return seeds


class StagePrograms:
    """The programs of one stage for one set of shapes: forward, backward, and ``weights`` of a split backward.

    ``backward`` or ``weights`` is None for a stage without, ``reducing`` (see ``reducing_program``) for one whose
    gradients a program of their own reduces. ``name`` of the constructor is the stage's, for messages.
    """

    def __init__(self, name: str, functions: StageFunctions, *, reduces: bool = False):
        self.functions = functions
        self.forward = Program.of(f"F {name}", functions.forward, functions.forward_avals)
        # The sums are updated in place. No output has a residual's shape, so donating residuals would free nothing.
        self.backward = (
            Program.of(f"B {name}", functions.backward, functions.backward_avals, donate=(1,))
            if functions.has_backward
            else None
        )
        self.weights = (
            Program.of(f"W {name}", functions.weights, functions.weights_avals, donate=(0,))
            if functions.deferred_avals
            else None
        )
        self.reducing = reducing_program(name, functions) if reduces else None

    @property
    def programs(self) -> list[Program]:
        """All programs of the stage."""
        return [program for program in (self.forward, self.backward, self.weights, self.reducing) if program]


class Executor:
    """Runs training steps of a placed model.

    Attributes:
      placed: the model on its devices.
      schedule: the order of ops, the same every step.
      reducing: stages whose last backward reduces their gradients (see ``reducing_stages``).
      states: state of each stage, by name; replace it to restore a checkpoint.
    """

    def __init__(self, placed: PlacedModel, schedule: Schedule, shapes: Mapping[Signature, InputShapes]):
        """Traces every program; ``compile`` and ``initialise`` come next.

        Args:
          placed: the model on its devices.
          schedule: an order for the placed model's graph.
          shapes: input shapes of one microbatch, for every bucket combination that may occur.
        """
        self.placed, self.schedule = placed, schedule
        self.states: dict[str, State] = {}
        self.stage_programs: dict[tuple[str, Signature], StagePrograms] = {}
        self.boundaries: dict[tuple[str, Signature], Boundary | SharedOut] = {}
        shared: dict[int, StagePrograms] = {}
        for signature, inputs in shapes.items():
            traced = placed.trace(inputs, schedule.graph)
            self.reducing = reducing_stages(schedule.graph, traced.stages)
            for name, functions in traced.stages.items():
                if id(functions) not in shared:
                    shared[id(functions)] = StagePrograms(name, functions, reduces=name in self.reducing)
                self.stage_programs[name, signature] = shared[id(functions)]
            for edge, boundary in traced.boundaries.items():
                self.boundaries[edge, signature] = boundary
        self._trained = [name for name, stage in placed.stages.items() if stage.state.trainable]
        self.reduce_programs, self.update_programs = {}, {}
        for name in self._trained:
            state = placed.stages[name].state
            self.update_programs[name] = update_program(state)
            if name not in self.reducing:
                self.reduce_programs[name] = reduce_program(state)
        submeshes = {name: placed.stages[name].submesh for name in self._trained}
        self.world_norm = WorldNorm(placed.world, submeshes, len(placed.model.modules)) if submeshes else None
        self.losses = {
            place: placed.world_gather(f"losses {place}", place, self._loss_aval(place), len(microbatches))
            for place, microbatches in self._microbatches_of_losses()
        }
        self.sums: dict[str, Any] = {}
        self._zeros: dict[str, Callable[[], Any]] = {}
        self._run = _Run(self)

    def _loss_aval(self, place: str) -> Any:
        outputs = (programs.functions.out for (name, _), programs in self.stage_programs.items() if name == place)
        return next(outputs).result

    def _microbatches_of_losses(self) -> Iterator[tuple[str, range]]:
        """The microbatches with a loss at each place; places without any are left out."""
        for node in self.schedule.graph.losses:
            for lane, place in enumerate(node.lane_names):
                if microbatches := range(lane, self.schedule.microbatches, node.lanes):
                    yield place, microbatches

    # ---- setting up --------------------------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        """All programs that this process has to compile."""
        result = [p for programs in self.stage_programs.values() for p in programs.programs]
        for boundary in self.boundaries.values():
            result += [*boundary.forward.programs(), *boundary.backward.programs()]
        for tie in self.placed.ties.values():
            result += [*tie.forward.programs(), *tie.backward.programs()]
        result += self.placed.prepare_programs()
        for name, gather in self.placed.lane_gathers.items():
            result += gather.programs(pulls=self.schedule.graph.stage(name).gather == "pull")
        for table in (self.reduce_programs, self.update_programs):
            result += table.values()
        result += [part.program for part in (self.world_norm, *self.losses.values()) if part]
        return [program for program in result if program.local]

    def compile(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles every program ahead of the first step; see ``compile_all`` for ``report``."""
        compile_all(self.programs(), report)

    def initialise(self, seed: int) -> None:
        """Sets ``states`` to fresh parameters and optimizer states, a function of the seed alone."""
        key = jax.random.key(seed)
        self.states = {name: stage.state.initialise(key) for name, stage in self.placed.local_stages.items()}

    def take_sums(self, place: str) -> Any:
        """Removes and returns the gradient sums of a place, for a program that overwrites them.

        They are a tree like ``sums_avals``; zeros if none are stored.
        """
        if place in self.sums:
            return self.sums.pop(place)
        if place not in self._zeros:
            self._zeros[place] = _making_zeros(self.placed.places[place].state.sums_avals)
        return self._zeros[place]()

    def take_stage_sums(self, stage: str) -> Any:
        """``take_sums`` of all lanes of a stage, as arrays over all of its lanes."""
        lanes = [self.take_sums(place) for place in self.placed.local_places(stage)]
        has_lanes = self.placed.graph.stage(stage).lanes > 1
        return over_lanes(lanes, self.placed.stages[stage].state.sums_avals) if has_lanes else lanes[0]

    # ---- running -----------------------------------------------------------------------------------------------------

    @property
    def walker(self) -> _Run:
        """The walker, which runs the ops of a step and owns their arrays meanwhile (see ``watched``)."""
        return self._run

    def step(
        self, microbatches: Sequence[tuple[Signature, InputShapes]], denominators: Mapping[str, float]
    ) -> StepResult:
        """One optimizer step, which replaces ``states``; returns when its ops are dispatched.

        Args:
          microbatches: per microbatch its bucket signature, and its host inputs, global rows, by module, then by name.
          denominators: the counts of the step that divide the losses, by ``Loss.count``, such as "llm" or "samples".

        Raises:
          ValueError: when the number of microbatches is not the schedule's; see also ``loss_seeds``.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(f"{len(microbatches)} microbatches for a schedule of {self.schedule.microbatches}")
        return self._run(microbatches, denominators)

    def follow(self, ends: Ends | None) -> None:
        """Records every op dispatched from now on in ``ends``; ``None`` stops that."""
        self._run.ends = ends


class _Run(Walker):
    """Runs the ops of one step; at the end of the step all of its arrays are dropped."""

    def __init__(self, executor: Executor):
        super().__init__(executor.placed, executor.schedule.graph, executor.boundaries)
        self.executor = executor
        self.residuals: dict[tuple[str, int], Any] = {}
        self.deferred: dict[tuple[str, int], Any] = {}
        self.reduced: dict[str, Any] = {}
        self.rows: dict[str, jax.Array] = {}
        self.totals: dict[str, jax.Array] = {}
        self.losses: dict[str, list[jax.Array]] = {}
        self.last_ops = last_ops(executor.schedule, executor.reducing)
        self.gathered = GatheredParams(executor.placed, executor.schedule)
        self.handlers["gather"] = self.gather
        self.handlers |= {"F": self.forward, "B": self.backward, "W": self.weights}
        self.handlers |= {"reduce": self.reduce, "norm": self.norm, "update": self.update}
        self.handlers |= {"offload": self.offload, "reload": self.reload}
        self.handlers |= {"stash": self.stash, "unstash": self.unstash}
        world = executor.placed.world
        in_turn = world.processes > 1 and world.platform == "cpu"
        self.awaiting = Awaiting(executor.schedule, self.dispatch, self.end, self.is_local, in_turn=in_turn)

    def __call__(
        self, microbatches: Sequence[tuple[Signature, InputShapes]], denominators: Mapping[str, float]
    ) -> StepResult:
        seeds, local = loss_seeds(self.placed, denominators), self.placed.local_stages
        self.seeds: dict[str, jax.Array] = {}
        for name in (name for name in seeds if name in local):
            for place, stage in self.placed.local_places(name).items():
                sharding = stage.submesh.sharding(stage.submesh.spread.replicated)
                self.seeds[place] = to_devices(seeds[name], sharding)
        self.losses = {place: [] for place in self.executor.losses}
        self.place_inputs(microbatches, self.placed.local_stages)
        self.lend(self.executor.states)
        self.walk(self.executor.schedule.ops, None if self.in_order or not self.awaiting.awaits else self.awaiting)
        losses: dict[str, list[jax.Array]] = {}
        for place, gather in self.executor.losses.items():
            gathered = gather(self.losses[place]) if gather else self.losses[place]
            losses.setdefault(self.placed.places[place].model.module, []).extend(gathered)
        kinds, modules = model_losses(self.placed), self.placed.model.modules
        result = StepResult(losses, self.totals.get(WORLD), denominators, kinds, modules)
        self.losses, self.totals, self.params, self.shards, self.states = {}, {}, {}, {}, {}
        return result

    def end(self, op: Op) -> Any:
        """Arrays that are ready when an F, B, W, stash or edge op, just dispatched, has ended."""
        keys = self.keys(op)
        key = keys.stage
        if op.kind == "stash":  # a copy for every array and shard
            return self.residuals[key], self.carry.get(key)
        if op.kind == "unpack":
            return completion_marker(self.cotangents[key] if op.backward else self.carry[key][keys.source])
        if op.edge:
            return completion_marker(self.in_transit.get(keys.carried))
        if op.kind == "F":
            activations = [self.in_transit[carried] for carried in keys.activations]
            return completion_marker((activations or self.losses[keys.place][-1], self.residuals.get(key)))
        gradients = [self.in_transit[carried] for _, carried in keys.gradients] if op.kind == "B" else []
        return completion_marker((gradients, self.executor.sums.get(keys.place), self.rows.get(op.stage)))

    def forward(self, op: Op) -> None:
        keys = self.keys(op)
        key, place, programs = keys.stage, keys.place, self._programs(keys)
        out, residuals = programs.forward(self._params(op, place), self.inputs[key], self.carry.get(key, {}))
        self.gathered.drop(op)
        if programs.backward:
            self.residuals[key] = residuals
            if not programs.functions.backward_reads_carry:
                self.carry.pop(key, None)
        else:
            self.inputs.pop(key)
            self.carry.pop(key, None)
        if out.result is not None:
            self.losses[place].append(out.result)
        self.send(op, out.activation)

    def backward(self, op: Op) -> None:
        keys = self.keys(op)
        key, place, programs = keys.stage, keys.place, self._programs(keys)
        assert programs.backward is not None
        sums = self.executor.take_sums(place)
        args = (
            self._params(op, place),
            programs.functions.backward_part(sums),
            self.inputs.pop(key),
            self.carry.pop(key, {}),
            self.residuals.pop(key),
            Output(self.cotangents.pop(key, None), self.seeds.get(place)),
        )
        if programs.reducing and self.last_ops[op.stage] == op:
            self.send_back(op, self._reduced_by(op, programs.reducing(*args))[0])
            return
        new, grads, *deferred = programs.backward(*args)
        self.gathered.drop(op)
        if programs.weights:
            (self.deferred[key],) = deferred
        self.executor.sums[place] = programs.functions.with_backward_part(sums, new)
        self.send_back(op, grads)

    def gather(self, op: Op) -> None:
        """Starts to gather the parameters of a lane, or of all lanes together."""
        self.gathered.start(op, self.keys(op).place, self.shards[op.stage])

    def _params(self, op: Op, place: str) -> Any:
        """The compute parameters for an F or B."""
        return self.gathered.params(op, place) if op.stage in self.shards else self.params[place]

    def weights(self, op: Op) -> None:
        keys = self.keys(op)
        programs = self._programs(keys)
        if not programs.weights:  # no trained weight is tapped
            return
        sums = self.executor.take_sums(keys.place)
        if programs.reducing and self.last_ops[op.stage] == op:
            self._reduced_by(op, programs.reducing(sums, self.deferred.pop(keys.stage)))
            return
        new = programs.weights(programs.functions.weights_part(sums), self.deferred.pop(keys.stage))
        self.executor.sums[keys.place] = programs.functions.with_weights_part(sums, new)

    def _reduced_by(self, op: Op, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Stores the reduced gradients among the results of a ``reducing_program``; returns those after them."""
        _, self.reduced[op.stage], self.rows[op.stage], *gradients = results
        return tuple(gradients)

    def prepare(self, op: Op) -> None:
        super().prepare(op)
        if self.placed.offload(op.stage).optimizer:
            state, stage_state = self.placed.stages[op.stage].state, self.executor.states[op.stage]
            inputs, _ = state.prepare_inputs(stage_state["master"], {})
            master = {**stage_state["master"], **moved(inputs, HOST)}
            self.executor.states[op.stage] = {"master": master, "opt": moved(stage_state["opt"], HOST)}

    def offload(self, op: Op) -> None:
        """Moves the stage's compute parameters to the host."""
        self._move_parameters(op.stage, HOST)

    def reload(self, op: Op) -> None:
        """Moves the stage's compute parameters back to its devices."""
        self._move_parameters(op.stage, DEVICE)

    def _move_parameters(self, stage: str, kind: str) -> None:
        """Moves compute parameters, of all lanes; masters that are the same arrays are moved with them."""
        places, states = self.placed.local_places(stage), self.executor.states
        before = {place: self.params[place] for place in places}
        after = {place: moved(params, kind) for place, params in before.items()}
        self.params |= after
        if self.graph.stage(stage).lanes == 1:
            states[stage] = replaced(states[stage], before[stage], after[stage])
        else:  # masters over all lanes have the shards of the lanes' parameters, but are other arrays
            state = self.placed.stages[stage].state
            direct = in_memory({m: state.master_avals[m] for m in state.direct_modules}, kind)
            masters = over_lanes([{m: params[m] for m in direct} for params in after.values()], direct)
            states[stage] = {**states[stage], "master": {**states[stage]["master"], **masters}}

    def stash(self, op: Op) -> None:
        """Moves a microbatch's residuals to the host."""
        self._move_residuals(op, HOST)

    def unstash(self, op: Op) -> None:
        """Moves a microbatch's residuals back to their devices."""
        self._move_residuals(op, DEVICE)

    def _move_residuals(self, op: Op, kind: str) -> None:
        key = (op.stage, op.microbatch)
        self.residuals[key] = moved(self.residuals[key], kind)
        if key in self.carry:
            self.carry[key] = moved(self.carry[key], kind)

    def reduce(self, op: Op) -> None:
        states = self.executor.states
        states[op.stage] = self.on_devices(op.stage, states[op.stage])  # the copy back overlaps with the reduction
        if op.stage in self.executor.reducing:
            return
        program = self.executor.reduce_programs[op.stage]
        out = program(self.executor.take_stage_sums(op.stage), self.returned.pop(op.stage, {}))
        grads, tied_grads, self.rows[op.stage] = out
        self.reduced[op.stage] = owned(self.placed.stages[op.stage].state, grads)
        for tie, gradient in tied_grads.items():
            self.in_transit[tie, ONCE, True] = gradient

    def norm(self, op: Op) -> None:
        assert self.executor.world_norm is not None
        self.totals, self.rows = self.executor.world_norm(self.rows), {}

    def update(self, op: Op) -> None:
        update, states = self.executor.update_programs[op.stage], self.executor.states
        self.shards.pop(op.stage, None)  # they may be the masters themselves, which are about to be overwritten
        for place in self.placed.local_places(op.stage):
            self.params.pop(place, None)
        states[op.stage] = update(states[op.stage], self.reduced.pop(op.stage), self.totals[op.stage])
        if self.placed.offload(op.stage).optimizer:
            states[op.stage] = {**states[op.stage], "opt": moved(states[op.stage]["opt"], HOST)}

    def _programs(self, keys: OpKeys) -> StagePrograms:
        _, microbatch = keys.stage
        return self.executor.stage_programs[keys.place, self.signatures[microbatch]]


def _making_zeros(avals: Any) -> Callable[[], Any]:
    """A function that makes zero arrays in given shardings on the devices, by one program."""
    shardings = jax.tree.map(lambda a: a.sharding, avals)
    return jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals), out_shardings=shardings)
