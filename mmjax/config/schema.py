"""The configuration of a run: every configurable class, gathered in one frozen ``Config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.checkpoint.config import FRESH, CheckpointConfig, WeightsConfig
from mmjax.configurable import configurable, not_negative, one_of, positive, require
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.tasks.registry import TASK_CONFIGS
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, CallbacksConfig, ModelConfig, lora_name, projector_name
from mmjax.models.families import FAMILIES
from mmjax.models.lora.config import NO_LORA, LoraConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.config import OffloadConfig
from mmjax.schedule.schedules import INNER, NESTING, ONE_F_ONE_B, SCHEDULES, WINDOWED

DTYPES = ("float32", "bfloat16")
LOWERINGS = ("auto", "ops", "single")
SINKS = ("tensorboard", "wandb")


@configurable("Train")
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run.

    Attributes:
      steps: optimizer steps.
      epochs: how often every training record is seen; sets steps. 0 leaves that to steps.
      global_batch: samples per optimizer step over all devices.
      microbatches: ops that a step's samples are cut into; divides global_batch.
      schedule: order of the ops, one of 1f1b, gpipe, interleaved, eager-1f1b, zb-h1, three-phase, encoders-first and
        nested.
      inner: the LLM's own schedule inside a nested one: 1f1b, interleaved, eager-1f1b or zb-h1.
      window: microbatches between whose encoder forward and backward the LLM runs, of three-phase; 0 is all.
      lowering: programs that a step is compiled to: ops (a program per op), single (one program; modules share one rank
        set), or auto (one program where all stages share their devices and microbatches follow one another, else ops).
      seed: of the parameters and of the data.
      dtype: dtype of the computation, float32 or bfloat16; trained parameters and their moments stay float32.
      unroll: compile layers one after another instead of as a loop over a stack: a loop copies every layer's weights
        twice a microbatch on a GPU, and compiles faster. Checkpoints are the same.
      clip_norm: largest norm of all modules' gradients together; 0 does not clip.
      log_every: steps between lines on the terminal; metrics.jsonl has every step.
      eval_every: steps between evaluations; 0 evaluates at the end only.
      patience: end the run after this many evaluations that are not better than the best by Checkpoint.best; 0 goes on.
      eval_samples: held-out samples of an evaluation; 0 skips evaluation.
      predictions: held-out samples drawn beside their answers in an evaluation.
      peak_tflops: dense peak of one device, for mfu; 0 looks the device up, and mfu is null where it is unknown.
      sinks: beside metrics.jsonl, any of 'tensorboard' and 'wandb' (their extras must be installed).
      profile_steps: first and last step of a profiler trace, such as (10, 12), in run_dir/profile; () takes none.
      max_skipped: end the run after this many updates in a row were skipped, because gradients were not finite; 0 goes
        on.
      debug_nans: check every op's outputs and end the run at the first that is not finite; slow, one program per op.
      deterministic: on a GPU, use kernels whose results repeat bit for bit, and no autotuning; a CPU's always do.
    """

    steps: int = 1000
    epochs: float = 0.0
    global_batch: int = 32
    microbatches: int = 4
    schedule: str = "1f1b"
    inner: str = ONE_F_ONE_B
    window: int = 0
    lowering: str = "auto"
    seed: int = 0
    dtype: str = "float32"
    unroll: bool = False
    clip_norm: float = 1.0
    log_every: int = 10
    eval_every: int = 0
    patience: int = 0
    eval_samples: int = 180
    predictions: int = 12
    peak_tflops: float = 0.0
    sinks: tuple[str, ...] = dataclasses.field(default=(), metadata={"example": ("wandb",)})
    profile_steps: tuple[int, ...] = dataclasses.field(default=(), metadata={"example": (10, 12)})
    max_skipped: int = 10
    debug_nans: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "microbatches", "log_every"):
            positive(f"Train.{name}", getattr(self, name))
        legal_zero = ("window", "seed", "clip_norm", "eval_every", "eval_samples", "predictions", "peak_tflops")
        for name in (*legal_zero, "max_skipped", "patience", "epochs"):
            not_negative(f"Train.{name}", getattr(self, name))
        require(self.seed < 2**32, "Train.seed", self.seed, "must be below 2**32, such as 0")
        one_of("Train.schedule", self.schedule, SCHEDULES)
        one_of("Train.inner", self.inner, INNER)
        fix = f"must be {ONE_F_ONE_B!r} for Train.schedule={self.schedule!r}; {' and '.join(NESTING)} has an inner one"
        require(self.inner == ONE_F_ONE_B or self.schedule in NESTING, "Train.inner", self.inner, fix)
        fix = f"must be 0 for Train.schedule={self.schedule!r}; {' and '.join(WINDOWED)} has windows"
        require(not self.window or self.schedule in WINDOWED, "Train.window", self.window, fix)
        one_of("Train.lowering", self.lowering, LOWERINGS)
        fix = "Train.debug_nans checks op by op; set it to 'ops' or 'auto'"
        require(not (self.debug_nans and self.lowering == "single"), "Train.lowering", self.lowering, fix)
        one_of("Train.dtype", self.dtype, DTYPES)
        for sink in self.sinks:
            one_of("Train.sinks", sink, SINKS)
        self._check_profile_steps()

    def _check_profile_steps(self) -> None:
        window = self.profile_steps
        fix = "must be () or a pair (first, last) of steps"
        require(len(window) in (0, 2), "Train.profile_steps", window, f"{fix}, such as (10, 12)")
        if window and not self.epochs:  # else it is compared when the steps are known
            legal = f"{fix} that rise within 1 to Train.steps ({self.steps}), such as {(1, min(3, self.steps))}"
            require(1 <= window[0] <= window[1] <= self.steps, "Train.profile_steps", window, legal)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. Built by `load_config`, or by hand and checked with `validate`.

    Attributes:
      train, world, data, checkpoint, model: settings of the whole run.
      modules: settings of each encoder, the LLM ("llm") and each generator by name, of its family's class (`ViTConfig`
        for "vit"), sources before users.
      projectors: by encoder and generator.
      packing: by module with rows: those and "llm".
      layouts: by module with a layout of its own: encoders, "llm" and generators.
      optimizers: by module that can be frozen: those, "<encoder>_projector" and "<generator>_projector", and
        "<module>_lora" of each with low-rank adapters.
      weights: by the same modules; one that is not there starts as `checkpoint` says.
      callbacks: names of a user's own functions, by module with a layout of its own.
      loras: low-rank adapters, likewise; a module that is not there has none.
      offloads: by module with a layout of its own; a module that is not there offloads nothing.
      task: settings of the task that `data.task` names, of its class (`DigitsConfig` for "digits"); None for a task
        without settings, or where `data.sources` takes its place.
      sources: by the names in `data.sources`.
      allow_code: whether code that a setting names, such as a reader of one's own in `Source.kind`, may be run. A flag
        of commands, not a setting.
      fitted: a line for each setting that was changed to fit the steps of a flag; not a setting either.
      known: by dataset, the records that a continued run has stored; not a setting either.
    """

    train: TrainConfig
    world: WorldConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    model: ModelConfig
    modules: Mapping[str, Any]
    projectors: Mapping[str, ProjectorConfig]
    packing: Mapping[str, PackingConfig]
    layouts: Mapping[str, Layout]
    optimizers: Mapping[str, OptimizerConfig]
    callbacks: Mapping[str, CallbacksConfig] = dataclasses.field(default_factory=dict)
    loras: Mapping[str, LoraConfig] = dataclasses.field(default_factory=dict)
    offloads: Mapping[str, OffloadConfig] = dataclasses.field(default_factory=dict)
    task: Any = None
    sources: Mapping[str, SourceConfig] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, WeightsConfig] = dataclasses.field(default_factory=dict)
    allow_code: bool = dataclasses.field(default=False, compare=False)
    fitted: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    known: Mapping[str, KnownRecords] = dataclasses.field(default_factory=dict, compare=False)

    def init_from(self, module: str) -> str:
        """The run, checkpoint or export that a module's parameters start from; "" for none."""
        if self.pretrained(module):
            return ""
        folder = self.weights.get(module, WeightsConfig()).init_from or self.checkpoint.init_from
        return "" if folder == FRESH else folder

    def pretrained(self, module: str) -> str:
        """The folder of safetensors that a module starts from; "" for none."""
        start = self.weights.get(module, WeightsConfig())
        if adapters := next((lora for name, lora in self.loras.items() if lora_name(name) == module), None):
            return "" if start.init_from else adapters.path
        return pretrained_folder(self.model, start, module)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of safetensors that modules start from."""
        return tuple(dict.fromkeys(filter(None, map(self.pretrained, self.optimizers))))

    def lora(self, module: str) -> LoraConfig:
        """The low-rank adapters of a module with a layout of its own."""
        return self.loras.get(module, NO_LORA)

    @property
    def devices(self) -> int:
        """Number of devices that the layouts need."""
        return max(layout.rank_offset + layout.size for layout in self.layouts.values())

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Every configured object with its scope, "" for the run's own."""
        task = self.data.origin.settings(self.task)
        for settings in filter(None, (self.train, self.world, self.data, task, self.checkpoint, self.model)):
            yield "", settings
        scoped = (self.modules, self.callbacks, self.loras, self.projectors, self.packing, self.layouts, self.offloads)
        for by_name in (*scoped, self.optimizers, self.weights, self.sources):
            yield from by_name.items()


def pretrained_folder(model: ModelConfig, weights: WeightsConfig, module: str) -> str:
    """The folder of safetensors that a module with these ``Weights`` starts from; "" for none."""
    if weights.path or weights.init_from:
        return weights.path
    adapters = [lora_name(name) for name, _, _ in model.roles]
    not_in_folder = (*model.generators, *map(projector_name, model.generators), *adapters)
    return "" if module in not_in_folder else model.weights


def folder_setting(weights: WeightsConfig, module: str) -> str:
    """The setting that names the folder of safetensors of a module with these ``Weights``."""
    return f"{module}/Weights.path" if weights.path else "Model.weights"


def scopes_of(model: ModelConfig, data: DataConfig, adapted: Iterable[str] = ()) -> dict[type[Any], tuple[str, ...]]:
    """The scopes that each class takes; () for a class of the whole run.

    Args:
      model: the modules.
      data: the datasets.
      adapted: names of the modules with low-rank adapters.
    """
    media, modules = model.media, tuple(name for name, _, _ in model.roles)
    scopes: dict[type[Any], tuple[str, ...]] = dict.fromkeys(
        (TrainConfig, WorldConfig, DataConfig, *TASK_CONFIGS, CheckpointConfig, ModelConfig), ()
    )
    for family in FAMILIES.values():
        scopes[family.config] = ()
    for name, family in model.families:
        scopes[family.config] = (*scopes.get(family.config, ()), name)
    scopes |= {ProjectorConfig: media, PackingConfig: (*media, LLM), Layout: modules, OffloadConfig: modules}
    scopes[CallbacksConfig] = scopes[LoraConfig] = modules
    scopes[SourceConfig] = tuple(data.sources)
    scopes[OptimizerConfig] = (*model.encoders, *map(projector_name, media), LLM, *model.generators)
    scopes[OptimizerConfig] += tuple(map(lora_name, adapted))
    scopes[WeightsConfig] = scopes[OptimizerConfig]
    return scopes
