"""The configuration with which a run's model is evaluated on the samples of a folder."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mmjax.build.assembly import build_packer, open_source
from mmjax.config import Config
from mmjax.configurable import ConfigError, require
from mmjax.data.buckets import per_microbatch
from mmjax.data.config import PackingConfig
from mmjax.data.loader import tokenizer_of
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import folder_as_source
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.layout import cell_count


def for_folder(config: Config, folder: str, source: str = "") -> Config:
    """The configuration that reads the samples of `folder` with the template and preprocessing of the run.

    The run's shapes, whose programs are compiled already, are kept where the samples fit into them. Otherwise a cell
    holds one sample, and rows and buckets have the size of the largest sample.

    Args:
      config: the run's configuration.
      folder: a folder of images with a data.jsonl.
      source: the name in `Data.sources` whose template and preprocessing apply; needed where they differ.

    Raises:
      ConfigError: the folder has no data.jsonl, something in it cannot be read, or it could be read in several ways.
    """
    data, sources = folder_as_source(replace(config.data, folder=folder), like_of(config, source))
    read = replace(config, data=data, sources=sources)
    worst = open_source(read, split="test").worst_case()
    read = replace(read, data=replace(data, sequence_length=max(data.sequence_length, worst.tokens)))
    try:
        run = build_packer(config, _tokenizer(config))
        packing = {
            name: PackingConfig(buckets=per_microbatch(spec.buckets, run.cells)) for name, spec in run.encoders.items()
        }
        wanted = replace(read, packing={**config.packing, **packing})
        if build_packer(wanted, _tokenizer(config)).encoders == run.encoders:
            return wanted  # else a bucket had to be added
    except ConfigError:  # an image is beyond the encoder's positions, or the run's own folder is gone
        pass
    rows = cell_count(config.layouts.values())
    train = replace(config.train, global_batch=rows, microbatches=1)
    return replace(read, packing=dict.fromkeys(config.packing, PackingConfig(buckets=())), train=train)


_FILES = ("kind", "path", "media", "held_out", "strict", "cut", "preset", "byte_limit", "pixel_limit")
"""Fields of a source that do not change what its records become."""


def like_of(config: Config, name: str, asked: str = "--data") -> SourceConfig | None:
    """The source of the run whose settings samples from elsewhere are read with; `None` for a run without sources.

    `asked` is the flag that names these samples.

    Raises:
      ConfigError: `name` is none of the run's sources; or it is empty, and the sources differ in preprocessing.
    """
    own = {source: config.sources[source] for source in config.data.sources if source in config.sources}
    if name:
        fix = (
            f"is none of the run's sources; use one of {', '.join(own)}"
            if own
            else "the run has no sources; leave it out"
        )
        require(name in own, "--source", name, fix)
        return own[name]
    made = {source: _preprocessing(config.sources[source]) for source in own}
    different = sorted(
        {field for one in made.values() for field in one if one[field] != next(iter(made.values()))[field]}
    )
    if different:
        said = f"the run's sources {', '.join(own)} differ in {', '.join(different)}"
        raise ConfigError(f"--source is missing: {said}; name the one whose samples are like those of {asked}")
    return next(iter(own.values()), None)


def _preprocessing(source: SourceConfig) -> dict[str, Any]:
    return {one.name: getattr(source, one.name) for one in fields(SourceConfig) if one.name not in _FILES}


def _tokenizer(config: Config) -> Tokenizer:
    return tokenizer_of(config.data, config.model.media)
