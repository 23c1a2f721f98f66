"""Turns encoded images into media of an encoder: decodes, turns upright, resizes, normalises, pads, cuts into tiles.

`Pictures.measure` plans an image's media from its header, so that metadata costs no decoding; `Pictures.media` makes
media of exactly these sizes. How images get their sizes is in `sizes.py`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmjax.configurable import require
from mmjax.data.sources.config import RESAMPLES, SourceConfig
from mmjax.data.sources.sizes import Size, Step, flipped, plan, tile_grid
from mmjax.data.sources.storage import Unusable
from mmjax.data.tiles import token_count
from mmjax.data.types import EncoderSpec, Tiled

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_UPRIGHT = {  # by the Orientation tag of EXIF
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112


class Measure(NamedTuple):
    """What an image's header says of its media.

    Attributes:
      original: the upright image's height and width.
      media: heights and widths of the media that it becomes, in their order.
    """

    original: Size
    media: list[Size]


class Pictures:
    """Images of a source for an encoder. Raises ConfigError where its settings do not fit the encoder."""

    def __init__(self, name: str, config: SourceConfig, spec: EncoderSpec):
        self.config, self.spec = config, spec
        legal = len(config.mean) in (0, spec.channels)
        require(legal, f"{name}/Source.mean", config.mean, f"the encoder takes {spec.channels} channels")
        if config.resize in ("fixed", "anyres"):
            fit = tuple(max(1, round(side / spec.block)) * spec.block for side in config.size)
            fix = f"must be multiples of patch * merge = {spec.block}, or less than a patch more, such as {fit}"
            legal = all(side % spec.block < spec.patch and side >= spec.block for side in config.size)
            require(legal, f"{name}/Source.size", config.size, fix)
        elif config.max_patches or config.resize == "naflex":
            least, field = spec.patches_per_token, f"{name}/Source.max_patches"
            require(config.max_patches >= least, field, config.max_patches, f"must be {least} or more: one token's")

    def measure(self, data: bytes, *, alone: bool = True) -> Measure:
        """The sizes of an image and of the media that it becomes, from its header (the start of its bytes may do).

        alone: whether it is the only image of its dialogue.
        """
        with _opened(data) as image:
            upright = self._upright_size(image)
        return Measure(upright, [self._covered(step.canvas) for step in self._plan(upright, alone)])

    def tiled(self, image: Measure) -> Tiled:
        """How an image is cut."""
        grid = tile_grid(image.original, self.config) if len(image.media) > 1 else (0, 0)
        return Tiled(size=image.original, grid=grid)

    def tokens(self, image: Measure) -> int:
        """LLM tokens of an image."""
        return token_count(self.spec, image.media, self.tiled(image))

    def sizes(self, data: bytes, *, alone: bool = True) -> list[Size]:
        """The sizes of the media that an image becomes; see `measure`."""
        return self.measure(data, alone=alone).media

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The media of an image, float32 [h, w, C], sides multiples of patch * merge; see `measure`."""
        with _opened(data) as image:
            upright = self._upright_size(image)
            turn = _orientation(image)
            steps = self._plan(upright, alone)
            if self.config.draft:
                largest = max(step.size[0] for step in steps), max(step.size[1] for step in steps)
                # JPEGs are decoded at a half, a quarter or an eighth where that is still large enough.
                image.draft("L" if self.spec.channels == 1 else "RGB", largest if turn >= 5 else flipped(largest))
            decoded = self._decoded(image)
        if turn in _UPRIGHT:
            decoded = decoded.transpose(_UPRIGHT[turn])
        # Tiles are cut from one resized image.
        resized = {(step.square, step.size): self._resized(decoded, step) for step in {_uncut(one) for one in steps}}
        return [self._laid(resized[step.square, step.size], step) for step in steps]

    def _decoded(self, image: Image.Image) -> Image.Image:
        """The pixels in the encoder's channels. An alpha channel is left out."""
        decoded = image.convert("L" if self.spec.channels == 1 else "RGB")
        if not self.config.white or decoded.info.get("transparency") is None:
            return decoded
        seen = decoded.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert(decoded.mode)

    def _upright_size(self, image: Image.Image) -> Size:
        height, width = image.height, image.width
        if height * width > self.config.pixel_limit or min(height, width) < 1:
            raise Unusable(f"{width}x{height} pixels; Source.pixel_limit is {self.config.pixel_limit}")
        return (width, height) if _orientation(image) >= 5 else (height, width)

    def _plan(self, size: Size, alone: bool) -> list[Step]:
        try:
            return plan(size, self.config, self.spec, alone=alone)
        except ValueError as error:
            raise Unusable(str(error)) from None

    def _covered(self, size: Size) -> Size:
        """The size without the pixels at the right and the bottom that no whole patch covers."""
        patch = self.spec.patch
        return size[0] // patch * patch, size[1] // patch * patch

    def _resized(self, image: Image.Image, step: Step) -> np.ndarray:
        """The whole image as `step` resizes it, normalised."""
        if step.square and image.height != image.width:
            # The mean's colour as whole numbers, rounded down: LLaVA's rule.
            side, colour = max(image.height, image.width), tuple(int(255 * value) for value in self.config.mean)
            around = Image.new(image.mode, (side, side), (colour[0] if len(colour) == 1 else colour) or 0)
            around.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = around
        if (image.height, image.width) != step.size:
            filter = Image.Resampling(RESAMPLES.index(self.config.resample))
            image = image.resize(flipped(step.size), filter)
        return self._normalised(np.asarray(image).reshape(*step.size, self.spec.channels))

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        values = np.asarray(pixels, np.float32) / 255.0
        if self.config.mean:
            values = (values - np.asarray(self.config.mean, np.float32)) / np.asarray(self.config.std, np.float32)
        return values

    def _laid(self, pixels: np.ndarray, step: Step) -> np.ndarray:
        top, left, height, width = step.crop
        canvas = part = pixels[top : top + height, left : left + width]
        if step.at != (0, 0) or (height, width) != step.canvas:
            canvas = np.zeros((*step.canvas, self.spec.channels), np.float32)
            if step.black:
                canvas += self._normalised(np.zeros(self.spec.channels, np.uint8))
            canvas[step.at[0] : step.at[0] + height, step.at[1] : step.at[1] + width] = part
        rows, columns = self._covered(step.canvas)
        return np.ascontiguousarray(canvas[:rows, :columns])


def _uncut(step: Step) -> Step:
    return replace(step, crop=(0, 0, 0, 0), at=(0, 0), canvas=(0, 0))


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, of which we judge ourselves, and of odd metadata
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:  # whose message names an address in memory
            raise Unusable(f"no {', '.join(FORMATS)} image") from None
        with image:
            yield image


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, from what was read with the header: asking Pillow for it would decode a PNG."""
    exif = image.info.get("exif")
    if not exif:
        return 1
    found = Image.Exif()
    try:
        found.load(exif)
        turn = found.get(_ORIENTATION, 1)
    except Exception:  # anything may be in there, and none of it keeps the image from being shown
        return 1
    return turn if isinstance(turn, int) and turn in _UPRIGHT else 1
