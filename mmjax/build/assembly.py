"""Builds the parts of a run from a ``Config``: model, data, devices, schedule and executor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax import jax_compat
from mmjax.build.model import build_model, build_modules, encoder_specs, require_inputs, require_rates, splits_of
from mmjax.build.orders import order_of, pair_costs, step_order
from mmjax.build.parts import Assembly, PlacedRun
from mmjax.config import Config, require_devices
from mmjax.config import validate as validate_config
from mmjax.configurable import ConfigError, require
from mmjax.data.buckets import ChosenBuckets, cells_for, choose, look_at, per_cell, per_microbatch
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.loader import Source, StepMaker, make_packer, make_source, tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder, train_schedule
from mmjax.data.send_lists import list_shapes
from mmjax.data.sources.mixture import Mixture
from mmjax.data.spec import DataSpec
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Microbatch
from mmjax.mesh.layout import cell_count
from mmjax.mesh.processes import gather_texts
from mmjax.mesh.world import World
from mmjax.models.config import LLM
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import deferred_bytes, residual_bytes
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.place import InputShapes, PlacedModel, Settings
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.walker import Signature
from mmjax.progress import IndexProgress
from mmjax.schedule.ops import Schedule
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate

Say = Callable[[str], None]


def open_source(config: Config, *, split: str, skipped: Path | None = None) -> Source:
    """The data of a run, for ``split`` "train" or "test".

    Args:
      config: the run's configuration.
      split: "train" or "test".
      skipped: a file for the names of samples that cannot be read.

    Raises:
      ConfigError: a setting does not fit the data, or the data cannot be read.
    """
    about: Any = {"task": config.task, "sources": config.sources, "observer": IndexProgress(), "skipped": skipped}
    about["known"] = config.known
    return make_source(config.data, encoder_specs(config), seed=config.train.seed, split=split, **about)


def require_same_data(config: Config, source: Source) -> None:
    """Requires that all processes have found the same samples; all of them have to call it.

    Raises:
      ConfigError: some process has other files, or lacks some.
    """
    said = gather_texts(source.identity) if isinstance(source, Mixture) else []
    others = [str(number) for number, identity in enumerate(said) if identity != said[0]]
    fix = f"process {', '.join(others)} finds other samples than process 0; give all of them the same files"
    require(not others, "Data.sources", dict(config.data.sources), fix)


def build_packer(
    config: Config, tokenizer: Tokenizer, one_bucket: bool = False, source: Source | None = None, **changes: Any
) -> Packer:
    """The packer of a run. Buckets that are not given are chosen from the data or made for its worst case.

    Args:
      config: the run's configuration.
      tokenizer: the run's tokenizer.
      one_bucket: whether the microbatches of a step share a bucket.
      source: the run's training samples; opened here if not given.
      changes: other values of ``global_batch`` or ``microbatches``.

    Raises:
      ConfigError: the vocabulary has no room for the tokenizer's, or a bucket none for the data.
    """
    vocab, least = config.modules[LLM].vocab, tokenizer.table_size
    fix = f"the tokenizer has {least} tokens; set it to {least} or more, or to 0 for the tokenizer's"
    if config.pretrained(LLM) and config.data.tokenizer:  # whose folder decides the vocabulary
        texts = tuple(tokenizer.shown([i]) for i in range(vocab, min(least, vocab + 4)))
        fix = f"the tokenizer has {least} tokens; set {LLM}/Weights.new_tokens={texts!r}, which adds rows for all"
    require(vocab == 0 or vocab >= least, f"{LLM}/Decoder.vocab", vocab, fix)
    source = source or open_source(config, split="train")
    return packer_for(with_buckets(config, source), tokenizer, source, one_bucket, **changes)


def packer_for(
    config: Config, tokenizer: Tokenizer, source: Source, one_bucket: bool = False, **changes: Any
) -> Packer:
    """``build_packer`` without a check of the vocabulary, and without a choice of buckets.

    Raises:
      ConfigError: a bucket has no room for the samples.
    """
    specs = encoder_specs(config)
    sizes: dict[str, Any] = {
        "global_batch": config.train.global_batch,
        "microbatches": config.train.microbatches,
    } | changes
    cells = cell_count(config.layouts.values())
    text = per_cell(config.packing[LLM].given if LLM in config.packing else (), cells)
    shapes: Any = {"cells": cells, "one_bucket": one_bucket, "text": text, "pairs": pair_costs(config)}
    llm = build_modules(config)[LLM]
    shapes |= {"axes": llm.position_axes, "mask": llm.sees}
    packer = make_packer(config.data, specs, source, tokenizer, **shapes, **sizes)
    # In one program for all stages, values go from lane to lane as they lie.
    packer = packer.split_over(splits_of(config), lists=config.train.lowering != "single")
    _check_reorder(config, packer)
    return packer


def with_buckets(
    config: Config,
    source: Source | None = None,
    *,
    say: Say = lambda line: None,
    before: Config | None = None,
) -> Config:
    """The configuration with buckets chosen where it asks for a number of them: those of least compute.

    Compute is summed over steps of the run, with its seed, batch and order of samples, from metadata alone. So every
    process chooses the same, and so does a run that continues.

    Args:
      config: the run's configuration.
      source: the run's training samples; opened here if not given.
      say: called with a line for each module.
      before: the configuration of the run so far; its buckets stay while batch, data and layouts do.

    Raises:
      ConfigError: a setting does not fit the data.
    """
    asked = {name: own.buckets for name, own in config.packing.items() if isinstance(own.buckets, int)}
    if not asked:
        return config
    source = source or open_source(config, split="train")
    if before and (kept := _kept(config, before, asked)):
        return kept
    found, cells = _chosen(config, asked, source), cell_count(config.layouts.values())
    chosen = {name: PackingConfig(buckets=per_microbatch(own.buckets, cells)) for name, own in found.items()}
    for name, own in found.items():
        shares = f"{own.padding:.1%} of its compute is padding, {own.alone:.1%} in the last one alone"
        say(f"{name}/Packing.buckets={chosen[name].buckets}: chosen from {own.microbatches} microbatches; {shares}")
    return replace(config, packing={**config.packing, **chosen})


def added_buckets(config: Config, packer: Packer) -> Iterator[str]:
    """A line about each bucket that was added because a module's given ones do not hold the largest cells.

    Args:
      config: the run's configuration.
      packer: the run's packer.
    """
    for name, own in config.packing.items():
        rounded = packer.rounded(name, per_cell(own.given, packer.cells))
        added = set(packer.buckets_of(name)).difference(rounded) if rounded else ()
        for bucket in per_microbatch((*added,), packer.cells):
            yield f"{name}/Packing.buckets={own.given}: {bucket} is added, which holds the largest batch of this layout"


def _kept(config: Config, before: Config, asked: Mapping[str, int]) -> Config | None:
    """The configuration with the buckets of ``before``, if both ask for the same choice; else ``None``."""
    packing = {name: before.packing.get(name, PackingConfig()) for name in asked}
    fit = all(0 < len(packing[name].given) <= count for name, count in asked.items())
    if not fit or _decides(config) != _decides(before):
        return None
    return replace(config, packing={**config.packing, **packing})


def _decides(config: Config) -> tuple[object, ...]:
    """The settings that a choice of buckets depends on, beside the samples themselves and their costs."""
    train, cells = config.train, cell_count(config.layouts.values())
    data = {one.name: getattr(config.data, one.name) for one in fields(DataConfig) if not one.metadata.get("local")}
    about = config.task, config.sources, cells, one_bucket(config)
    return data, *about, train.seed, train.global_batch, train.microbatches


def _chosen(config: Config, asked: Mapping[str, int], source: Source) -> dict[str, ChosenBuckets]:
    train, data = config.train, config.data
    # Shapes for the worst case: nothing is chosen yet.
    rows = train.global_batch // train.microbatches
    rooms = {name: ((rows, data.sequence_length),) if name == LLM else () for name in asked}
    packing = {**config.packing, **{name: PackingConfig(buckets=own) for name, own in rooms.items()}}
    whole = replace(config, data=replace(data, reorder="none"), packing=packing)
    tokenizer = tokenizer_of(data, config.model.media)
    packer = build_packer(whole, tokenizer, one_bucket=one_bucket(config), source=source)
    order = None
    if data.reorder != "none":
        planned, world = _planned(whole)
        order = order_of(config, place(planned, packer, world), data.reorder)
    worst, parts = source.worst_case(), look_at(packer, source.meta, train.global_batch, order)
    return {name: choose(cells_for(packer, worst, parts, name), count) for name, count in asked.items()}


def _check_reorder(config: Config, packer: Packer) -> None:
    """Requires shapes to choose from: with one alone, all microbatches take the same time in any order."""
    if config.data.reorder == "none" or any(count > 1 for count in packer.bucket_counts.values()):
        return
    name, why = next(iter(packer.encoders)), "in their one bucket all microbatches take the same time"
    raise ConfigError(f"Data.reorder={config.data.reorder!r}: {why}; set {name}/Packing.buckets=4 or this to 'none'")


def data_spec(config: Config, packer: Packer, order: StepOrder | None) -> DataSpec:
    """The spec that decides over the batches of a run; ``order`` is its ``step_order``."""
    train = config.train
    about: Any = {"seed": train.seed, "global_batch": train.global_batch, "sources": config.sources}
    about["known"] = config.known
    return DataSpec(data=config.data, task=config.task, packer=packer, order=order, **about)


def batch_maker(config: Config, parts: PlacedRun, source: Source) -> tuple[DataSpec, StepMaker]:
    """The spec that decides over the batches of a run, and the maker of this process's rows of them.

    All processes have to call it.

    Raises:
      ConfigError: the processes have found different samples.
    """
    require_same_data(config, source)
    spec = data_spec(config, parts.packer, step_order(config, parts))
    return spec, spec.maker(source, own_rows(parts.placed, parts.packer.inputs, config.train.microbatches))


def planned_data_spec(config: Config) -> DataSpec:
    """The ``data_spec`` of a configuration, made without a run and without its devices."""
    if config.data.reorder == "none":
        tokenizer = tokenizer_of(config.data, config.model.media)
        return data_spec(config, build_packer(config, tokenizer, one_bucket=one_bucket(config)), None)
    parts = plan(config)
    return data_spec(config, parts.packer, step_order(config, parts))


def bucket_shapes(packer: Packer, rows: int) -> dict[Signature, InputShapes]:
    """Input shapes of a microbatch of ``rows`` LLM rows for every combination of the media's buckets."""
    empty = replace(packer, lists=False).microbatch([], rows)
    counts, shapes = packer.bucket_counts, dict[Signature, InputShapes]()
    for buckets in itertools.product(*map(range, counts.values())):
        inputs: dict[str, Any] = dict(empty.inputs)
        for name, bucket in zip(counts, buckets, strict=True):
            rows_per_cell, width = packer.buckets_of(name)[bucket]
            own, rows = empty.inputs[name], rows_per_cell * packer.cells
            scaled = {k: a.shape[1] * width // own["segments"].shape[1] for k, a in own.items()}
            inputs[name] = {k: jax.ShapeDtypeStruct((rows, scaled[k], *a.shape[2:]), a.dtype) for k, a in own.items()}
        for module, (name, shape) in list_shapes(packer.listed, inputs, packer.splits, packer.cells).items():
            inputs[module] = {**inputs[module], name: jax.ShapeDtypeStruct(shape, np.int32)}
        shapes[tuple(sorted(zip(counts, buckets, strict=True)))] = inputs
    return shapes


def own_rows(placed: PlacedModel, names: Mapping[str, Collection[str]], microbatches: int) -> ProcessRows | None:
    """The rows that this process's devices read of a step's microbatches; ``None`` for all, in a run of one process.

    ``names`` are those of the host inputs that there are, by module.
    """
    if placed.world.processes == 1:
        return None
    count = math.lcm(*(layout.lanes for layout in placed.layouts.values()))
    return ProcessRows.in_turns([_rows_of(placed, names, microbatch) for microbatch in range(min(count, microbatches))])


def _rows_of(placed: PlacedModel, names: Mapping[str, Collection[str]], microbatch: int) -> ProcessRows:
    """The rows of a microbatch that this process's devices read."""
    cells: dict[str, dict[str, set[int]]] = {}
    for stage in (placed.places[node.lane_name(microbatch)] for node in placed.graph.stages):
        if not stage.submesh.local:
            continue
        layout, own = stage.submesh.layout, cells.setdefault(stage.model.module, {})
        here = [i for i, rank in enumerate(stage.submesh.ranks) if rank in placed.world.local_ranks]
        read = {cell for i in here for cell in _cells(i // layout.replica_size % layout.dp, layout.dp, placed.cells)}
        for name in stage.model.read(names[stage.model.module]):
            own.setdefault(name, set()).update(read)
    return ProcessRows(cells={m: {name: tuple(sorted(c)) for name, c in own.items()} for m, own in cells.items()})


def _cells(shard: int, dp: int, cells: int) -> range:
    """The cells of one dp shard."""
    return range(shard * cells // dp, (shard + 1) * cells // dp)


def signed(microbatch: Microbatch) -> tuple[Signature, InputShapes]:
    """The bucket signature and the inputs of a microbatch, as the executor takes them."""
    return tuple(sorted(microbatch.bucket.items())), microbatch.inputs


def one_bucket(config: Config) -> bool:
    """Whether a step's microbatches share a bucket: if one program runs it, or all stages are on the same devices."""
    if config.train.lowering == "single":
        return True
    return not _pipelined(config)


def _pipelined(config: Config) -> bool:
    """Whether there is more than one stage submesh."""
    layouts = [layout.lane(k) for layout in config.layouts.values() for k in range(layout.lanes)]
    return len({layout.stage_ranks(stage) for layout in layouts for stage in range(layout.pp)}) > 1


def _check_processes(config: Config) -> None:
    """Raises ConfigError, before a device is touched, if several processes are to run a pipeline as one program."""
    if (count := jax_compat.process_count()) > 1 and config.train.lowering == "single" and _pipelined(config):
        raise ConfigError(
            f"Train.lowering='single': a pipeline is one program in one process, this run has {count}; set it to 'auto'"
        )


def place(
    config: Config,
    packer: Packer | None = None,
    world: World | None = None,
    source: Source | None = None,
    *,
    trained: bool = True,
) -> PlacedRun:
    """Puts the model on its devices; no program is traced and no parameter exists yet.

    Args:
      config: the run's configuration.
      packer: for other samples than the configured data's; made from the configuration if not given.
      world: its devices; started here if not given.
      source: the run's training samples, where they are open already.
      trained: whether something is to be trained.

    Raises:
      ConfigError: the devices here are too few, or a part does not fit another.
    """
    validate_config(config, trained=trained)  # it may have been changed by hand since it was loaded
    tokenizer = tokenizer_of(config.data, config.model.media)
    model = build_model(config, tokenizer)
    packer = packer or build_packer(config, tokenizer, one_bucket=one_bucket(config), source=source)
    require_inputs(model, packer)
    require_rates(model, config.optimizers)
    world = world or World.create(
        config.world,
        config.layouts.values(),
        lambda found: require_devices(config, found),
        deterministic=config.train.deterministic,
    )
    settings = Settings(
        optimizers=config.optimizers,
        total_steps=config.train.steps,
        dtype=config.train.dtype,
        clip_norm=config.train.clip_norm,
        transport=config.world.transport,
        route=config.world.route,
        offloads=config.offloads,
    )
    placed = PlacedModel(model, config.layouts, world, settings)
    samples = config.train.global_batch // config.train.microbatches
    shapes = bucket_shapes(packer, samples)
    return PlacedRun(tokenizer=tokenizer, packer=packer, world=world, placed=placed, shapes=shapes, samples=samples)


def plan(config: Config, source: Source | None = None) -> Assembly:
    """``assemble`` for devices that need not be here: no backend is started, and nothing can be run.

    All devices count as this process's own, so that ``World.transport='auto'`` is direct copies.

    Raises:
      ConfigError: a part does not fit another.
    """
    planned, world = _planned(config)
    return assemble(planned, world=world, source=source)


def _planned(config: Config) -> tuple[Config, World]:
    transport = "device_put" if config.world.transport == "auto" else config.world.transport
    world = World.planned(config.world.devices or config.devices)
    return replace(config, world=replace(config.world, transport=transport)), world


def assemble(
    config: Config,
    packer: Packer | None = None,
    world: World | None = None,
    source: Source | None = None,
) -> Assembly:
    """Builds everything up to traced programs; nothing is compiled and no parameter exists yet.

    Args:
      config: the run's configuration.
      packer: see ``place``.
      world: see ``place``.
      source: see ``place``.

    Raises:
      ConfigError: the devices here are too few, a part does not fit another, or one program is to be a pipeline of
        several processes.
    """
    lowering = "ops" if config.train.debug_nans else config.train.lowering
    _check_processes(config)
    parts = place(config, packer, world, source)
    costs = parts.placed.nominal_costs(next(iter(parts.shapes.values())))
    train = config.train
    schedule = train_schedule(train.schedule, parts.placed.graph, train.microbatches, costs, train.window, train.inner)
    held = (parts.placed, parts.shapes.values(), schedule.graph)
    report = validate(schedule, residual_bytes(*held), deferred_bytes(*held))
    return Assembly(
        **vars(parts),
        schedule=schedule,
        report=report,
        planned=simulate(schedule, costs),
        executor=_executor(parts.placed, schedule, parts.shapes, lowering),
    )


def _executor(
    placed: PlacedModel, schedule: Schedule, shapes: dict[Signature, InputShapes], lowering: str
) -> Executor | OneProgramExecutor:
    """The executor of steps lowered in this way.

    Where all stages share their devices and microbatches follow one another (a straight line), the step is a loop over
    microbatches and is not unrolled.
    """
    straight = placed.straight_line and not placed.offloads
    straight = straight and not any(stage.split for stage in schedule.graph.stages)
    straight = straight and all(schedule.bound(name) == 1 for name in placed.stages)
    if lowering == "ops" or (lowering == "auto" and not straight):
        return Executor(placed, schedule, shapes)
    return (StraightExecutor if straight else SingleExecutor)(placed, schedule, shapes)
