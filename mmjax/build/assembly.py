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
    return make_source(
        config.data,
        encoder_specs(config),
        seed=config.train.seed,
        split=split,
        task=config.task,
        sources=config.sources,
        observer=IndexProgress(),
        skipped=skipped,
        known=config.known,
    )


def require_same_data(config: Config, source: Source) -> None:
    """Requires that all processes have found the same samples; all of them have to call it.

    Raises:
      ConfigError: some process has other files, or lacks some.
    """
    identities = gather_texts(source.identity) if isinstance(source, Mixture) else []
    differing = [str(process) for process, identity in enumerate(identities) if identity != identities[0]]
    fix = f"process {', '.join(differing)} finds other samples than process 0; give all of them the same files"
    require(not differing, "Data.sources", dict(config.data.sources), fix)


def build_packer(
    config: Config, tokenizer: Tokenizer, *, one_bucket: bool = False, source: Source | None = None
) -> Packer:
    """The packer of a run. Buckets that are not given are chosen from the data or made for its worst case.

    Args:
      config: the run's configuration.
      tokenizer: the run's tokenizer.
      one_bucket: whether the microbatches of a step share a bucket.
      source: the run's training samples; opened here if not given.

    Raises:
      ConfigError: the vocabulary is smaller than the tokenizer's, or a bucket is too small for the data.
    """
    vocab, least = config.modules[LLM].vocab, tokenizer.table_size
    fix = f"the tokenizer has {least} tokens; set it to {least} or more, or to 0 for the tokenizer's"
    if config.pretrained(LLM) and config.data.tokenizer:  # whose folder decides the vocabulary
        texts = tuple(tokenizer.shown([i]) for i in range(vocab, min(least, vocab + 4)))
        fix = f"the tokenizer has {least} tokens; set {LLM}/Weights.new_tokens={texts!r}, which adds rows for all"
    require(vocab == 0 or vocab >= least, f"{LLM}/Decoder.vocab", vocab, fix)
    source = source or open_source(config, split="train")
    return packer_for(with_buckets(config, source), tokenizer, source, one_bucket=one_bucket)


def packer_for(config: Config, tokenizer: Tokenizer, source: Source, *, one_bucket: bool = False) -> Packer:
    """``build_packer`` without a check of the vocabulary, and without a choice of buckets.

    Raises:
      ConfigError: a bucket is too small for the samples.
    """
    cells = cell_count(config.layouts.values())
    llm = build_modules(config)[LLM]
    packer = make_packer(
        config.data,
        encoder_specs(config),
        source,
        tokenizer,
        global_batch=config.train.global_batch,
        microbatches=config.train.microbatches,
        cells=cells,
        one_bucket=one_bucket,
        text=per_cell(config.packing[LLM].given if LLM in config.packing else (), cells),
        pairs=pair_costs(config),
        axes=llm.position_axes,
        mask=llm.sees,
    )
    # The lowering of all stages into one program has no lists of sends: whole shards go from lane to lane.
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
    """The configuration with the buckets of least compute, for each module that is given a number of buckets.

    Compute is summed over steps of the run, with its seed, batch and order of samples, from metadata alone. So every
    process makes the same choice, and so does a run that continues.

    Args:
      config: the run's configuration.
      source: the run's training samples; opened here if not given.
      say: called with a line for each module.
      before: the configuration of the run so far; its buckets stay while batch, data and layouts stay the same.

    Raises:
      ConfigError: a setting does not fit the data.
    """
    counts = {name: packing.buckets for name, packing in config.packing.items() if isinstance(packing.buckets, int)}
    if not counts:
        return config
    source = source or open_source(config, split="train")
    if before and (unchanged := _with_earlier_buckets(config, before, counts)):
        return unchanged
    choices, cells = _choose_buckets(config, counts, source), cell_count(config.layouts.values())
    packings = {name: PackingConfig(buckets=per_microbatch(choice.buckets, cells)) for name, choice in choices.items()}
    for name, choice in choices.items():
        shares = f"{choice.padding:.1%} of its compute is padding, {choice.alone:.1%} in the last one alone"
        say(
            f"{name}/Packing.buckets={packings[name].buckets}: chosen from {choice.microbatches} microbatches; {shares}"
        )
    return replace(config, packing={**config.packing, **packings})


def added_buckets(config: Config, packer: Packer) -> Iterator[str]:
    """A line about each bucket that was added because a module's given ones do not hold the largest cells.

    Args:
      config: the run's configuration.
      packer: the run's packer.
    """
    for name, packing in config.packing.items():
        rounded = packer.rounded(name, per_cell(packing.given, packer.cells))
        added = set(packer.buckets_of(name)).difference(rounded) if rounded else ()
        for bucket in per_microbatch((*added,), packer.cells):
            setting = f"{name}/Packing.buckets={packing.given}"
            yield f"{setting}: {bucket} is added, which holds the largest batch of this layout"


def _with_earlier_buckets(config: Config, before: Config, counts: Mapping[str, int]) -> Config | None:
    """The configuration with the buckets of ``before``, or ``None`` where these have to be chosen again."""
    packing = {name: before.packing.get(name, PackingConfig()) for name in counts}
    fit = all(0 < len(packing[name].given) <= count for name, count in counts.items())
    if not fit or _bucket_settings(config) != _bucket_settings(before):
        return None
    return replace(config, packing={**config.packing, **packing})


def _bucket_settings(config: Config) -> tuple[object, ...]:
    """The settings that a choice of buckets depends on, beside the samples themselves and their costs."""
    train, cells = config.train, cell_count(config.layouts.values())
    data = {
        field.name: getattr(config.data, field.name) for field in fields(DataConfig) if not field.metadata.get("local")
    }
    batch = train.seed, train.global_batch, train.microbatches
    return data, config.task, config.sources, cells, one_bucket(config), *batch


def _choose_buckets(config: Config, counts: Mapping[str, int], source: Source) -> dict[str, ChosenBuckets]:
    """The buckets of least compute, at most ``counts`` of each module."""
    train, data = config.train, config.data
    # The samples are packed into shapes for the worst case, since no bucket is chosen yet.
    rows = train.global_batch // train.microbatches
    largest = {name: ((rows, data.sequence_length),) if name == LLM else () for name in counts}
    packing = {**config.packing, **{name: PackingConfig(buckets=buckets) for name, buckets in largest.items()}}
    unchosen = replace(config, data=replace(data, reorder="none"), packing=packing)
    tokenizer = tokenizer_of(data, config.model.media)
    packer = build_packer(unchosen, tokenizer, one_bucket=one_bucket(config), source=source)
    order = None
    if data.reorder != "none":
        planned, world = _planned(unchosen)
        order = order_of(config, place(planned, packer, world), data.reorder)
    worst, parts = source.worst_case(), look_at(packer, source.meta, train.global_batch, order)
    return {name: choose(cells_for(packer, worst, parts, name), count) for name, count in counts.items()}


def _check_reorder(config: Config, packer: Packer) -> None:
    """Requires a module with several buckets: with one alone, all microbatches take the same time in any order."""
    if config.data.reorder == "none" or any(count > 1 for count in packer.bucket_counts.values()):
        return
    name, why = next(iter(packer.encoders)), "in their one bucket all microbatches take the same time"
    raise ConfigError(f"Data.reorder={config.data.reorder!r}: {why}; set {name}/Packing.buckets=4 or this to 'none'")


def data_spec(config: Config, packer: Packer, order: StepOrder | None) -> DataSpec:
    """The spec from which the batches of a run are made; ``order`` is its ``step_order``."""
    return DataSpec(
        data=config.data,
        task=config.task,
        sources=config.sources,
        known=config.known,
        packer=packer,
        order=order,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
    )


def batch_maker(config: Config, parts: PlacedRun, source: Source) -> tuple[DataSpec, StepMaker]:
    """The spec of a run's batches, and the maker of this process's rows of them. All processes have to call it.

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
            arrays, rows = empty.inputs[name], rows_per_cell * packer.cells
            scaled = {k: a.shape[1] * width // arrays["segments"].shape[1] for k, a in arrays.items()}
            inputs[name] = {
                k: jax.ShapeDtypeStruct((rows, scaled[k], *a.shape[2:]), a.dtype) for k, a in arrays.items()
            }
        for module, (name, shape) in list_shapes(packer.listed, inputs, packer.splits, packer.cells).items():
            inputs[module] = {**inputs[module], name: jax.ShapeDtypeStruct(shape, np.int32)}
        shapes[tuple(sorted(zip(counts, buckets, strict=True)))] = inputs
    return shapes


def own_rows(placed: PlacedModel, names: Mapping[str, Collection[str]], microbatches: int) -> ProcessRows | None:
    """The rows of a step's microbatches that this process's devices read; ``None`` for all, in a run of one process.

    Args:
      placed: the model on its devices.
      names: the names of each module's host inputs.
      microbatches: microbatches of a step.
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
        layout, cells_of_inputs = stage.submesh.layout, cells.setdefault(stage.model.module, {})
        local = [i for i, rank in enumerate(stage.submesh.ranks) if rank in placed.world.local_ranks]
        read = {cell for i in local for cell in _cells(i // layout.replica_size % layout.dp, layout.dp, placed.cells)}
        for name in stage.model.read(names[stage.model.module]):
            cells_of_inputs.setdefault(name, set()).update(read)
    return ProcessRows(
        cells={
            module: {name: tuple(sorted(numbers)) for name, numbers in inputs.items()}
            for module, inputs in cells.items()
        }
    )


def _cells(shard: int, dp: int, cells: int) -> range:
    """The cells of one dp shard."""
    return range(shard * cells // dp, (shard + 1) * cells // dp)


def signed(microbatch: Microbatch) -> tuple[Signature, InputShapes]:
    """The bucket signature and the inputs of a microbatch, as the executor takes them."""
    return tuple(sorted(microbatch.bucket.items())), microbatch.inputs


def one_bucket(config: Config) -> bool:
    """Whether a step's microbatches share a bucket: where one program runs it, or all stages have the same devices."""
    if config.train.lowering == "single":
        return True
    return not _pipelined(config)


def _pipelined(config: Config) -> bool:
    """Whether there is more than one stage submesh."""
    layouts = [layout.lane(k) for layout in config.layouts.values() for k in range(layout.lanes)]
    return len({layout.stage_ranks(stage) for layout in layouts for stage in range(layout.pp)}) > 1


def _check_processes(config: Config) -> None:
    """Raises ConfigError, before a device is used, if several processes are to run a pipeline as one program."""
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
      packer: the packer, for samples that are not the configured data's; by default the configuration's.
      world: the run's devices; started here if not given.
      source: the run's training samples, where they are open already.
      trained: whether something is to be trained.

    Raises:
      ConfigError: there are too few devices, or two settings contradict each other.
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
        lambda devices: require_devices(config, devices),
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
    """``assemble`` without devices: no backend is started, and the result cannot be run.

    All devices count as this process's own, so that ``World.transport='auto'`` is direct copies.

    Raises:
      ConfigError: two settings contradict each other.
    """
    planned, world = _planned(config)
    return assemble(planned, world=world, source=source)


def _planned(config: Config) -> tuple[Config, World]:
    """The configuration for a world without devices, and that world."""
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
      ConfigError: there are too few devices, two settings contradict each other, or one program is to be a pipeline
        of several processes.
    """
    lowering = "ops" if config.train.debug_nans else config.train.lowering
    _check_processes(config)
    parts = place(config, packer, world, source)
    costs = parts.placed.nominal_costs(next(iter(parts.shapes.values())))
    train = config.train
    schedule = train_schedule(train.schedule, parts.placed.graph, train.microbatches, costs, train.window, train.inner)
    shapes = parts.shapes.values()
    residuals = residual_bytes(parts.placed, shapes, schedule.graph)
    deferred = deferred_bytes(parts.placed, shapes, schedule.graph)
    report = validate(schedule, residuals, deferred)
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
