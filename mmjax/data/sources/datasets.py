"""Builds a `Mixture` from the configuration: from the datasets `Data.sources`, or from the folder `Data.folder`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.index import default_cache
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.sources.mixing import quotas
from mmjax.data.sources.mixture import Mixture
from mmjax.data.sources.observer import IndexObserver, Silent
from mmjax.data.sources.prepared import PreparedRecords
from mmjax.data.sources.skipped import Skipped
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec

__all__ = ["IndexObserver", "folder_as_source", "open_folder", "open_sources"]
DATA_FILE = "data.jsonl"
_LINE = '{"images": ["a.png"], "question": "what is it?", "answer": "a cat"}'
"""A line of this file, for messages."""


def open_sources(
    config: DataConfig,
    encoders: Mapping[str, EncoderSpec],
    tokenizer: Tokenizer,
    *,
    sources: Mapping[str, SourceConfig],
    seed: int,
    split: str,
    observer: IndexObserver | None = None,
    skipped: str | os.PathLike[str] | None = None,
    settings: None = None,
    known: Mapping[str, KnownRecords] | None = None,
) -> Mixture:
    """The datasets of `Data.sources`, for split "train" or "test".

    encoders: specs of encoders and generators, by name. sources: by name, the configuration of each dataset. seed: the
    run's seed. observer: receives the progress of indexes that have to be made. skipped: a file for records that cannot
    be used. known: by dataset, the records that the run knows. settings: None, as there is no task.

    Raises ConfigError if data cannot be read or do not fit the model.
    """
    unusable = Skipped(path=Path(skipped) if skipped else None)
    cache = Path(config.cache).expanduser() if config.cache else default_cache()
    shares = quotas(config.sources)
    opened = []
    for name in config.sources:
        if name not in sources:
            raise ConfigError(f"{name}/Source.path='': name the file or files of the data, such as 'data.json'")
        opened.append(
            PreparedRecords(
                name,
                sources[name],
                config,
                encoders,
                tokenizer,
                cache=cache,
                observer=observer or Silent(),
                skipped=unusable,
            )
        )
    return Mixture(opened, shares, seed=seed, split=split, known=known)


def open_folder(
    config: DataConfig, encoders: Mapping[str, EncoderSpec], tokenizer: Tokenizer, **options: Any
) -> Mixture:
    """The samples of `Data.folder`. Raises ConfigError.

    options: keywords of `open_sources`, at least `seed` and `split`; `sources` is ignored.
    """
    config, sources = folder_as_source(config)
    return open_sources(config, encoders, tokenizer, **{**options, "sources": sources})


def folder_as_source(
    config: DataConfig, like: SourceConfig | None = None
) -> tuple[DataConfig, dict[str, SourceConfig]]:
    """`Data.folder` as the only dataset of `Data.sources`; a record of it that cannot be used ends the run.

    like: a source with the template and the preprocessing for the samples. Raises ConfigError if the folder is not set
    or has no data.jsonl.

    Returns:
      `config` with "folder" as its only dataset, and the configuration of this dataset by name.
    """
    folder, like = config.folder, like or SourceConfig(max_pixels=config.max_pixels, max_patches=0)
    if not folder:
        raise ConfigError("Data.folder='': name the folder of images and data.jsonl, such as 'my_images'")
    path = data_file(folder, "Data.folder")
    source = replace(like, kind="llava", path=path, media=folder, held_out=0, strict=True)
    return replace(config, sources={"folder": 1.0}), {"folder": source}


def data_file(folder: str, field: str) -> str:
    """The path of a folder's data.jsonl. Raises ConfigError if it is missing.

    field: the setting that names the folder, such as "Data.folder", for the message.
    """
    path = os.path.join(folder, DATA_FILE)
    if not os.path.isfile(path):
        lines = f"write one line per sample into {path}, such as {_LINE}"
        raise ConfigError(f"{field}={folder!r} has no {DATA_FILE}: {lines}")
    return path
