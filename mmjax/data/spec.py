"""`DataSpec`: the parts of a configuration that a run's batches depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.data import tree
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_source
from mmjax.data.origin import origin_class
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder
from mmjax.data.source import Source
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The parts of a configuration that batches depend on.

    Attributes:
      data: the data's configuration.
      packer: the run's packer.
      seed: the run's seed.
      global_batch: samples of a step.
      order: reorders the samples of a step; None leaves them as they come.
      task: settings of the task; None for its defaults.
      sources: the configuration of each of `data.sources`, by name.
      known: the records of each of them that the run knows; see `make_source`.
    """

    data: DataConfig
    packer: Packer
    seed: int
    global_batch: int
    order: StepOrder | None = None
    task: Any = None
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)
    known: Mapping[str, KnownRecords] = field(default_factory=dict)

    def maker(self, source: Source | None = None, process_rows: ProcessRows | None = None) -> StepMaker:
        """The maker of the batches, which fills in `process_rows` (all by default).

        source: the samples of split "train"; by default they are opened. Raises ConfigError if the data cannot be read.
        """
        source = source or make_source(
            self.data,
            self.packer.encoders,
            seed=self.seed,
            split="train",
            task=self.task,
            sources=self.sources,
            known=self.known,
        )
        return StepMaker(
            source=source,
            packer=self.packer,
            global_batch=self.global_batch,
            order=self.order,
            process_rows=process_rows,
        )

    def to_json(self) -> Any:
        """The spec as a value of JSON (see `tree.write`), for another process of this host."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # The class of a task's settings follows from `data`: it may be a user's own, which `tree` does not know.
        task = dataclasses.asdict(self.task) if self.task else None
        return tree.write({**values, "task": task})

    @classmethod
    def from_json(cls, value: Any) -> DataSpec:
        """The spec that `to_json` wrote as this JSON, whose task is imported. Raises ValueError if it is malformed."""
        values = tree.read(value)
        config = origin_class(values["data"]).Config
        return cls(**{**values, "task": config(**values["task"]) if config and values["task"] else None})
