"""The noise and times of media that generators learn to make: functions of the seed, the split and the sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mmjax.data.types import EncoderSpec, Sample

SPLITS = ("train", "test")
_NOISE, _DROPS, _LATENTS = 2, 3, 4
"""Separate these random numbers from each other, and from a task's other ones of the same sample."""


def with_noise(
    sample: Sample,
    generators: Mapping[str, EncoderSpec],
    counts: Mapping[str, int],
    *,
    seed: int,
    split: str,
    index: int,
) -> Sample:
    """The sample with noise and a time for each of its media of some generators, and the marks of dropped conditions.

    Latents are drawn of their distributions first. Noise is normal, float32, of the medium's shape. It depends on the
    arguments and the shapes of a generator's media alone: an index that comes once in training, as each epoch has
    others, has noise of its own, and held-out samples have the same in every evaluation. Whether a condition is dropped
    is the same in a process that opens no media. A
    sample with a broken part has no noise.

    Args:
      sample: a sample, with the media that are opened in this process.
      generators: specs of generators of patches, by name; those without media in the sample get nothing.
      counts: number of the sample's media by generator, opened or not; 0 for a missing one.
      seed: the run's seed.
      split: "train" or "test".
      index: the number of the sample, from 0.
    """
    noise, times, dropped = dict(sample.noise), dict(sample.times), dict(sample.dropped)
    entropy = seed, SPLITS.index(split), index
    latent = {name for name, spec in generators.items() if spec.latents} & sample.media.keys()
    if latent:
        latents = {name: _latents(sample.media[name], np.random.default_rng([*entropy, _LATENTS])) for name in latent}
        sample = replace(sample, media={**sample.media, **latents})
    for name, spec in generators.items():
        media, process = () if sample.broken else sample.media.get(name, ()), spec.process
        if media:
            rng = np.random.default_rng([*entropy, _NOISE])
            drawn = [process.draw(rng, medium.shape, spec.patches(*medium.shape[:-1])) for medium in media]
            noise[name], times[name] = tuple(of for of, _ in drawn), tuple(time for _, time in drawn)
        if process.drop_condition and (count := counts.get(name, 0)):
            rng = np.random.default_rng([*entropy, _DROPS])
            dropped[name] = tuple(process.draw_dropped(rng) for _ in range(count))
    return replace(sample, noise=noise, times=times, dropped=dropped)


def _latents(distributions: tuple[np.ndarray, ...], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Latents [h, w, Z] of their means and deviations, which are side by side in [h, w, 2 Z]."""
    halves = (np.split(distribution, 2, axis=-1) for distribution in distributions)
    return tuple(mean + deviation * rng.standard_normal(mean.shape, np.float32) for mean, deviation in halves)
