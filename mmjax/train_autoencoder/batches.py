"""Batches of pictures for a training: a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from mmjax.configurable import ConfigError, require
from mmjax.data.sources.media import Media
from mmjax.latents.pictures import BYTES, Broken, Records, Resizing, pixels_of
from mmjax.train_autoencoder.settings import Training

_MOST_KEPT = 1 << 30
"""Bytes of decoded pictures that stay in memory."""


class Batch(NamedTuple):
    """A step's pictures, and the noise of their latents.

    Attributes:
      pictures: in -1 to 1, ``[B, H, W, C]``.
      noise: ``[B, h, w, Z]``.
    """

    pictures: Float[np.ndarray, "B H W C"]
    noise: Float[np.ndarray, "B h w Z"]


class Batches:
    """The batches of a training, and the pictures that are held out.

    Args:
      training: the settings.
      records: the pictures.

    Raises:
      ConfigError: there are too few pictures, or one cannot be read.
    """

    def __init__(self, training: Training, records: Records):
        self._training = training
        media = [each for record in records if not isinstance(record, Broken) for each in record]
        count, apart = len(media), training.held_out
        fix = f"there are {count} pictures; leave at least one to train on"
        require(apart < count, "--held_out", apart, fix)
        places = {number * count // apart for number in range(apart)} if apart else set[int]()
        self._trained = [each for number, each in enumerate(media) if number not in places]
        self._apart = [media[number] for number in sorted(places)]
        c = training.autoencoder
        self._pictures = Resizing(size=training.size, block=c.factor).pictures(c.channels)
        self._kept: dict[str, np.ndarray] = {}
        self._bytes = 0

    @property
    def held_out(self) -> int:
        """The number of pictures that are held out."""
        return len(self._apart)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        t, c = self._training, self._training.autoencoder
        rng = np.random.default_rng([t.seed, step])
        numbers = [self._number(step * t.batch + at) for at in range(t.batch)]
        pictures = self._pixels([self._trained[number] for number in numbers])
        flipped = rng.random(t.batch) < 0.5
        if t.flip:
            pictures[flipped] = pictures[flipped, :, ::-1]
        sides = (side // c.factor for side in t.size)
        return Batch(pictures, rng.standard_normal((t.batch, *sides, c.latent_channels), np.float32))

    def apart(self, first: int, count: int) -> Float[np.ndarray, "B H W C"]:
        """``count`` pictures that are held out, from number ``first`` on; the last one is repeated behind the end."""
        last = len(self._apart) - 1
        return self._pixels([self._apart[min(first + at, last)] for at in range(count)])

    def _number(self, at: int) -> int:
        """The number of the picture at place ``at`` of all epochs; each epoch has another order."""
        epoch, place = divmod(at, len(self._trained))
        return int(np.random.default_rng([self._training.seed, epoch, 1]).permutation(len(self._trained))[place])

    def _pixels(self, media: Sequence[Media]) -> Float[np.ndarray, "B H W C"]:
        with ThreadPoolExecutor() as pool:
            levels = np.stack(list(pool.map(self._levels, media)))
        return levels.astype(np.float32) / 127.5 - 1

    def _levels(self, media: Media) -> np.ndarray:
        """A picture's levels of 0 to 255, which small folders keep in memory."""
        name = media.path or media.name
        if name in self._kept:
            return self._kept[name]
        try:
            pixels = pixels_of(self._pictures, media.read(BYTES))
        except Exception as error:  # decoders may raise anything on broken files
            cause = " ".join(str(error).split())
            raise ConfigError(f"{media.name}: {cause}; remove it from the pictures") from None
        levels = np.rint((pixels + 1) * 127.5).astype(np.uint8)
        if self._bytes + levels.nbytes <= _MOST_KEPT:
            self._kept[name] = levels
            self._bytes += levels.nbytes
        return levels
