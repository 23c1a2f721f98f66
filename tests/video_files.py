"""Video files for tests: mpeg4 from one thread, or lossless."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

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


def decoded(path: Path) -> list[np.ndarray]:
    """All frames of a file."""
    import av

    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
