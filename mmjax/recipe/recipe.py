"""The settings of a run: a model, its data and its training. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmjax.checkpoint.config import FRESH, CheckpointConfig
from mmjax.data.config import DataConfig
from mmjax.data.sources.config import SourceConfig
from mmjax.data.spec import DataSpec
from mmjax.mesh.config import WorldConfig
from mmjax.optimizer_config import OptimizerConfig, fit_warmup
from mmjax.recipe.datasets import Datasets
from mmjax.recipe.model_spec import ModelSpec
from mmjax.recipe.schedules import ScheduleConfig
from mmjax.recipe.specs import ModuleSpec
from mmjax.recipe.train_config import TrainConfig
from mmjax.user_code import is_allowed


@dataclass(frozen=True, init=False)
class Recipe:
    """All settings of a run: a pure value. ``load_config`` makes one from gin, and ``validate`` checks it.

    Attributes:
      model: the nodes, each with its settings, layout and optimizer.
      data: the data: settings, those of the task and those of each dataset.
      train, world, checkpoint: settings of the whole run.
      allow_code: whether code that a setting names, such as a reader of one's own in `Source.kind`, may be run. A flag
        of commands, not a setting.
      fitted: a line for each setting that was changed to fit the steps of a flag; not a setting either.
    """

    model: ModelSpec
    train: TrainConfig
    world: WorldConfig
    data: DataSpec
    checkpoint: CheckpointConfig
    allow_code: bool = field(compare=False)
    fitted: tuple[str, ...] = field(compare=False)

    def __init__(
        self,
        *,
        model: ModelSpec,
        data: DataSpec | DataConfig | Datasets | None = None,
        schedule: ScheduleConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        train: TrainConfig | None = None,
        world: WorldConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        task: Any = None,
        sources: Mapping[str, SourceConfig] | None = None,
        allow_code: bool = False,
        fitted: tuple[str, ...] = (),
    ):
        """Settings that are left out have their defaults.

        Args:
          model, train, world, checkpoint, allow_code, fitted: see the attributes.
          data: the data, or their settings alone; or datasets, such as ``messages(…)``, whose template and rules for
            images are those of the model's folder, and whose batch takes the place of that of ``train``.
          schedule: takes the place of the schedule and the microbatches of ``train``.
          optimizer: trains every part whose own optimizer is not set; frozen parts stay frozen.
          task: settings of the task, in place of those of ``data``; of another task, or left out, its defaults.
          sources: the settings of each of ``Data.sources``, by name, in place of those of ``data``.
        """
        train = train or TrainConfig()
        if isinstance(data, Datasets):
            train, sources = replace(train, global_batch=data.batch), data.sources(model.processor)
            data = data.config(model.processor)
        data = data if isinstance(data, DataSpec) else DataSpec(data or DataConfig())
        data = replace(
            data, task=data.task if task is None else task, sources=data.sources if sources is None else sources
        )
        if schedule:
            order = {"schedule": schedule.name, "inner": schedule.inner, "window": schedule.window}
            train = replace(train, microbatches=schedule.microbatches, **order)
        if data.settings.sources or is_allowed(data.settings.task, allowed=allow_code):  # else `validate` refuses it
            data = replace(data, task=data.origin.config)
        values = {
            "model": model.with_default_optimizer(optimizer) if optimizer else model,
            "train": train,
            "world": world or WorldConfig(),
            "data": data,
            "checkpoint": checkpoint or CheckpointConfig(),
            "allow_code": allow_code,
            "fitted": fitted,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_steps(self, steps: int) -> Recipe:
        """A copy that is trained for ``steps`` optimizer steps.

        A warm-up that is not shorter becomes the same share of these steps as it was of the recipe's own, or a tenth.
        """
        train = self.train

        def fit(optimizer: OptimizerConfig) -> OptimizerConfig:
            return replace(optimizer, warmup=fit_warmup(optimizer.warmup, steps, train.steps))

        model = self.model.with_optimizers({name: fit(optimizer) for name, optimizer in self.model.optimizers.items()})
        return replace(self, model=model, train=replace(train, steps=steps, epochs=0.0))

    def init_from(self, part: str) -> str:
        """The run, checkpoint or export that a part's parameters start from; "" for none, and for a ``model.folder``.

        Args:
          part: one of ``model.parts``, such as "vision_projector".
        """
        if self.model.folder(part):
            return ""
        folder = self.model.parts[part].weights.init_from or self.checkpoint.init_from
        return "" if folder == FRESH else folder

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of safetensors that parts start from, each once."""
        return tuple(dict.fromkeys(filter(None, map(self.model.folder, self.model.parts))))

    @property
    def devices(self) -> int:
        """Number of devices that the layouts need: one more than the highest rank."""
        return max(layout.rank_offset + layout.size for layout in self.model.layouts.values())

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Yields the scope in gin and the settings of every configurable object, as ("vision", ``ViTConfig(…)``).

        The scope of the run's own settings is "".
        """
        of_run = (self.train, self.world, self.data.settings, self.data.task, self.checkpoint, self.model.config)
        for settings in filter(None, of_run):
            yield "", settings
        for name, node in self.model.nodes.items():
            yield from ((name, settings) for settings in _settings_of(node))
            for part_name, part in self.model.parts_of(name).items():
                yield from ((part_name, settings) for settings in (part.optimizer, part.weights))
        yield from ((edge.name, edge.settings) for edge in self.model.edges)
        yield from self.data.sources.items()


def _settings_of(node: ModuleSpec) -> Iterator[Any]:
    """The settings of a node whose scope is its name."""
    yield node.settings
    yield node.layout
    if node.projector:
        yield node.projector.settings
    if node.role == "generator":
        yield node.latents
        yield node.vocoder
    yield from (node.packing, node.lora.settings, node.offload, node.callbacks)
