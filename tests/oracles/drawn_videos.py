"""The videos of ``make_video.py``, drawn from seeds: tests draw the same ones. NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

VIDEOS: dict[str, tuple[int, int, int, float, dict[str, Any]]] = {
    "odd": (9, 70, 90, 4.0, {}),
    "long": (40, 48, 64, 8.0, {}),
    "small": (12, 20, 40, 6.0, {"fps": 3}),
    "wide": (5, 36, 160, 2.5, {}),
    "number": (31, 64, 64, 29.97, {"num_frames": 7, "fps": None}),
    "capped": (16, 96, 80, 4.0, {"cap_pixels_per_frame": True, "max_video_tokens": 4}),
    "two": (2, 64, 32, 1.0, {}),
}
"""By name: frames, height, width, frames a second, and settings of the processor beside ``RULES``."""


def drawn_video(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3]: waves that move, with noise."""
    rng = np.random.default_rng(seed)
    t, y, x = np.meshgrid(np.arange(count), np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    waves = [np.sin(9 * (c + 1) * x + 7 * y * (c + 2) + 0.7 * t) for c in range(3)]
    return np.clip(127 + 100 * np.stack(waves, -1) + rng.normal(0, 12, (count, height, width, 3)), 0, 255).astype(
        np.uint8
    )


def named_video(name: str) -> np.ndarray:
    """The frames of a video of ``VIDEOS``."""
    count, height, width, _, _ = VIDEOS[name]
    return drawn_video([*VIDEOS].index(name), count, height, width)
