"""Buckets of the least compute, for modules that are given a number of buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace

from mmjax.assembly.orders import order_of
from mmjax.assembly.packers import one_bucket, packer_for
from mmjax.assembly.placing import place_model, planned_world
from mmjax.assembly.samples import open_source
from mmjax.configurable import require
from mmjax.data.buckets import ChosenBuckets, cells_for, choose, per_cell, per_microbatch, plan_some_steps
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.derived import completed_worst
from mmjax.data.loader import tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.source import Source
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.recipe import Recipe

Say = Callable[[str], None]
ALIGNED = 8
"""Products of bf16 on GPUs want a multiple of it as the tokens of a microbatch on a rank: XLA copies their operands to
pad them to that in every layer. It follows from the recipe alone, since data servers choose the same buckets without a
GPU."""


def build_packer(
    recipe: Recipe, tokenizer: Tokenizer, *, one_bucket: bool = False, source: Source | None = None
) -> Packer:
    """The packer of a run's samples into rows. Buckets that are not given are chosen, or made for the worst case.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      tokenizer: the run's tokenizer, such as ``plan(recipe).tokenizer``.
      one_bucket: whether the microbatches of a step share a bucket, such as ``one_bucket(recipe)``.
      source: the run's training samples, where ``open_source(recipe, split="train")`` has opened them already.

    Raises:
      ConfigError: the vocabulary is smaller than the tokenizer's, or a bucket is too small for the data.
    """
    vocab, least = recipe.model[LLM].settings.vocab, tokenizer.table_size
    fix = f"the tokenizer has {least} tokens; set it to {least} or more, or to 0 for the tokenizer's"
    if recipe.model.folder(LLM) and recipe.data.settings.tokenizer:  # whose folder decides the vocabulary
        texts = tuple(tokenizer.shown([i]) for i in range(vocab, min(least, vocab + 4)))
        fix = f"the tokenizer has {least} tokens; set {LLM}/Weights.new_tokens={texts!r}, which adds rows for all"
    require(vocab == 0 or vocab >= least, f"{LLM}/Decoder.vocab", vocab, fix)
    source = source or open_source(recipe, split="train")
    return packer_for(with_buckets(recipe, source), tokenizer, source, one_bucket=one_bucket)


def with_buckets(
    recipe: Recipe,
    source: Source | None = None,
    *,
    say: Say = lambda line: None,
    before: Recipe | None = None,
) -> Recipe:
    """The configuration with the buckets of least compute, for each module that is given a number of buckets.

    In place of the number, ``vision/Packing.buckets`` has at most so many (rows of a microbatch, patches per row)
    pairs, cheapest first, such as ((8, 256), (8, 512)); for the LLM (rows, tokens per row). Without a number it is
    ``recipe``.

    Compute is summed over steps of the run, with its seed, batch and order of samples, from metadata alone. So every
    process makes the same choice, and so does a run that continues.

    Args:
      recipe: the run's configuration, in which ``vision/Packing.buckets`` may be a number such as 4.
      source: the run's training samples, where ``open_source(recipe, split="train")`` has opened them already.
      say: called with a line for each module whose buckets are chosen now, such as ``print``.
      before: the configuration of the run so far; its buckets stay while batch, data and layouts stay the same.

    Raises:
      ConfigError: a setting does not fit the data.
    """
    counts = {
        name: packing.buckets for name, packing in recipe.model.packing.items() if isinstance(packing.buckets, int)
    }
    if not counts:
        return recipe
    source = source or open_source(recipe, split="train")
    if before and (unchanged := _with_earlier_buckets(recipe, before, counts)):
        return unchanged
    choices, cells = _choose_buckets(recipe, counts, source), cell_count(recipe.model.layouts.values())
    packings = {name: PackingConfig(buckets=per_microbatch(choice.buckets, cells)) for name, choice in choices.items()}
    for name, choice in choices.items():
        shares = f"{choice.padding:.1%} of its compute is padding, {choice.alone:.1%} in the last one alone"
        say(
            f"{name}/Packing.buckets={packings[name].buckets}: chosen from {choice.microbatches} microbatches; {shares}"
        )
    return replace(recipe, model=recipe.model.with_packing(packings))


def added_buckets(recipe: Recipe, packer: Packer) -> Iterator[str]:
    """Yields a line, without line break, for each bucket added because a module's own do not hold the largest cells.

    "vision/Packing.buckets=((8, 64),): (16, 256) is added, which holds …". Modules without buckets by shape have none.

    Args:
      recipe: the run's configuration.
      packer: the run's packer, as ``build_packer(recipe, tokenizer)`` makes it.
    """
    for name, packing in recipe.model.packing.items():
        rounded = packer.rounded(name, per_cell(packing.given, packer.cells))
        added = set(packer.buckets_of(name)).difference(rounded) if rounded else ()
        for bucket in per_microbatch((*added,), packer.cells):
            setting = f"{name}/Packing.buckets={packing.given}"
            yield f"{setting}: {bucket} is added, which holds the largest batch of this layout"


def _with_earlier_buckets(recipe: Recipe, before: Recipe, counts: Mapping[str, int]) -> Recipe | None:
    """The configuration with the buckets of ``before``, or ``None`` where these have to be chosen again."""
    earlier = before.model.packing
    packing = {name: earlier.get(name, PackingConfig()) for name in counts}
    fit = all(0 < len(packing[name].given) <= count for name, count in counts.items())
    if not fit or _bucket_settings(recipe) != _bucket_settings(before):
        return None
    return replace(recipe, model=recipe.model.with_packing(packing))


def _bucket_settings(recipe: Recipe) -> tuple[object, ...]:
    """The settings that a choice of buckets depends on, beside the samples themselves and their costs."""
    train, cells = recipe.train, cell_count(recipe.model.layouts.values())
    settings = recipe.data.settings
    data = {
        field.name: getattr(settings, field.name) for field in fields(DataConfig) if not field.metadata.get("local")
    }
    batch = train.seed, train.global_batch, train.microbatches
    return data, recipe.data.task, recipe.data.sources, cells, one_bucket(recipe), *batch


def _choose_buckets(recipe: Recipe, counts: Mapping[str, int], source: Source) -> dict[str, ChosenBuckets]:
    """The buckets of least compute, at most ``counts`` of each module."""
    train, data = recipe.train, recipe.data.settings
    # The samples are packed into shapes for the worst case, since no bucket is chosen yet.
    rows = train.global_batch // train.microbatches
    largest = {name: ((rows, data.sequence_length),) if name == LLM else () for name in counts}
    packing = {name: PackingConfig(buckets=buckets) for name, buckets in largest.items()}
    unchosen = replace(recipe, data=recipe.data.with_settings(reorder="none"), model=recipe.model.with_packing(packing))
    tokenizer = tokenizer_of(data, recipe.model.media)
    packer = packer_for(unchosen, tokenizer, source, one_bucket=one_bucket(recipe))
    order = None
    if data.reorder != "none":
        planned, world = planned_world(unchosen)
        order = order_of(recipe, place_model(planned, packer, tokenizer, world), data.reorder)
    worst = completed_worst(source.worst_case(), packer.encoders)
    parts = plan_some_steps(packer, source.meta, train.global_batch, order)
    aligned = ALIGNED if train.dtype == "bfloat16" else 1
    return {
        name: choose(cells_for(packer, worst, parts, name, aligned=aligned), count) for name, count in counts.items()
    }
