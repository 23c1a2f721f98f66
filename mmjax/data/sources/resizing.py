"""Resizes pictures, also very long ones. If a large result is cropped, only the cropped part is made.

Pillow resizes a picture at once, as processors do, if all intermediate pictures are small. Of a larger picture, the
long side is resized first, in bands, and cropped. Pillow rounds between the two sides and may take the other one first,
so values may then differ in their last digits.
"""

from __future__ import annotations

from PIL import Image

from mmjax.data.sources.sizes import Size, Step, flipped

MOST = 1 << 26
"""The most pixels of an intermediate picture."""
_AT_ONCE = 1 << 22
"""Pixels of a band."""
_MOST_CUT = 1 << 24
"""The most pixels of a resized picture that is then cropped."""
Part = tuple[int, int, int, int]
"""Top, left, height and width."""
Colour = int | tuple[int, ...]


def is_too_thin(size: Size, step: Step) -> bool:
    """Whether an image takes an intermediate picture of more than ``MOST`` (2²⁶) pixels for a step of `plan`.

    Args:
      size: height and width of the image.
      step: one of the steps that ``sizes.plan(size, config, spec)`` lists.
    """
    square = (max(size), max(size)) if step.square else size
    if _fits(square, step.size, step.crop, padded=step.square):
        return False
    wide = size[1] >= size[0]
    (high, _), (height, width) = (square, step.size) if wide else (flipped(square), flipped(step.size))
    columns = step.crop[3 if wide else 2]
    return max(width * min(size), columns * high, columns * height) > MOST


def resize_part(
    image: Image.Image, size: Size, resample: Image.Resampling, part: Part, *, square: Colour | None = None
) -> Image.Image:
    """Resizes an image to `size` and returns a part of the result, which has the height and width of `part`.

    Args:
      image: the image.
      size: height and width to which the whole image is resized.
      resample: Pillow's filter, such as Image.Resampling.BICUBIC.
      part: top, left, height and width of the part in the resized image; (0, 0, *size) for all of it.
      square: the colour, such as (255, 255, 255), in which the image is first padded to a square; None does not pad it.
    """
    top, left, rows, columns = part
    side = max(image.size)
    padded = (side, side) if square is not None else flipped(image.size)
    if _fits(padded, size, part, padded=square is not None):
        resized = _in_square(image, square) if square is not None and image.width != image.height else image
        resized = resized if flipped(resized.size) == size else resized.resize(flipped(size), resample)
        return resized.crop((left, top, left + columns, top + rows))
    if image.width >= image.height:
        return _in_bands(image, size, resample, part=part, square=square)
    turn = Image.Transpose.TRANSPOSE
    transposed = (left, top, columns, rows)
    turned = _in_bands(image.transpose(turn), flipped(size), resample, part=transposed, square=square)
    return turned.transpose(turn)


def _fits(size: Size, resized: Size, part: Part, *, padded: bool) -> bool:
    """Whether Pillow may resize an image at once, in either order of the sides."""
    most = max(resized[1] * size[0], resized[0] * size[1], size[0] * size[1] if padded else 0)
    return most <= MOST and resized[0] * resized[1] <= max(_MOST_CUT, part[2] * part[3])


def _in_square(image: Image.Image, colour: Colour) -> Image.Image:
    side = max(image.size)
    around = Image.new(image.mode, (side, side), colour)
    around.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return around


def _in_bands(
    image: Image.Image, size: Size, resample: Image.Resampling, *, part: Part, square: Colour | None
) -> Image.Image:
    """`resize_part` of an image that is at least as wide as high, so that a square adds rows above and below it."""
    (height, width), (top, left, rows, columns) = size, part
    high = image.width if square is not None else image.height
    first = (high - image.height) // 2
    between = Image.new(image.mode, (columns, high), square or 0)
    step = max(1, _AT_ONCE // max(width, image.width))
    for row in range(0, image.height, step):
        band = image.crop((0, row, image.width, min(image.height, row + step)))
        band = band.resize((width, band.height), resample)
        between.paste(band.crop((left, 0, left + columns, band.height)), (0, first + row))
    return between.resize((columns, height), resample).crop((0, top, columns, top + rows))
