"""Rows of handwritten digits with questions about them, from the images bundled with scikit-learn (no network).

A sample is a pure function of (seed, split, index). It is first planned (which digits, which sizes, which questions),
which costs microseconds and gives its metadata; pixels are rendered from the plan only when they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from mmjax.data.config import QUESTION_KINDS, DataConfig
from mmjax.data.sample import build_sample, layout_tokens
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, WorstCase

HELD_OUT = 360  # the last images of the data set: evaluated on, never trained on
SIDE = 8  # pixels of a digit in the data set
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
SPLITS = ("train", "test")


@lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] float32 in 0…1 and labels [1797] int64 of scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits as load

    data: Any = load()
    return (data.images / 16.0).astype(np.float32), data.target


def split_range(split: str) -> tuple[int, int]:
    """The half-open range of data set indices that `split` ("train" or "test") draws from."""
    total = len(load_digits()[1])
    return (0, total - HELD_OUT) if split == "train" else (total - HELD_OUT, total)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One image: the data set indices of its digits, and its size in pixels before padding.

    warps: for each digit the affine map (a, b, c, d, e, f) from a pixel to where it is read, x' = ax + by + c and
    y' = dx + ey + f, in pixels of the data set; () = none.
    """

    indices: tuple[int, ...]
    height: int
    width: int
    warps: tuple[tuple[float, ...], ...] = ()

    @property
    def label(self) -> str:
        """The digits as text."""
        return "".join(str(load_digits()[1][i]) for i in self.indices)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """A sample before its pixels exist: its images and its question–answer turns."""

    rows: tuple[RowPlan, ...]
    turns: tuple[tuple[str, str], ...]


def question_and_answer(kind: str, image: int, labels: Sequence[str]) -> tuple[str, str]:
    """The question of `kind` about image number `image` (from 0) of a sample whose images read `labels`."""
    label, where = labels[image], f"the {ORDINALS[image]} image"
    if kind == "read":
        return f"read {where}", label
    if kind == "count":
        return f"count {where}", str(len(label))
    return f"sum {where}", str(sum(int(d) for d in label))


def _random_warps(rng: np.random.Generator, count: int, strength: float) -> tuple[tuple[float, ...], ...]:
    """Random affine maps about a digit's centre: the matrix differs from 1 by up to `strength`, the shift is up to
    half of `strength` times a digit's side."""
    drawn = rng.uniform(-strength, strength, (count, 2, 3))
    matrices = np.eye(2) + drawn[:, :, :2]
    shifts = SIDE / 2 * (1.0 - matrices.sum(2) + drawn[:, :, 2])
    return tuple(map(tuple, np.concatenate([matrices, shifts[:, :, None]], 2).reshape(count, 6).tolist()))


def _warped(digits_NYX: np.ndarray, warps: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Digits [N, 8, 8] read bilinearly where their `warps` say; zero outside."""
    maps = np.asarray(warps).reshape(-1, 2, 3)
    grid = np.indices((SIDE, SIDE)).reshape(2, -1)[::-1] + 0.5
    # One row and column of zeros all around, so that a read outside is a read of zero.
    at = np.clip(maps[:, :, :2] @ grid + maps[:, :, 2:] + 0.5, 0.0, SIDE + 1.0)
    low = np.minimum(at.astype(np.int64), SIDE)
    x, y = np.moveaxis(at - low, 1, 0)
    padded = np.pad(digits_NYX, ((0, 0), (1, 1), (1, 1))).reshape(len(digits_NYX), -1)
    corner = low[:, 1] * (SIDE + 2) + low[:, 0]

    def read(step: int) -> np.ndarray:
        return np.take_along_axis(padded, corner + step, 1)

    below = SIDE + 2
    upper = read(0) * (1 - x) + read(1) * x
    lower = read(below) * (1 - x) + read(below + 1) * x
    return (upper * (1 - y) + lower * y).reshape(digits_NYX.shape).astype(np.float32)


class DigitsSource:
    """Digit samples by index. `split` is "train" or "test" (the held-out images; no curriculum; one turn)."""

    def __init__(self, config: DataConfig, spec: EncoderSpec, tokenizer: Tokenizer, *, seed: int, split: str):
        self.config, self.spec, self.tokenizer, self.seed, self.split = config, spec, tokenizer, seed, split
        self._range = split_range(split)
        weights = {kind: float(getattr(config, kind)) for kind in QUESTION_KINDS}
        self._asked = {kind: weight for kind, weight in weights.items() if weight > 0}

    def plan(self, index: int) -> SamplePlan:
        """The plan of sample `index`."""
        config = self.config
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        most = self._most_digits(index)
        rows = tuple(self._row(rng, most) for _ in range(rng.integers(*config.images, endpoint=True)))
        labels = [row.label for row in rows]
        pairs = [(kind, image) for kind in self._asked for image in range(len(rows))]
        turns = min(config.turns if self.split == "train" else 1, len(pairs))
        # The largest of u^(1/weight) draw without replacement by weight (Efraimidis & Spirakis 2006, algorithm A).
        keys = rng.random(len(pairs)) ** [1.0 / self._asked[kind] for kind, _ in pairs]
        asked = (pairs[i] for i in np.argsort(-keys)[:turns])
        return SamplePlan(rows=rows, turns=tuple(question_and_answer(kind, image, labels) for kind, image in asked))

    def meta(self, index: int) -> SampleMeta:
        """Token and patch counts of sample `index`; renders nothing."""
        plan = self.plan(index)
        sizes = [self._padded(row) for row in plan.rows]
        counts = [self.spec.tokens(*size) for size in sizes]
        tokens, _, _ = layout_tokens(self.tokenizer, self.config.encoder, counts, plan.turns)
        patches = tuple(self.spec.patches(*size) for size in sizes)
        return SampleMeta(tokens=len(tokens), patches={self.config.encoder: patches} if patches else {})

    def sample(self, index: int) -> Sample:
        """Sample `index`, rendered."""
        plan = self.plan(index)
        images = [self.render(row) for row in plan.rows]
        labels = [row.label for row in plan.rows]
        return build_sample(self.tokenizer, self.config.encoder, self.spec, images, plan.turns, labels)

    def worst_case(self) -> WorstCase:
        """Bounds on any sample of this source, from the configured ranges."""
        config = self.config
        digits, images = config.digits[1], config.images[1]
        size = self._padded(self._sized((0,) * digits, config.scale[1], config.aspect[1]))
        widest = ["9" * digits] * images
        asked = [question_and_answer(kind, image, widest) for kind in self._asked for image in range(images)]
        asked.sort(key=lambda turn: -sum(len(self.tokenizer.encode(text)) for text in turn))
        counts = [self.spec.tokens(*size)] * images
        tokens, _, _ = layout_tokens(self.tokenizer, config.encoder, counts, asked[: config.turns])
        return WorstCase(
            tokens=len(tokens),
            images={config.encoder: images},
            patches={config.encoder: self.spec.patches(*size)},
            sides={config.encoder: max(size) // self.spec.patch},
        )

    def render(self, row: RowPlan) -> np.ndarray:
        """Pixels [h, w, C] of `row`: bilinear at its size, zeros below and to the right up to multiples of a block."""
        digits = load_digits()[0][list(row.indices)]
        if row.warps:
            digits = _warped(digits, row.warps)
        strip = np.ascontiguousarray(digits.transpose(1, 0, 2).reshape(SIDE, -1))
        sized = np.asarray(Image.fromarray(strip).resize((row.width, row.height), Image.Resampling.BILINEAR))
        height, width = self._padded(row)
        image = np.zeros((height, width, self.spec.channels), np.float32)
        image[: row.height, : row.width] = sized[:, :, None]
        return image

    def _row(self, rng: np.random.Generator, most: int) -> RowPlan:
        config = self.config
        low, high = config.digits
        count = int(rng.integers(min(low, most), min(high, most), endpoint=True))
        scale, aspect = rng.uniform(*config.scale), rng.uniform(*config.aspect)
        row = self._sized(tuple(int(i) for i in rng.integers(*self._range, size=count)), scale, aspect)
        if self.split == "train" and config.distortion:
            return replace(row, warps=_random_warps(rng, count, config.distortion))
        return row

    @staticmethod
    def _sized(indices: tuple[int, ...], scale: float, aspect: float) -> RowPlan:
        height, width = round(SIDE * scale), round(SIDE * len(indices) * scale * aspect)
        return RowPlan(indices=indices, height=max(1, height), width=max(1, width))

    def _padded(self, row: RowPlan) -> tuple[int, int]:
        block = self.spec.block
        return -(-row.height // block) * block, -(-row.width // block) * block

    def _most_digits(self, index: int) -> int:
        most = self.config.digits[1]
        if self.split == "train":
            for start, limit in self.config.curriculum:
                if index >= start:
                    most = min(limit, self.config.digits[1])
        return most
