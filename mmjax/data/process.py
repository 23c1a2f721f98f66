"""Noise processes of generators: mixtures of a medium with noise, a model's targets for them, and times.

A *flow* mixes along a straight line, x_t = (1 - t) x + t noise with t in 0…1 (Liu et al. 2022, "Flow Straight and
Fast", eq. 1); the model learns the velocity noise - x. A *ddpm* has discrete timesteps, x_t = sqrt(ā_t) x +
sqrt(1 - ā_t) noise, where ā_t is the product of 1 - beta up to step t (Ho et al. 2020, "Denoising Diffusion
Probabilistic Models", eq. 4); the model learns the noise, the medium, or v = sqrt(ā_t) noise - sqrt(1 - ā_t) x
(Salimans and Ho 2022, "Progressive Distillation", §4). NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from mmjax.configurable import not_negative, one_of, positive, require

PREDICTIONS: Mapping[str, tuple[str, ...]] = {"flow": ("velocity",), "ddpm": ("noise", "v", "sample")}
"""What a model may learn, by kind of process."""
TIMES = ("uniform", "logit_normal")
BETAS = ("scaled_linear", "linear", "squaredcos_cap_v2")
Values = TypeVar("Values", np.ndarray, np.float32)
_MOST_BETA = 0.999
"""The largest beta of "squaredcos_cap_v2" (Nichol and Dhariwal 2021, "Improved DDPM", §3.2)."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings of a generator's noise process.

    Attributes:
      process: ``flow``, a straight line from a medium to noise, or ``ddpm``, discrete timesteps of growing noise.
      prediction: what the model learns: ``velocity`` of a flow; ``noise``, ``v`` or ``sample``, the medium itself, of a
        ddpm.
      times: the distribution of training times: ``uniform``, or ``logit_normal``, the logistic function of a normal
        number (Esser et al. 2024, "Scaling Rectified Flow Transformers", §3.1).
      times_mean, times_std: mean and standard deviation of that normal number.
      shift: s of s t / (1 + (s - 1) t), which replaces a flow's times t in training and drawing (Esser et al. 2024,
        §5.3.2); 1 shifts nothing.
      dynamic_shift: whether a flow's shift is exp(mu), with mu linear in the number of a picture's patches.
      base_shift, max_shift: mu of a picture with ``base_patches`` patches, and of one with ``max_patches``.
      base_patches, max_patches: numbers of patches.
      betas: the schedule of a ddpm's noise: ``scaled_linear`` (linear in the root), ``linear`` or
        ``squaredcos_cap_v2``.
      beta_start, beta_end: beta of the first and of the last timestep.
      train_steps: number of a ddpm's timesteps.
      zero_snr: whether betas are rescaled so that the last timestep is pure noise (Lin et al. 2024, "Common Diffusion
        Noise Schedules and Sample Steps are Flawed", §3.1).
      min_snr: gamma of min-SNR loss weights (Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting
        Strategy", §3.4); 0 weighs all timesteps equally.
      drop_condition: probability with which a picture is learned without its condition, for guidance.
    """

    process: str = "flow"
    prediction: str = "velocity"
    times: str = "uniform"
    times_mean: float = 0.0
    times_std: float = 1.0
    shift: float = 1.0
    dynamic_shift: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_patches: int = 256
    max_patches: int = 4096
    betas: str = "scaled_linear"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    train_steps: int = 1000
    zero_snr: bool = False
    min_snr: float = 0.0
    drop_condition: float = 0.0

    def check_process(self, scope: str) -> None:
        """Raises ``ConfigError`` unless the settings are a process; ``scope`` is their name in gin, such as "DiT"."""
        one_of(f"{scope}.process", self.process, PREDICTIONS)
        predictions = PREDICTIONS[self.process]
        fix = f"{scope}.process={self.process!r} learns {' or '.join(map(repr, predictions))}"
        require(self.prediction in predictions, f"{scope}.prediction", self.prediction, fix)
        one_of(f"{scope}.times", self.times, TIMES)
        one_of(f"{scope}.betas", self.betas, BETAS)
        positive(f"{scope}.times_std", self.times_std)
        positive(f"{scope}.shift", self.shift)
        positive(f"{scope}.base_patches", self.base_patches, 256)
        fix = f"must be above {scope}.base_patches={self.base_patches}, such as {16 * self.base_patches}"
        require(self.max_patches > self.base_patches, f"{scope}.max_patches", self.max_patches, fix)
        legal = 0 < self.beta_start <= self.beta_end < 1
        fix = (
            f"0 < beta_start <= beta_end < 1 must hold, and {scope}.beta_end is {self.beta_end}; use 0.00085 and 0.012"
        )
        require(legal, f"{scope}.beta_start", self.beta_start, fix)
        require(self.train_steps > 1, f"{scope}.train_steps", self.train_steps, "must be 2 or more, such as 1000")
        not_negative(f"{scope}.min_snr", self.min_snr)
        fix = "must be a probability below 1, such as 0.1"
        require(0 <= self.drop_condition < 1, f"{scope}.drop_condition", self.drop_condition, fix)
        fix = f"the last timestep has no medium in it to tell from noise; set {scope}.prediction to 'v'"
        require(not (self.zero_snr and self.prediction == "noise"), f"{scope}.zero_snr", self.zero_snr, fix)

    def idle_process(self, scope: str) -> dict[str, str]:
        """The reason why nothing reads a setting, by field; ``scope`` is as in ``check_process``."""
        reasons: dict[str, str] = {}
        if self.times == "uniform":
            reasons |= dict.fromkeys(("times_mean", "times_std"), f"{scope}.times='uniform' has neither")
        shifts = ("base_shift", "max_shift", "base_patches", "max_patches")
        if not self.dynamic_shift:
            reasons |= dict.fromkeys(shifts, f"{scope}.dynamic_shift=False: every picture has {scope}.shift")
        else:
            reasons["shift"] = f"{scope}.dynamic_shift=True: the number of patches decides"
        if self.process == "flow":
            names = ("betas", "beta_start", "beta_end", "train_steps", "zero_snr", "min_snr")
            return reasons | dict.fromkeys(names, f"{scope}.process='flow' has no timesteps; set it to 'ddpm'")
        if self.betas == "squaredcos_cap_v2":
            reasons |= dict.fromkeys(("beta_start", "beta_end"), f"{scope}.betas={self.betas!r} has neither")
        return reasons | dict.fromkeys(("shift", "dynamic_shift", *shifts), f"{scope}.process='ddpm' shifts no times")


@dataclass(frozen=True, kw_only=True)
class Process(ProcessSettings):
    """A noise process: times, mixtures of a medium with noise, targets and weights.

    A *time* is what the model reads: the share of noise, 0…1, of a flow; the number of the timestep, from 0, of a ddpm.
    """

    @property
    def pure(self) -> float:
        """The time of noise without any medium, from which drawing begins: 1 of a flow; behind the last timestep of a
        ddpm, whose own timesteps may all have some of the medium.
        """
        return 1.0 if self.process == "flow" else float(self.train_steps)

    @property
    def time_scale(self) -> float:
        """The divisor that puts times into 0…1: 1 of a flow, the number of timesteps of a ddpm."""
        return self.pure

    def time_at(self, share: float) -> float:
        """The time at a share, below 1, of all times: of a ddpm a whole timestep."""
        return share if self.process == "flow" else float(int(share * self.train_steps))

    @property
    def signal_shares(self) -> np.ndarray:
        """ā_t of each timestep of a ddpm, [train_steps] float64: the share of the medium's variance in the mixture."""
        return _signal_shares(self.betas, self.beta_start, self.beta_end, self.train_steps, self.zero_snr)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], patches: int) -> tuple[np.ndarray, float]:
        """Noise of a medium's ``shape``, float32, and its training time, for a medium of ``patches`` patches.

        ``rng`` is advanced.
        """
        noise = rng.standard_normal(shape, np.float32)
        return noise, self.draw_time(rng, patches)

    def draw_time(self, rng: np.random.Generator, patches: int) -> float:
        """A training time for a medium of ``patches`` patches; advances ``rng``."""
        if self.times == "uniform":
            share = float(rng.random())
        else:
            share = 1.0 / (1.0 + math.exp(-(self.times_mean + self.times_std * float(rng.standard_normal()))))
        if self.process == "ddpm":
            return float(min(int(share * self.train_steps), self.train_steps - 1))
        return float(self.shifted(share, patches))

    def draw_dropped(self, rng: np.random.Generator) -> bool:
        """Whether a medium is learned without its condition; advances ``rng`` unless none ever is."""
        return self.drop_condition > 0 and bool(rng.random() < self.drop_condition)

    def shifted(self, times: np.ndarray | float, patches: int) -> np.ndarray | float:
        """A flow's times after the shift, for a medium of ``patches`` patches."""
        shift = self.shift
        if self.dynamic_shift:
            share = (patches - self.base_patches) / (self.max_patches - self.base_patches)
            shift = math.exp(self.base_shift + (self.max_shift - self.base_shift) * share)
        return times if shift == 1 else shift * times / (1 + (shift - 1) * times)

    def shares(self, time: float) -> tuple[np.float32, np.float32]:
        """The factors of the medium and of the noise in the mixture at a time."""
        if self.process == "flow":
            return np.float32(1) - np.float32(time), np.float32(time)
        signal = 0.0 if time >= self.train_steps else float(self.signal_shares[int(time)])
        return np.float32(math.sqrt(signal)), np.float32(math.sqrt(1 - signal))

    def mixture(self, x: Values, noise: Values, time: float) -> Values:
        """The medium ``x`` with noise of its shape mixed into it."""
        of_x, of_noise = self.shares(time)
        return of_x * x + of_noise * noise

    def target(self, x: Values, noise: Values, time: float) -> Values:
        """The right prediction for the mixture, of the shape of ``x``."""
        if self.prediction == "velocity":
            return noise - x
        if self.prediction == "v":
            of_x, of_noise = self.shares(time)
            return of_x * noise - of_noise * x
        return noise if self.prediction == "noise" else x

    def medium_shares(self, time: float) -> tuple[np.float32, np.float32]:
        """The factors of the medium in the mixture and in the target at a time, which are linear in it."""
        one, none = np.float32(1), np.float32(0)
        return self.mixture(one, none, time), self.target(one, none, time)

    def weight(self, time: float) -> np.float32:
        """The weight of the squared error at a time.

        By min-SNR it is min(SNR, gamma) of an error of the medium, which is SNR times smaller for an error of the
        noise, and SNR + 1 times smaller for one of v.
        """
        if not self.min_snr:
            return np.float32(1)
        signal = 0.0 if time >= self.train_steps else float(self.signal_shares[int(time)])
        snr = signal / (1 - signal) if signal < 1 else math.inf
        if self.prediction == "noise":
            return np.float32(1 if snr <= self.min_snr else self.min_snr / snr)
        clipped = min(snr, self.min_snr)
        return np.float32(clipped / (snr + 1) if self.prediction == "v" else clipped)


@lru_cache(maxsize=16)
def _signal_shares(betas: str, start: float, end: float, steps: int, zero_snr: bool) -> np.ndarray:
    """See ``Process.signal_shares``."""
    if betas == "squaredcos_cap_v2":
        at = (np.arange(steps + 1) / steps + 0.008) / 1.008
        cosine = np.cos(at * np.pi / 2) ** 2
        values = np.minimum(1 - cosine[1:] / cosine[:-1], _MOST_BETA)
    else:
        power = 2 if betas == "scaled_linear" else 1
        values = np.linspace(start ** (1 / power), end ** (1 / power), steps) ** power
    signal = np.cumprod(1 - values)
    if zero_snr:
        root = np.sqrt(signal)
        signal = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
    signal.setflags(write=False)
    return signal
