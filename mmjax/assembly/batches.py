"""The batches of a run: their spec, and the rows that this process reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from mmjax.assembly.orders import step_order
from mmjax.assembly.parts import PlacedRun
from mmjax.assembly.samples import require_same_data
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import StepMaker
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder
from mmjax.data.source import Source
from mmjax.data.together import Together
from mmjax.pipeline.place import PlacedModel
from mmjax.recipe import Recipe


def batch_spec(recipe: Recipe, packer: Packer, order: StepOrder | None) -> BatchSpec:
    """The spec from which the batches of a run are made, also by data servers; ``spec.maker()(0)`` is the first batch.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      packer: the run's packer, such as ``plan(recipe).packer``.
      order: reorders the samples of a step, as ``step_order(recipe, plan(recipe))`` gives it; ``None`` leaves them.
    """
    return BatchSpec(
        data=recipe.data,
        packer=packer,
        order=order,
        seed=recipe.train.seed,
        global_batch=recipe.train.global_batch,
    )


def batch_maker(recipe: Recipe, parts: PlacedRun, source: Source) -> tuple[BatchSpec, StepMaker]:
    """The spec of a run's batches, and the maker of this process's rows of them. All processes have to call it.

    ``maker(0)`` is the ``StepBatch`` of the first step.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      parts: the run on its devices, as ``place(recipe)`` gives it.
      source: the run's training samples, as ``open_source(recipe, split="train")`` opens them.

    Raises:
      ConfigError: the processes have found different samples.
    """
    require_same_data(recipe, source)
    spec = batch_spec(recipe, parts.packer, step_order(recipe, parts))
    return spec, spec.maker(source, own_rows(parts.placed, parts.packer.inputs, recipe.train.microbatches))


def own_rows(placed: PlacedModel, names: Mapping[str, Collection[str]], microbatches: int) -> ProcessRows | None:
    """The rows of a step's microbatches that this process's devices read; ``None`` for all, in a run of one process.

    ``rows.cells["llm"]["tokens"]`` are the numbers of the cells, from 0, whose rows of "tokens" are read.

    Args:
      placed: the model on its devices, such as ``place(recipe).placed``.
      names: the names of host inputs by module, such as {"llm": ["segments", …]}, a packer's ``inputs``.
      microbatches: microbatches of a step.
    """
    if placed.world.processes == 1:
        return None
    # Microbatches of an op have different rows on this process, and those of the last op others again.
    several = any(node.microbatches > 1 for node in placed.graph.stages)
    count = microbatches if several else math.lcm(*(layout.lanes for layout in placed.layouts.values()))
    turns = range(min(count, microbatches))
    return ProcessRows.in_turns([_rows_of(placed, names, microbatch, microbatches) for microbatch in turns])


def _rows_of(
    placed: PlacedModel, names: Mapping[str, Collection[str]], microbatch: int, microbatches: int
) -> ProcessRows:
    """The rows of a microbatch, of so many in a step, that this process's devices read."""
    cells: dict[str, dict[str, set[int]]] = {}
    for node in placed.graph.stages:
        stage = placed.places[node.lane_name(microbatch)]
        if not stage.submesh.local:
            continue
        layout, cells_of_inputs = stage.submesh.layout, cells.setdefault(stage.model.module, {})
        local = [i for i, rank in enumerate(stage.submesh.ranks) if rank in placed.world.local_ranks]
        together = Together(microbatches=node.microbatches, dp=layout.dp)
        span = node.together(microbatch, microbatches)
        shards = {i // layout.replica_size % layout.dp for i in local}
        read = {cell for shard in shards for cell in together.cells_of(shard, placed.cells, span, microbatch)}
        for name in stage.model.read(names[stage.model.module]):
            cells_of_inputs.setdefault(name, set()).update(read)
    return ProcessRows(
        cells={
            module: {name: tuple(sorted(numbers)) for name, numbers in inputs.items()}
            for module, inputs in cells.items()
        }
    )
