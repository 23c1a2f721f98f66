"""The model of a run on its devices."""

from __future__ import annotations

from dataclasses import replace

from mmjax.assembly.compiled_runs import compiled_runs
from mmjax.assembly.model import build_model, require_inputs, require_rates
from mmjax.assembly.packers import bucket_shapes, is_pipelined
from mmjax.assembly.parts import PlacedRun
from mmjax.config import require_devices
from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh import gpu
from mmjax.mesh.world import World
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import GPU, TargetDevice
from mmjax.recipe.schedules import op_microbatches


def require_fitting(recipe: Recipe, packer: Packer, tokenizer: Tokenizer) -> None:
    """Requires that data and rates fit the model; starts no device.

    Args:
      recipe: the run's recipe, as ``load_config(["run.gin"])`` gives it.
      packer: the packer of its samples, as ``build_packer(recipe, tokenizer)`` makes it.
      tokenizer: the tokenizer of its text, such as ``plan(recipe).tokenizer``.

    Raises:
      ConfigError: the data lack what a callback reads, or a pattern of rates fits no parameter.
    """
    model = build_model(recipe, tokenizer)
    require_inputs(model, packer)
    require_rates(model, recipe.model.optimizers)


def start_world(recipe: Recipe) -> World:
    """The devices of a run; starts JAX's backend.

    Raises:
      ConfigError: there are too few devices.
    """
    return World.create(
        recipe.world,
        recipe.model.layouts.values(),
        lambda devices: require_devices(recipe, devices),
        deterministic=recipe.train.deterministic,
    )


def place_model(recipe: Recipe, packer: Packer, tokenizer: Tokenizer, world: World) -> PlacedRun:
    """Puts the model on its devices; no program is traced and no parameter exists yet.

    Args:
      recipe: the run's recipe, as ``load_config(["run.gin"])`` gives it.
      packer: the packer of its samples, as ``build_packer(recipe, tokenizer)`` makes it.
      tokenizer: the tokenizer of its text, such as ``plan(recipe).tokenizer``.
      world: the run's devices, as ``start_world(recipe)`` gives them.
    """
    model = build_model(recipe, tokenizer)
    settings = Settings(
        optimizers=recipe.model.optimizers,
        total_steps=recipe.train.steps,
        dtype=recipe.train.dtype,
        clip_norm=recipe.train.clip_norm,
        transport=recipe.world.transport,
        route=recipe.world.route,
        offloads=recipe.model.offloads,
        microbatches=op_microbatches(recipe.train, recipe.model.layouts),
        overlap_grad_reduce=recipe.train.overlap_grad_reduce is True,
    )
    placed = PlacedModel(model, recipe.model.layouts, world, settings)
    samples = recipe.train.global_batch // recipe.train.microbatches
    runs = compiled_runs(placed, packer, samples)
    shapes = runs.shapes(bucket_shapes(packer, samples))
    return PlacedRun(
        recipe=recipe,
        tokenizer=tokenizer,
        packer=packer,
        world=world,
        placed=placed,
        shapes=shapes,
        samples=samples,
        runs=runs,
    )


def planned_world(recipe: Recipe, device: TargetDevice | None = None) -> tuple[Recipe, World]:
    """The configuration for a world without devices, with transport "device_put" in place of "auto"; and that world.

    The world has ``World.devices`` ranks, or as many as the layouts need.

    Args:
      recipe: the run's configuration.
      device: the kind of the devices; by default ``planned_device(recipe)``.
    """
    device = device or planned_device(recipe)
    transport = "device_put" if recipe.world.transport == "auto" else recipe.world.transport
    world = World.planned(recipe.world.devices or recipe.devices, device.platform, device.kind)
    return replace(recipe, world=replace(recipe.world, transport=transport)), world


def target_of(world: World) -> TargetDevice:
    """The device of a world that a recipe's defaults are chosen for; all processes call it."""
    kind = world.devices[0].device_kind
    if memory := world.device_memory:
        return TargetDevice(world.platform, memory, kind, "what JAX takes of the GPU")
    return replace(supposed_gpu(), kind=kind) if world.platform == GPU else TargetDevice(world.platform, kind=kind)


def planned_device(recipe: Recipe, memory: float = 0.0) -> TargetDevice:
    """The device of a run that is not started: a CPU, or a GPU if this process would start one.

    Args:
      recipe: the run's configuration.
      memory: bytes of the GPU; 0 for those of an H100.
    """
    if not gpu.will_start(recipe.world.platform):
        return TargetDevice("cpu")
    return supposed_gpu(memory, owner="") if memory else supposed_gpu()


def supposed_gpu(memory: float = gpu.H100_MEMORY, kind: str = gpu.H100, owner: str = "an H100's ") -> TargetDevice:
    """A GPU that is not present, with the memory that a run would take.

    Args:
      memory: bytes that CUDA sees.
      kind: the name that JAX gives it.
      owner: whose memory it is, for the lines that tell a choice, such as "an H100's "; "" does not say.
    """
    share = gpu.memory_share()
    return TargetDevice(GPU, share * memory, kind, f"{100 * share:.3g} % of {owner}{memory / 1e9:.3g} GB")


def require_pipeline_in_one_process(recipe: Recipe, count: int) -> None:
    """Raises ConfigError, before a device is used, if several processes are to run a pipeline as one program.

    Args:
      recipe: the run's configuration.
      count: processes of the run.
    """
    if count > 1 and recipe.train.lowering == "single" and is_pipelined(recipe):
        raise ConfigError(
            f"Train.lowering='single': a pipeline is one program in one process, this run has {count}; set it to 'auto'"
        )
