"""The parts of a run: `PlacedRun`, the placed model and its data side; `Assembly` adds schedule and executor."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.assembly.compiled_runs import NO_RUNS, CompiledRuns
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.walker import Signature
from mmjax.recipe import Recipe
from mmjax.schedule.ops import Schedule
from mmjax.schedule.simulate import Timeline
from mmjax.schedule.validate import ScheduleReport


@dataclass(frozen=True, kw_only=True)
class PlacedRun:
    """A model on its devices and the shapes of its data, enough to predict with.

    Attributes:
      tokenizer: the tokenizer of its text.
      packer: packs samples into microbatches.
      world: the devices.
      placed: the model on its devices.
      shapes: input shapes by signature: a combination of buckets, with ``runs`` where kernels differ by it.
      samples: the most samples of a microbatch.
      runs: the numbers of runs in rows for which attention is compiled; gives the signatures of microbatches.
      recipe: the recipe, in which nothing is left to the devices.
      choices: lines about what was chosen for the devices; see ``recipe.device_defaults``.
    """

    recipe: Recipe
    tokenizer: Tokenizer
    packer: Packer
    world: World
    placed: PlacedModel
    shapes: dict[Signature, InputShapes]
    samples: int
    runs: CompiledRuns = NO_RUNS
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assembly(PlacedRun):
    """The parts of a training run.

    Attributes:
      schedule: the order of ops of every step.
      report: the schedule's report from `validate`.
      planned: the schedule timed with nominal costs; a simulation, not a measurement.
      executor: runs steps.
    """

    schedule: Schedule
    report: ScheduleReport
    planned: Timeline
    executor: Executor | OneProgramExecutor
