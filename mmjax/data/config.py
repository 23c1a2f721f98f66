"""The configurable part of the data side: `Data` (what is trained on) and `Packing` (static shapes per encoder)."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.configurable import configurable, not_negative, one_of, positive, require

TASKS = ("digits", "folder")
QUESTION_KINDS = ("read", "count", "sum")
MOST_IMAGES, MOST_DIGITS = 4, 6


@configurable("Data")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model is trained on. All ranges are inclusive.

    task: "digits" (bundled handwritten digits) or "folder" (images and a data.jsonl). folder: path of the folder.
    sequence_length: tokens of one LLM row. workers: processes that prepare batches (0 = in this process).
    prefetch: steps that each worker prepares ahead. tokenizer: path of a tokenizer.json ("" = bytes).
    encoder: name of the encoder that sees the images. max_pixels: larger images of a folder are scaled down.

    Digits only. images, digits: how many images a sample has, and digits an image has. scale: height of a digit, in
    units of its 8 pixels. aspect: extra horizontal stretch of a row. distortion: strength of the random affine map of
    each training digit (0.1 = up to 10 % of stretch and shear, 5 % of shift). read, count, sum: relative frequencies
    of the questions. turns: questions asked about each training sample (evaluation asks one).
    curriculum: pairs (from this training sample on, at most so many digits an image), ascending; () = none.
    """

    task: str = "digits"
    sequence_length: int = 96
    workers: int = 1
    prefetch: int = 2
    tokenizer: str = ""
    encoder: str = "vision"
    folder: str = ""
    max_pixels: int = 65536
    images: tuple[int, int] = (2, 2)
    digits: tuple[int, int] = (1, 4)
    scale: tuple[float, float] = (1.0, 1.5)
    aspect: tuple[float, float] = (0.8, 1.25)
    distortion: float = 0.0
    read: float = 1.0
    count: float = 0.0
    sum: float = 0.0
    turns: int = 1
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        one_of("Data.task", self.task, TASKS)
        for name in ("sequence_length", "prefetch", "max_pixels", "turns"):
            positive(f"Data.{name}", getattr(self, name))
        for name in ("workers", "distortion", *QUESTION_KINDS):
            not_negative(f"Data.{name}", getattr(self, name))
        require(self.read + self.count + self.sum > 0, "Data.read", self.read, "ask something, such as Data.read=1.0")
        require(bool(self.encoder), "Data.encoder", self.encoder, "name an encoder of the model, such as 'vision'")
        for name, least, most in (("images", 1, MOST_IMAGES), ("digits", 1, MOST_DIGITS)):
            low, high = self._pair(name)
            require(least <= low <= high <= most, f"Data.{name}", (low, high), f"must ascend within {least} to {most}")
        for name in ("scale", "aspect"):
            low, high = self._pair(name)
            require(0 < low <= high, f"Data.{name}", (low, high), "must ascend from above 0, such as (0.8, 1.25)")
        self._check_curriculum()

    def _pair(self, name: str) -> tuple[float, float]:
        value = getattr(self, name)
        require(len(value) == 2, f"Data.{name}", value, "must be a pair (low, high)")
        return value[0], value[1]

    def _check_curriculum(self) -> None:
        fix = "must be pairs (training sample, digits), ascending, such as ((0, 1), (10000, 4))"
        starts = [start for start, _ in self.curriculum]
        legal = starts == sorted(set(starts)) and all(start >= 0 and digits > 0 for start, digits in self.curriculum)
        require(legal, "Data.curriculum", self.curriculum, fix)


@configurable("Packing")
@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Static shapes of an encoder's input.

    buckets: (rows per cell, patches per row) of each; () makes one from the worst case of the data.
    """

    buckets: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        legal = all(len(bucket) == 2 and min(bucket) > 0 for bucket in self.buckets)
        require(legal, "Packing.buckets", self.buckets, "must be (rows per cell, patches per row) pairs, or ()")
