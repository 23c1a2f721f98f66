"""The sizes of images: a `Step` for each medium that an image becomes. Only arithmetic, no pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, sqrt

from mmjax.data.sources.config import SourceConfig
from mmjax.data.types import EncoderSpec

Size = tuple[int, int]
"""Height and width."""
_MOST_ASPECT = 200
"""Qwen2-VL takes no image whose longer side is more than so many times its shorter side."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One medium of an image: the image is resized, cropped, and placed on a canvas.

    Attributes:
      size: height and width after resizing.
      crop: top, left, height and width of the part that is cut out.
      at: top and left of that part on the canvas.
      canvas: height and width of the medium.
      square: whether the image is first padded to a square in the colour of the mean.
      black: whether the rest of the canvas is black before normalising, or else 0 after it.
    """

    size: Size
    crop: tuple[int, int, int, int]
    at: Size
    canvas: Size
    square: bool = False
    black: bool = False


def plan(size: Size, config: SourceConfig, spec: EncoderSpec, *, alone: bool = True) -> list[Step]:
    """The steps that make the media of an image of this size, one for each medium, in order.

    A `Step` has the height and width after resizing (`size`), the part that is cut out (`crop`: top, left, height,
    width), its place on the canvas (`at`) and the height and width of the medium (`canvas`), all in pixels.

    Args:
      size: height and width of the upright image, in pixels.
      config: the rule, `Source.resize`, and its settings: SourceConfig(resize="fixed", size=(336, 336)).
      spec: the encoder's patches, EncoderSpec(patch=14, …).
      alone: whether it is the only image of its dialogue.

    Raises:
      ValueError: the rule takes no such image.
    """
    if config.resize == "budget":
        bounded = _bounded(size, config, spec)
        return [Step(size=bounded, crop=(0, 0, *bounded), at=(0, 0), canvas=_padded(bounded, spec.block))]
    if config.resize == "smart":
        return [stretched(smart_size(size, spec.block, config.min_pixels, config.max_pixels))]
    if config.resize == "naflex":
        return [stretched(_naflex(size, spec.block, config.max_patches // spec.patches_per_token))]
    if config.resize == "largest":
        return [stretched(_largest(size, config.max_patches, spec))]
    if config.resize == "fixed":
        return [_fitted(size, config)]
    if config.alone and not alone:
        return [Step(size=config.size, crop=(0, 0, *config.size), at=(0, 0), canvas=config.size, square=True)]
    return [stretched(config.size), *_tiles(size, config)]


def stretched(size: Size) -> Step:
    return Step(size=size, crop=(0, 0, *size), at=(0, 0), canvas=size)


def _bounded(size: Size, config: SourceConfig, spec: EncoderSpec) -> Size:
    """The size scaled down, aspect kept, until pixels and patches (padding included) are within the budget."""
    height, width = size
    pixels, shrink = spec.patch**2, 1.0
    if config.max_pixels:
        shrink = min(shrink, sqrt(config.max_pixels / (height * width)))
    if config.max_patches:
        shrink = min(shrink, sqrt(config.max_patches * pixels / (height * width)))
    while True:
        bounded = max(1, int(height * shrink)), max(1, int(width * shrink))
        if not config.max_patches or spec.patches(*_padded(bounded, spec.block)) <= config.max_patches:
            return bounded
        shrink *= 0.98


def _padded(size: Size, block: int) -> Size:
    return -(-size[0] // block) * block, -(-size[1] // block) * block


def smart_size(size: Size, block: int, least: int, most: int) -> Size:
    """The nearest multiples of `block`, scaled to `least` and `most` pixels; most 0 = any (Qwen2-VL's smart_resize).

    Raises ValueError if a side is more than 200 times the other.
    """
    height, width = size
    if max(size) > _MOST_ASPECT * min(size):
        raise ValueError(f"{width}x{height} pixels: one side is more than {_MOST_ASPECT} times the other")
    nearest = round(height / block) * block, round(width / block) * block
    if most and nearest[0] * nearest[1] > most:
        scale = sqrt(height * width / most)
        down = (floor(side / scale / block) * block for side in size)
        nearest = max(block, next(down)), max(block, next(down))
    elif nearest[0] * nearest[1] < least:
        scale = sqrt(least / (height * width))
        nearest = ceil(height * scale / block) * block, ceil(width * scale / block) * block
    return max(block, nearest[0]), max(block, nearest[1])


def _naflex(size: Size, block: int, most: int) -> Size:
    """As many whole blocks as `most` allows, with about the same aspect (SigLIP 2's rule and search)."""

    def scaled(scale: float) -> Size:
        height, width = (max(block, ceil(side * scale / block) * block) for side in size)
        return height, width

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        height, width = scaled(scale)
        low, high = (scale, high) if (height / block) * (width / block) <= most else (low, scale)
    return scaled(low)


def _largest(size: Size, most: int, spec: EncoderSpec) -> Size:
    """The size of `most` patches with the same aspect, its sides rounded down to whole tokens (Gemma 4's rule)."""
    height, width = size
    pixels = most * spec.patch**2
    factor = sqrt(pixels / (height * width))
    rows, columns = (floor(factor * side / spec.block) for side in size)
    if not rows:
        rows, columns = 1, min(width // height, most // spec.patches_per_token)
    elif not columns:
        rows, columns = min(height // width, most // spec.patches_per_token), 1
    return rows * spec.block, columns * spec.block


def _fitted(size: Size, config: SourceConfig) -> Step:
    wanted = config.size
    if config.fit == "stretch":
        return stretched(wanted)
    if config.fit == "pad":
        inside = _inside(size, wanted)
        at = (wanted[0] - inside[0]) // 2, (wanted[1] - inside[1]) // 2
        return Step(size=inside, crop=(0, 0, *inside), at=at, canvas=wanted)
    square = config.fit == "square"
    return covering((max(size), max(size)) if square else size, wanted, edge=config.edge, square=square)


def covering(size: Size, wanted: Size, *, edge: int = 0, square: bool = False) -> Step:
    """The step that scales an image, aspect kept, until it covers `wanted`, and cuts this from its middle.

    Args:
      size: height and width of the image, in pixels.
      wanted: height and width of the medium.
      edge: the shorter side to which the image is scaled instead; 0 for none.
      square: see `Step`.
    """
    if edge:
        short, long = sorted(size)
        longer = int(edge * long / short)
        over = (edge, longer) if size[0] <= size[1] else (longer, edge)
    else:
        scale = max(wanted[0] / size[0], wanted[1] / size[1])
        over = max(wanted[0], round(size[0] * scale)), max(wanted[1], round(size[1] * scale))
    (top, height, above), (left, width, before) = map(_middle, over, wanted)
    crop = (top, left, height, width)
    return Step(size=over, crop=crop, at=(above, before), canvas=wanted, square=square, black=True)


def _middle(side: int, wanted: int) -> tuple[int, int, int]:
    """First pixel and length of the part cut from the middle of a side, and its place in `wanted` if that is longer."""
    return ((side - wanted) // 2, wanted, 0) if side >= wanted else (0, side, ceil((wanted - side) / 2))


def tile_grid(size: Size, config: SourceConfig) -> Size:
    """The (rows, columns) of `config.grids` for an image: it keeps most pixels and, among equals, wastes least.

    This is LLaVA-NeXT's rule for tiles of `config.size`, such as (336, 336). size: height and width of the upright
    image, in pixels.
    """
    height, width = config.size

    def useful_and_wasted(grid: Size) -> tuple[int, int]:
        grid_size = grid[0] * height, grid[1] * width
        scale = min(grid_size[1] / size[1], grid_size[0] / size[0])
        useful = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return useful, -(grid_size[0] * grid_size[1] - useful)

    return max(config.grids, key=useful_and_wasted)


def _tiles(size: Size, config: SourceConfig) -> Iterator[Step]:
    """Tiles of the image's grid."""
    (height, width), (rows, columns) = config.size, tile_grid(size, config)
    grid_size = rows * height, columns * width
    inside = _within(size, grid_size)
    top, left = (grid_size[0] - inside[0]) // 2, (grid_size[1] - inside[1]) // 2
    for row in range(rows):
        for column in range(columns):
            # The part of the resized image under this tile, and its place in the tile.
            begin = max(0, row * height - top), max(0, column * width - left)
            end = (
                max(begin[0], min(inside[0], (row + 1) * height - top)),
                max(begin[1], min(inside[1], (column + 1) * width - left)),
            )
            at = max(0, top - row * height), max(0, left - column * width)
            crop = (*begin, end[0] - begin[0], end[1] - begin[1])
            yield Step(size=inside, crop=crop, at=at, canvas=(height, width), black=True)


def _inside(size: Size, box: Size) -> Size:
    """The largest size of the same aspect that fits into `box`."""
    scale = min(box[0] / size[0], box[1] / size[1])
    return (
        min(box[0], max(1, round(size[0] * scale))),
        min(box[1], max(1, round(size[1] * scale))),
    )


def _within(size: Size, box: Size) -> Size:
    """The size of the same aspect that fills one side of `box`, the other side rounded up (LLaVA-NeXT's rule)."""
    scale_height, scale_width = box[0] / size[0], box[1] / size[1]
    if scale_width < scale_height:
        return min(ceil(size[0] * scale_width), box[0]), box[1]
    return box[0], min(ceil(size[1] * scale_height), box[1])


def flipped(size: Size) -> Size:
    """(width, height) from (height, width), or the reverse: Pillow's order of sides."""
    return size[1], size[0]
