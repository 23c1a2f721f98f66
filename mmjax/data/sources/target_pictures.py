"""Turns encoded images into pictures that a generator is to make: upright, of a size that it makes, in -1…1."""

from __future__ import annotations

from dataclasses import replace
from math import floor

import numpy as np
from PIL import Image

from mmjax.configurable import require
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.images import Pictures, on_white
from mmjax.data.sources.media import Media
from mmjax.data.sources.sizes import Size, Step, covering, smart_size
from mmjax.data.types import EncoderSpec

PIXEL_CHANNELS = 3
"""Red, green and blue."""
_CHANNELS = (1, PIXEL_CHANNELS)
"""Channels of pictures: grey, or red, green and blue."""

_EPSILON = 1e-9
"""More than rounding takes off a side that fits a canvas exactly."""


class TargetPictures(Pictures):
    """Makes the pictures of a source that a generator is to make.

    An image is scaled, aspect kept, until it covers `Source.drawn_size`, or the multiples of the generator's block that
    are nearest to its sides with at most `Source.drawn_pixels` pixels, within its largest canvas. What is too much is
    cut off around the middle. Transparent pixels are laid on white. Levels 0…255 become -1…1: level / 127.5 - 1.

    Args:
      name: the source's name, for messages.
      config: the source.
      generator: the generator's name.
      spec: the generator's spec.

    Raises:
      ConfigError: the settings do not fit the generator.
    """

    def __init__(self, name: str, config: SourceConfig, generator: str, spec: EncoderSpec):
        block, size = spec.block, config.drawn_size
        self._size = size if any(size) else None
        nearest = tuple(max(1, round(side / block)) * block for side in size)
        fix = f"{generator!r} makes sides of multiples of {block} pixels; set it to such, as {nearest}"
        require(not any(side % block for side in size), f"{name}/Source.drawn_size", size, fix)
        fix = f"{generator!r} makes pictures of at least {block} by {block} pixels; set it to {block * block} or more"
        require(config.drawn_pixels >= block * block, f"{name}/Source.drawn_pixels", config.drawn_pixels, fix)
        if self._size and spec.canvases:
            spec.canvas(spec.grid(*size))  # raises if none holds it
        half = (0.5,) * spec.channels
        super().__init__(name, replace(config, preset="", resize="smart", max_patches=0, mean=half, std=half), spec)

        rule = with_reference_size(config)
        is_same = not spec.references or rule == config
        self._of_references = self if is_same else TargetPictures(name, rule, generator, spec)

    files = ()

    def reference_size(self, image: Media) -> Size:
        """See `Targets`."""
        (size,) = self._of_references.measure_file(image, alone=True).media
        return size

    def reference(self, data: bytes) -> np.ndarray:
        """See `Targets`."""
        (picture,) = self._of_references.media(data)
        return picture

    def _steps(self, size: Size, *, alone: bool) -> list[Step]:
        return [covering(size, self._size or self._nearest(size))]

    def _nearest(self, size: Size) -> Size:
        """Height and width for a picture in its own shape, within the largest canvas."""
        block = self.spec.block
        nearest = smart_size(size, block, 0, self.config.drawn_pixels)
        most = [self.spec.patch * side for side in (self.spec.canvases or [nearest])[-1]]
        if not self.spec.canvases or (nearest[0] <= most[0] and nearest[1] <= most[1]):
            return nearest
        scale = min(most[0] / size[0], most[1] / size[1])
        height, width = (max(1, floor(side * scale / block + _EPSILON)) * block for side in size)
        return height, width

    def _decoded(self, image: Image.Image) -> Image.Image:
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = on_white(image)
        return super()._decoded(image)


def with_reference_size(config: SourceConfig) -> SourceConfig:
    """The source with `reference_size` and `reference_pixels`, if they are set, in place of `drawn_size` and so on."""
    if not (any(config.reference_size) or config.reference_pixels):
        return config
    sizes = {"drawn_size": config.reference_size, "drawn_pixels": config.reference_pixels or config.drawn_pixels}
    return replace(config, reference_size=(0, 0), reference_pixels=0, **sizes)


def makes_pictures(spec: EncoderSpec) -> bool:
    """Whether a module is a generator whose media are pictures as files have them: of one channel or three."""
    return spec.drawn and not spec.codes and spec.axes == 2 and spec.channels in _CHANNELS
