"""Small datasets on disk, and sources opened on them, for the tests of the data side."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.data.config import DataConfig
from mmjax.data.log_mel import LogMel
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import open_sources
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.sources.mixture import Mixture
from mmjax.data.tasks.task import TaskContext
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec

VISION = EncoderSpec(patch=4, merge=2, channels=3)
AUDIO = EncoderSpec(patch=1, merge=4, channels=8, axes=1, log_mel=LogMel(sample_rate=4000, window=128, hop=40, mels=8))
ENCODERS = {"vision": VISION, "audio": AUDIO}
TOKENIZER = ByteTokenizer(tuple(ENCODERS))


class Heard:
    """Remembers what is said while an index is made."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counted = 0

    def progress(self, total: int, description: str) -> Any:
        import contextlib

        self.lines.append(f"{description} {total}")

        @contextlib.contextmanager
        def bar():
            yield lambda _: setattr(self, "counted", self.counted + 1)

        return bar()

    def message(self, text: str) -> None:
        self.lines.append(text)


def opened(
    folder: Path,
    sources: Mapping[str, SourceConfig] | SourceConfig,
    weights: Mapping[str, float] | None = None,
    *,
    split: str = "train",
    seed: int = 0,
    encoders: Mapping[str, EncoderSpec] = ENCODERS,
    skipped: Path | None = None,
    observer: Any = None,
    known: Mapping[str, KnownRecords] | None = None,
    **data: Any,
) -> Mixture:
    """The datasets of some configurations, their indexes in `folder`/cache."""
    sources = {"own": sources} if isinstance(sources, SourceConfig) else sources
    config = DataConfig(
        sources=weights or dict.fromkeys(sources, 1.0),
        cache=str(folder / "cache"),
        **{"sequence_length": 4096, **data},
    )
    context = TaskContext(
        data=config,
        encoders=encoders,
        tokenizer=ByteTokenizer(tuple(encoders)),
        sources=sources,
        seed=seed,
        split=split,
        skipped=skipped,
        observer=observer,
        known=known,
    )
    return open_sources(context)


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Random colours [h, w, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: np.ndarray | Image.Image, suffix: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, suffix, **options)
    return file.getvalue()


def recorded(samples: np.ndarray, *, rate: int = 4000, width: int = 2, channels: int = 1) -> bytes:
    """A WAV file of samples in -1 to 1, the same in every channel."""
    scale = 2.0 ** (8 * width - 1)
    integers = np.clip(np.round(samples * scale), -scale, scale - 1).astype("<i8")
    integers = np.repeat(integers + (128 if width == 1 else 0), channels)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(integers.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()


def text_of(tokens: np.ndarray) -> str:
    """Tokens as text; `<v>` and `<a>` for runs of placeholders, `$` for eos."""
    marks = {TOKENIZER.media_token("vision"): "<v>", TOKENIZER.media_token("audio"): "<a>", TOKENIZER.eos: "$"}
    text, last = bytearray(), -1
    for token in map(int, tokens):
        if token < 256:
            text.append(token)
        elif token in marks and (token != last or token == TOKENIZER.eos):
            text += marks[token].encode()
        last = token
    return text.decode()
