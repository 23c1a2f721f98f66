"""The frames of a video that are taken, their size and their times. Only arithmetic, no pixels.

Under "timestamps" the rules are those of ``Qwen3VLVideoProcessor`` and ``Qwen3VLProcessor`` in ``transformers``
(Qwen3-VL, 2025, §2), under "positions" those of ``Qwen2VLVideoProcessor`` and of Qwen2.5-VL's model (2025, §2.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, sqrt
from typing import NamedTuple

import numpy as np

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.sizes import Size, smart_size

_MOST_ASPECT = 200


class Clip(NamedTuple):
    """A video as its file describes it.

    Attributes:
      frames: number of its frames.
      rate: frames a second.
    """

    frames: int
    rate: float


def taken_frames(clip: Clip, config: SourceConfig, frames: int = 2) -> list[int]:
    """The numbers, from 0, of the frames that are taken, evenly spread.

    There are ``Source.frames`` of them; or ``Source.fps`` a second, at least ``Source.min_frames`` and at most
    ``Source.max_frames`` and the frames that there are. Under "timestamps" they go from the first to the last; under
    "positions" there are as many as whole temporal patches have, each the first of an equal part of the video.

    frames: frames of a temporal patch.
    """
    if config.video == "positions":
        count = _whole(clip, config, frames)
        return [number * clip.frames // count for number in range(count)]
    count = config.frames
    if not count:
        count = max(int(clip.frames / clip.rate * config.fps), config.min_frames)
        count = min(count, config.max_frames, clip.frames)
    return np.linspace(0, clip.frames - 1, count).round().astype(int).tolist()


def _whole(clip: Clip, config: SourceConfig, frames: int) -> int:
    """The number of frames that are taken, a multiple of ``frames``, as ``Qwen2VLVideoProcessor`` counts them."""
    if config.frames:
        return round(config.frames / frames) * frames
    most = min(config.max_frames, clip.frames) // frames * frames
    wanted = min(max(clip.frames / clip.rate * config.fps, config.min_frames), most)
    return floor(wanted / frames) * frames


def frame_size(count: int, size: Size, config: SourceConfig, *, block: int, frames: int) -> Size:
    """Height and width to which each frame is resized: multiples of ``block`` with about the same aspect.

    The pixels of all frames together, under "positions" of each, lie between the two numbers of
    ``Source.video_pixels``.

    Args:
      count: number of frames that are taken.
      size: height and width of a frame in the file.
      config: the source, whose ``video_pixels`` and ``frame_pixels`` are read.
      block: edge of the block of pixels that becomes one LLM token.
      frames: frames of a temporal patch.

    Raises:
      ValueError: a side is more than 200 times the other.
    """
    low, high = config.video_pixels
    if config.video == "positions":
        return smart_size(size, block, low, high)
    if config.frame_pixels:
        high = max(min(config.frame_pixels, high // count), int(low * 1.05)) * count
    height, width = size
    if min(size) < block:
        scale = max(block / height, block / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MOST_ASPECT:
        raise ValueError(f"{size[1]}x{size[0]} pixels: one side is more than {_MOST_ASPECT} times the other")
    nearest = round(height / block) * block, round(width / block) * block
    rounded = round(count / frames) * frames
    if rounded * nearest[0] * nearest[1] > high:
        scale = sqrt(count * height * width / high)
        return max(block, floor(height / scale / block) * block), max(block, floor(width / scale / block) * block)
    if rounded * nearest[0] * nearest[1] < low:
        scale = sqrt(low / (count * height * width))
        return ceil(height * scale / block) * block, ceil(width * scale / block) * block
    return nearest


def padded(numbers: Sequence[int], frames: int) -> list[int]:
    """The numbers of the frames, the last one repeated up to a multiple of ``frames``, those of a temporal patch."""
    return [*numbers, *[numbers[-1]] * (-len(numbers) % frames)]


def seconds_of(clip: Clip, config: SourceConfig, frames: int) -> tuple[float, ...]:
    """The time of each temporal patch: the mean of those of its first and last frame, in seconds.

    frames: frames of a temporal patch, such as 2.
    """
    times = [number / clip.rate for number in padded(taken_frames(clip, config), frames)]
    return tuple((times[at] + times[at + frames - 1]) / 2 for at in range(0, len(times), frames))


def time_numbers(clip: Clip, config: SourceConfig, frames: int) -> tuple[int, ...]:
    """The number of each temporal patch along time, from 0: how many ``Source.time_positions`` a second it has passed.

    ``time_positions`` 0 counts temporal patches. frames: frames of a temporal patch, such as 2.
    """
    taken = taken_frames(clip, config, frames)
    numbers = np.arange(-(-len(taken) // frames))
    if config.time_positions:
        rate = len(taken) / clip.frames * clip.rate
        # The precision of the published model's own arithmetic, which decides what is rounded down.
        interval = np.float32(config.time_positions) * np.float32(frames / rate)
        numbers = (numbers.astype(np.float32) * interval).astype(int)
    return tuple(numbers.tolist())
