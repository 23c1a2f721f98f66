"""Noise processes of generators, written apart from `mmjax.data.process`: mixtures, targets and weights of errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mmjax.models.diffusion import Diffusion


def signal_share(settings: Diffusion, timestep: float) -> float:
    """The share of a medium's variance that is left at a timestep of a ddpm: the product of 1 - beta up to it.

    With `zero_snr` the roots of these products are shifted and stretched, so that the last is 0 and the first stays.
    A timestep behind the last has none of the medium.
    """
    if timestep >= settings.train_steps:
        return 0.0
    root = math.sqrt(math.prod(1 - _beta(settings, step) for step in range(int(timestep) + 1)))
    if not settings.zero_snr:
        return root**2
    first = math.sqrt(1 - _beta(settings, 0))
    last = math.sqrt(math.prod(1 - _beta(settings, step) for step in range(settings.train_steps)))
    return ((root - last) / (first - last) * first) ** 2


def _beta(settings: Diffusion, step: int) -> float:
    """The variance of the noise that a timestep adds."""
    if settings.betas == "squaredcos_cap_v2":
        left, right = (
            math.cos((number / settings.train_steps + 0.008) / 1.008 * math.pi / 2) ** 2 for number in (step, step + 1)
        )
        return min(1 - right / left, 0.999)
    share = step / (settings.train_steps - 1)
    if settings.betas == "linear":
        return settings.beta_start + share * (settings.beta_end - settings.beta_start)
    root, end = math.sqrt(settings.beta_start), math.sqrt(settings.beta_end)
    return (root + share * (end - root)) ** 2


def noised(settings: Diffusion, x: np.ndarray, noise: np.ndarray, time: float) -> tuple[np.ndarray, np.ndarray, float]:
    """The mixture of a medium `x` with noise at a time, the right prediction for it, and the weight of a squared error.

    `settings` are the generator's, such as a `DiTConfig`, and `noise` has the shape of `x`.
    """
    if settings.process == "flow":
        return (1 - time) * x + time * noise, noise - x, 1.0
    signal = signal_share(settings, time)
    seen = math.sqrt(signal) * x + math.sqrt(1 - signal) * noise
    targets = {"noise": noise, "sample": x, "v": math.sqrt(signal) * noise - math.sqrt(1 - signal) * x}
    return seen, targets[settings.prediction], _weight(settings, signal)


def _weight(settings: Diffusion, signal: float) -> float:
    """The min-SNR weight of an error of the prediction."""
    if not settings.min_snr:
        return 1.0
    snr = signal / (1 - signal)
    of_medium = min(snr, settings.min_snr)
    return {"sample": of_medium, "noise": of_medium / snr if snr else 1.0, "v": of_medium / (snr + 1)}[
        settings.prediction
    ]


def share_of(settings: Diffusion, time: float) -> float:
    """A time of the process in 0…1."""
    return time / settings.train_steps if settings.process == "ddpm" else time


def flow_times(settings: Diffusion, patches: int) -> list[float]:
    """The times at which a flow's picture of so many patches is predicted, descending, and 0 at the end."""
    shift = settings.shift
    if settings.dynamic_shift:
        slope = (settings.max_shift - settings.base_shift) / (settings.max_patches - settings.base_patches)
        shift = math.exp(settings.base_shift + slope * (patches - settings.base_patches))
    times = [1 - step / settings.steps for step in range(settings.steps)]
    times = [shift * time / (1 + (shift - 1) * time) for time in times]
    if settings.terminal_time and settings.steps > 1:
        stretch = (1 - settings.terminal_time) / (1 - times[-1])
        times = [1 - stretch * (1 - time) for time in times]
    return [*times, 0.0]
