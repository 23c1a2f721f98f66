"""Synthetic samples that cover the cases of packing, boundaries and masks in real data.

Media have uneven sizes; a sample has several, of several encoders, at its start, in the middle and at its end. There is
text without media, a medium on which no loss depends, weights of 0, and pictures to be drawn, also without learned
text. There are few lengths and sizes, because the reference compiles once for each. All elements differ, so that a row
in the wrong place is noticed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.assembly.latents import encoded_in_step
from mmjax.data.derived import in_text
from mmjax.data.process import Process
from mmjax.data.sample import meta_of
from mmjax.data.tiles import token_count
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, Tiled, WorstCase
from mmjax.models.graph import MultimodalModel

LENGTH, MEDIA = 20, 3
"""The most tokens and media of a sample, except for a text that repeats one token."""
REPEATS = 128
"""Tokens of a text that repeats one token. Eight texts have a thousand; 320 terms have a small error in bf16."""
SPOKEN = {0: (5, 3), 3: (3, 4), 5: (4, 4), 6: (2, 3), 7: (6, 2)}
"""By kind, the tokens of the last answer and the codes that speak it, where the model has a generator of codes."""
LARGEST, ROOM = 4, 8
"""LLM tokens of the largest medium, and of a row into which an encoder's media are packed."""
GRIDS = ((2, 2), (1, 2), (1, 1), (0, 0))
"""Rows and columns of tiles that images may have."""

Steps = tuple[tuple[Sample, ...], ...]
"""The samples of every step."""


@dataclass(frozen=True, kw_only=True)
class SampleKind:
    """The shape of a sample.

    Attributes:
      length: number of tokens.
      media: for each medium, the position of its first token and its (rows, columns) in LLM tokens; a recording is as
        long as an image of that size.
      learned: number of first tokens that may have a loss weight; a medium behind them gets no gradient.
      turn: index of the first medium's encoder; the other media take the next encoders in turn.
      drawn: index of the medium that is drawn, if the model has a generator; None for none.
    """

    length: int
    media: tuple[tuple[int, tuple[int, int]], ...] = ()
    learned: int = LENGTH
    turn: int = 0
    drawn: int | None = None


KINDS = (
    SampleKind(length=16, media=((5, (2, 2)),)),
    SampleKind(length=9),
    SampleKind(length=20, media=((0, (2, 2)), (18, (1, 2))), drawn=1),
    SampleKind(length=20, media=((2, (1, 2)), (4, (1, 2)), (12, (2, 2))), drawn=2),
    SampleKind(length=16, media=((0, (2, 2)),), turn=1),
    SampleKind(length=20, media=((4, (3, 1)), (11, (3, 1))), drawn=0),
    SampleKind(length=16, media=((10, (2, 2)),), learned=10, drawn=0),
    SampleKind(length=20, media=((1, (2, 2)), (9, (1, 2))), learned=0, drawn=1),
)
TEXT, REPEATED = 1, 7
ONE_MEDIUM = (0, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes samples for a model.

    Attributes:
      encoders: shape of a medium, by encoder and generator with media; no encoder that reads another.
      vocab: vocabulary size of the LLM; its last ids are the placeholders.
      uniform: whether every token has the same loss weight; otherwise weights are random, some of them 0.
      repeated: whether a text without media is one token ``REPEATS`` times, with the loss weight of ``LENGTH`` tokens.
        The gradient of that token is a sum of many almost equal terms: summed in bf16, it has a far larger error than
        its terms.
    """

    encoders: Mapping[str, EncoderSpec]
    vocab: int
    uniform: bool = False
    repeated: bool = False

    @classmethod
    def of(cls, model: MultimodalModel, *, uniform: bool = False, repeated: bool = False) -> Maker:
        """A maker for a model whose LLM has a vocabulary size above 0; uniform, repeated: see the attributes."""
        media = {name: node.medium for name, node in model.nodes.items() if node.drawn or not model.into(name)}
        specs = {name: spec for name, spec in media.items() if spec}
        for edge in (edge for edge in model.edges if edge.latents):
            specs |= encoded_in_step(specs, edge.source, edge.target)
        return cls(encoders=specs, vocab=model.llm.vocab, uniform=uniform, repeated=repeated)

    @property
    def placeholders(self) -> dict[str, int]:
        """Token id of the placeholder by encoder and generator: the last of the vocabulary, descending."""
        return {name: self.vocab - 1 - i for i, name in enumerate(in_text(self.encoders))}

    @property
    def longest(self) -> int:
        """The most tokens of a sample."""
        return longest(many=self.repeated)

    def sample(self, rng: np.random.Generator, kind: int) -> Sample:
        """A sample of a kind with random text, media and weights.

        Args:
          rng: the source of randomness, which is advanced.
          kind: an index into ``KINDS``, modulo their number; also chooses between several generators.
        """
        shape, ids = KINDS[kind % len(KINDS)], self.placeholders
        tokens, weights = self._text(rng, shape)
        media: dict[str, tuple[np.ndarray, ...]] = dict.fromkeys(self.encoders, ())
        tiled: dict[str, tuple[Tiled, ...]] = {}
        for name, (start, size) in self._placed(kind):
            spec = self.encoders[name]
            sides, tiles = _sides(size, spec), None
            if spec.newline:
                tiles, sides = _tiled(size, spec), (1, 1)
                tiled[name] = (*tiled.get(name, ()), tiles)
            pixels = tuple(side * spec.block for side in sides)
            count = 1 + math.prod(tiles.grid) if tiles else 1
            tokens[start : start + token_count(spec, [pixels] * count, tiles)] = ids[name]
            # Every second medium of an encoder of videos is a temporal patch, whose frames differ.
            frames = spec.frames if len(media[name]) % 2 else 1
            if spec.sounds:  # the last patch may be partly behind the end
                pixels = (pixels[0] - int(rng.integers(spec.block)),)
            media[name] += tuple(_numbers(rng, (*pixels, frames * spec.channels)) for _ in range(count))
        drawn = [name for name, arrays in media.items() if arrays and self.encoders[name].drawn]
        references = {name: self._references(rng, name, media[name]) for name in drawn if self._most_references(name)}
        media |= self._encoded(rng, media, references)
        prompt = len(tokens)
        for name in (name for name, spec in self.encoders.items() if spec.codes and kind % len(KINDS) in SPOKEN):
            learned, count = SPOKEN[kind % len(KINDS)]
            prompt = len(tokens) - learned
            media[name] = (rng.integers(0, self.encoders[name].codes, (count, 1)).astype(np.int32),)
        return Sample(
            tokens=tokens,
            loss_weights=weights,
            media=media,
            question=f"kind {kind % len(KINDS)}",
            answer="",
            prompt=prompt,
            media_tokens=ids,
            noise={name: tuple(_numbers(rng, medium.shape) for medium in media[name]) for name in drawn},
            times={name: tuple(self._time(rng, name, medium) for medium in media[name]) for name in drawn},
            dropped={name: tuple(self._process(name).draw_dropped(rng) for _ in media[name]) for name in drawn},
            references=references,
            tiled=tiled,
        )

    def _encoded(
        self,
        rng: np.random.Generator,
        media: Mapping[str, tuple[np.ndarray, ...]],
        references: Mapping[str, tuple[tuple[np.ndarray, ...], ...]],
    ) -> dict[str, tuple[np.ndarray, ...]]:
        """The pictures that encoders of latents see, by encoder, of the sizes of latents."""
        pictures: dict[str, tuple[np.ndarray, ...]] = {}
        for encoder, spec in ((name, spec) for name, spec in self.encoders.items() if spec.encodes):
            behind = references.get(spec.encodes) or ((),) * len(media[spec.encodes])
            latents = [x for medium, of in zip(media[spec.encodes], behind, strict=True) for x in (medium, *of)]
            shapes = [(x.shape[0] * spec.patch, x.shape[1] * spec.patch, spec.channels) for x in latents]
            pictures[encoder] = tuple(_numbers(rng, shape) for shape in shapes)
        return pictures

    def _most_references(self, name: str) -> int:
        return self.encoders[name].references

    def _references(
        self, rng: np.random.Generator, name: str, media: Sequence[np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], ...]:
        """Pictures from which each of the media of a generator is made: none, or up to its most, turned about."""
        counts = rng.integers(0, self._most_references(name) + 1, len(media))
        shapes = [(width, height, channels) for height, width, channels in (medium.shape for medium in media)]
        of_media = zip(shapes, counts, strict=True)
        return tuple(tuple(_numbers(rng, shape) for _ in range(count)) for shape, count in of_media)

    def _process(self, name: str) -> Process:
        return self.encoders[name].process

    def _time(self, rng: np.random.Generator, name: str, medium: np.ndarray) -> float:
        """A training time of a medium of the generator `name`."""
        return self._process(name).draw_time(rng, self.encoders[name].patches(*medium.shape[:-1]))

    def _text(self, rng: np.random.Generator, shape: SampleKind) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss weights of a sample, without its media's placeholders."""
        if self.repeated and not shape.media:
            weight = 1.0 if self.uniform else LENGTH / REPEATS
            return np.full(REPEATS, REPEATED, np.int32), np.full(REPEATS, weight, np.float32)
        tokens = rng.integers(0, self.vocab - len(self.placeholders), shape.length).astype(np.int32)
        weights = (rng.random(shape.length) * (rng.random(shape.length) < 0.8)).astype(np.float32)
        if self.uniform:
            weights = np.ones(shape.length, np.float32)
        weights[shape.learned :] = 0
        return tokens, weights

    def _placed(self, kind: int) -> list[tuple[str, tuple[int, tuple[int, int]]]]:
        """The encoder or generator of each medium in a sample of a kind, with the medium's place and size.

        A model without encoders has the drawn medium alone.
        """
        shape = KINDS[kind % len(KINDS)]
        encoders = [name for name, spec in self.encoders.items() if not (spec.drawn or spec.encodes)]
        drawn = [name for name, spec in self.encoders.items() if spec.drawn and not spec.codes]
        names = [encoders[(shape.turn + i) % len(encoders)] if encoders else "" for i in range(len(shape.media))]
        if shape.drawn is not None and drawn:
            names[shape.drawn] = drawn[kind % len(drawn)]
        counts = [self._tokens(name, size) for name, (_, size) in zip(names, shape.media, strict=True)]
        starts = _apart([start for start, _ in shape.media], counts, shape.length)
        return [
            (name, (start, size)) for name, start, (_, size) in zip(names, starts, shape.media, strict=True) if name
        ]

    def _tokens(self, name: str, size: tuple[int, int]) -> int:
        """The most LLM tokens of a medium of this size: a generator with queries has as many for every picture."""
        spec = self.encoders.get(name)
        return (spec.queries if spec else 0) or math.prod(size)


def _apart(starts: Sequence[int], counts: Sequence[int], length: int) -> list[int]:
    """Places of media's first tokens in a sample, moved as little as makes them disjoint.

    Args:
      starts: the places in rising order.
      counts: each medium's tokens.
      length: tokens of the sample.

    Raises:
      ValueError: the sample has too few tokens.
    """
    if sum(counts) > length:
        raise ValueError(f"a sample of {length} tokens has no room for media of {list(counts)}: use fewer queries")
    moved, end = [], 0
    for start, count in zip(starts, counts, strict=True):
        moved.append(max(start, end))
        end = moved[-1] + count
    end = length
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], end - counts[i])
        end = moved[i]
    return moved


def _sides(size: tuple[int, int], spec: EncoderSpec) -> tuple[int, ...]:
    """The sides of a medium in LLM tokens, no longer than learned positions allow."""
    most = spec.longest // spec.merge if spec.longest else LENGTH
    if spec.canvases:
        most = min(spec.canvases[-1]) // (spec.merge * spec.multiple)
    if spec.pictures:
        most = min(most, min(spec.pictures.canvases[-1]) // spec.block)
    return tuple(min(side, most) for side in (size if spec.axes == 2 else (math.prod(size),)))


def _tiled(size: tuple[int, int], spec: EncoderSpec) -> Tiled:
    """An image in tiles of one token each, with at most as many LLM tokens as a medium of this size."""
    counts: dict[tuple[int, int], int] = {}
    for rows, columns in GRIDS:
        tiles = Tiled(size=(max(rows, 1), max(columns, 1)), grid=(rows, columns))
        with contextlib.suppress(ValueError):  # the picture has too few tokens for these tiles
            counts[tiles.grid] = token_count(spec, [(spec.block, spec.block)] * (1 + rows * columns), tiles)
    rows, columns = max((grid for grid in counts if counts[grid] <= math.prod(size)), key=lambda grid: counts[grid])
    return Tiled(size=(max(rows, 1), max(columns, 1)), grid=(rows, columns))


def _largest(spec: EncoderSpec) -> int:
    """The most patches of a medium, with those of the pictures that it is made from."""
    return (1 + spec.references) * LARGEST * spec.patches_per_token * spec.multiple**spec.axes


def _most_media(spec: EncoderSpec) -> int:
    """The most media of a sample."""
    return MEDIA * (1 + max(rows * columns for rows, columns in GRIDS)) if spec.newline else MEDIA


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers away from 0: normalising a patch that is almost 0 would magnify rounding."""
    signs = rng.choice((-1.0, 1.0), shape)
    return (signs * rng.uniform(0.5, 1.5, shape)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The number of samples of a step, and how they are divided.

    Attributes:
      microbatches: microbatches of a step.
      per_cell: LLM rows of a cell.
      rows: LLM rows of a microbatch.
      per: samples of a microbatch; the other rows stay empty.
    """

    microbatches: int
    per_cell: int
    rows: int
    per: int

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.microbatches * self.per

    @classmethod
    def of(cls, cells: int, microbatches: int, *, many: bool = False) -> BatchSizes:
        """Sizes with four, two or one rows for each cell, fewer with more cells.

        With several cells every microbatch has an empty row.

        Args:
          cells: cells of a microbatch.
          microbatches: microbatches of a step.
          many: whether a cell has 16 rows, so that a repeated token is read often.
        """
        per_cell = 16 if many else 4 if cells <= 2 else 2 if cells <= 4 else 1
        rows = cells * per_cell
        per = rows - 1 if cells > 1 else rows
        return cls(microbatches=microbatches, per_cell=per_cell, rows=rows, per=per)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a check: a ``Source`` (see ``mmjax.data.loader``) and a pure function of its seed.

    Microbatches in turn have samples of all kinds; media in only one half of the rows, so that half of the dp ranks
    have none; and no media. If texts repeat a token, every other sample is such a text as well: a check may have a
    single step of a single microbatch, which would have few of them.

    Attributes:
      maker: makes samples for the model.
      sizes: rows and samples of a step's batches.
      seed: seed of the run.
    """

    maker: Maker
    sizes: BatchSizes
    seed: int

    def sample(self, index: int, media: Collection[str] | None = None, learned: bool = True) -> Sample:
        """Sample ``index``, from 0 and counted over all steps, with only the media of the encoders ``media``.

        By default it has all media. ``learned`` changes nothing.
        """
        step, place = divmod(index, self.sizes.samples)
        microbatch, row = divmod(place, self.sizes.per)
        turn, second_half = step * self.sizes.microbatches + microbatch, row >= self.sizes.rows // 2
        number, text = divmod(place, 2) if self.maker.repeated else (place, 0)
        kind = TEXT if text else _kind(turn, step + number, second_half=second_half)
        sample = self.maker.sample(np.random.default_rng((self.seed, step, place)), kind)
        if media is None:
            return sample
        return replace(sample, media={name: arrays for name, arrays in sample.media.items() if name in media})

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample ``index``."""
        return meta_of(self.sample(index), self.maker.encoders)

    def worst_case(self) -> WorstCase:
        """Bounds on every sample, whatever its kind."""
        encoders = self.maker.encoders
        return WorstCase(
            tokens=self.maker.longest,
            media={name: _most_media(spec) for name, spec in encoders.items()},
            patches={name: _largest(spec) for name, spec in encoders.items()},
            sides={name: max(_sides((LARGEST, 1), spec)) * spec.block // spec.patch for name, spec in encoders.items()},
        )

    def steps(self, count: int) -> Steps:
        """The samples of the first ``count`` steps: a tuple of ``sizes.samples`` samples for each step."""
        size = self.sizes.samples
        return tuple(tuple(self.sample(step * size + place) for place in range(size)) for step in range(count))


def _kind(turn: int, index: int, *, second_half: bool) -> int:
    """The kind of sample ``index`` of a microbatch; ``turn`` is the microbatch's number over all steps."""
    arrangement = turn % 3
    if arrangement == 0:
        return index
    has_media = second_half == bool(turn % 2)
    return ONE_MEDIUM[index % len(ONE_MEDIUM)] if arrangement == 1 and has_media else TEXT


def longest(*, many: bool) -> int:
    """The most tokens of a check's sample: ``LENGTH``, or ``REPEATS`` with ``many``, where texts repeat a token."""
    return REPEATS if many else LENGTH


def text_buckets(samples_per_cell: int, length: int, *, several: bool) -> tuple[tuple[int, int], ...]:
    """Shapes (rows of a cell, tokens of a row) of LLM buckets that hold the samples of a cell.

    Args:
      samples_per_cell: samples of a cell.
      length: the most tokens of a sample; two fit into a row.
      several: whether a bucket of about half as many tokens comes first, for microbatches of texts alone.
    """
    rows = -(-samples_per_cell // 2)
    large, small = (rows, 2 * length), (rows // 2, 2 * length) if rows > 1 else (1, length)
    return (small, large) if several else (large,)


def buckets(spec: EncoderSpec, rows_per_cell: int, *, several: bool) -> tuple[tuple[int, int], ...]:
    """Shapes (rows of a cell, positions of a row) of an encoder's buckets that hold the samples' media.

    Args:
      spec: the encoder's or generator's media, such as ``encoder_specs(recipe)["vision"]``.
      rows_per_cell: LLM rows of a cell.
      several: whether a smaller bucket comes first, for microbatches with few media.
    """
    per_row = ROOM // LARGEST
    medium = _largest(spec) + spec.prefix
    if spec.alone:  # a picture has a row to itself
        widths = [spec.prefix + math.prod(canvas) for canvas in spec.canvases] or [medium]
        large = MEDIA * rows_per_cell, widths[-1]
        return ((rows_per_cell, widths[0]), large) if several else (large,)
    if spec.newline:  # an image is as many media of one token each
        medium = _most_media(spec) // MEDIA * (spec.patches_per_token + spec.prefix)
    large = (-(-MEDIA * rows_per_cell // per_row), per_row * medium)
    small = (-(-rows_per_cell // per_row), (per_row if rows_per_cell > 1 else 1) * medium)
    return (small, large) if several else (large,)


def clip_buckets(rows_per_cell: int, *, several: bool) -> tuple[tuple[int, int], ...]:
    """Shapes (rows of a cell, positions of a row) of buckets of an encoder that reads another one's tokens.

    They hold the tokens of all media of every sample.

    Args:
      rows_per_cell: LLM rows of a cell.
      several: whether a smaller bucket comes first, for microbatches with few media.
    """
    large = -(-rows_per_cell // 2), min(2, rows_per_cell) * MEDIA * LARGEST
    small = max(1, large[0] // 2), large[1] // 2
    return (small, large) if several else (large,)
