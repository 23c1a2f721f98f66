"""The model of a run on its devices."""

from __future__ import annotations

from dataclasses import replace

from mmjax import jax_compat
from mmjax.assembly.compiled_runs import compiled_runs
from mmjax.assembly.model import build_model, require_inputs, require_rates
from mmjax.assembly.packers import bucket_shapes, is_pipelined
from mmjax.assembly.parts import PlacedRun
from mmjax.config import require_devices
from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.world import World
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.recipe import Recipe


def place_model(recipe: Recipe, packer: Packer, tokenizer: Tokenizer, world: World | None = None) -> PlacedRun:
    """Puts the model on its devices; no program is traced and no parameter exists yet.

    Args:
      recipe: the run's recipe, as ``load_config(["run.gin"])`` gives it.
      packer: the packer of its samples, as ``build_packer(recipe, tokenizer)`` makes it.
      tokenizer: the tokenizer of its text, such as ``plan(recipe).tokenizer``.
      world: the run's devices, as ``World.create`` gives them; started here if not given.

    Raises:
      ConfigError: there are too few devices, or the data lack what a callback reads.
    """
    model = build_model(recipe, tokenizer)
    require_inputs(model, packer)
    require_rates(model, recipe.model.optimizers)
    world = world or World.create(
        recipe.world,
        recipe.model.layouts.values(),
        lambda devices: require_devices(recipe, devices),
        deterministic=recipe.train.deterministic,
    )
    settings = Settings(
        optimizers=recipe.model.optimizers,
        total_steps=recipe.train.steps,
        dtype=recipe.train.dtype,
        clip_norm=recipe.train.clip_norm,
        transport=recipe.world.transport,
        route=recipe.world.route,
        offloads=recipe.model.offloads,
    )
    placed = PlacedModel(model, recipe.model.layouts, world, settings)
    samples = recipe.train.global_batch // recipe.train.microbatches
    runs = compiled_runs(placed, packer, samples)
    shapes = runs.shapes(bucket_shapes(packer, samples))
    return PlacedRun(
        tokenizer=tokenizer, packer=packer, world=world, placed=placed, shapes=shapes, samples=samples, runs=runs
    )


def planned_world(recipe: Recipe) -> tuple[Recipe, World]:
    """The configuration for a world without devices, with transport "device_put" in place of "auto"; and that world.

    The world has ``World.devices`` ranks, or as many as the layouts need. ``recipe``: the run's configuration.
    """
    transport = "device_put" if recipe.world.transport == "auto" else recipe.world.transport
    world = World.planned(recipe.world.devices or recipe.devices)
    return replace(recipe, world=replace(recipe.world, transport=transport)), world


def require_pipeline_in_one_process(recipe: Recipe) -> None:
    """Raises ConfigError, before a device is used, if several processes are to run a pipeline as one program."""
    if (count := jax_compat.process_count()) > 1 and recipe.train.lowering == "single" and is_pipelined(recipe):
        raise ConfigError(
            f"Train.lowering='single': a pipeline is one program in one process, this run has {count}; set it to 'auto'"
        )
