"""Configurations of a run that read other samples than its own: those of a folder, and messages that are answered."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any

from mmjax.config import Config
from mmjax.config.folder_alone import positions_of
from mmjax.configurable import ConfigError, require
from mmjax.data.buckets import per_microbatch
from mmjax.data.config import PackingConfig
from mmjax.data.loader import Source, tokenizer_of
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.datasets import folder_as_source
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Sample
from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.run.assembly import build_packer, open_source

_BUCKET = 64
"""Tokens: rows of messages and their answers have a multiple of it, so that few shapes are compiled."""
_ROWS = 8
"""The most messages of a cell that are answered side by side."""


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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Messages, ready to be placed with a run.

    Attributes:
      config: the run's configuration, with messages as its data and nothing trained.
      source: the messages.
      room: tokens of a row, prompt and answer.
      limit: the most tokens of an answer.
    """

    config: Config
    source: Source
    room: int
    limit: int

    def samples(self) -> list[Sample]:
        """The messages as samples, up to where they are answered."""
        assert isinstance(self.source, Sized)
        return [self.source.sample(index) for index in range(len(self.source))]

    def require_positions(self, samples: Sequence[Sample]) -> None:
        """Requires that the model has positions for every prompt and its answer. Raises ConfigError."""
        most = positions_of(self.config)
        for number, sample in enumerate(samples, 1):
            fix = f"prompt {number} has {sample.prompt} tokens, and the model has positions for {most} tokens"
            most_new = max(1, most - sample.prompt)
            legal = not most or sample.prompt + self.limit <= most
            require(legal, "--max_tokens", self.limit, f"{fix}; use {most_new}, or a shorter prompt")


def for_messages(config: Config, path: str, media: str, cache: str, limit: int, source: str = "") -> Asked:
    """The configuration that reads messages with the template and preprocessing of the run.

    Args:
      config: the run's configuration.
      path: JSONL of dialogues, see `write_messages`.
      media: the folder that names of media start from.
      cache: a directory for what is measured of them.
      limit: the most tokens of an answer.
      source: the name in `Data.sources` whose template and preprocessing apply; needed where they differ.

    Raises:
      ConfigError: a dialogue or a medium cannot be read.
    """
    like = like_of(config, source, "--messages") or SourceConfig(max_pixels=config.data.max_pixels, max_patches=0)
    own = replace(like, kind=PROMPTS, path=path, media=media, held_out=0, strict=True, cut=False)
    here: Any = {"sources": {"messages": 1.0}, "cache": cache, "reorder": "none", "servers": (), "workers": 0}
    frozen = {module: replace(optimizer, frozen=True) for module, optimizer in config.optimizers.items()}
    changes: Any = {"sources": {"messages": own}, "optimizers": frozen, "offloads": {}}
    read = replace(config, data=replace(config.data, **here), **changes)
    found = open_source(read, split="test")
    assert isinstance(found, Sized)
    count, longest, cells = len(found), found.worst_case().tokens, cell_count(config.layouts.values())
    # As many microbatches as fill the language model's pipeline, if there are so many rows.
    microbatches = max(1, min(config.layouts[LLM].pp, -(-count // cells)))
    rows = cells * min(_ROWS, -(-count // (cells * microbatches)))
    train = replace(config.train, global_batch=rows * microbatches, microbatches=microbatches)
    data = replace(read.data, sequence_length=_rounded(longest))
    packing = dict.fromkeys(config.packing, PackingConfig(buckets=()))
    config = replace(read, data=data, packing=packing, train=train)
    return Asked(config=config, source=found, room=_rounded(longest + limit), limit=limit)


def _rounded(tokens: int) -> int:
    return -(-tokens // _BUCKET) * _BUCKET


def _tokenizer(config: Config) -> Tokenizer:
    return tokenizer_of(config.data, config.model.media)
