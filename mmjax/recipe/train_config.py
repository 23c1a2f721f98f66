"""The settings of a run that belong to no module. Imports no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mmjax.attention.settings import DTYPES
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.models.choices import AUTO
from mmjax.schedule.schedules import INNER, ONE_F_ONE_B, SCHEDULES, SURROUNDING, WINDOWED

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
      inner: the LLM's own schedule inside a nested or three-phase one: 1f1b, interleaved, eager-1f1b or zb-h1.
      window: microbatches between whose encoder forward and backward the LLM runs, of three-phase; 0 is all.
      lowering: programs that a step is compiled to: ops (a program per op), single (one program; modules share one rank
        set), or auto (one program where all stages share their devices and microbatches follow one another, else ops).
      seed: of the parameters and of the data.
      dtype: dtype of the computation, float32 or bfloat16; trained parameters and their moments stay float32.
      unroll: compile layers one after another instead of as a loop over a stack: a loop copies every layer's weights
        twice a microbatch on a GPU, and compiles faster. Checkpoints are the same. 'auto' unrolls on GPUs alone.
      overlap_grad_reduce: reduce gradients over ranks layer by layer inside a step's last backward, beside the layers
        before, where layers are unrolled. 'auto' does so on GPUs alone.
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
    unroll: bool | str = AUTO
    overlap_grad_reduce: bool | str = AUTO
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
        fix = f"must be {ONE_F_ONE_B!r} for Train.schedule={self.schedule!r}; {' and '.join(SURROUNDING)} have one"
        require(self.inner == ONE_F_ONE_B or self.schedule in SURROUNDING, "Train.inner", self.inner, fix)
        fix = f"must be 0 for Train.schedule={self.schedule!r}; {' and '.join(WINDOWED)} has windows"
        require(not self.window or self.schedule in WINDOWED, "Train.window", self.window, fix)
        one_of("Train.lowering", self.lowering, LOWERINGS)
        fix = "Train.debug_nans checks op by op; set it to 'ops' or 'auto'"
        require(not (self.debug_nans and self.lowering == "single"), "Train.lowering", self.lowering, fix)
        one_of("Train.dtype", self.dtype, DTYPES)
        fix = f"must be True, False or {AUTO!r}, which is True on GPUs"
        for name in ("unroll", "overlap_grad_reduce"):
            value = getattr(self, name)
            require(isinstance(value, bool) or value == AUTO, f"Train.{name}", value, fix)
        for sink in self.sinks:
            one_of("Train.sinks", sink, SINKS)
        self._check_profile_steps()

    def check_batch(self) -> None:
        """Raises ``ConfigError`` unless the microbatches divide the batch."""
        divides("Train.microbatches", self.microbatches, self.global_batch, "Train.global_batch")

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason, such as "window"."""
        reasons = {}
        if self.schedule not in SURROUNDING:
            reasons["inner"] = f"Train.schedule={self.schedule!r} has none; it belongs to {' and '.join(SURROUNDING)}"
        if self.schedule not in WINDOWED:
            reasons["window"] = f"Train.schedule={self.schedule!r} has none; it belongs to {WINDOWED[0]!r}"
        if not self.eval_samples:
            reasons |= dict.fromkeys(("eval_every", "predictions"), "Train.eval_samples=0 skips evaluation")
        if self.overlap_grad_reduce is True and self.unroll is False:
            reasons["overlap_grad_reduce"] = "Train.unroll=False stacks layers, whose gradients are complete together"
        return reasons

    def _check_profile_steps(self) -> None:
        window = self.profile_steps
        fix = "must be () or a pair (first, last) of steps"
        require(len(window) in (0, 2), "Train.profile_steps", window, f"{fix}, such as (10, 12)")
        if window and not self.epochs:  # else it is compared when the steps are known
            legal = f"{fix} that rise within 1 to Train.steps ({self.steps}), such as {(1, min(3, self.steps))}"
            require(1 <= window[0] <= window[1] <= self.steps, "Train.profile_steps", window, legal)
