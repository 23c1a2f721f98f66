"""The configuration with which a run's model is evaluated on the samples of a folder."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.samples import open_source
from mmjax.configurable import ConfigError, require
from mmjax.data.buckets import per_microbatch
from mmjax.data.config import PackingConfig
from mmjax.data.loader import tokenizer_of
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import folder_as_source
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.layout import cell_count
from mmjax.recipe import Recipe


def for_folder(recipe: Recipe, folder: str, source: str = "") -> Recipe:
    """The configuration that reads the samples of `folder` with the template and preprocessing of the run.

    The run's shapes, whose programs are compiled already, are kept where the samples fit into them. Otherwise a cell
    holds one sample, and rows and buckets have the size of the largest sample.

    Args:
      recipe: the run's configuration, as `load_run_config(run_dir)` gives it.
      folder: the path of a folder of images with a data.jsonl.
      source: the name in `Data.sources` whose template and preprocessing apply; "" where all have the same.

    Raises:
      ConfigError: the folder has no data.jsonl, something in it cannot be read, or it could be read in several ways.
    """
    data, sources = folder_as_source(replace(recipe.data.settings, folder=folder), source_like(recipe, source))
    with_folder = replace(recipe, data=replace(recipe.data, settings=data, sources=sources))
    worst = open_source(with_folder, split="test").worst_case()
    length = max(data.sequence_length, worst.tokens)
    with_folder = replace(with_folder, data=with_folder.data.with_settings(sequence_length=length))
    try:
        run = build_packer(recipe, _tokenizer(recipe))
        packing = {
            name: PackingConfig(buckets=per_microbatch(spec.buckets, run.cells)) for name, spec in run.encoders.items()
        }
        in_shapes_of_run = replace(with_folder, model=recipe.model.with_packing(packing))
        if build_packer(in_shapes_of_run, _tokenizer(recipe)).encoders == run.encoders:
            return in_shapes_of_run  # else a bucket had to be added
    except ConfigError:  # an image is beyond the encoder's positions, or the run's own folder is gone
        pass
    rows = cell_count(recipe.model.layouts.values())
    train = replace(recipe.train, global_batch=rows, microbatches=1)
    model = recipe.model.map(lambda node: replace(node, packing=PackingConfig(buckets=())))
    return replace(with_folder, model=model, train=train)


_FILES = ("kind", "path", "media", "held_out", "strict", "cut", "preset", "byte_limit", "pixel_limit")
"""Fields of a source that do not change its samples."""


def source_like(recipe: Recipe, name: str, flag: str = "--data") -> SourceConfig | None:
    """The source of the run whose settings other samples are read with; `None` for a run without sources.

    Args:
      recipe: the run's configuration, as `load_run_config(run_dir)` gives it.
      name: the source's name in `Data.sources`; "" takes the first one, if all have the same preprocessing.
      flag: the flag that names the other samples, for errors.

    Raises:
      ConfigError: `name` is none of the run's sources; or it is empty, and the sources differ in preprocessing.
    """
    data = recipe.data
    sources = {source: data.sources[source] for source in data.settings.sources if source in data.sources}
    names = ", ".join(sources)
    if name:
        fix = f"is none of the run's sources; use one of {names}" if sources else "the run has no sources; leave it out"
        require(name in sources, "--source", name, fix)
        return sources[name]
    settings = [_preprocessing(source) for source in sources.values()]
    different = sorted({field for values in settings for field in values if values[field] != settings[0][field]})
    if different:
        cause = f"the run's sources {names} differ in {', '.join(different)}"
        raise ConfigError(f"--source is missing: {cause}; name the one whose samples are like those of {flag}")
    return next(iter(sources.values()), None)


def _preprocessing(source: SourceConfig) -> dict[str, Any]:
    """The settings of a source that change its samples."""
    return {field.name: getattr(source, field.name) for field in fields(SourceConfig) if field.name not in _FILES}


def _tokenizer(recipe: Recipe) -> Tokenizer:
    return tokenizer_of(recipe.data.settings, recipe.model.media)
