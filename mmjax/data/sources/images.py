"""Turns encoded images into media of an encoder: decodes, turns upright, resizes, normalises, pads, cuts into tiles.

`Pictures.measure` plans an image's media from its header, so that metadata needs no decoding. `Pictures.media` makes
media of exactly these sizes, which `sizes.py` computes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmjax.configurable import require
from mmjax.data.sources import storage
from mmjax.data.sources.clips import Clip
from mmjax.data.sources.config import RESAMPLES, SourceConfig
from mmjax.data.sources.orientation import PNG, TAIL, orientation, swaps_sides, upright
from mmjax.data.sources.record import Media
from mmjax.data.sources.resizing import MOST, Part, is_too_thin, resize_part
from mmjax.data.sources.sizes import Size, Step, flipped, plan, tile_grid
from mmjax.data.sources.storage import Unusable
from mmjax.data.tiles import token_count
from mmjax.data.types import EncoderSpec, Tiled

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_HEAD = 1 << 16
"""Bytes of an image that are read for its size; if they are not enough, all are read."""
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""Tags of TIFF, and a value of the latter."""


class Measure(NamedTuple):
    """Sizes of an image or a video and its media, from its header.

    Attributes:
      original: the upright image's height and width, or those of a video's frames.
      media: heights and widths of the media that it becomes, in order.
      clip: the frames of a video; None for an image.
    """

    original: Size
    media: list[Size]
    clip: Clip | None = None


def on_white(image: Image.Image) -> Image.Image:
    """The image, with an alpha channel, laid on white."""
    with_alpha = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", with_alpha.size, "white"), with_alpha)


class Pictures:
    """Makes media of a source's images for an encoder.

    Args:
      name: the source's name, for messages.
      config: the source, whose settings decide how images are resized.
      spec: the encoder's spec.

    Raises:
      ConfigError: the settings do not fit the encoder.
    """

    def __init__(self, name: str, config: SourceConfig, spec: EncoderSpec):
        self.config, self.spec = config, spec
        legal = len(config.mean) in (0, spec.channels)
        require(legal, f"{name}/Source.mean", config.mean, f"the encoder takes {spec.channels} channels")
        if config.resize in ("fixed", "anyres"):
            fit = tuple(max(1, round(side / spec.block)) * spec.block for side in config.size)
            fix = f"must be multiples of patch * merge = {spec.block}, or less than a patch more, such as {fit}"
            legal = all(side % spec.block < spec.patch and side >= spec.block for side in config.size)
            require(legal, f"{name}/Source.size", config.size, fix)
        elif config.max_patches or config.resize in ("naflex", "largest"):
            least, field = spec.patches_per_token, f"{name}/Source.max_patches"
            require(config.max_patches >= least, field, config.max_patches, f"must be {least} or more: one token's")

    def measure(self, data: bytes, *, alone: bool = True, tail: bytes = b"") -> Measure:
        """The sizes of an image and of the media that it becomes, from its header.

        Args:
          data: the start of its bytes, or all of them.
          alone: whether it is the only image of its dialogue.
          tail: the end of its bytes, if `data` is only the start.

        Raises:
          Unusable: it is no image of `FORMATS`, is too large, or cannot be resized. Pillow may raise other errors.
        """
        with _opened(data) as image:
            size = self._upright_size(image, orientation(image, tail or data))
        return Measure(size, [self._covered(step.canvas) for step in self._plan(size, alone=alone)])

    def measure_file(self, image: Media, *, alone: bool) -> Measure:
        """The `Measure` of an encoded image; reads no more of its bytes than needed. See `measure` for errors."""
        limit = self.config.byte_limit
        head = image.read(limit, _HEAD)
        begun = image.data is None and len(head) == _HEAD
        try:
            tail = _read_tail(image.path) if begun and head.startswith(PNG) else b""
            return self.measure(head, alone=alone, tail=tail)
        except Exception:
            if not begun:
                raise
            return self.measure(image.read(limit), alone=alone)  # its header may be longer, or be at its end

    def tiled(self, image: Measure) -> Tiled:
        """How an image is cut into tiles; grid (0, 0) if it is not."""
        grid = tile_grid(image.original, self.config) if len(image.media) > 1 else (0, 0)
        return Tiled(size=image.original, grid=grid)

    def tokens(self, image: Measure) -> int:
        """Number of LLM tokens of an image."""
        return token_count(self.spec, image.media, self.tiled(image))

    def sizes(self, data: bytes, *, alone: bool = True) -> list[Size]:
        """The sizes of the media that an image becomes; see `measure`."""
        return self.measure(data, alone=alone).media

    def media(self, data: bytes, *, alone: bool = True) -> list[np.ndarray]:
        """The media of an image, float32 [h, w, C], with the sizes that `measure` gives; `data`: all of its bytes."""
        with _opened(data) as image:
            turn = orientation(image, data)
            steps = self._plan(self._upright_size(image, turn), alone=alone)
            if self.config.draft:
                largest = max(step.size[0] for step in steps), max(step.size[1] for step in steps)
                # JPEGs are decoded at a half, a quarter or an eighth if that is still large enough.
                image.draft("L" if self.spec.channels == 1 else "RGB", largest if turn >= 5 else flipped(largest))
            decoded = upright(self._decoded(image), turn, image.format)
        # Tiles are cut from one resized image.
        parts: dict[tuple[bool, Size], Part] = {}
        for step in steps:
            parts[step.square, step.size] = _around(parts.get((step.square, step.size)), step.crop)
        resized = {
            (square, size): self._resized(decoded, size, part, square=square) for (square, size), part in parts.items()
        }
        corners = {key: part[:2] for key, part in parts.items()}
        return [self._on_canvas(resized[s.square, s.size], corners[s.square, s.size], s) for s in steps]

    def _decoded(self, image: Image.Image) -> Image.Image:
        """The pixels in the encoder's channels. An alpha channel is left out."""
        decoded = _eight_bits(image).convert("L" if self.spec.channels == 1 else "RGB")
        if not self.config.white or decoded.info.get("transparency") is None:
            return decoded
        return on_white(decoded).convert(decoded.mode)

    def _upright_size(self, image: Image.Image, turn: int) -> Size:
        height, width = image.height, image.width
        if height * width > self.config.pixel_limit or min(height, width) < 1:
            raise Unusable(f"{width}x{height} pixels; Source.pixel_limit is {self.config.pixel_limit}")
        return (width, height) if swaps_sides(image, turn) else (height, width)

    def _plan(self, size: Size, *, alone: bool) -> list[Step]:
        try:
            steps = self._steps(size, alone=alone)
        except ValueError as error:
            raise Unusable(str(error)) from None
        if any(is_too_thin(size, step) for step in steps):
            cause = f"resizing it takes a picture of more than {MOST >> 20}M pixels"
            shown = f"{size[1]}x{size[0]} pixels are too thin for Source.resize={self.config.resize!r}"
            raise Unusable(f"{shown}: {cause}; cut the image")
        return steps

    def _steps(self, size: Size, *, alone: bool) -> list[Step]:
        """The steps that make the media of an image of this size. Raises ValueError if the rule takes no such image."""
        return plan(size, self.config, self.spec, alone=alone)

    def _covered(self, size: Size) -> Size:
        """The size without the pixels at the right and the bottom that no whole patch covers."""
        patch = self.spec.patch
        return size[0] // patch * patch, size[1] // patch * patch

    def _resized(self, image: Image.Image, size: Size, part: Part, *, square: bool) -> np.ndarray:
        """A part of the image resized to `size`, normalised. With `square`, the image is first padded to a square."""
        around = None
        if square:
            # The mean's colour rounded down to integers, as LLaVA does.
            colour = tuple(int(255 * value) for value in self.config.mean)
            around = (colour[0] if len(colour) == 1 else colour) or 0
        resample = Image.Resampling(RESAMPLES.index(self.config.resample))
        if self.config.rounded:
            resized = resize_part(image, size, resample, part, square=around)
            return self._normalised(np.asarray(resized).reshape(*part[2:], self.spec.channels))
        colours = around if isinstance(around, tuple) else (around,) * self.spec.channels
        channels = (
            resize_part(channel.convert("F"), size, resample, part, square=colour if square else None)
            for channel, colour in zip(image.split(), colours, strict=True)
        )
        return self._normalised(np.stack([np.asarray(channel) for channel in channels], axis=-1))

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        values = np.asarray(pixels, np.float32) / 255.0
        if self.config.mean:
            values = (values - np.asarray(self.config.mean, np.float32)) / np.asarray(self.config.std, np.float32)
        return values

    def _on_canvas(self, pixels: np.ndarray, corner: Size, step: Step) -> np.ndarray:
        """The medium of a step. pixels: the resized image from `corner` on."""
        top, left, height, width = step.crop[0] - corner[0], step.crop[1] - corner[1], *step.crop[2:]
        canvas = part = pixels[top : top + height, left : left + width]
        if step.at != (0, 0) or (height, width) != step.canvas:
            canvas = np.zeros((*step.canvas, self.spec.channels), np.float32)
            if step.black:
                canvas += self._normalised(np.zeros(self.spec.channels, np.uint8))
            canvas[step.at[0] : step.at[0] + height, step.at[1] : step.at[1] + width] = part
        rows, columns = self._covered(step.canvas)
        return np.ascontiguousarray(canvas[:rows, :columns])


def _read_tail(path: str) -> bytes:
    size, _ = storage.stamp(path)
    return storage.read(path, max(0, size - TAIL), limit=TAIL)


def _around(part: Part | None, crop: Part) -> Part:
    """The smallest part that contains both."""
    if part is None or not part[2] * part[3]:
        return crop
    if not crop[2] * crop[3]:
        return part
    top, left = min(part[0], crop[0]), min(part[1], crop[1])
    bottom, right = max(part[0] + part[2], crop[0] + crop[2]), max(part[1] + part[3], crop[1] + crop[3])
    return top, left, bottom - top, right - left


def _eight_bits(image: Image.Image) -> Image.Image:
    """Converts grey of 16 bits to 8, by the upper bits, as Pillow reads 16-bit colours; returns others unchanged."""
    if image.mode in ("I", "F"):
        kind = "whole" if image.mode == "I" else "floating-point"
        raise Unusable(f"grey in {kind} numbers of 32 bits has no white; save it with 8 or 16 bits")
    if not image.mode.startswith("I;16"):
        return image
    tags = getattr(image, "tag_v2", {})
    bits = max(8, min(16, *tags.get(_BITS_PER_SAMPLE, (16,))))
    values = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    return Image.fromarray(255 - values if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else values)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, for which there is a limit, and of odd metadata
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:  # whose message names an address in memory
            raise Unusable(f"no {', '.join(FORMATS)} image") from None
        with image:
            yield image
