"""Runs a configuration on the samples of a comparison, with the code that training uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mmjax.assembly.assembly import assemble, place
from mmjax.assembly.batches import batch_maker
from mmjax.assembly.packers import one_bucket, packer_for
from mmjax.data.packing import Packer
from mmjax.data.source import Source
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import StepBatch
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program
from mmjax.mesh.world import World
from mmjax.parity.compare import Leaves, Run, of_kind
from mmjax.parity.samples import Samples
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.place import PlacedModel, Stage
from mmjax.pipeline.state_shapes import State
from mmjax.pipeline.world_gather import WorldGather
from mmjax.recipe import Recipe
from mmjax.schedule.schedules import ONE_F_ONE_B
from mmjax.train.warm_up import Initializer


def sample_packer(recipe: Recipe, tokenizer: Tokenizer, samples: Samples) -> Packer:
    """The packer of a check's samples. Its rows are padded with token 0.

    Args:
      recipe: the shrunk configuration, ``shrink(recipe, 3, tokenizer.vocab_size).recipe``.
      tokenizer: the tokenizer, such as ``plan(recipe).tokenizer``.
      samples: the samples, ``Samples(maker=…, sizes=shrunk.sizes, seed=0)``.
    """
    packer = packer_for(recipe, tokenizer, samples, one_bucket=one_bucket(recipe))
    return replace(packer, pad=0)  # the tokenizer's padding id may be outside of the small vocabulary


class Session:
    """A configuration that is ready to run as in `Trainer`: placed, traced and, after `start`, compiled.

    Attributes:
      recipe: the configuration.
      parts: see ``Assembly``.
      placed, schedule, executor: attributes of ``parts``.
      batches: the rows of this process, one batch for each step; empty without samples.
    """

    def __init__(self, recipe: Recipe, packer: Packer, source: Source | None = None):
        """Places and traces the configuration, and makes the batches of all its steps from ``source``, if given."""
        self.recipe, self.parts = recipe, assemble(recipe, packer)
        self.placed, self.schedule, self.executor = self.parts.placed, self.parts.schedule, self.parts.executor
        self.batches: list[StepBatch] = self._batches(source) if source else []

    def _batches(self, source: Source) -> list[StepBatch]:
        _, maker = batch_maker(self.recipe, self.parts, source)
        return [maker(step) for step in range(self.recipe.train.steps)]

    @cached_property
    def _initializer(self) -> Initializer:
        return Initializer(self.recipe.world, self.parts.world, self.executor)

    def programs(self) -> list[Program]:
        """All programs of a step and of the initialisation; one that several stages share is repeated."""
        return [*self.executor.programs(), *self._initializer.programs()]

    def start(self, report: Callable[[int, int, str], None] | None = None) -> Self:
        """Compiles and initialises, and tries boundaries and collectives if a run would; returns the session.

        report: called with (done, total, name of the program just compiled).

        Raises:
          WarmUpError: a boundary or a collective does not work.
        """
        compile_all(self.programs(), report)
        self.executor.initialise(self.recipe.train.seed)
        self._initializer(None)
        return self

    def step(self, index: int) -> tuple[float, dict[str, float]]:
        """Trains on batch ``index``, after ``start``: the loss, and by module the gradient norm before clipping."""
        batch = self.batches[index]
        return self.executor.step(self.parts.runs.signed(batch.microbatches), batch.divisors).fetch()

    def leaves(self) -> Leaves:
        """Every logical leaf in float32, on the host of every process, as in ``logical_leaves``."""
        return logical_leaves(self.placed, self.executor.states)

    def run(self, report: Callable[[int], None] | None = None) -> Run:
        """Runs every step, after ``start``; calls ``report`` after each with the number of steps done."""
        result = Run(losses=[], norms=[], leaves=[self.leaves()])
        for index in range(len(self.batches)):
            loss, norms = self.step(index)
            result.losses.append(loss)
            result.norms.append(norms)
            result.leaves.append(self.leaves())
            if report:
                report(index + 1)
        return result


def logical_leaves(placed: PlacedModel, states: Mapping[str, State]) -> Leaves:
    """Logical leaves of all stages' states in float32, on the host of every process; all processes call it.

    Args:
      placed: the model on its devices, such as ``assemble(recipe).placed``.
      states: by stage name ("llm.0"), states of the stages on this process's devices, such as ``executor.states``.

    Returns:
      Whole arrays by name, with the kind: "params/llm/embed", "adam_m/llm/embed".
    """
    result: Leaves = {}
    for name, stage in placed.stages.items():
        for leaf, value in _fetch_leaves(placed, stage, states.get(name)).items():
            assert leaf not in result, f"{leaf} is held by two stages"
            result[leaf] = value
    return result


def _fetch_leaves(placed: PlacedModel, stage: Stage, state: State | None) -> Leaves:
    """A stage's leaves on the host. Other processes receive them as one flat array from the stage's first device."""
    named = stage.state.to_logical(state) if state else {}
    if placed.world.processes == 1:
        return {name: np.asarray(value, np.float32) for name, value in named.items()}
    avals = stage.state.logical_avals()
    row_N = jax.ShapeDtypeStruct((sum(aval.size for aval in avals.values()),), np.float32)
    first = placed.world.submesh(Layout(rank_offset=stage.submesh.ranks[0]), 0)
    rows = []
    if named:

        def flatten(named: Leaves) -> jax.Array:
            return jnp.concatenate([named[name].ravel().astype(row_N.dtype) for name in avals])

        rows = [jax.jit(flatten, out_shardings=stage.submesh.sharding(PartitionSpec()))(named)]
    (fetched_N,) = WorldGather(f"leaves of {stage.name}", placed.world, first, row_N, 1)(rows)
    ends = np.cumsum([aval.size for aval in avals.values()])[:-1]
    parts = np.split(np.asarray(fetched_N), ends)
    return {name: part.reshape(aval.shape) for (name, aval), part in zip(avals.items(), parts, strict=True)}


def initial_parameters(recipe: Recipe, packer: Packer, world: World | None = None) -> Leaves:
    """Initialises the parameters on one device from the configuration's seed.

    Parameters of frozen modules are rounded to the dtype in which they are stored.

    Args:
      recipe: the run's configuration.
      packer: the packer of its samples, as ``build_packer(recipe, tokenizer)`` makes it.
      world: the device, such as ``World(jax.devices()[:1])``; by default the first of all.

    Returns:
      The parameters in float32 by logical name without ``params/``: {"llm/embed": array [V, D], …}.
    """
    train = replace(
        recipe.train, schedule=ONE_F_ONE_B, inner=ONE_F_ONE_B, window=0
    )  # other schedules may need a pipeline
    model = recipe.model.map(lambda node: replace(node.at(Layout()), offload=OffloadConfig()))
    one_device = replace(recipe, model=model, train=train)
    placed = place(one_device, packer, world).placed
    key = jax.random.key(recipe.train.seed)
    states = {name: stage.state.initialise(key) for name, stage in placed.stages.items()}
    return of_kind(logical_leaves(placed, states), "params")
