"""The samples of an evaluation: held-out ones, as they are and with media exchanged."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace

from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.data.sample import swap_media
from mmjax.data.source import Source
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Sample, SampleMeta
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import open_remat, with_remat


def held_out(recipe: Recipe, count: int) -> list[Sample]:
    """The first `count` evaluation samples, the same in every run of a configuration; fewer where there are fewer.

    Samples that cannot be read are left out, since they have nothing to answer, unless there are no others.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.
    """
    source, count = _source_and_count(recipe, count)
    samples = [source.sample(index) for index in range(count)]
    return [sample for sample in samples if sample.loss_weights.any()] or samples


def held_out_metas(recipe: Recipe, count: int) -> list[SampleMeta]:
    """Metadata of the first `count` evaluation samples, or of all there are, unreadable ones included.

    No medium is opened.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.
    """
    source, count = _source_and_count(recipe, count)
    return [source.meta(index) for index in range(count)]


def _source_and_count(recipe: Recipe, count: int) -> tuple[Source, int]:
    """The evaluation data, and `count` or the number of its samples where that is smaller."""
    source = open_source(recipe, split="test")
    return source, min(count, len(source)) if isinstance(source, Sized) else count


def exchanged(recipe: Recipe, tokenizer: Tokenizer, samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Copies of all samples, in their order, each with the next one's media of one encoder (the last with the first's),
    by the encoder's name: {"vision": [Sample, …]}.

    Empty for fewer than two samples, and for tasks without such an evaluation: a folder's media differ in size, so
    exchanged ones might not fit its buckets.

    Args:
      recipe: the configuration, as `load_config(["run.gin"])` gives it.
      tokenizer: the tokenizer, such as `plan(recipe).tokenizer`.
      samples: the samples, such as those of `held_out(recipe, 100)`.
    """
    if not recipe.data.origin.exchanges or len(samples) < 2:
        return {}
    specs, names = encoder_specs(recipe), dict.fromkeys(name for sample in samples for name in sample.media_tokens)
    return {name: swap_media(tokenizer, specs, samples, name) for name in names if not specs[name].drawn}


def as_evaluated(recipe: Recipe) -> Recipe:
    """The configuration without settings that only change training: reordering, and `remat` if it is to be chosen."""
    recipe = with_remat(recipe, open_remat(recipe), "none")
    return replace(recipe, data=recipe.data.with_settings(reorder="none"))
