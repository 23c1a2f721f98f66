"""The encoded pictures of a folder or a dataset, and their pixels for an autoencoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from mmjax.configurable import one_of, positive, require
from mmjax.data.sources.config import RESAMPLES, SourceConfig
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.index import default_cache
from mmjax.data.sources.kinds import make_reader
from mmjax.data.sources.media import Media
from mmjax.data.sources.record import Record
from mmjax.data.sources.storage import Unreachable
from mmjax.data.sources.target_pictures import TargetPictures
from mmjax.data.types import EncoderSpec

BYTES = SourceConfig().byte_limit
"""Larger files of pictures are not read."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """How pictures become those that an autoencoder sees: scaled, aspect kept, and cut in the middle.

    Attributes:
      size: height and width in pixels that a picture is scaled to cover; (0, 0) keeps the shape of each.
      pixels: the most pixels of a picture that keeps its shape, whose sides become the nearest multiples of ``block``.
      block: pixels of which the sides of pictures are multiples: a multiple of the autoencoder's factor.
      resample: Pillow's filter.
    """

    size: tuple[int, int] = (0, 0)
    pixels: int = 65536
    block: int = 8
    resample: str = "bicubic"

    def __post_init__(self) -> None:
        one_of("--resample", self.resample, RESAMPLES)
        positive("--block", self.block, 8)
        legal = all(side >= 0 and side % self.block == 0 for side in self.size) and all(self.size) == any(self.size)
        require(legal, "--size", self.size, f"must be multiples of {self.block} (--block)")
        is_read = not any(self.size) or self.pixels == type(self).pixels
        require(is_read, "--pixels", self.pixels, f"--size={self.size} decides the size; leave one of them out")
        fix = f"must be {self.block**2} or more: a picture of --block ({self.block}) pixels"
        require(self.pixels >= self.block**2, "--pixels", self.pixels, fix)

    def stated(self) -> dict[str, Any]:
        """The settings that count, for a description."""
        return {name: value for name, value in asdict(self).items() if name != ("pixels" if any(self.size) else "size")}

    def pictures(self, channels: int) -> Pictures:
        """Makes pixels of -1 to 1 of encoded pictures, as generators of pixels have them; without `Source.draft`."""
        rule = {"drawn_size": self.size, "drawn_pixels": self.pixels, "resample": self.resample, "draft": False}
        source = SourceConfig(**rule)  # pyright: ignore[reportArgumentType]
        return TargetPictures("pictures", source, "autoencoder", EncoderSpec(patch=self.block, channels=channels))


def pixels_of(pictures: Pictures, data: bytes) -> Float[np.ndarray, "H W C"]:
    """The pixels of an encoded picture, -1 to 1. Raises Unusable for a broken one; Pillow may raise other errors."""
    (pixels,) = pictures.media(data)
    return pixels


class Records(Protocol):
    """An iterable of records with a known length: a folder or a dataset."""

    def __len__(self) -> int:
        """The number of records."""
        ...

    def __iter__(self) -> Iterator[Sequence[Media] | Broken]:
        """The pictures of each record, or why it cannot be read."""
        ...


class Broken(NamedTuple):
    """A record or picture that cannot be read.

    Attributes:
      name: its name.
      reason: the reason, in one line.
    """

    name: str
    reason: str

    @classmethod
    def of(cls, name: str, error: Exception) -> Broken:
        """A record or picture that raised this error."""
        return cls(name, " ".join(str(error).split()) or type(error).__name__)


class Folder:
    """The pictures in a folder and the folders in it, in the order of their names; a record for each.

    Args:
      path: the folder.

    Raises:
      ConfigError: it is no folder, or has no picture.
    """

    def __init__(self, path: str):
        folder = Path(path)
        require(folder.is_dir(), "--pictures", path, "is no folder; name a folder of pictures")
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        require(bool(files), "--pictures", path, f"has no picture ({', '.join(SUFFIXES)})")
        self._media = [Media(name=str(file.relative_to(folder)), path=str(file)) for file in files]

    def __len__(self) -> int:
        return len(self._media)

    def __iter__(self) -> Iterator[Sequence[Media] | Broken]:
        for media in self._media:
            yield [media]


class Dataset:
    """The pictures of a dataset's records, without videos.

    Args:
      kind, path, media: as ``Source.kind``, ``Source.path`` and ``Source.media``.

    Raises:
      ConfigError: there is no such dataset, or it has no records.
    """

    def __init__(self, kind: str, path: str, media: str):
        self._reader = make_reader("data", SourceConfig(kind=kind, path=path, media=media), default_cache())
        self._entries = list(self._reader.scan())
        require(bool(self._entries), "--data", path, "has no records; name the file or files of the data")

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence[Media] | Broken]:
        for entry in self._entries:
            if entry.fault:
                yield Broken(entry.name, entry.fault)
                continue
            try:
                yield pictures_of(self._reader.read(entry.place))
            except Unreachable:
                raise
            except Exception as error:  # readers may raise anything on broken records
                yield Broken.of(entry.name, error)


def pictures_of(record: Record) -> list[Media]:
    """The pictures of a record: those that it is about, without videos, and those to be made."""
    return [*(image for image in record.images if not image.is_video), *record.targets]
