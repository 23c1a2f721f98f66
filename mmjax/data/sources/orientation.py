"""The orientation of an image, from EXIF or XMP anywhere in its file; no pixel is decoded.

As in Pillow's ``exif_transpose``, EXIF takes precedence over a raw profile of EXIF, and this over XMP. A PNG may have
them after its pixels.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from PIL import Image

TAIL = 1 << 16
"""Bytes at the end of a PNG that are searched for its orientation."""
PNG = b"\x89PNG\r\n\x1a\n"
_TAG = 0x0112
_TURNS: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_CHUNK = re.compile(rb"eXIf|tEXt|[iz]TXt")
_PROFILE, _XMP = "Raw profile type exif", "XML:com.adobe.xmp"
_LONGEST_TEXT = 1 << 20


def orientation(image: Image.Image, tail: bytes = b"") -> int:
    """The Orientation tag of an open image, 1 (upright) to 8; 1 if it has none that can be read.

    Args:
      image: the image, as `PIL.Image.open` gives it.
      tail: the end of its file, which is read for a PNG; metadata there are added to `image.info`.
    """
    if image.format == "PNG":
        image.info.update(_behind_pixels(tail[-TAIL:]))
    try:
        # The method of the class for PNG would decode the image.
        turn = Image.Image.getexif(image).get(_TAG, 1)
    except Exception:  # EXIF may contain anything, and an image can be shown without it
        return 1
    return turn if isinstance(turn, int) and turn in _TURNS else 1


def swaps_sides(image: Image.Image, turn: int) -> bool:
    """Whether turning an image upright swaps the height and width that Pillow gives.

    image: the open image. turn: its Orientation tag, 1 to 8, as from `orientation`; from 5 on sides are swapped, but
    for some TIFFs.
    """
    if image.format == "TIFF":  # Pillow may give the size of the upright image
        stored = (image.tag_v2.get(256), image.tag_v2.get(257))  # type: ignore[attr-defined]
        return turn >= 5 and image.size == stored
    return turn >= 5


def upright(image: Image.Image, turn: int, kind: str | None) -> Image.Image:
    """The decoded image, turned upright; Pillow turns a TIFF itself.

    turn: the Orientation tag, 1 to 8, as from `orientation`. kind: the format of the file as Pillow names it, such as
    "PNG", the `format` of the opened image.
    """
    return image if kind == "TIFF" or turn not in _TURNS else image.transpose(_TURNS[turn])


def _behind_pixels(tail: bytes) -> Iterator[tuple[str, str | bytes]]:
    """Names, as in Pillow, and values of the chunks at the end of a PNG. A chunk is recognised by its checksum."""
    for chunk in _CHUNK.finditer(tail):
        begin = chunk.start()
        end = chunk.end() + int.from_bytes(tail[max(0, begin - 4) : begin], "big")
        if (
            begin < 4
            or end + 4 > len(tail)
            or zlib.crc32(tail[begin:end]) != int.from_bytes(tail[end : end + 4], "big")
        ):
            continue
        body = tail[chunk.end() : end]
        if chunk[0] == b"eXIf":
            yield "exif", b"Exif\0\0" + body
            continue
        key, _, text = body.partition(b"\0")
        name = key.decode("latin-1")
        if name in (_PROFILE, _XMP):
            yield name, _text(chunk[0], text)


def _text(kind: bytes, text: bytes) -> str:
    """The text of a chunk, without its key; "" if it is damaged."""
    packed = kind == b"zTXt"
    if kind == b"iTXt":
        # A flag and a method of compression, then a language and a translated key.
        packed, text = text[:1] == b"\1", text[2:].partition(b"\0")[2].partition(b"\0")[2]
    elif packed:
        text = text[1:]
    if packed:
        try:
            text = zlib.decompressobj().decompress(text, _LONGEST_TEXT)
        except zlib.error:
            return ""
    return text.decode("utf-8" if kind == b"iTXt" else "latin-1", "replace")
