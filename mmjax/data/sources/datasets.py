"""Builds a `Mixture` from the configuration: from the datasets `Data.sources`, or from the folder `Data.folder`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.index import default_cache
from mmjax.data.sources.mixing import quotas
from mmjax.data.sources.mixture import Mixture
from mmjax.data.sources.observer import IndexObserver, Silent
from mmjax.data.sources.prepared import PreparedRecords
from mmjax.data.sources.skipped import Skipped
from mmjax.data.tasks.task import TaskContext

__all__ = ["IndexObserver", "folder_as_source", "open_folder", "open_sources"]
DATA_FILE = "data.jsonl"
_LINE = '{"images": ["a.png"], "question": "what is it?", "answer": "a cat"}'
"""A line of this file, for messages."""


def open_sources(context: TaskContext) -> Mixture:
    """The datasets of `Data.sources`. Raises ConfigError if data cannot be read or do not fit the model.

    Of the result `meta(0)` is the metadata of the first sample, and `sample(0)` the sample itself.

    context: TaskContext(data=…, encoders={"vision": EncoderSpec(…)}, tokenizer=…, seed=0, split="train", sources=…),
    where `data.sources` are shares by name, such as {"mine": 1.0}, and `sources` is {"mine":
    SourceConfig(path="data.json")}.
    """
    config = context.data
    unusable = Skipped(path=Path(context.skipped) if context.skipped else None)
    cache = Path(config.cache).expanduser() if config.cache else default_cache()
    shares = quotas(config.sources)
    opened = []
    for name in config.sources:
        if name not in context.sources:
            raise ConfigError(f"{name}/Source.path='': name the file or files of the data, such as 'data.json'")
        opened.append(
            PreparedRecords(
                name,
                context.sources[name],
                config,
                context.encoders,
                context.tokenizer,
                cache=cache,
                observer=context.observer or Silent(),
                skipped=unusable,
            )
        )
    return Mixture(opened, shares, seed=context.seed, split=context.split, known=context.known)


def open_folder(context: TaskContext) -> Mixture:
    """The samples of `Data.folder`; `context.sources` is ignored. Raises ConfigError as `open_sources`.

    Of the result `meta(0)` is the metadata of the first sample, and `sample(0)` the sample itself.

    context: TaskContext(data=…, encoders={"vision": EncoderSpec(…)}, tokenizer=…, seed=0, split="train"), where
    `data.folder` is a folder with a data.jsonl.
    """
    data, sources = folder_as_source(context.data)
    return open_sources(replace(context, data=data, sources=sources))


def folder_as_source(
    config: DataConfig, like: SourceConfig | None = None
) -> tuple[DataConfig, dict[str, SourceConfig]]:
    """`Data.folder` as the only dataset of `Data.sources`; a record of it that cannot be used ends the run.

    Args:
      config: the data's configuration, such as DataConfig(folder="my_images").
      like: a source with the template and the preprocessing for the samples; by default images are scaled down to
        `config.max_pixels`.

    Returns:
      `config` with "folder" as its only dataset, and {"folder": SourceConfig(…)}, the configuration of this dataset.

    Raises:
      ConfigError: the folder is not set or has no data.jsonl.
    """
    folder, like = config.folder, like or SourceConfig(max_pixels=config.max_pixels, max_patches=0)
    if not folder:
        raise ConfigError("Data.folder='': name the folder of images and data.jsonl, such as 'my_images'")
    path = data_file(folder, "Data.folder")
    source = replace(like, kind="llava", path=path, media=folder, held_out=0, strict=True)
    return replace(config, sources={"folder": 1.0}), {"folder": source}


def data_file(folder: str, field: str) -> str:
    """The path of a folder's data.jsonl, such as "my_images/data.jsonl". Raises ConfigError if it is missing.

    field: the setting that names the folder, such as "Data.folder", for the message.
    """
    path = os.path.join(folder, DATA_FILE)
    if not os.path.isfile(path):
        lines = f"write one line per sample into {path}, such as {_LINE}"
        raise ConfigError(f"{field}={folder!r} has no {DATA_FILE}: {lines}")
    return path
