"""Video files for tests: mpeg4 from one thread, or lossless."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np


def write_video(path: Path, frames: Iterable[np.ndarray], rate: float, *, lossless: bool = False) -> Path:
    """A file of these frames, uint8 [h, w, 3]; the ending of its name is that of the format."""
    import av

    frames = list(frames)
    codec, pixels = ("ffv1", "bgr0") if lossless else ("mpeg4", "yuv420p")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1001))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return path


def write_sound_film(
    path: Path, frames: Iterable[np.ndarray], rate: float, samples_CN: np.ndarray, *, samples_a_second: int, codec: str
) -> Path:
    """A file of these frames, uint8 [h, w, 3], with a sound track of samples in -1 to 1 in channels.

    codec: such as "pcm_s16le", which keeps 16 bits of each sample in a .mkv, or "aac".
    """
    import av

    frames = list(frames)
    with av.open(str(path), "w") as container:
        film: Any = container.add_stream("mpeg4", rate=Fraction(rate).limit_denominator(1001))
        film.height, film.width = frames[0].shape[:2]
        film.pix_fmt = "yuv420p"
        film.codec_context.thread_count = 1
        layout = {1: "mono", 2: "stereo"}[len(samples_CN)]
        sound: Any = container.add_stream(codec, rate=samples_a_second, layout=layout)
        for frame in frames:
            container.mux(film.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(film.encode())
        for at in range(0, samples_CN.shape[1], 1024):
            block_CN = np.ascontiguousarray(samples_CN[:, at : at + 1024], np.float32)
            block = av.AudioFrame.from_ndarray(block_CN, format="fltp", layout=layout)
            block.sample_rate, block.pts = samples_a_second, at
            container.mux(sound.encode(block))
        container.mux(sound.encode())
    return path


def decoded(path: Path) -> list[np.ndarray]:
    """All frames of a file."""
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
