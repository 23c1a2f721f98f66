"""`Media`: an encoded image, recording or video of a record."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mmjax.data.sources import storage
from mmjax.data.sources.storage import Unusable

RECORDINGS = ("wav", "flac", "ogg", "oga", "opus", "mp3")
"""Endings of recordings; the format is recognised by the bytes."""
_BEGINNINGS = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"OggS", b"ID3", *(bytes((255, low)) for low in range(0xE0, 0x100)))
"""First bytes of the files that the library of recordings may open: it knows many more formats."""


def begins_recording(data: bytes) -> bool:
    """Whether the bytes begin as those of WAV, FLAC, OGG or MP3."""
    return data.startswith(_BEGINNINGS) and data[8:12] != b"WEBP"


@dataclass(frozen=True, kw_only=True)
class Media:
    """An encoded image, recording or video.

    Attributes:
      name: its name for messages.
      data: its bytes; None if they are in a file.
      path: the path of its file, or of a folder of frames; "" for bytes.
      is_video: whether it is a video.
      is_heard: whether a video's sound track is a recording of the record too.
      is_track: whether it is a recording, the sound track of this video.
      generator: the generator that is to make it; "" leaves that to its record, or to the data's settings.
      is_sound: whether it is a recording that a generator is to make.
    """

    name: str
    data: bytes | None = None
    path: str = ""
    is_video: bool = False
    is_heard: bool = False
    is_track: bool = False
    generator: str = ""
    is_sound: bool = False

    @property
    def sounds(self) -> bool:
        """Whether it is a recording, by its part of a message, its bytes or the ending of its name."""
        if self.data is not None:
            return self.is_sound or begins_recording(self.data)
        return self.is_sound or self.path.rpartition(".")[2].lower() in RECORDINGS

    def read(self, limit: int, head: int | None = None) -> bytes:
        """All bytes; of a file only the first `head`, if that is set.

        Raises Unusable when there are more than `limit` bytes in all, or the file is missing.
        """
        if self.data is not None:
            if len(self.data) > limit:
                raise Unusable(f"{self.name}: {len(self.data)} bytes are more than {limit}")
            return self.data
        if not storage.is_url(self.path) and not os.path.exists(self.path):
            raise Unusable(f"{self.name} does not exist: put it at {self.path}")
        size, _ = storage.stamp(self.path)
        if size > limit:
            raise Unusable(f"{self.name}: {size} bytes are more than {limit}")
        return storage.read(self.path, 0, size if head is None else min(head, size), limit=limit)
