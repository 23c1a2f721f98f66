"""`Media`: an encoded image, recording or video of a record."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mmjax.data.sources import storage
from mmjax.data.sources.storage import Unusable


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
    """

    name: str
    data: bytes | None = None
    path: str = ""
    is_video: bool = False
    is_heard: bool = False
    is_track: bool = False
    generator: str = ""

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
