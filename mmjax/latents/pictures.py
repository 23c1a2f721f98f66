"""The encoded pictures of a folder or a dataset, and their pixels for an autoencoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from mmjax.configurable import ConfigError, one_of, positive, require
from mmjax.data.sources.config import FITS, RESAMPLES, SourceConfig
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.index import default_cache
from mmjax.data.sources.kinds import make_reader
from mmjax.data.sources.media import Media
from mmjax.data.sources.record import Record
from mmjax.data.sources.storage import Unreachable
from mmjax.data.types import EncoderSpec

BYTES = SourceConfig().byte_limit
"""Larger files of pictures are not read."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
RESIZES = ("fixed", "smart")
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """How pictures become those that an autoencoder sees.

    Attributes:
      resize: "fixed" gives all pictures ``size``; "smart" keeps sizes and aspects, but for sides that become multiples
        of ``block`` and a number of pixels between ``min_pixels`` and ``max_pixels``.
      size: height and width in pixels, for "fixed".
      fit: how "fixed" reaches it, as ``Source.fit``: "crop", "pad", "stretch" or "square".
      min_pixels, max_pixels: the fewest and the most pixels of a picture under "smart"; 0 = any.
      block: pixels of which the sides of pictures are multiples: a multiple of the autoencoder's factor.
      resample: Pillow's filter.
    """

    resize: str = "fixed"
    size: tuple[int, int] = (256, 256)
    fit: str = "crop"
    min_pixels: int = 0
    max_pixels: int = 0
    block: int = 8
    resample: str = "bicubic"

    def __post_init__(self) -> None:
        one_of("--resize", self.resize, RESIZES)
        one_of("--fit", self.fit, FITS)
        one_of("--resample", self.resample, RESAMPLES)
        positive("--block", self.block, 8)
        legal = self.resize != "fixed" or all(side > 0 and side % self.block == 0 for side in self.size)
        require(legal, "--size", self.size, f"must be multiples of --block ({self.block})")
        idle = {"size", "fit"} if self.resize == "smart" else {"min_pixels", "max_pixels"}
        changed = [name for name in sorted(idle) if getattr(self, name) != type(self).__dict__[name]]
        for name in changed:
            raise ConfigError(
                f"--{name}={getattr(self, name)!r}: --resize={self.resize} does not read it; leave it out"
            )

    def stated(self) -> dict[str, Any]:
        """The settings that count, for a description."""
        idle = {"size", "fit"} if self.resize == "smart" else {"min_pixels", "max_pixels"}
        return {name: value for name, value in asdict(self).items() if name not in idle}

    def pictures(self, channels: int) -> Pictures:
        """Makes pixels of -1 to 1 of encoded pictures."""
        source = SourceConfig(
            **{"resize": self.resize, "size": self.size, "fit": self.fit, "resample": self.resample, "draft": False},
            **{"min_pixels": self.min_pixels, "max_pixels": self.max_pixels},
            **{"mean": _HALF[:channels], "std": _HALF[:channels]},
        )
        return Pictures("pictures", source, EncoderSpec(patch=self.block, channels=channels))


def pixels_of(pictures: Pictures, data: bytes) -> Float[np.ndarray, "H W C"]:
    """The pixels of an encoded picture, -1 to 1. Raises Unusable for a broken one; Pillow may raise other errors."""
    (pixels,) = pictures.media(data)
    return pixels


class Records(Protocol):
    """A folder or a dataset: an iterable of records, of which the number is known."""

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
        """What was wrong with a record or picture, from the error."""
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
    """The pictures of a record, without its videos."""
    return [image for image in record.images if not image.is_video]
