"""`BatchSpec`: all that the batches of a run depend on, for every process that makes some."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mmjax.data import tree
from mmjax.data.loader import StepMaker, make_source
from mmjax.data.origin import origin_class
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.reorder import StepOrder
from mmjax.data.source import Source
from mmjax.data.spec import DataSpec


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """All that the batches of a run depend on, except a batch's step.

    Attributes:
      data: the run's data.
      packer: the run's packer.
      seed: the run's seed.
      global_batch: samples of a step.
      order: reorders the samples of a step; None leaves them as they come.
    """

    data: DataSpec
    packer: Packer
    seed: int
    global_batch: int
    order: StepOrder | None = None

    def maker(self, source: Source | None = None, process_rows: ProcessRows | None = None) -> StepMaker:
        """The maker of the batches, which fills in `process_rows` (all by default).

        source: the samples of split "train"; by default they are opened. Raises ConfigError if the data cannot be read.
        """
        source = source or make_source(self.data, self.packer.encoders, seed=self.seed, split="train")
        return StepMaker(
            source=source,
            packer=self.packer,
            global_batch=self.global_batch,
            order=self.order,
            process_rows=process_rows,
        )

    def to_json(self) -> Any:
        """The spec as a value of JSON (see `tree.write`), for another process of this host."""
        # The class of a task's settings follows from those of the data: it may be a user's own, which `tree` does not
        # know.
        data = {**_fields(self.data), "task": _fields(self.data.task) if self.data.task else None}
        return tree.write({**_fields(self), "data": data})

    @classmethod
    def from_json(cls, value: Any) -> BatchSpec:
        """The spec that `to_json` wrote as this JSON, whose task is imported. Raises ValueError if it is malformed."""
        values = tree.read(value)
        data = values["data"]
        config = origin_class(data["settings"]).Config
        task = config(**data["task"]) if config and data["task"] else None
        return cls(**{**values, "data": DataSpec(**{**data, "task": task})})


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
