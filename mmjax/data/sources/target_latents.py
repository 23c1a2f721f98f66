"""Media that a generator is to make: pictures, recordings, or latents of pictures.

Latents are made ahead, or in the step, or blank ones of prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from mmjax.configurable import require
from mmjax.data.latents import LatentStore, key_of
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.images import Measure, Pictures
from mmjax.data.sources.media import Media
from mmjax.data.sources.recordings import Recordings
from mmjax.data.sources.sizes import Size, Step, stretched
from mmjax.data.sources.storage import Unusable
from mmjax.data.sources.target_pictures import (
    PIXEL_CHANNELS,
    TargetPictures,
    makes_pictures,
    with_reference_size,
)
from mmjax.data.types import BLANK, EncoderSpec


class Targets(Protocol):
    """Makes the media that a generator is to make of a source's pictures or recordings."""

    def measure_file(self, image: Media, *, alone: bool) -> Measure:
        """The size of the medium that an encoded picture or recording becomes; (frames, 0) of the latter.

        Raises Unusable if it has none.
        """
        ...

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The medium of a picture, float32; ``data`` are all of its bytes."""
        ...

    def reference_size(self, image: Media) -> Size:
        """The size of a picture that others are made from, as the generator sees it. Raises Unusable for none."""
        ...

    def reference(self, data: bytes) -> np.ndarray:
        """A picture that others are made from, float32 [h, w, C]; ``data`` are all of its bytes."""
        ...

    @property
    def files(self) -> tuple[str, ...]:
        """The files that decide which media there are, beside those of the source."""
        ...


def targets_of(name: str, config: SourceConfig, generators: dict[str, EncoderSpec]) -> dict[str, Targets]:
    """The maker of each generator's media, by the generator's name; generators of other media are left out.

    Args:
      name: the source's name, for messages.
      config: the source.
      generators: specs by name.

    Raises:
      ConfigError: the settings do not fit a generator.
    """
    makers: dict[str, Targets] = {}
    for generator, spec in generators.items():
        if spec.latents == BLANK:
            makers[generator] = BlankLatents(name, config, spec)
        elif spec.pictures:
            makers[generator] = EncodedPictures(name, config, generator, spec)
        elif spec.latents:
            makers[generator] = TargetLatents(config, generator, spec)
        elif spec.sounds:
            makers[generator] = TargetRecordings(config, spec)
        elif makes_pictures(spec):
            makers[generator] = TargetPictures(name, config, generator, spec)
    return makers


class TargetLatents:
    """Latents that ``python -m mmjax.latents`` has made of a source's pictures, found by the content of their files.

    Args:
      config: the source, whose ``byte_limit`` is read.
      generator: the generator's name.
      spec: the generator's spec.

    Raises:
      ConfigError: the latents have other channels than the generator, or are damaged.
    """

    def __init__(self, config: SourceConfig, generator: str, spec: EncoderSpec):
        self._store, self._spec, self._limit = LatentStore.open(spec.latents), spec, config.byte_limit
        self._generator, channels = generator, self._store.description.channels
        fix = f"they have {channels} channels, and {generator!r} makes {spec.channels}; set its channels to {channels}"
        require(channels == spec.channels, f"{generator}/Latents.path", spec.latents, fix)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of latents."""
        return self._store.files

    def measure_file(self, image: Media, *, alone: bool) -> Measure:
        """The size of a picture's latent. Raises Unusable if there is none, or the generator does not make its size."""
        del alone
        size = self._store.size(self._key(image.read(self._limit)))
        block = self._spec.block
        if any(side % block for side in size):
            pixels = block * self._spec.factor
            fix = f"make latents with --block={pixels}, or --size of multiples of it"
            shown = f"its latent is {size[0]} x {size[1]}"
            raise Unusable(f"{shown}, and {self._generator!r} makes sides that are multiples of {block}; {fix}")
        return Measure(size, [size])

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The distribution of a picture's latent, float32 [h, w, 2 Z]: its mean and its deviation."""
        del alone
        return [self._store.distribution(self._key(data))]

    def reference_size(self, image: Media) -> Size:
        """See `Targets`."""
        return self.measure_file(image, alone=True).media[0]

    def reference(self, data: bytes) -> np.ndarray:
        """See `Targets`: the mean of the latent's distribution."""
        return self._store.latent(self._key(data), None)

    def _key(self, data: bytes) -> str:
        key = key_of(data)
        if key not in self._store:
            fix = "run python -m mmjax.latents over all pictures"
            raise Unusable(f"it has no latent in {self._store.folder}; {fix}")
        return key


class EncodedPictures:
    """Pictures for an encoder of latents; their sizes are those of latents.

    Args:
      name: the source's name, for messages.
      config: the source.
      generator: the generator's name.
      spec: the generator's spec, with ``pictures``.

    Raises:
      ConfigError: the settings do not fit the generator.
    """

    files = ()

    def __init__(self, name: str, config: SourceConfig, generator: str, spec: EncoderSpec):
        assert spec.pictures
        self._pictures, self._factor = TargetPictures(name, config, generator, spec.pictures), spec.factor

    def measure_file(self, image: Media, *, alone: bool) -> Measure:
        """The size of the latent of an encoded picture. Raises Unusable if it cannot be read."""
        (size,) = self._pictures.measure_file(image, alone=alone).media
        return Measure(self._of_latent(size), [self._of_latent(size)])

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The picture, float32 [H, W, C] in -1…1."""
        return self._pictures.media(data, alone=alone)

    def reference_size(self, image: Media) -> Size:
        """See `Targets`."""
        return self._of_latent(self._pictures.reference_size(image))

    def reference(self, data: bytes) -> np.ndarray:
        """See `Targets`: the picture, float32 [H, W, C]."""
        return self._pictures.reference(data)

    def _of_latent(self, size: tuple[int, ...]) -> Size:
        return size[0] // self._factor, size[1] // self._factor


def blank_medium(spec: EncoderSpec, size: tuple[int, ...], frames: int = 1) -> np.ndarray:
    """Zeros of the shape that a medium's file gives: of a picture, a recording, or distributions of a latent.

    Args:
      spec: of the encoder or generator.
      size: height and width, or frames of a recording; in pixels of latents where it is encoded in the step.
      frames: frames of a medium, one behind another along channels.
    """
    if spec.pictures:
        return np.zeros((*(side * spec.factor for side in size), spec.pictures.channels), np.float32)
    return np.zeros((*size, spec.channels * (2 if spec.latents else frames)), np.float32)


def unit_distribution(spec: EncoderSpec, size: tuple[int, ...]) -> np.ndarray:
    """Means of 0 and deviations of 1, [h, w, 2 C]: ``with_noise`` draws a latent's noise of them."""
    distribution = np.zeros((*size, 2 * spec.channels), np.float32)
    distribution[..., spec.channels :] = 1
    return distribution


class TargetRecordings:
    """Recordings as log-mel frames; they end with the recording, or at ``Source.max_seconds``.

    Args:
      config: the source.
      spec: the generator's spec.
    """

    files = ()

    def __init__(self, config: SourceConfig, spec: EncoderSpec):
        self._recordings, self._limit = Recordings(config, spec), config.byte_limit

    def measure_file(self, image: Media, *, alone: bool) -> Measure:
        """The number of frames of a recording. Raises Unusable if it cannot be read."""
        del alone
        size = self._recordings.frames(image.read(self._limit)), 0
        return Measure(size, [size])

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The frames of a recording, float32 [F, M]."""
        del alone
        return [self._recordings(data)]

    def reference_size(self, image: Media) -> Size:
        """Raises Unusable: no recording is made from pictures."""
        raise Unusable(f"{image.name}: recordings are made from no pictures")

    def reference(self, data: bytes) -> np.ndarray:
        """Raises Unusable, as ``reference_size`` does."""
        raise Unusable("recordings are made from no pictures")


class BlankLatents(Pictures):
    """Blank latents of the sizes that blank pictures name, for prompts whose pictures are drawn.

    Args:
      name: the source's name, for messages.
      config: the source.
      spec: the generator's spec.
    """

    files = ()

    def __init__(self, name: str, config: SourceConfig, spec: EncoderSpec):
        super().__init__(name, SourceConfig(path=config.path, resize="smart", max_patches=0), spec)
        pixels = replace(spec, patch=spec.block * spec.factor, merge=1, channels=PIXEL_CHANNELS, canvases=())
        self._references = TargetPictures(name, with_reference_size(config), "", pixels) if spec.references else None

    def reference_size(self, image: Media) -> Size:
        """See `Targets`."""
        assert self._references
        height, width = self._references.reference_size(image)
        return height // self.spec.factor, width // self.spec.factor

    def reference(self, data: bytes) -> np.ndarray:
        """See `Targets`: pixels in place of the latent, -1 to 1, which its autoencoder is to encode."""
        assert self._references
        return self._references.reference(data)

    def _steps(self, size: Size, *, alone: bool) -> list[Step]:
        return [stretched((size[0] // self.spec.factor, size[1] // self.spec.factor))]

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """Zeros [h, w, 2 Z]."""
        return [np.zeros((*size, 2 * self.spec.channels), np.float32) for size in self.sizes(data, alone=alone)]
