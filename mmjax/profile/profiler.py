"""The profiler: from a configuration and the devices here to a profile that plans are made from."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace

import jax

from mmjax import jax_compat
from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.epochs import with_steps
from mmjax.assembly.model import packed_specs
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.samples import open_source
from mmjax.data.derived import completed
from mmjax.data.lengths import figures_of, lengths_of
from mmjax.data.loader import tokenizer_of
from mmjax.data.source import Source
from mmjax.mesh.layout import Layout
from mmjax.mesh.processes import broadcast_text, gather_texts, is_first
from mmjax.mesh.world import World
from mmjax.planner.profile_file import Compiled, Device, Profile, Trial, model_of, parse_profile
from mmjax.profile.links import QUICK, SIZES, all_to_alls, copies, gathers, moves, ranks_here, reduces
from mmjax.profile.trials import ROUNDS, at_a_time, attempts, best_trials, compiled, legal_tps, points
from mmjax.progress import Progress
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import GPU, open_remat, with_remat, with_unroll

VIRTUAL = 8
"""CPU devices of a profile that names no number."""
_SAMPLES, _FEW = 512, 64
_ALL = 0.9
"""If at least this share of the devices works at a time, each device counts as having a processor of its own."""


def profile_of(recipe: Recipe, *, quick: bool = False, style: str = "auto") -> Profile:
    """Measures the configured model on the devices here. All processes call it, and get the profile of the first.

    Layouts and numbers of layers of the configuration are not used. `World.devices` says how many devices to measure;
    without it, all accelerators here or eight virtual CPU devices.

    Args:
      recipe: model, data, batch and buckets, as `load_config(["run.gin"])` gives them.
      quick: fewer shapes and sizes.
      style: the style of the progress display: "auto", "bar", "lines" or "silent"; see `Progress`.

    Raises:
      ConfigError: two settings contradict each other, or there are fewer devices than `World.devices`.
    """
    source = open_source(recipe, split="train")
    recipe = with_buckets(with_steps(recipe, source), source)
    data = sampled(recipe, source, _FEW if quick else _SAMPLES)
    world = world_for(recipe)
    # A profile is of no layout, so that nobody knows what fits: keeping products costs a plan nothing.
    remat = "dots" if world.platform == GPU else "none"
    recipe = with_remat(with_unroll(recipe, world.platform), open_remat(recipe), remat)
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    packer = build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)
    tried = points(packer, recipe.train.global_batch // recipe.train.microbatches, quick=quick)
    trials, needs, calls = list[Trial](), list[Compiled](), list[float]()
    for tp in sorted({tp for name in recipe.model for tp in legal_tps(recipe, name, world.size)}):
        stages = list(attempts(recipe, tokenizer, packer, world, tp, tried))
        gather_texts("")  # a process without devices in the last ones has not been waiting in these
        programs = sum(len(stage.programs.programs) for stage in stages)
        with Progress(programs, f"compiling for tp {tp}", style=style) as progress:
            compiled(stages, lambda *_, progress=progress: progress.advance())
        needs += [stage.compiled() for stage in stages]
        stages = [stage for stage in stages if stage.timed]
        with Progress(ROUNDS * len(stages), f"timing tp {tp}", style=style, log_every=len(stages)) as progress:
            timed, calls = best_trials(stages, progress.advance)
        trials += timed
    shared = at_a_time(recipe, tokenizer, packer, world, tried[0]) if world.size > 1 else 1.0
    sizes, ranks = QUICK if quick else SIZES, ranks_here(world)
    profile = Profile(
        device=_device(world),
        jax=jax.__version__,
        dtype=recipe.train.dtype,
        model=model_of(recipe),
        data=data,
        trials=tuple(trials),
        compiled=tuple(needs),
        moves=moves(world, sizes) if world.size > 1 else (),
        copies=copies(world, sizes),
        gathers={count: gathers(world, count, sizes) for count in ranks},
        all_to_alls={count: all_to_alls(world, count, sizes) for count in ranks},
        reduces={count: reduces(world, count, sizes) for count in ranks},
        op=statistics.median(calls) if calls else 0.0,
        shared=shared if shared < _ALL * world.size else float(world.size),
    )
    shared_profile = broadcast_text(json.dumps(profile.as_json()))
    return profile if is_first() else parse_profile(json.loads(shared_profile))


def sampled(recipe: Recipe, source: Source, samples: int) -> dict[str, dict[str, float]]:
    """Figures of the lengths, in positions, of the first `samples` samples or of their media, by module name.

    The figures of a module are those of `FIGURES` ("count", "mean", ...) and "per_sample", the average number in a
    sample: {"llm": {"count": 64.0, "mean": 310.5, …, "per_sample": 1.0}}.

    Args:
      recipe: the configuration.
      source: its training samples, as `open_source(recipe, split="train")` opens them.
      samples: how many samples, 1 or more.
    """
    specs = packed_specs(recipe)
    lengths = lengths_of([completed(source.meta(index), specs) for index in range(samples)], specs)
    return {name: figures_of(values) | {"per_sample": len(values) / samples} for name, values in lengths.items()}


def world_for(recipe: Recipe) -> World:
    """The devices to measure: `World.devices` of them, or else all accelerators here or `VIRTUAL` CPU devices.

    Of several processes it is as many as a run has, by default those of the layouts. Starts the backend of JAX.

    recipe: the run's configuration, as `load_config(["run.gin"])` gives it.

    Raises:
      ConfigError: there are fewer than `World.devices`.
    """
    deterministic = recipe.train.deterministic
    if jax_compat.process_count() > 1:
        return World.create(
            recipe.world, [Layout(dp=recipe.world.devices or recipe.devices)], deterministic=deterministic
        )
    wanted = recipe.world.devices or VIRTUAL
    if not jax_compat.backends_are_initialized():
        # A world of one device starts the backend, and with it as many virtual ones as may be wanted.
        jax.config.update("jax_num_cpu_devices", max(wanted, jax.config.values["jax_num_cpu_devices"]))
    World.create(replace(recipe.world, devices=1), [Layout()], deterministic=deterministic)
    devices = jax.devices(recipe.world.platform or None)
    count = len(devices) if devices[0].platform != "cpu" else min(wanted, len(devices))
    return World.create(
        replace(recipe.world, devices=recipe.world.devices or count), [Layout()], deterministic=deterministic
    )


def _device(world: World) -> Device:
    device = jax.local_devices(backend=world.platform)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = float(limit or _host_memory() / world.size)
    return Device(
        kind=device.device_kind,
        platform=device.platform,
        count=world.size,
        memory=memory,
        processes=world.processes,
    )


def _host_memory() -> float:
    """Bytes of the host's memory, which virtual devices share; 0 where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0.0
