"""Settings of a training of an autoencoder. Imports no JAX."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmjax import json_files
from mmjax.configurable import ConfigError, not_negative, one_of, positive, require
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.optimizer_config import SCHEDULES, OptimizerConfig

ERRORS = ("l1", "l2")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of an autoencoder of pictures.

    Attributes:
      autoencoder: its settings.
      start: the digest of the parameters that the training begins with; "" for new ones.
      size: height and width of pictures; they are scaled to cover it, and the middle is cut out.
      batch: pictures of a step, on all devices together.
      steps: steps of the whole run.
      seed: of new parameters, the order of pictures, flips and noise.
      error: "l1" or "l2", the absolute or squared error of each number of a picture.
      divergence: the weight of the divergence of latents from a standard normal distribution, beside the sum of errors.
      flip: whether half of the pictures are mirrored.
      learning_rate, warmup, schedule: of AdamW, as ``Optimizer``.
      clip: the largest norm of the gradient.
      held_out: pictures, evenly spread over all, that are not trained on; their error is measured at checkpoints.
      every: steps between checkpoints; the last step has one too.
    """

    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    start: str = ""
    size: tuple[int, int] = (256, 256)
    batch: int = 8
    steps: int = 1000
    seed: int = 0
    error: str = "l1"
    divergence: float = 1e-6
    flip: bool = False
    learning_rate: float = 1e-4
    warmup: int = 0
    schedule: str = "constant"
    clip: float = 1.0
    held_out: int = 0
    every: int = 500

    def __post_init__(self) -> None:
        one_of("--error", self.error, ERRORS)
        one_of("--schedule", self.schedule, SCHEDULES)
        for name in ("batch", "steps", "every", "learning_rate", "clip"):
            positive(f"--{name}", getattr(self, name))
        for name in ("seed", "divergence", "held_out", "warmup"):
            not_negative(f"--{name}", getattr(self, name))
        factor = self.autoencoder.factor
        legal = all(side > 0 and side % factor == 0 for side in self.size)
        require(legal, "--size", self.size, f"must be multiples of {factor}, pixels of one of a latent's")
        require(self.warmup < self.steps, "--warmup", self.warmup, f"must be below --steps ({self.steps})")

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW's settings, without weight decay."""
        rates = {"learning_rate": self.learning_rate, "warmup": self.warmup, "schedule": self.schedule}
        return OptimizerConfig(**rates, b1=0.9, b2=0.99)  # pyright: ignore[reportArgumentType]

    def text(self) -> str:
        """The settings as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def require_same(self, file: Path) -> None:
        """Raises ConfigError if the run whose settings are in ``file`` was begun with others, and names one.

        ``every`` may differ, and ``steps`` where the learning rate does not depend on them.
        """
        begun: dict[str, Any] = json_files.read_object(file)
        may_change = {"every", "steps"} if self.schedule == "constant" else {"every"}
        for name, value in json.loads(self.text()).items():
            if name not in may_change and begun.get(name) != value:
                flag = "--widths and others" if name == "autoencoder" else f"--{name}"
                shown = f"{flag}={value!r}: the run in {file.parent.parent} was begun with {begun.get(name)!r}"
                raise ConfigError(f"{shown}; leave it, or name another --out")
