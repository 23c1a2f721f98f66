"""Video files, by PyAV, and folders of frames: their sizes from headers, and their frames one after another.

PyAV is imported when a video is read: training on other media does not need it. FFmpeg gets a file's bytes from here
and may open nothing itself; a playlist or a URL is no video.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.clips import Clip
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.media import Media
from mmjax.data.sources.sizes import Size
from mmjax.data.sources.storage import Unusable

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,gif,ivf,rawvideo,h264,hevc"
"""FFmpeg's names of the formats that are read; others, such as playlists, name files of their own."""
FRAMES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""Endings of the frames in a folder."""


class Video(Protocol):
    """An open video."""

    def clip(self) -> Clip:
        """The number of its frames and their rate."""
        ...

    def size(self) -> Size:
        """Height and width of its frames."""
        ...

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the frames of these ascending numbers, from 0, one after another: uint8 [h, w, 3]."""
        ...


@contextmanager
def open_video(media: Media, config: SourceConfig) -> Iterator[Video]:
    """Opens a video file or a folder of frames.

    config: the source, whose limits and ``folder_fps`` are read.

    Raises:
      Unusable: it is missing, is no video, or is too large.
      ConfigError: PyAV is not installed.
    """
    if media.data is None and not storage.is_url(media.path) and os.path.isdir(media.path):
        yield _Folder(media, config)
        return
    with opened_container(media, config) as container:
        yield _File(container, config)


@contextmanager
def opened_container(media: Media, config: SourceConfig) -> Iterator[Any]:
    """Opens a video file by PyAV, whose container is the context's value; errors of FFmpeg become Unusable.

    Raises:
      Unusable: it is missing, is no video file, or is damaged.
      ConfigError: PyAV is not installed.
    """
    if media.data is None and not storage.is_url(media.path) and os.path.isdir(media.path):
        raise Unusable("a folder of frames has no sound track; give the sound as a recording beside it")
    data = _opened(media, config)
    av = _library()
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
    with data:
        try:
            container = av.open(data, options=options, metadata_errors="ignore")
        except (av.FFmpegError, ValueError, OSError) as error:
            raise Unusable(f"no video that FFmpeg reads ({_reason(error)})") from None
        with container:
            try:
                yield container
            except av.FFmpegError as error:
                raise Unusable(f"the video is damaged ({_reason(error)})") from None


def files_of(media: Media) -> list[str]:
    """The local files of a video: of a folder all its frames; [] for bytes and URLs."""
    if not media.path or storage.is_url(media.path):
        return []
    return _frame_paths(media.path) if os.path.isdir(media.path) else [media.path]


def _frame_paths(folder: str) -> list[str]:
    """The frames of a folder, by name; numbers in names need equally many digits."""
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.lower().endswith(FRAMES)]


def _opened(media: Media, config: SourceConfig) -> Any:
    if media.data is not None or storage.is_url(media.path):
        return io.BytesIO(media.read(config.byte_limit))
    if not os.path.exists(media.path):
        raise Unusable(f"{media.name} does not exist: put it at {media.path}")
    storage.stamp(media.path)  # a pipe would wait for its writer
    return open(media.path, "rb")


@cache
def _library() -> Any:
    """PyAV."""
    try:
        import av
    except (ImportError, OSError) as error:
        fix = "pip install av, or leave videos out of the data"
        raise ConfigError(f"videos need the av package ({error}): {fix}") from None
    return av


def _reason(error: BaseException) -> str:
    """The cause of an error of PyAV, without the file's name."""
    return str(getattr(error, "strerror", "") or error)


def _require_small(size: Size, frames: int, config: SourceConfig) -> None:
    height, width = size
    if height * width > config.pixel_limit or min(size) < 1:
        raise Unusable(f"{width}x{height} pixels; Source.pixel_limit is {config.pixel_limit}")
    if frames > config.frame_limit:
        raise Unusable(f"{frames} frames or more; Source.frame_limit is {config.frame_limit}")


class _File:
    """A video file that PyAV has opened."""

    def __init__(self, container: Any, config: SourceConfig):
        if not container.streams.video:
            raise Unusable("it has no pictures" + (", only sound" if container.streams.audio else ""))
        self._container, self._config = container, config
        self._stream = container.streams.video[0]
        _require_small(self.size(), self._stream.frames, config)

    def size(self) -> Size:
        codec = self._stream.codec_context
        if codec is None:
            raise Unusable("a video of an unknown codec")
        return int(codec.height), int(codec.width)

    def clip(self) -> Clip:
        """From the header; without a count there, packets are counted and not decoded."""
        stream = self._stream
        count, rate = int(stream.frames), float(stream.average_rate or stream.guessed_rate or 0)
        if count < 1:
            for packet in self._container.demux(stream):
                count += packet.size > 0
                _require_small(self.size(), count, self._config)
            self._container.seek(0)
        if not 0 < rate < 1e6 or count < 1:
            raise Unusable(f"{count} frames at {rate:g} a second")
        return Clip(count, rate)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        size, wanted, at = self.size(), list(numbers), 0
        codec = self._stream.codec_context
        codec.thread_count = 1  # data workers are processes
        # FFmpeg itself refuses a frame that is larger than its header says.
        codec.options = {"max_pixels": str(self._config.pixel_limit)}
        for at, frame in enumerate(self._container.decode(self._stream), 1):
            if at - 1 < wanted[0]:
                continue
            if (frame.height, frame.width) != size:
                raise Unusable(f"frame {at} has {frame.width}x{frame.height} pixels, not {size[1]}x{size[0]}")
            pixels = frame.to_ndarray(format="rgb24")
            while wanted and wanted[0] == at - 1:
                wanted.pop(0)
                yield pixels
            if not wanted:
                return
        raise Unusable(f"the video breaks off after {at} frames, of which {wanted[-1] + 1} are needed")


class _Folder:
    """A folder of frames, which all have one size."""

    def __init__(self, media: Media, config: SourceConfig):
        self._paths, self._config = _frame_paths(media.path), config
        if not self._paths:
            raise Unusable(f"a folder without frames ({', '.join(FRAMES)})")
        if not config.folder_fps:
            raise Unusable("it is a folder of frames; set Source.folder_fps to their rate, such as 2.0")
        with self._opened(self._paths[0]) as image:
            self._size = image.height, image.width
        _require_small(self._size, len(self._paths), config)

    def _opened(self, path: str) -> Image.Image:
        try:
            return Image.open(io.BytesIO(storage.read(path, limit=self._config.byte_limit)))
        except OSError:
            raise Unusable(f"{os.path.basename(path)} is no image") from None

    def size(self) -> Size:
        return self._size

    def clip(self) -> Clip:
        return Clip(len(self._paths), self._config.folder_fps)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for number in numbers:
            path = self._paths[number]
            with self._opened(path) as image:
                if (image.height, image.width) != self._size:
                    shown = f"{image.width}x{image.height} pixels, not {self._size[1]}x{self._size[0]}"
                    raise Unusable(f"{os.path.basename(path)} has {shown}")
                yield np.asarray(image.convert("RGB"))
