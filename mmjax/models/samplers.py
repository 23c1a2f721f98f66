"""Samplers: loops on the host that make a medium of noise with a model's predictions. NumPy only.

Euler's method for flows; DDIM (Song et al. 2021, "Denoising Diffusion Implicit Models", eq. 12 and 16) and
DPM-Solver++ of second order, multistep and midpoint (Lu et al. 2022, "DPM-Solver++", algorithm 2), for ddpm. Levels of
noise are those of the schedulers of ``diffusers``.

Shapes: R rows, T patches of a row, E numbers in a patch. A row holds the patches of several pictures, which may have
different times: a shift may follow from a picture's number of patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from mmjax.data.process import Process

HostInputs = Mapping[str, np.ndarray]
Predict = Callable[[Sequence[HostInputs]], Sequence[np.ndarray]]
"""A function that predicts: the results of ``Module.predict``, such as [R, T, E], for the inputs of each microbatch."""
SAMPLERS: Mapping[str, tuple[str, ...]] = {"flow": ("euler",), "ddpm": ("ddim", "dpm++")}
"""Samplers by kind of process."""
SPACINGS = ("leading", "trailing", "linspace")
_LEAST_SIGNAL = 2.0**-24
"""The least share of the medium's variance in DPM-Solver++, whose logarithm has to be finite."""


class _Updates(Protocol):
    """The steps of a sampler over the patches of a microbatch."""

    def time(self, step: int) -> np.ndarray | float:
        """The time of each patch, [R, T], or of all, at which step ``step`` (from 0) predicts."""
        ...

    def __call__(self, step: int, x_RTE: np.ndarray, prediction_RTE: np.ndarray) -> np.ndarray:
        """The patches after step ``step``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Makes media of noise.

    Attributes:
      process: the process whose noise is removed.
      kind: "euler", "ddim" or "dpm++".
      steps: number of predictions.
      spacing, steps_offset, end_clean, eta, clip, terminal_time: see ``Diffusion``.
    """

    process: Process
    kind: str = "euler"
    steps: int = 20
    spacing: str = "leading"
    steps_offset: int = 0
    end_clean: bool = True
    eta: float = 0.0
    clip: float = 0.0
    terminal_time: float = 0.0

    def draw(self, inputs: Sequence[HostInputs], predict: Predict) -> list[np.ndarray]:
        """Patches [R, T, E] of each microbatch, made of noise.

        Args:
          inputs: the host inputs of each microbatch by name, with noise as "patches" [R, T, E], and "times" [R, T],
            which are replaced; others are passed on. "segments" tell pictures apart; its last T columns are patches'.
          predict: computes the model's predictions for such inputs.
        """
        updates = [self.updates(microbatch) for microbatch in inputs]
        patches, drawn = [microbatch["patches"] for microbatch in inputs], [*map(is_drawn, inputs)]
        for step in range(self.steps):
            step_inputs = [
                {**microbatch, "patches": x, "times": _filled(microbatch["times"], update.time(step)) * is_drawn_RT}
                for microbatch, x, update, is_drawn_RT in zip(inputs, patches, updates, drawn, strict=True)
            ]
            predictions = predict(step_inputs)
            patches = [
                np.where(is_drawn_RT[..., None], update(step, x, prediction), x)
                for update, x, prediction, is_drawn_RT in zip(updates, patches, predictions, drawn, strict=True)
            ]
        return patches

    def updates(self, microbatch: HostInputs, noise: Callable[[int], np.ndarray] | None = None) -> _Updates:
        """The steps over the patches of a microbatch.

        Args:
          microbatch: its host inputs by name, with noise as "patches".
          noise: the fresh noise [R, T, E] of a step of DDIM with ``eta``; by default it follows from "patches".
        """
        if self.kind == "euler":
            return _Euler(self._flow_times(microbatch))
        if self.kind == "dpm++":
            return _DpmSolver(self.process, self.timesteps)
        return _Ddim(self, noise or PatchNoise(microbatch["patches"]))

    # ---- times -------------------------------------------------------------------------------------------------------

    def flow_times(self, patches: int) -> np.ndarray:
        """The times [steps + 1] of a flow's steps for a picture of so many patches, from 1, and 0 at the end."""
        times = np.asarray(self.process.shifted(1 - np.arange(self.steps) / self.steps, patches))
        if self.terminal_time and self.steps > 1:
            times = 1 - (1 - times) * (1 - self.terminal_time) / (1 - times[-1])
        return np.append(times, 0.0)

    def _flow_times(self, microbatch: HostInputs) -> Sequence[np.ndarray | float]:
        """The times of each patch, [R, T], or of all, one after another."""
        if not self.process.dynamic_shift:
            return self.flow_times(0).tolist()
        counts_RT = _patch_counts(microbatch["segments"][:, -microbatch["patches"].shape[1] :] * is_drawn(microbatch))
        table = {count: self.flow_times(count) for count in np.unique(counts_RT).tolist()}
        every = np.asarray([table[count] for count in counts_RT.ravel().tolist()])
        return [column.reshape(counts_RT.shape) for column in every.T]

    @cached_property
    def timesteps(self) -> np.ndarray:
        """The timesteps [steps] of a ddpm at which the model predicts, descending."""
        total, steps = self.process.train_steps, self.steps
        if self.spacing == "trailing":
            return np.round(np.arange(total, 0, -total / steps)).astype(np.int64)[:steps] - 1
        # DPM-Solver++ counts the medium without noise, at the end, among the timesteps.
        count = steps + (self.kind == "dpm++")
        if self.spacing == "linspace":
            return np.linspace(0, total - 1, count).round()[::-1][:steps].astype(np.int64)
        return (np.arange(count) * (total // count))[::-1][:steps] + self.steps_offset


@dataclass(frozen=True)
class _Euler:
    """Euler's method: dx/dt is the velocity."""

    times: Sequence[np.ndarray | float]

    def time(self, step: int) -> np.ndarray | float:
        return self.times[step]

    def __call__(self, step: int, x_RTE: np.ndarray, prediction_RTE: np.ndarray) -> np.ndarray:
        # Divided by the inverse, which is an exact float for equal steps.
        rate = np.asarray(1 / (np.asarray(self.times[step]) - self.times[step + 1]), np.float32)
        return x_RTE - prediction_RTE / rate[..., None]


@dataclass(frozen=True)
class _Ddim:
    """DDIM: the predicted medium and the predicted noise are mixed again, with less noise."""

    sampler: Sampler
    noise: Callable[[int], np.ndarray]

    def time(self, step: int) -> float:
        return float(self.sampler.timesteps[step])

    def __call__(self, step: int, x_RTE: np.ndarray, prediction_RTE: np.ndarray) -> np.ndarray:
        sampler, process = self.sampler, self.sampler.process
        timestep = int(sampler.timesteps[step])
        following = timestep - process.train_steps // sampler.steps
        signal = float(process.signal_shares[timestep])
        end = 1.0 if sampler.end_clean else float(process.signal_shares[0])
        signal_next = float(process.signal_shares[following]) if following >= 0 else end
        medium, noise = _medium_and_noise(process.prediction, x_RTE, prediction_RTE, signal)
        if sampler.clip:
            medium = np.clip(medium, -sampler.clip, sampler.clip)
        variance = sampler.eta**2 * (1 - signal_next) / (1 - signal) * (1 - signal / signal_next)
        mixed = signal_next**0.5 * medium + max(0.0, 1 - signal_next - variance) ** 0.5 * noise
        return mixed + variance**0.5 * self.noise(step) if sampler.eta else mixed


@dataclass
class _DpmSolver:
    """DPM-Solver++ of second order: the first and the last step are of first order."""

    process: Process
    timesteps: np.ndarray
    media: list[np.ndarray] = field(default_factory=list)

    def time(self, step: int) -> float:
        return float(self.timesteps[step])

    def __call__(self, step: int, x_RTE: np.ndarray, prediction_RTE: np.ndarray) -> np.ndarray:
        is_last = step == len(self.timesteps) - 1
        (a, s), (a_next, s_next) = self._shares(step), (1.0, 0.0) if is_last else self._shares(step + 1)
        medium, _ = _medium_and_noise(self.process.prediction, x_RTE, prediction_RTE, a**2)
        self.media = [*self.media[-1:], medium]
        shrink = a * s_next / (a_next * s)  # exp(-h), h being the step in log(a / s)
        mixed = s_next / s * x_RTE + a_next * (1 - shrink) * medium
        if step == 0 or is_last:
            return mixed
        a_before, s_before = self._shares(step - 1)
        last_h, h = np.log(a / s * s_before / a_before), -np.log(shrink)
        slope = (medium - self.media[0]) * float(h / last_h)
        return mixed + 0.5 * a_next * (1 - shrink) * slope

    def _shares(self, step: int) -> tuple[float, float]:
        """The factors of the medium and of the noise in the mixture at a step."""
        signal = max(_LEAST_SIGNAL, float(self.process.signal_shares[self.timesteps[step]]))
        return signal**0.5, (1 - signal) ** 0.5


class PatchNoise:
    """Fresh noise for each step, which follows from the noise with which a patch began: its row does not matter."""

    def __init__(self, patches_RTE: np.ndarray):
        """``patches_RTE`` are the noise of the first step, float32."""
        self._shape = patches_RTE.shape
        words = np.ascontiguousarray(patches_RTE, np.float32).view(np.uint32).reshape(-1, self._shape[-1])
        self._generators = [np.random.default_rng(entropy) for entropy in words]

    def __call__(self, step: int) -> np.ndarray:
        """The noise [R, T, E] of a step; steps are taken one after another."""
        values = [generator.standard_normal(self._shape[-1], np.float32) for generator in self._generators]
        return np.asarray(values, np.float32).reshape(self._shape)


def _medium_and_noise(
    prediction: str, x_RTE: np.ndarray, predicted_RTE: np.ndarray, signal: float
) -> tuple[np.ndarray, np.ndarray]:
    """The medium and the noise of a mixture ``x_RTE``, from the model's prediction."""
    of_medium, of_noise = signal**0.5, (1 - signal) ** 0.5
    if prediction == "noise":
        return (x_RTE - of_noise * predicted_RTE) / of_medium, predicted_RTE
    if prediction == "sample":
        return predicted_RTE, (x_RTE - of_medium * predicted_RTE) / of_noise
    return of_medium * x_RTE - of_noise * predicted_RTE, of_medium * predicted_RTE + of_noise * x_RTE


def is_drawn(microbatch: HostInputs) -> np.ndarray:
    """Whether each patch is of a picture that is drawn, bool [R, T]; others are of pictures that one is made from."""
    shape_RT, positions = microbatch["patches"].shape[:2], microbatch.get("positions")
    if positions is None or positions.shape[-1] < 3:
        return np.ones(shape_RT, bool)
    return positions[:, -shape_RT[1] :, 0] == 0


def _filled(times_RT: np.ndarray, time: np.ndarray | float) -> np.ndarray:
    """Times of the shape and dtype of ``times_RT`` with other values."""
    return np.broadcast_to(np.asarray(time, times_RT.dtype), times_RT.shape).copy()


def _patch_counts(segments_RT: np.ndarray) -> np.ndarray:
    """The number of patches of each patch's picture, [R, T]; 1 at padding."""
    counts = [np.bincount(row)[row] for row in segments_RT]
    return np.where(segments_RT > 0, np.asarray(counts).reshape(segments_RT.shape), 1)
