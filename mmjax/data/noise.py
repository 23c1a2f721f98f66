"""The noise and times of media that generators learn to make: functions of the seed, the split and the sample."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from mmjax.data.types import Sample

SPLITS = ("train", "test")
_PURPOSE = 2
"""Separates these random numbers from a task's other ones of the same sample."""


def with_noise(sample: Sample, generators: Collection[str], *, seed: int, split: str, index: int) -> Sample:
    """The sample with noise and a time for each of its media of some generators.

    Noise is normal, float32, of the medium's shape; times are uniform in 0…1. They depend on the arguments and the
    shapes of a generator's media alone: an index that comes once in training, as each epoch has others, has noise of
    its own, and held-out samples have the same in every evaluation.

    Args:
      sample: a sample, with the media that are opened in this process.
      generators: names of generators of patches; those without media in the sample get nothing.
      seed: the run's seed.
      split: "train" or "test".
      index: the number of the sample, from 0.
    """
    noise, times = dict(sample.noise), dict(sample.times)
    for name in generators:
        if media := sample.media.get(name, ()):
            rng = np.random.default_rng([seed, SPLITS.index(split), index, _PURPOSE])
            drawn = [(rng.standard_normal(medium.shape, np.float32), float(rng.random())) for medium in media]
            noise[name], times[name] = tuple(of for of, _ in drawn), tuple(time for _, time in drawn)
    return replace(sample, noise=noise, times=times)
