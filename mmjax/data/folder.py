"""Samples from a folder: images and a `data.jsonl` of {"images": [...], "question": "...", "answer": "..."}.

Image paths are relative to the folder. Images larger than `max_pixels` are scaled down; all are padded with zeros at
the right and below to multiples of patch * merge, so nothing is stretched.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmjax.configurable import ConfigError
from mmjax.data.sample import build_meta, build_sample
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, WorstCase

DATA_FILE = "data.jsonl"
IMAGE_MARK = "<image>"
_UNREADABLE = (UnidentifiedImageError, OSError, Image.DecompressionBombError)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a data.jsonl. `place` is "file:line" for messages."""

    images: tuple[Path, ...]
    question: str
    answer: str
    place: str


def read_records(folder: str | Path) -> list[Record]:
    """The records of `folder`/data.jsonl, in order; blank lines are skipped.

    Raises ConfigError naming file and line for bad JSON, a missing or mistyped key, and an image that does not exist.
    """
    path = Path(folder) / DATA_FILE
    if not str(folder):
        raise ConfigError("Data.folder='': name the folder of images and data.jsonl, such as 'my_images'")
    if not path.is_file():
        raise ConfigError(f"Data.folder={str(folder)!r} has no {DATA_FILE}: write one line per sample into {path}")
    try:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from None
    records = [_record(Path(folder), line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not records:
        raise ConfigError(f"{path} holds no samples: write one JSON object per line")
    return records


def _record(folder: Path, line: str, place: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error.msg} at column {error.colno}): fix the line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: must be an object with images, question and answer, not {type(value).__name__}")
    for key in ("question", "answer"):
        if not isinstance(value.get(key), str):
            raise ConfigError(f"{place}: {key}={value.get(key)!r} must be a string")
    names = value.get("images", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{place}: images={names!r} must be a list of file names")
    marks = value["question"].count(IMAGE_MARK)
    if marks > len(names):
        raise ConfigError(f"{place}: the question has {marks} {IMAGE_MARK} marks for {len(names)} images: name {marks}")
    paths = tuple(folder / name for name in names)
    for name, path in zip(names, paths, strict=True):
        if not path.is_file():
            raise ConfigError(f"{place}: image {name!r} does not exist: put it at {path}")
    return Record(images=paths, question=value["question"], answer=value["answer"], place=place)


class FolderSource:
    """Samples of a folder by index: in order for split "test", reshuffled every epoch for "train"."""

    def __init__(
        self,
        folder: str | Path,
        encoder: str,
        spec: EncoderSpec,
        tokenizer: Tokenizer,
        *,
        max_pixels: int,
        seed: int = 0,
        split: str = "test",
    ):
        self.encoder, self.spec, self.tokenizer = encoder, spec, tokenizer
        self.max_pixels, self.seed, self.split = max_pixels, seed, split
        self.records = read_records(folder)
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        return len(self.records)

    def meta(self, index: int) -> SampleMeta:
        """Token and patch counts of sample `index`; reads the images' headers only."""
        return self._meta(self._record(index))

    def sample(self, index: int, media: Collection[str] | None = None) -> Sample:
        """Sample `index`, images decoded to float32 in 0…1 unless `media` are wanted without those of their encoder."""
        record, encoders = self._record(index), {self.encoder: self.spec}
        turns = ((record.question, record.answer),)
        if media is None or self.encoder in media:
            images = [self._load(path, record) for path in record.images]
            return build_sample(self.tokenizer, encoders, {self.encoder: images}, turns)
        return build_sample(self.tokenizer, encoders, {}, turns, sizes=self._sizes(record))

    def worst_case(self) -> WorstCase:
        """The largest counts over all records."""
        metas = [self._meta(record) for record in self.records]
        patches = [meta.patches.get(self.encoder, ()) for meta in metas]
        return WorstCase(
            tokens=max(meta.tokens for meta in metas),
            media={self.encoder: max(map(len, patches))},
            patches={self.encoder: max((n for counts in patches for n in counts), default=0)},
            sides={self.encoder: max(self._sides(), default=0)},
        )

    def _sides(self) -> Iterator[int]:
        """Patches along the longer side of every image, where it matters."""
        for record in self.records if self.spec.longest else ():
            for path in record.images:
                yield max(self._padded(self._open(path, record))) // self.spec.patch

    def _record(self, index: int) -> Record:
        epoch, at = divmod(index, len(self.records))
        if self.split != "train":
            return self.records[at]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.records)).tolist())
        return self.records[self._order[1][at]]

    def _meta(self, record: Record) -> SampleMeta:
        turns = ((record.question, record.answer),)
        return build_meta(self.tokenizer, {self.encoder: self.spec}, self._sizes(record), turns)

    def _sizes(self, record: Record) -> dict[str, list[tuple[int, ...]]]:
        return {self.encoder: [self._padded(self._open(path, record)) for path in record.images]}

    def _open(self, path: Path, record: Record) -> tuple[int, int]:
        try:
            with Image.open(path) as image:
                return self._bounded(image.height, image.width)
        except _UNREADABLE as error:
            raise ConfigError(f"{record.place}: {path} is not a readable image ({error})") from None

    def _load(self, path: Path, record: Record) -> np.ndarray:
        try:
            with Image.open(path) as image:
                decoded = image.convert("L" if self.spec.channels == 1 else "RGB")
        except _UNREADABLE as error:
            raise ConfigError(f"{record.place}: {path} is not a readable image ({error})") from None
        height, width = self._bounded(decoded.height, decoded.width)
        if (height, width) != (decoded.height, decoded.width):
            decoded = decoded.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(decoded, np.float32).reshape(height, width, self.spec.channels) / 255.0
        padded = np.zeros((*self._padded((height, width)), self.spec.channels), np.float32)
        padded[:height, :width] = pixels
        return padded

    def _bounded(self, height: int, width: int) -> tuple[int, int]:
        shrink = min(1.0, sqrt(self.max_pixels / (height * width)))
        return max(1, int(height * shrink)), max(1, int(width * shrink))

    def _padded(self, size: tuple[int, int]) -> tuple[int, int]:
        block = self.spec.block
        return -(-size[0] // block) * block, -(-size[1] // block) * block
