"""A folder of pictures or recordings, each with its caption in a text file beside it: `a.png` and `a.txt`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.media import RECORDINGS
from mmjax.data.sources.record import Entry, Media, Record, Unusable, parse_record
from mmjax.data.sources.tar import IMAGES

_MOST_TEXT = 1 << 20
"""The most bytes of a caption."""


class CaptionedReader:
    """A `Reader` of pictures and recordings with captions. A place is (number of the file,), sorted by their paths."""

    def __init__(self, config: SourceConfig):
        folder = not storage.is_url(config.path) and os.path.isdir(config.path)
        paths = storage.expand(f"{config.path.rstrip('/')}/*" if folder else config.path)
        self._pictures = [path for path in paths if _ending(path).lower() in (*IMAGES, *RECORDINGS)]
        self._question, self._draw = config.question, config.draw

    def files(self) -> Sequence[str]:
        """The pictures, and the captions that there are."""
        return [*self._pictures, *filter(_exists, map(_caption_of, self._pictures))]

    def scan(self) -> Iterator[Entry]:
        """An entry for every picture."""
        return (Entry(name=path, place=(number,)) for number, path in enumerate(self._pictures))

    def read(self, place: tuple[int, ...]) -> Record:
        """The record of a picture. Raises Unusable if it has no caption, or none that can be read."""
        picture = self._pictures[place[0]]
        path = _caption_of(picture)
        if not _exists(path):
            raise Unusable(f"it has no caption: write {path}")
        try:
            caption = storage.read(path, limit=_MOST_TEXT).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise Unusable(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None

        def find(name: object, kind: str) -> Media:
            return Media(name=f"{kind} {name!r}", path=str(name))

        key = "audio" if _ending(picture).lower() in RECORDINGS else "image"
        return parse_record({"caption": caption, key: picture}, find, self._question, draw=self._draw)


def _caption_of(picture: str) -> str:
    """The path of the text file beside a picture."""
    return f"{picture.removesuffix(_ending(picture))}txt"


def _exists(path: str) -> bool:
    try:
        storage.stamp(path)
    except (Unusable, OSError):
        return False
    return True


def _ending(path: str) -> str:
    return path.rpartition(".")[2]
