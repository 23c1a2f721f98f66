"""Samples that a function makes, for tasks of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.noise import SPLITS, with_noise
from mmjax.data.sample import build_meta, build_sample
from mmjax.data.tasks.task import TaskContext
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, WorstCase


@dataclass(frozen=True, kw_only=True)
class Example:
    """A dialogue about media, before it is tokens and patches.

    Attributes:
      turns: pairs of a question and its answer, in order. Media stand before the first question, or where a question
        has their marks, such as "<image>".
      images: arrays [h, w, C] of any size, for `Data.image_encoder`; C is its number of channels, values are in 0…1.
      recordings: waveforms [N], for `Data.audio_encoder`, at its sample rate; values are in -1…1.
      drawing: the picture [h, w, C] that `Data.generator` is to draw, in -1…1; a question has the mark "<drawing>".
      codes: integers [n] that speak the last answer, for `Data.speaker`, from 2 on and a 1 at the end; () for none.
      kind: the kind of the last question, for scores by kind.
    """

    turns: Sequence[tuple[str, str]]
    images: Sequence[np.ndarray] = ()
    recordings: Sequence[np.ndarray] = ()
    drawing: np.ndarray | None = None
    codes: Sequence[int] = ()
    kind: str = ""


class Examples:
    """The samples of a task whose examples a function makes, from index 0 without end: a `Source`.

    An example depends on the run's seed, the split and its index alone. It is made again wherever its sizes or its
    media are needed.

    Args:
      context: the argument of `Task.open`.
      make: makes an example from a random generator. It is pickled to worker processes, so it is a function of a
        module, a method of the task, or a `functools.partial` of these.
      largest: examples that no other exceeds in the number or size of its media, or in the length of its text.

    Raises:
      ConfigError: an encoder that the media of `largest` need is not in the model, or has other channels.
    """

    def __init__(
        self, context: TaskContext, make: Callable[[np.random.Generator], Example], *, largest: Sequence[Example]
    ):
        self.context, self.make, self.largest = context, make, tuple(largest)
        self._worst = self.worst_case()

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample `index`; see `Source`. Raises ConfigError if an example exceeds `largest`."""
        meta, worst = self._meta(self._example(index)), self._worst
        counts = {"tokens": (meta.tokens, worst.tokens)}
        for name, grids in meta.grids.items():
            counts[f"media of {name}"] = len(grids), worst.media.get(name, 0)
            counts[f"patches in a medium of {name}"] = max(meta.lengths(name)), worst.patches.get(name, 0)
        for unit, (count, most) in counts.items():
            if count > most:
                problem = f"example {index} has {count} {unit}, and those in `largest` have {most} at most"
                raise ConfigError(f"Data.task={self.context.data.task!r}: {problem}; add a larger one there")
        return meta

    def _meta(self, example: Example) -> SampleMeta:
        return build_meta(self.context.tokenizer, self.context.encoders, _sizes(self._media(example)), example.turns)

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """Sample `index` with the media of the encoders and generators `media`, by default of all; see `Source`."""
        example = self._example(index)
        arrays = self._media(example)
        chosen = {name: arrays_of for name, arrays_of in arrays.items() if media is None or name in media}
        sample = build_sample(
            self.context.tokenizer,
            self.context.encoders,
            chosen,
            example.turns,
            sizes=_sizes(arrays),
            kind=example.kind,
        )
        generator = self.context.data.generator
        if example.drawing is None:
            return sample
        context = self.context
        specs = {generator: context.encoders[generator]}
        return with_noise(sample, specs, {generator: 1}, seed=context.seed, split=context.split, index=index)

    def worst_case(self) -> WorstCase:
        """The bounds that `largest` gives."""
        tokens, media, patches, sides = 0, dict[str, int](), dict[str, int](), dict[str, int]()
        for example in self.largest:
            meta = self._meta(example)
            tokens = max(tokens, meta.tokens)
            for name, grids in meta.grids.items():
                media[name] = max(media.get(name, 0), len(grids))
                patches[name] = max(patches.get(name, 0), *meta.lengths(name))
                sides[name] = max(sides.get(name, 0), *(side for grid in grids for side in grid))
        return WorstCase(tokens=tokens, media=media, patches=patches, sides=sides)

    def _example(self, index: int) -> Example:
        context = self.context
        return self.make(np.random.default_rng([context.seed, SPLITS.index(context.split), index]))

    def _media(self, example: Example) -> dict[str, list[np.ndarray]]:
        """The media by encoder and generator, as these take them; those that it has none of are left out."""
        data, encoders = self.context.data, self.context.encoders
        drawings = [] if example.drawing is None else [example.drawing]
        speaks = len(example.codes) and data.speaker in encoders
        media = {
            data.image_encoder: [self._padded(data.image_encoder, image) for image in example.images],
            data.audio_encoder: [self._frames(data.audio_encoder, waveform) for waveform in example.recordings],
            data.generator: [self._padded(data.generator, drawing, -1.0) for drawing in drawings],
            data.speaker: [np.asarray(example.codes, np.int32)[:, None]] if speaks else [],
        }
        return {name: arrays for name, arrays in media.items() if arrays}

    def _spec(self, name: str, medium: str) -> EncoderSpec:
        if name not in self.context.encoders:
            problem = f"examples have {medium}s for {name!r}, which the model lacks"
            raise ConfigError(f"Data.task={self.context.data.task!r}: {problem}; add it, or leave them out")
        return self.context.encoders[name]

    def _padded(self, name: str, image: np.ndarray, value: float = 0.0) -> np.ndarray:
        """The image, float32, with `value` below and to the right, up to multiples of a block."""
        spec = self._spec(name, "image")
        if image.ndim != 3 or image.shape[2] != spec.channels:
            problem = f"an image has shape {image.shape}, and {name!r} takes {spec.channels} channels"
            raise ConfigError(f"Data.task={self.context.data.task!r}: {problem}; make it [h, w, {spec.channels}]")
        height, width = (-side % spec.block for side in image.shape[:2])
        padding = ((0, height), (0, width), (0, 0))
        return np.pad(np.asarray(image, np.float32), padding, constant_values=value)

    def _frames(self, name: str, waveform: np.ndarray) -> np.ndarray:
        spec = self._spec(name, "recording")
        assert spec.log_mel is not None
        return spec.log_mel(waveform, spec.block)


def _sizes(media: Mapping[str, Sequence[np.ndarray]]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [array.shape[:-1] for array in arrays] for name, arrays in media.items()}
