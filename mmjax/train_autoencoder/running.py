"""A run of ``python -m mmjax.train_autoencoder`` with checked flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import jax
import numpy as np

from mmjax.latents.pictures import Records
from mmjax.models.autoencoder.model import DP, Autoencoder
from mmjax.progress import Progress
from mmjax.train_autoencoder.batches import Batches
from mmjax.train_autoencoder.checkpoints import last_checkpoint, restore, save_checkpoint, with_statistics
from mmjax.train_autoencoder.settings import Training
from mmjax.train_autoencoder.step import State, Steps

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training with its data and folder.

    Attributes:
      training: the settings.
      records: the pictures.
      out: the run's folder.
      start: the autoencoder that the training begins with; ``None`` for new parameters.
      devices: the most devices that share a batch; 0 for all of this process.
      log_every: steps between lines of metrics.
    """

    training: Training
    records: Records
    out: Path
    start: Autoencoder | None = None
    devices: int = 0
    log_every: int = 10

    def train(self) -> Path:
        """Trains from the last checkpoint on, or from the start; returns the folder of the last one.

        Raises:
          ConfigError: a setting does not fit the pictures or the run, or a file cannot be read or written.
        """
        training = self.training
        batches = Batches(training, self.records)
        number = gcd(training.batch, min(self.devices or training.batch, len(jax.local_devices())))
        steps = Steps(training, jax.sharding.Mesh(np.array(jax.local_devices()[:number]), (DP,)))
        autoencoder = self.start or Autoencoder.new(training.autoencoder, training.seed)
        state = steps.begin(autoencoder.params)
        checkpoint = last_checkpoint(self.out)
        folder, done = checkpoint or (self.out, 0)
        if checkpoint:
            state = steps.place(restore(folder, training, state))
        self._cut_metrics(done)
        with Progress(training.steps, "training", start=done, log_every=self.log_every) as progress:
            for step in range(done, training.steps):
                state, metrics = steps.step(state, batches.batch(step))
                if (step + 1) % self.log_every == 0 or step + 1 == training.steps:
                    values = {name: float(value) for name, value in metrics.items()}
                    self._write({"step": step + 1, **values})
                    progress.update(step + 1, **values)
                if (step + 1) % training.every == 0 or step + 1 == training.steps:
                    folder = self._save(step + 1, replace(autoencoder, source=None), steps, batches, state)
        return folder

    def _save(self, step: int, autoencoder: Autoencoder, steps: Steps, batches: Batches, state: State) -> Path:
        """Writes a checkpoint, whose settings have the statistics of a batch of latents."""
        batch = batches.batch(step - 1)
        latents = steps.measure(state.params, batch.pictures)[1].sample(batch.noise)
        trained = with_statistics(replace(autoencoder, params=state.params), np.asarray(latents))
        if batches.held_out:
            self._write({"step": step, "held_out_error": self._held_out_error(steps, batches, state)})
        return save_checkpoint(self.out, step, trained, self.training, state)

    def _held_out_error(self, steps: Steps, batches: Batches, state: State) -> float:
        size, errors = self.training.batch, list[float]()
        for first in range(0, batches.held_out, size):
            measured = np.asarray(steps.measure(state.params, batches.apart(first, size))[0])
            errors += measured[: batches.held_out - first].tolist()
        return float(np.mean(errors))

    def _write(self, values: Mapping[str, float]) -> None:
        with open(self.out / METRICS, "a") as file:
            file.write(json.dumps(dict(values)) + "\n")

    def _cut_metrics(self, done: int) -> None:
        """Removes lines of steps that are done again."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / METRICS
        lines = file.read_text().splitlines() if file.exists() else []
        before = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= done]
        file.write_text("".join(f"{line}\n" for line in before))
