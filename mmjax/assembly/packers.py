"""Packers of a run, and the shapes of their microbatches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mmjax.assembly.model import build_modules, packed_specs, splits_of
from mmjax.assembly.orders import pair_costs
from mmjax.configurable import ConfigError
from mmjax.data.buckets import per_cell
from mmjax.data.loader import make_packer
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.send_lists import list_shapes
from mmjax.data.source import Source
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.pipeline.place import InputShapes
from mmjax.pipeline.walker import Signature
from mmjax.recipe import Recipe


def packer_for(recipe: Recipe, tokenizer: Tokenizer, source: Source, *, one_bucket: bool = False) -> Packer:
    """The packer of samples into rows, without a check of the vocabulary, and without a choice of buckets.

    Args:
      recipe: the run's configuration.
      tokenizer: the tokenizer, such as ``plan(recipe).tokenizer``.
      source: the samples, as ``open_source(recipe, split="train")`` opens them.
      one_bucket: whether the microbatches of a step share a bucket, such as ``one_bucket(recipe)``.

    Raises:
      ConfigError: a bucket is too small for the samples, or ``Data.reorder`` is set and every module has one bucket.
    """
    cells = cell_count(recipe.model.layouts.values())
    llm = build_modules(recipe)[LLM]
    packer = make_packer(
        recipe.data.settings,
        packed_specs(recipe),
        source,
        tokenizer,
        global_batch=recipe.train.global_batch,
        microbatches=recipe.train.microbatches,
        cells=cells,
        one_bucket=one_bucket,
        text=per_cell(recipe.model.llm.packing.given, cells),
        pairs=pair_costs(recipe),
        axes=llm.position_axes,
        mask=llm.sees,
    )
    # The lowering of all stages into one program has no lists of sends: whole shards go from lane to lane.
    packer = packer.split_over(splits_of(recipe), lists=recipe.train.lowering != "single")
    _check_reorder(recipe, packer)
    return packer


def bucket_shapes(packer: Packer, rows: int) -> dict[Signature, InputShapes]:
    """Input shapes of a microbatch of up to ``rows`` samples, by signature: for every combination of modules' buckets.

    Such as {(("vision", 0),): {"llm": {"tokens": ShapeDtypeStruct((8, 512), int32), …}, …}}: a signature has the index
    from 0 of the bucket of each encoder and generator, and of the LLM where its rows are packed, sorted by name. Shapes
    are those of all cells' rows.

    Args:
      packer: the run's packer, as ``build_packer(recipe, tokenizer)`` makes it.
      rows: samples of a microbatch, ``global_batch // microbatches``.
    """
    packed = replace(packer, lists=False)
    counts, shapes = packer.bucket_counts, dict[Signature, InputShapes]()
    by_rank = [_empty(packed, rows, rank) for rank in range(max(counts.values(), default=1))]
    for buckets in itertools.product(*map(range, counts.values())):
        chosen = zip(counts, buckets, strict=True)
        inputs: dict[str, Any] = {**by_rank[0], **{name: by_rank[bucket][name] for name, bucket in chosen}}
        for module, (name, shape) in list_shapes(packer.listed, inputs, packer.splits, packer.cells).items():
            inputs[module] = {**inputs[module], name: jax.ShapeDtypeStruct(shape, np.int32)}
        shapes[tuple(sorted(zip(counts, buckets, strict=True)))] = inputs
    return shapes


def _empty(packer: Packer, rows: int, rank: int) -> dict[str, dict[str, Any]]:
    """The shapes of a microbatch in which each module has its bucket of this number, or its last one."""
    bucket = {name: min(rank, count - 1) for name, count in packer.bucket_counts.items()}
    # Without cells, arrays have shapes alone.
    filled = packer.fill(packer.plan_microbatch([], rows, bucket), {}, ProcessRows(cells={}))
    return {
        module: {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
        for module, arrays in filled.inputs.items()
    }


def one_bucket(recipe: Recipe) -> bool:
    """Whether a step's microbatches share a bucket: where one program runs it, or all stages have the same devices.

    ``recipe``: the run's configuration, as ``load_config(["run.gin"])`` gives it.
    """
    if recipe.train.lowering == "single":
        return True
    return not is_pipelined(recipe)


def is_pipelined(recipe: Recipe) -> bool:
    """Whether there is more than one stage submesh: stages, lanes or modules on different sets of ranks.

    ``recipe``: the run's configuration, as ``load_config(["run.gin"])`` gives it.
    """
    layouts = [layout.lane(k) for layout in recipe.model.layouts.values() for k in range(layout.lanes)]
    return len({layout.stage_ranks(stage) for layout in layouts for stage in range(layout.pp)}) > 1


def _check_reorder(recipe: Recipe, packer: Packer) -> None:
    """Requires a module with several buckets: with one alone, all microbatches take the same time in any order."""
    reorder = recipe.data.settings.reorder
    if reorder == "none" or any(count > 1 for count in packer.bucket_counts.values()):
        return
    name, why = next(iter(packer.encoders)), "in their one bucket all microbatches take the same time"
    raise ConfigError(f"Data.reorder={reorder!r}: {why}; set {name}/Packing.buckets=4 or this to 'none'")
