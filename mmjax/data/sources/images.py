"""Turns encoded images into media of an encoder: decodes, turns upright, resizes, normalises, pads, cuts into tiles.

`Pictures.sizes` plans an image's media from its header, so that metadata costs no decoding; `Pictures.media` makes
media of exactly these sizes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmjax.configurable import require
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.storage import Unusable
from mmjax.data.types import EncoderSpec

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
Size = tuple[int, int]
"""Height and width."""
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


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Resize to `size`, then cut out `crop` (top, left, height, width), lay it at `at` on a canvas of `canvas`."""

    size: Size
    crop: tuple[int, int, int, int]
    at: Size
    canvas: Size


class Pictures:
    """Images of a source for an encoder. Raises ConfigError where its settings do not fit the encoder."""

    def __init__(self, name: str, config: SourceConfig, spec: EncoderSpec):
        self.config, self.spec = config, spec
        legal = len(config.mean) in (0, spec.channels)
        require(legal, f"{name}/Source.mean", config.mean, f"the encoder takes {spec.channels} channels")
        if config.resize != "budget":
            fit = tuple(max(1, round(side / spec.block)) * spec.block for side in config.size)
            fix = f"must be multiples of patch * merge = {spec.block}, or less than a patch more, such as {fit}"
            legal = all(side % spec.block < spec.patch and side >= spec.block for side in config.size)
            require(legal, f"{name}/Source.size", config.size, fix)
        elif config.max_patches:
            least, field = spec.patches_per_token, f"{name}/Source.max_patches"
            require(config.max_patches >= least, field, config.max_patches, f"must be {least} or more: one token's")

    def sizes(self, data: bytes) -> list[Size]:
        """The sizes of the media that an image becomes, from its header (the start of its bytes may do)."""
        with _opened(data) as image:
            return [self._covered(step.canvas) for step in self._plan(self._upright_size(image))]

    def media(self, data: bytes) -> list[np.ndarray]:
        """The media of an image, float32 [h, w, C], sides multiples of patch * merge."""
        with _opened(data) as image:
            upright = self._upright_size(image)
            turn = _orientation(image)
            steps = self._plan(upright)
            largest = max(step.size[0] for step in steps), max(step.size[1] for step in steps)
            # JPEGs are decoded at a half, a quarter or an eighth where that is still large enough.
            image.draft("L" if self.spec.channels == 1 else "RGB", largest if turn >= 5 else _flipped(largest))
            decoded = image.convert("L" if self.spec.channels == 1 else "RGB")
        if turn in _UPRIGHT:
            decoded = decoded.transpose(_UPRIGHT[turn])
        resized = {size: self._resized(decoded, size) for size in {step.size for step in steps}}
        return [self._laid(resized[step.size], step) for step in steps]

    def _upright_size(self, image: Image.Image) -> Size:
        height, width = image.height, image.width
        if height * width > self.config.pixel_limit or min(height, width) < 1:
            raise Unusable(f"{width}x{height} pixels; Source.pixel_limit is {self.config.pixel_limit}")
        return (width, height) if _orientation(image) >= 5 else (height, width)

    def _plan(self, size: Size) -> list[_Step]:
        config = self.config
        if config.resize == "budget":
            bounded = self._bounded(size)
            return [_Step(size=bounded, crop=(0, 0, *bounded), at=(0, 0), canvas=self._padded(bounded))]
        if config.resize == "fixed":
            return [_fitted(size, config.size, config.fit)]
        return [_fitted(size, config.size, "stretch"), *self._tiles(size)]

    def _bounded(self, size: Size) -> Size:
        """The size scaled down, aspect kept, until pixels and patches (padding included) are within the budget."""
        height, width = size
        config, pixels, shrink = self.config, self.spec.patch**2, 1.0
        if config.max_pixels:
            shrink = min(shrink, sqrt(config.max_pixels / (height * width)))
        if config.max_patches:
            shrink = min(shrink, sqrt(config.max_patches * pixels / (height * width)))
        while True:
            bounded = max(1, int(height * shrink)), max(1, int(width * shrink))
            if not config.max_patches or self.spec.patches(*self._padded(bounded)) <= config.max_patches:
                return bounded
            shrink *= 0.98

    def _padded(self, size: Size) -> Size:
        block = self.spec.block
        return -(-size[0] // block) * block, -(-size[1] // block) * block

    def _covered(self, size: Size) -> Size:
        """The size without the pixels at the right and the bottom that no whole patch covers."""
        patch = self.spec.patch
        return size[0] // patch * patch, size[1] // patch * patch

    def _tiles(self, size: Size) -> Iterator[_Step]:
        """Tiles of the grid that keeps most of the image's pixels and, of those, wastes least (LLaVA-NeXT's rule)."""
        height, width = self.config.size

        def kept(grid: Size) -> tuple[int, int]:
            whole = grid[0] * height, grid[1] * width
            inside = _inside(size, whole)
            useful = min(inside[0] * inside[1], size[0] * size[1])
            return useful, -(whole[0] * whole[1] - useful)

        rows, columns = max(self.config.grids, key=kept)
        whole = rows * height, columns * width
        inside = _inside(size, whole)
        top, left = (whole[0] - inside[0]) // 2, (whole[1] - inside[1]) // 2
        for row in range(rows):
            for column in range(columns):
                # The part of the resized image under this tile, and where in the tile it lies.
                begin = max(0, row * height - top), max(0, column * width - left)
                end = (
                    max(begin[0], min(inside[0], (row + 1) * height - top)),
                    max(begin[1], min(inside[1], (column + 1) * width - left)),
                )
                at = max(0, top - row * height), max(0, left - column * width)
                crop = (*begin, end[0] - begin[0], end[1] - begin[1])
                yield _Step(size=inside, crop=crop, at=at, canvas=(height, width))

    def _resized(self, image: Image.Image, size: Size) -> np.ndarray:
        if (image.height, image.width) != size:
            image = image.resize(_flipped(size), Image.Resampling.BICUBIC)
        pixels = np.asarray(image, np.float32).reshape(*size, self.spec.channels) / 255.0
        if self.config.mean:
            pixels = (pixels - np.asarray(self.config.mean, np.float32)) / np.asarray(self.config.std, np.float32)
        return pixels

    def _laid(self, pixels: np.ndarray, step: _Step) -> np.ndarray:
        top, left, height, width = step.crop
        canvas = part = pixels[top : top + height, left : left + width]
        if step.at != (0, 0) or (height, width) != step.canvas:
            canvas = np.zeros((*step.canvas, self.spec.channels), np.float32)
            canvas[step.at[0] : step.at[0] + height, step.at[1] : step.at[1] + width] = part
        rows, columns = self._covered(step.canvas)
        return np.ascontiguousarray(canvas[:rows, :columns])


def _fitted(size: Size, wanted: Size, fit: str) -> _Step:
    if fit == "pad":
        inside = _inside(size, wanted)
        at = (wanted[0] - inside[0]) // 2, (wanted[1] - inside[1]) // 2
        return _Step(size=inside, crop=(0, 0, *inside), at=at, canvas=wanted)
    if fit == "stretch":
        return _Step(size=wanted, crop=(0, 0, *wanted), at=(0, 0), canvas=wanted)
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    over = max(wanted[0], round(size[0] * scale)), max(wanted[1], round(size[1] * scale))
    crop = ((over[0] - wanted[0]) // 2, (over[1] - wanted[1]) // 2, *wanted)
    return _Step(size=over, crop=crop, at=(0, 0), canvas=wanted)


def _inside(size: Size, whole: Size) -> Size:
    """The largest size of the same aspect that fits into `whole`."""
    scale = min(whole[0] / size[0], whole[1] / size[1])
    return (
        min(whole[0], max(1, round(size[0] * scale))),
        min(whole[1], max(1, round(size[1] * scale))),
    )


def _flipped(size: Size) -> Size:
    return size[1], size[0]


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
