"""Samples of handwritten digits and dialled digits, with questions about them, and digits to be drawn (no network).

The images are in `digits.npz`, see `digits.md`. A sample is a pure function of (seed, split, index). It is first
planned (digits, sizes and questions), which takes microseconds and gives its metadata. Pixels and sounds are rendered
from the plan only when they are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.data.config import DataConfig
from mmjax.data.log_mel import LogMel
from mmjax.data.noise import SPLITS, with_noise
from mmjax.data.sample import build_meta, build_sample, encode_dialogue
from mmjax.data.sources.places import DRAWING
from mmjax.data.tasks.digits.config import CALL_QUESTIONS, DRAW, IMAGE_QUESTIONS, QUESTION_KINDS, SAY, DigitsConfig
from mmjax.data.tasks.digits.dtmf import CallPlan, longest_call, plan_call, render_call, spoken
from mmjax.data.tiles import token_count
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, WorstCase

HELD_OUT = 360  # the last images of the data set: evaluated on, never trained on
SIDE = 8  # pixels of a digit in the data set
_CALL = 5  # separates the random numbers of calls to be made from a sample's other ones
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] float32 in 0…1 and labels [1797] int64 of the handwritten digits beside this file."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"].astype(np.float32) / 16.0, file["labels"].astype(np.int64)


def split_range(split: str) -> tuple[int, int]:
    """The half-open range of data set indices that `split` ("train" or "test") draws from.

    (0, 1437) for "train", (1437, 1797) for "test".
    """
    total = len(load_digits()[1])
    return (0, total - HELD_OUT) if split == "train" else (total - HELD_OUT, total)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One image: the data set indices of its digits, and its size in pixels before padding.

    warps: for each digit the affine map (a, b, c, d, e, f) from a pixel to the point where it is read, x' = ax + by + c
    and y' = dx + ey + f, in pixels of the data set; () = none.
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
    """A sample before its pixels and sounds exist: its images, its calls, its question–answer turns and their kinds.

    drawn: the data set indices of the digits that are to be drawn, () = nothing is.
    said: the call that is to be made, None = nothing is.
    """

    rows: tuple[RowPlan, ...]
    turns: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...] = ()
    calls: tuple[CallPlan, ...] = ()
    drawn: tuple[int, ...] = ()
    said: CallPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of `kind` about image number `image` or call number `call` (from 0), or both.

    dialled: whether the digits to be drawn were dialled, not seen.
    """

    kind: str
    image: int = 0
    call: int = 0
    dialled: bool = False

    def text(self, images: int, calls: int) -> str:
        """The text of the question for a sample with `images` images and `calls` calls."""
        image, dialled = f"the {ORDINALS[self.image]} image", "what was dialled"
        if self.kind == DRAW and not self.dialled:
            return f"draw {image} <drawing>"
        if self.kind == SAY:
            return f"say {image} <drawing>"
        if self.kind in IMAGE_QUESTIONS:
            return f"{self.kind} {image}"
        if calls > 1:
            dialled += f" {ORDINALS[self.call]}"
        if self.kind == DRAW:
            return f"draw {dialled} <drawing>"
        if self.kind == "hear":
            return dialled
        if images == calls == 1:
            return {"both": "what do they say", "same": "are they the same"}[self.kind]
        return {"both": f"read {image} and {dialled}", "same": f"is {image} {dialled}"}[self.kind]

    def answer(self, labels: Sequence[str], dialled: Sequence[str]) -> str:
        """The right answer, from the digits of each image (`labels`) and of each call (`dialled`)."""
        if self.kind == "hear" or self.dialled:
            return dialled[self.call]
        label = labels[self.image]
        if self.kind == "both":
            return f"{label} {dialled[self.call]}"
        if self.kind == "same":
            return "yes" if label == dialled[self.call] else "no"
        return {"read": label, DRAW: label, SAY: label, "count": str(len(label)), "sum": str(sum(map(int, label)))}[
            self.kind
        ]


def _compared(rng: np.random.Generator, label: str, unrelated: str) -> str:
    """Digits to compare with `label`: half of the time the same, a quarter with one digit changed, else `unrelated`."""
    chance, place, step = rng.random(), int(rng.integers(len(label))), int(rng.integers(1, 10))
    if chance < 0.5:
        return label
    if chance < 0.75:
        return f"{label[:place]}{(int(label[place]) + step) % 10}{label[place + 1 :]}"
    return unrelated


def _random_warps(rng: np.random.Generator, count: int, strength: float) -> tuple[tuple[float, ...], ...]:
    """Random affine maps about a digit's centre.

    The matrix differs from 1 by up to `strength`; the shift is up to half of `strength` times a digit's side.
    """
    drawn = rng.uniform(-strength, strength, (count, 2, 3))
    matrices = np.eye(2) + drawn[:, :, :2]
    shifts = SIDE / 2 * (1.0 - matrices.sum(2) + drawn[:, :, 2])
    return tuple(map(tuple, np.concatenate([matrices, shifts[:, :, None]], 2).reshape(count, 6).tolist()))


def _warped(digits_NYX: np.ndarray, warps: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Digits [N, 8, 8], read bilinearly at the points of their `warps`; zero outside."""
    maps = np.asarray(warps).reshape(-1, 2, 3)
    grid = np.indices((SIDE, SIDE)).reshape(2, -1)[::-1] + 0.5
    # One row and column of zeros on every side, so that reads outside give zero.
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


@lru_cache(maxsize=20)
def _of_digit(split: str, digit: int) -> np.ndarray:
    """Indices of all images of `digit` in `split`."""
    first, last = split_range(split)
    return first + np.flatnonzero(load_digits()[1][first:last] == digit)


def _drawing_first(questions: Sequence[Question]) -> list[Question]:
    """The questions with at most one medium to be made, in the first place: media belong to the first question."""
    makes = [question for question in questions if question.kind in (DRAW, SAY)]
    return makes[:1] + [question for question in questions if question not in makes]


class DigitsSource:
    """Digit samples by index, from 0 without end.

    Args:
      data: names the encoders and the generator.
      encoders: specs of the model's encoders and generators, by name.
      tokenizer: the tokenizer.
      settings: the task's settings.
      seed: the run's seed.
      split: "train" or "test" (the held-out images; no curriculum; one turn).
    """

    def __init__(
        self,
        data: DataConfig,
        encoders: Mapping[str, EncoderSpec],
        tokenizer: Tokenizer,
        *,
        settings: DigitsConfig,
        seed: int,
        split: str,
    ):
        self.data, self.config, self.encoders, self.tokenizer = data, settings, encoders, tokenizer
        self.seed, self.split = seed, split
        self._range = split_range(split)
        self._weights = {kind: float(getattr(settings, kind)) for kind in QUESTION_KINDS}
        # In the order of the media in a sample.
        named = {data.image_encoder: settings.images, data.audio_encoder: settings.calls}
        self._names = tuple(name for name, (_, most) in named.items() if most)
        self._speaks = data.speaker in encoders and encoders[data.speaker].codes > 0

    def plan(self, index: int) -> SamplePlan:
        """The plan of sample `index`."""
        config = self.config
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        most = self._most_digits(index)
        rows = tuple(self._row(rng, most) for _ in range(rng.integers(*config.images, endpoint=True)))
        count = int(rng.integers(*config.calls, endpoint=True)) if config.calls[1] else 0
        questions = self._questions(len(rows), count)
        turns = min(config.turns if self.split == "train" else 1, len(questions))
        # The largest keys u^(1/weight) are a weighted draw without replacement (Efraimidis & Spirakis 2006, alg. A).
        keys = rng.random(len(questions)) ** [1.0 / self._weights[question.kind] for question in questions]
        chosen = _drawing_first([questions[i] for i in np.argsort(-keys)[:turns]])
        labels = [row.label for row in rows]
        calls = self._calls(rng, count, most=most, questions=chosen, labels=labels)
        turns = tuple(
            (question.text(len(rows), count), question.answer(labels, [call.digits for call in calls]))
            for question in chosen
        )
        return SamplePlan(
            rows=rows,
            turns=turns,
            kinds=tuple(question.kind for question in chosen),
            calls=calls,
            drawn=self._drawn(index, turns[0][1]) if chosen[0].kind == DRAW else (),
            said=self._said(index, turns[0][1]) if chosen[0].kind == SAY else None,
        )

    def _drawn(self, index: int, digits: str) -> tuple[int, ...]:
        """The data set index of a random image of each digit."""
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index, 1])
        return tuple(int(rng.choice(_of_digit(self.split, int(digit)))) for digit in digits)

    def _said(self, index: int, digits: str) -> CallPlan:
        """A call in which these digits are dialled."""
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index, _CALL])
        return plan_call(rng, digits, self.config, self._spoken_frames.sample_rate)

    def _questions(self, images: int, calls: int) -> list[Question]:
        """Every question about a sample with `images` images and `calls` calls."""
        return [
            Question(kind=kind, image=image, call=call)
            for kind in self.config.kinds(images, calls)
            for image in range(1 if kind in CALL_QUESTIONS else images)
            for call in range(1 if kind in (*IMAGE_QUESTIONS, SAY) else calls)
            if kind != DRAW
        ] + self._drawings(images, calls)

    def _drawings(self, images: int, calls: int) -> list[Question]:
        if not self.config.draw:
            return []
        of_images = [Question(kind=DRAW, image=image) for image in range(images)]
        return of_images + [Question(kind=DRAW, call=call, dialled=True) for call in range(calls)]

    def _calls(
        self, rng: np.random.Generator, count: int, *, most: int, questions: Sequence[Question], labels: Sequence[str]
    ) -> tuple[CallPlan, ...]:
        """The calls of a sample. A call that is compared with an image has the same digits half of the time."""
        low, high = self.config.digits
        calls = []
        for number in range(count):
            length = int(rng.integers(min(low, most), min(high, most), endpoint=True))
            dialled = "".join(map(str, rng.integers(0, 10, length)))
            for question in questions:
                if question.kind == "same" and question.call == number:
                    dialled = _compared(rng, labels[question.image], dialled)
            calls.append(plan_call(rng, dialled, self.config, self._sample_rate))
        return tuple(calls)

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample `index`; nothing is rendered."""
        plan = self.plan(index)
        return build_meta(self.tokenizer, self.encoders, self._sizes(plan), plan.turns)

    def _sizes(self, plan: SamplePlan) -> dict[str, list[tuple[int, ...]]]:
        """Sizes of all media by encoder, and of the medium to be drawn by generator."""
        sizes = ([self._padded(row) for row in plan.rows], [self._frames(call.samples) for call in plan.calls])
        shown = {name: list(sizes_of) for name, sizes_of in self._by_encoder(*sizes).items()}
        shown |= {self.data.generator: [self._canvas]} if plan.drawn else {}
        shown |= {self.data.speaker: [(self._spoken_frames.frames(plan.said.samples),)]} if plan.said else {}
        return shown | ({self.data.speaker: [(len(spoken(plan.turns[-1][1])),)]} if self._speaks else {})

    def _by_encoder(self, images: Sequence[Any], calls: Sequence[Any]) -> dict[str, Sequence[Any]]:
        named = {self.data.image_encoder: images, self.data.audio_encoder: calls}
        return {name: named[name] for name in self._names}

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """Sample `index`, rendered for the encoders and generators `media`; for all by default. See `Source`."""
        plan = self.plan(index)
        render = {self.data.image_encoder: self.render, self.data.audio_encoder: self.hear}
        rendered = {
            name: [render[name](planned) for planned in plans]
            for name, plans in self._by_encoder(plan.rows, plan.calls).items()
            if media is None or name in media
        }
        labels = dict(self._by_encoder([row.label for row in plan.rows], [call.digits for call in plan.calls]))
        name = self.data.speaker if plan.said else self.data.generator
        if (plan.drawn or plan.said) and (media is None or name in media):
            made = self.say(plan.said) if plan.said else self.drawing(plan.drawn)
            rendered[name], labels[name] = [made], [plan.turns[0][1]]
        if self._speaks and (media is None or self.data.speaker in media):
            rendered[self.data.speaker] = [spoken(plan.turns[-1][1])]
        sample = build_sample(
            self.tokenizer,
            self.encoders,
            rendered,
            plan.turns,
            sizes=self._sizes(plan),
            labels=labels,
            kind=plan.kinds[-1],
        )
        if not (plan.drawn or plan.said):
            return sample
        generators = {name: self.encoders[name]}
        return with_noise(sample, generators, {name: 1}, seed=self.seed, split=self.split, index=index)

    def say(self, call: CallPlan) -> np.ndarray:
        """Log-mel frames [F, M] float32 of a call to be made, as the generator of recordings has them."""
        log_mel = self._spoken_frames
        return log_mel(render_call(call, log_mel.sample_rate))

    def drawing(self, indices: Sequence[int]) -> np.ndarray:
        """Pixels [h, w, C] float32 in -1…1 of digits side by side, in the common size of drawings.

        indices: data set indices of the digits, at most as many as `Digits.digits` allows.
        """
        canvas = np.full((*self._canvas, self.encoders[self.data.generator].channels), -1.0, np.float32)
        strip = np.concatenate(list(load_digits()[0][list(indices)]), axis=1)
        strip = np.kron(strip, np.ones((self.config.drawn_scale,) * 2, np.float32))
        canvas[: strip.shape[0], : strip.shape[1]] = 2 * strip[:, :, None] - 1
        return canvas

    @property
    def _canvas(self) -> tuple[int, int]:
        """Height and width of a drawing: room for the most digits, rounded up to blocks."""
        block, side = self.encoders[self.data.generator].block, SIDE * self.config.drawn_scale
        return -(-side // block) * block, -(-side * self.config.digits[1] // block) * block

    def worst_case(self) -> WorstCase:
        """Bounds on any sample of this source, from the configured ranges."""
        config = self.config
        digits, images, calls = config.digits[1], config.images[1], config.calls[1]
        widest = ["9" * digits] * max(images, calls)
        turns = [
            (question.text(images, calls), question.answer(widest, widest))
            for question in self._questions(images, calls)
        ]
        turns.sort(key=lambda turn: -sum(len(self.tokenizer.encode(text)) for text in turn))
        plain = [turn for turn in turns if DRAWING not in turn[0]]
        making = [turn for turn in turns if turn not in plain]
        sizes: dict[str, tuple[int, ...]] = {}
        least: dict[str, int] = {}
        if images:
            sizes[self.data.image_encoder] = self._padded(self._sized((0,) * digits, config.scale[1], config.aspect[1]))
            fewest = min([config.digits[0], *(limit for _, limit in config.curriculum)])
            smallest = self._padded(self._sized((0,) * fewest, config.scale[0], config.aspect[0]))
            least[self.data.image_encoder] = self.encoders[self.data.image_encoder].patches(*smallest)
        if calls:
            sizes[self.data.audio_encoder] = self._frames(longest_call(config, self._sample_rate))
        media = {name: len(numbers) for name, numbers in self._by_encoder(range(images), range(calls)).items()}
        if config.draw:
            sizes[self.data.generator], media[self.data.generator] = self._canvas, 1
        if config.say:
            log_mel = self._spoken_frames
            sizes[self.data.speaker] = (log_mel.frames(longest_call(config, log_mel.sample_rate)),)
            media[self.data.speaker] = 1
        specs = {name: self.encoders[name] for name in sizes}
        counts = {name: [token_count(specs[name], [size])] * media[name] for name, size in sizes.items()}
        if self._speaks:
            name = self.data.speaker
            sizes[name], media[name] = (max(len(spoken(answer)) for _, answer in turns),), 1
            specs[name] = self.encoders[name]
        tokens = []
        makers = {DRAW: self.data.generator, SAY: self.data.speaker}
        shown_counts = {name: count for name, count in counts.items() if not self.encoders[name].drawn}
        for kind in ("", *makers):
            made = [turn for turn in making if kind and turn[0].startswith(kind)][:1]
            chosen = [*made, *plain]
            if chosen and (made or not kind):
                counts_of = {**shown_counts, **({makers[kind]: counts[makers[kind]]} if made else {})}
                dialogue = encode_dialogue(self.tokenizer, self.encoders, counts_of, chosen[: config.turns])
                tokens.append(len(dialogue.tokens))
        return WorstCase(
            tokens=max(tokens, default=0),
            media=media,
            patches={name: specs[name].patches(*size) for name, size in sizes.items()},
            sides={name: max(specs[name].grid(*size)) for name, size in sizes.items()},
            least=least,
        )

    @property
    def _log_mel(self) -> LogMel:
        log_mel = self.encoders[self.data.audio_encoder].log_mel
        assert log_mel is not None
        return log_mel

    @property
    def _spoken_frames(self) -> LogMel:
        """The frames of recordings to be made."""
        log_mel = self.encoders[self.data.speaker].log_mel
        assert log_mel is not None
        return log_mel

    @property
    def _sample_rate(self) -> int:
        return self._log_mel.sample_rate

    def _frames(self, samples: int) -> tuple[int]:
        return (self._log_mel.frames(samples, self.encoders[self.data.audio_encoder].block),)

    def hear(self, call: CallPlan) -> np.ndarray:
        """Log-mel frames [F, M] float32 of `call`; silence follows it, up to a multiple of a block."""
        log_mel = self._log_mel
        return log_mel(render_call(call, log_mel.sample_rate), self.encoders[self.data.audio_encoder].block)

    def render(self, row: RowPlan) -> np.ndarray:
        """Pixels [h, w, C] of `row`, float32 in 0…1, bilinear at its size.

        Zeros follow below and to the right, up to multiples of a block.
        """
        digits = load_digits()[0][list(row.indices)]
        if row.warps:
            digits = _warped(digits, row.warps)
        strip = np.ascontiguousarray(digits.transpose(1, 0, 2).reshape(SIDE, -1))
        sized = np.asarray(Image.fromarray(strip).resize((row.width, row.height), Image.Resampling.BILINEAR))
        height, width = self._padded(row)
        image = np.zeros((height, width, self.encoders[self.data.image_encoder].channels), np.float32)
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
        block = self.encoders[self.data.image_encoder].block
        return -(-row.height // block) * block, -(-row.width // block) * block

    def _most_digits(self, index: int) -> int:
        most = self.config.digits[1]
        if self.split == "train":
            for start, limit in self.config.curriculum:
                if index >= start:
                    most = min(limit, self.config.digits[1])
        return most
