"""`DataSpec`: the parts of a configuration that a run's batches depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.data import tree
from mmjax.data.config import DataConfig
from mmjax.data.loader import Source, StepMaker, make_source
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder
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
        return tree.write({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_json(cls, value: Any) -> DataSpec:
        """The spec that `to_json` wrote as this JSON. Raises ValueError if it is malformed."""
        return cls(**tree.read(value))
