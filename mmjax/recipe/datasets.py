"""Datasets of a recipe that is written in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmjax.data.config import DataConfig
from mmjax.data.sources.config import SourceConfig

DATASET = "messages"
"""The name of a dataset that is the only one."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The conversion of records to samples that a model's folder brings.

    Attributes:
      tokenizer: path of the folder that has the tokenizer; "" for bytes.
      source: settings of a dataset with the folder's chat template and its rules for images.
    """

    tokenizer: str = ""
    source: SourceConfig = field(default_factory=SourceConfig)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Datasets that a model is trained on; the template and the rules for images are the model's unless they are set.

    Attributes:
      settings: settings of each dataset by its name: values of ``SourceConfig``'s fields.
      shares: the share of the samples that each gives.
      length: tokens of one LLM row, at most.
      batch: samples of a step.
    """

    settings: Mapping[str, Mapping[str, Any]]
    shares: Mapping[str, float]
    length: int
    batch: int

    def config(self, processor: Processor) -> DataConfig:
        """The settings of a run's data, for a model with this processor: shares, length of rows and tokenizer."""
        return DataConfig(sources=dict(self.shares), sequence_length=self.length, tokenizer=processor.tokenizer)

    def sources(self, processor: Processor) -> dict[str, SourceConfig]:
        """The settings of each dataset by name: the processor's, changed by those that are set here."""
        return {name: replace(processor.source, **settings) for name, settings in self.settings.items()}


def messages(
    path: str | os.PathLike[str],
    *,
    length: int,
    batch: int,
    media: str | os.PathLike[str] = "",
    held_out: int = 0,
    **settings: Any,
) -> Datasets:
    """Dialogues of a JSON or JSONL file, each with its images and recordings.

    Args:
      path: the file, with "messages" or "conversations" in each record.
      length: tokens of one LLM row, at most.
      batch: samples of a step.
      media: the folder to which names of images and recordings are relative; "" for the folder of ``path``.
      held_out: records, evenly spread over all, that are evaluated on and never trained on.
      settings: other fields of ``SourceConfig``, such as ``system="You are helpful."``.
    """
    values = {"path": os.fspath(path), "media": os.fspath(media), "held_out": held_out, **settings}
    return Datasets(settings={DATASET: values}, shares={DATASET: 1.0}, length=length, batch=batch)


def mixture(datasets: Mapping[str, Datasets], shares: Mapping[str, float]) -> Datasets:
    """A mixture of datasets that each have one; length and batch are the first one's.

    Args:
      datasets: results of ``messages``, each by a name of its own, such as "chats".
      shares: the share of the samples that each gives, by the same names, such as {"chats": 0.75, "charts": 0.25}.

    Raises:
      ValueError: names differ between both, or there are none.
    """
    if not datasets or datasets.keys() != shares.keys():
        raise ValueError(f"shares: {sorted(shares)} are not the datasets {sorted(datasets)}; give each its share")
    first = next(iter(datasets.values()))
    settings = {name: values for name, part in datasets.items() for values in part.settings.values()}
    return Datasets(settings=settings, shares=shares, length=first.length, batch=first.batch)
