"""Assembles a run: mesh, model, data, schedule and executor, one after another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mmjax import jax_compat
from mmjax.assembly.batches import batch_spec
from mmjax.assembly.buckets import build_packer
from mmjax.assembly.orders import step_order
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.parts import Assembly, PlacedRun
from mmjax.assembly.placing import (
    place_model,
    planned_device,
    planned_world,
    require_fitting,
    require_pipeline_in_one_process,
    start_world,
    target_of,
)
from mmjax.configurable import require
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.reorder import train_schedule
from mmjax.data.source import Source
from mmjax.mesh.movers import MOVERS, transport_of
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import deferred_bytes, residual_bytes
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.peak import fullest
from mmjax.pipeline.place import InputShapes, PlacedModel
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.walker import Signature
from mmjax.recipe import Recipe
from mmjax.recipe import validate as validate_recipe
from mmjax.recipe.device_defaults import (
    Estimate,
    Resolved,
    TargetDevice,
    leaves_open,
    open_remat,
    resolve,
    with_remat,
)
from mmjax.recipe.targets import require_targets
from mmjax.schedule.ops import Schedule
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate


def assemble(
    recipe: Recipe,
    packer: Packer | None = None,
    world: World | None = None,
    source: Source | None = None,
    *,
    device: TargetDevice | None = None,
    waiting_beyond: int = 0,
) -> Assembly:
    """Builds everything up to traced programs; nothing is compiled and no parameter exists yet.

    The result has the model on its devices as ``placed``, the ``schedule``, the ``executor`` and what they are made of.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      packer: packs samples that are not the configured data's; by default ``build_packer`` makes the configuration's.
      world: the run's devices, as ``World.create`` gives them; started here if not given.
      source: the run's training samples, where ``open_source(recipe, split="train")`` has opened them already.
      device: what defaults are chosen for; by default the world's devices.
      waiting_beyond: in a world of planned devices, the ranks of a process, between which senders wait for receivers;
        0 is as many as there are.

    Raises:
      ConfigError: there are too few devices, two settings contradict each other, or one program is to be a pipeline
        of several processes.
    """
    require_pipeline_in_one_process(recipe, jax_compat.process_count())
    parts = place(recipe, packer, world, source, device=device)  # data, then mesh and model
    recipe = parts.recipe
    placed, shapes, train = parts.placed, parts.shapes, recipe.train

    costs = placed.nominal_costs(next(iter(shapes.values())))
    graph = placed.graph.with_moves("rendezvous", within=waiting_beyond) if waiting_beyond else placed.graph
    schedule = train_schedule(train.schedule, graph, train.microbatches, costs, train.window, train.inner)
    residuals = residual_bytes(placed, shapes.values(), schedule.graph)
    report = validate(schedule, residuals, deferred_bytes(placed, shapes.values(), schedule.graph))

    executor = _executor(placed, schedule, shapes, "ops" if train.debug_nans else train.lowering)
    planned = simulate(schedule, costs)
    return Assembly(**vars(parts), schedule=schedule, report=report, planned=planned, executor=executor)


def place(
    recipe: Recipe,
    packer: Packer | None = None,
    world: World | None = None,
    source: Source | None = None,
    *,
    trained: bool = True,
    device: TargetDevice | None = None,
) -> PlacedRun:
    """Puts the model on its devices; no program is traced and no parameter exists yet.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      packer: packs samples that are not the configured data's; by default ``build_packer`` makes the configuration's.
      world: the run's devices, as ``World.create`` gives them; started here if not given.
      source: the run's training samples, where ``open_source(recipe, split="train")`` has opened them already.
      trained: whether something is to be trained, so that not every part may be frozen.
      device: what defaults are chosen for; by default the world's devices.

    Raises:
      ConfigError: there are too few devices, or two settings contradict each other.
    """
    validate_recipe(recipe, trained=trained)  # it may have been changed by hand since it was loaded
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    packer = packer or build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)
    if trained and packer.worst and recipe.data.origin.draws is None:
        require_targets(recipe, {name for name, count in packer.worst.media.items() if count})
    require_fitting(recipe, packer, tokenizer)
    world = world or start_world(recipe)
    if not trained:  # nothing waits for a backward
        recipe = with_remat(recipe, open_remat(recipe), "none")
    resolved = Resolved(recipe)
    if leaves_open(recipe):
        device = device or target_of(world)
        resolved = resolve(recipe, device, lambda tried: _estimate(tried, device, packer, source))
    return replace(place_model(resolved.recipe, packer, tokenizer, world), choices=resolved.lines)


def _estimate(recipe: Recipe, device: TargetDevice, packer: Packer, source: Source | None) -> Estimate:
    """Estimates the bytes of a run by the counts of a dry run, for stacked layers, which are traced in less time."""
    recipe, world = planned_world(replace(recipe, train=replace(recipe.train, unroll=False)), device)
    parts = assemble(recipe, packer, world, source)
    residuals = Counter[str]()
    for name, stage in parts.placed.stages.items():
        residuals[stage.model.module] += parts.report.residual_bytes[name]
    if isinstance(parts.executor, SingleExecutor):
        return Estimate(parts.executor.memory().total, residuals)
    return Estimate(fullest(parts.placed, parts.schedule, parts.shapes.values()).bytes, residuals)


def plan(recipe: Recipe, source: Source | None = None, *, device_memory: float = 0.0, processes: int = 1) -> Assembly:
    """``assemble`` without devices: no backend is started, and the result cannot be run.

    All devices count as this process's own: with ``World.transport='auto'`` programs are those of direct copies. On
    GPUs of several processes moves between these wait in the schedule.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      source: the run's training samples, where ``open_source(recipe, split="train")`` has opened them already.
      device_memory: bytes of a GPU, where the run would be on GPUs; 0 for those of an H100.
      processes: processes of the run, with as many devices each.

    Raises:
      ConfigError: two settings contradict each other, or the processes do not divide the devices.
    """
    device = planned_device(recipe, device_memory)
    planned, world = planned_world(recipe, device)
    require_pipeline_in_one_process(recipe, processes)
    fix = f"must divide the {world.size} devices"
    require(processes > 0 and world.size % processes == 0, "--num_processes", processes, fix)
    between = transport_of(recipe.world.transport, device.platform, crosses=processes > 1)
    beyond = world.size // processes if MOVERS[between].kind == "rendezvous" else 0
    return assemble(planned, world=world, source=source, device=device, waiting_beyond=beyond)


def planned_batch_spec(recipe: Recipe) -> BatchSpec:
    """The spec from which the batches of a run are made, without the run and its devices.

    ``spec.maker()`` opens the data; ``spec.to_json()`` is for another process. ``recipe``: the run's configuration, as
    ``load_config(["run.gin"])`` gives it.

    Raises:
      ConfigError: two settings contradict each other, or the data cannot be read.
    """
    if recipe.data.settings.reorder == "none":
        tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
        return batch_spec(recipe, build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe)), None)
    parts = plan(recipe)
    return batch_spec(recipe, parts.packer, step_order(recipe, parts))


def _executor(
    placed: PlacedModel, schedule: Schedule, shapes: dict[Signature, InputShapes], lowering: str
) -> Executor | OneProgramExecutor:
    """The executor for ``Train.lowering`` ``lowering``.

    Where all stages share their devices and each microbatch ends before the next begins, one program loops over the
    microbatches and is not unrolled.
    """
    straight = placed.straight_line and not placed.offloads
    straight = straight and not any(stage.split for stage in schedule.graph.stages)
    straight = straight and all(schedule.bound(name) == 1 for name in placed.stages)
    if lowering == "ops" or (lowering == "auto" and not straight):
        return Executor(placed, schedule, shapes)
    return (StraightExecutor if straight else SingleExecutor)(placed, schedule, shapes)
