"""The types that the data side shares with the rest: samples, packed microbatches, the batch of a step. NumPy only.

A *medium* is what an encoder encodes, an array whose last axis is channels: an image [h, w, C] or a recording [F, M] of
log-mel frames. It is cut into patches along its other axes.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
P patch edge, C channels, A axes of a medium, F frames, M mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import le

import numpy as np

from mmjax.configurable import require
from mmjax.data.log_mel import LogMel
from mmjax.data.process import Process

BLANK = "blank"
"""The latents of prompts, whose pictures are not there yet."""
ENCODED = "encoded"
"""The latents that a module of the model makes of pictures in the step."""
_MEDIA = {1: ("recording", "frames"), 2: ("image", "pixels")}


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """How the media of an encoder become patches, and patches LLM tokens, for the data side.

    For a generator the reverse: its LLM tokens become patches, and these a medium.

    Attributes:
      patch: patch edge in pixels or frames.
      merge: edge of the block of patches that become one LLM token.
      channels: 1 (grayscale), 3 (RGB) or the mel bins.
      frames: frames of a patch. A medium has so many, one behind the other along channels; or one, which is repeated.
      axes: axes of a medium, 2 for images and 1 for recordings.
      special: number of positions of a medium without a patch, such as a class token. They come before its patches.
      buckets: the static (rows per cell, patches per row) shapes, cheapest first; () = derived.
      abreast: media that a row of a derived bucket has room for: one for each rank of cp that takes whole media.
      longest: the most patches along a side of a medium; 0 = any.
      bounded_by: the field of the configuration that sets `longest`, or `canvases`.
      boundless: the value of the setting `positions` with which there is no such bound.
      log_mel: how a recording becomes frames; None for images.
      drawn: whether this is a generator.
      queries: tokens of the LLM that condition a picture, whatever its size; 0 = one for each block of patches. A row
        of such a generator has one picture: first so many places of the condition, which `special` counts, then its
        patches, which have arrays of their own.
      canvases: grids of patches (rows, columns), each of which holds the one before; () = patches in one line. A
        picture of a generator with `queries` lies in the upper left corner of the canvas of its bucket.
      references: the most pictures that a picture of a generator with `queries` is made from: their patches, without
        noise, follow its own in its row, and positions have the number of the picture in front. 0 = none.
      multiple: a side of a medium is a multiple of so many blocks.
      latents: the folder of the latents that a generator makes in place of pictures, as `mmjax.data.latents` has them;
        `BLANK` for blank ones, of prompts; `ENCODED` for those that a module makes in the step; "" for pictures. A
        sample's medium is then first [h, w, 2 C], mean and deviation, until `with_noise` draws it. Of `ENCODED` ones
        these are 0 and 1, so that it is the noise with which the latent will be drawn.
      pictures: with `ENCODED`, the cutting of the pictures, and `encoder` the name of the module that encodes them.
      encodes: of such a module the name of the generator. Its media are the pictures that the generator makes, and
        behind each those that it is made from.
      factor: pixels of a picture along a side of a latent's pixel; 1 for pictures.
      newline: whether an image and its tiles become rows of one picture with newlines; see `mmjax.data.tiles`.
      most_tiles: the largest picture, in tiles; larger ones are resized. 0 = any.
      reads: the modules whose tokens it reads, each with the name of its host input of places ("" for the default); ()
        for a generator that reads the LLM alone, and for an encoder of media.
      text_index: the LLM's host input of the places of its tokens, "" for the default; None if the LLM does not read
        them.
      codes: number of codes of a generator that speaks a sample's last answer in codes, 0 begins and 1 ends them; 0 for
        other modules. Its medium is int32 [n, 1], codes from 2 on and then 1, and has no placeholders in the text.
      process: the noise process of a generator of media.
    """

    patch: int
    merge: int = 1
    channels: int = 1
    frames: int = 1
    axes: int = 2
    special: int = 0
    buckets: tuple[tuple[int, int], ...] = ()
    abreast: int = 1
    longest: int = 0
    bounded_by: str = ""
    boundless: str = ""
    log_mel: LogMel | None = None
    drawn: bool = False
    queries: int = 0
    canvases: tuple[tuple[int, int], ...] = ()
    references: int = 0
    multiple: int = 1
    latents: str = ""
    factor: int = 1
    pictures: EncoderSpec | None = None
    encoder: str = ""
    encodes: str = ""
    newline: bool = False
    most_tiles: int = 0
    reads: tuple[tuple[str, str], ...] = ()
    text_index: str | None = ""
    codes: int = 0
    process: Process = field(default_factory=Process)

    @property
    def alone(self) -> bool:
        """Whether each of its media has a row to itself."""
        return self.queries > 0 or bool(self.canvases)

    @property
    def in_text(self) -> bool:
        """Whether each token of its media has a placeholder in the text."""
        return not self.codes and not self.derived and not self.encodes

    @property
    def follows(self) -> bool:
        """Whether its media follow from those of another module."""
        return self.derived or bool(self.encodes)

    @property
    def derived(self) -> bool:
        """Whether this is an encoder of another one's tokens: its segments are a sample's media, one after another."""
        return bool(self.reads) and not self.drawn

    @property
    def block(self) -> int:
        """Sides of media are multiples of so many pixels or frames: `multiple` blocks of an LLM token's patches."""
        return self.patch * self.merge * self.multiple

    @property
    def patches_per_token(self) -> int:
        """Number of patches that become one LLM token."""
        return self.merge**self.axes

    @property
    def blended(self) -> int:
        """The most tokens whose mean is a place of the LLM's rows: 4 where pictures may be resized, else 1."""
        return 4 if self.most_tiles else 1

    @property
    def position_axes(self) -> int:
        """Numbers of a patch's position."""
        return self.axes + (self.references > 0)

    @property
    def prefix(self) -> int:
        """Number of positions before a medium's patches: special ones, and padding up to a whole LLM token."""
        return -(-self.special // self.patches_per_token) * self.patches_per_token

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.frames * self.patch**self.axes * self.channels

    @property
    def medium(self) -> str:
        """The name of a medium: "image" or "recording"; "clip" for a sample's media as another encoder sees them, and
        "speech" for codes.
        """
        if self.codes:
            return "speech"
        return "clip" if self.derived else _MEDIA[self.axes][0]

    @property
    def unit(self) -> str:
        """The unit of a medium's sides: "pixels", "frames" or "codes"."""
        return "codes" if self.codes else _MEDIA[self.axes][1]

    @property
    def mark(self) -> str:
        """The mark for a medium's place in the text of a question: "<image>", "<recording>" or "<drawing>"."""
        return "<drawing>" if self.drawn else f"<{self.medium}>"

    def patches(self, *size: int) -> int:
        """Number of patches of a medium of this `size`, such as height and width (multiples of `block`)."""
        return prod(self.grid(*size))

    def tokens(self, *size: int) -> int:
        """Number of LLM tokens of a medium of this `size` (multiples of `block`)."""
        return self.queries or prod(self.grid(*size)) // self.patches_per_token

    def canvas(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The smallest of `canvases` that holds a picture of this grid of patches. Raises ConfigError if none does."""
        holding = [canvas for canvas in self.canvases if all(map(le, grid, canvas))]
        rows, columns = (side * self.patch for side in grid)
        fix = f"hold no picture of {rows} x {columns} {self.unit}; add a larger canvas, or scale the picture down"
        require(bool(holding), self.bounded_by, self.canvases, fix)
        return holding[0]

    def grid(self, *size: int) -> tuple[int, ...]:
        """Patches along every axis of a medium of this `size`: multiples of `block`, or `frames` of one to be made."""
        return tuple(self.padded(side) // self.patch for side in size)

    def padded(self, side: int) -> int:
        """A side of a medium; frames of a recording to be made are rounded up to whole LLM tokens."""
        return -(-side // self.block) * self.block if self.sounds else side

    @property
    def sounds(self) -> bool:
        """Whether this is a generator of recordings."""
        return self.drawn and self.axes == 1 and not self.codes


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """How an image was cut into tiles, which follow the whole image among the media of an encoder.

    Attributes:
      size: height and width of the image, upright, before it was resized.
      grid: rows and columns of tiles; (0, 0) for none.
    """

    size: tuple[int, int]
    grid: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class SampleMeta:
    """The sizes of a sample that packing and reordering need, computable without decoding a medium.

    Attributes:
      tokens: length of `Sample.tokens`.
      weight: sum of its loss weights except the first, as float32.
      grids: per encoder, the patches along every axis of each medium in order of appearance; an encoder without media
        in this sample is left out.
      prefixes: per encoder, `EncoderSpec.prefix`; an encoder without one is left out.
      canvases: per generator with `EncoderSpec.canvases`, the canvas of each medium.
      references: per generator and medium, the patches along every axis of each picture that it is made from; a
        generator without any is left out.
      learned: number of its tokens with a loss weight; 0 if unknown.
      padding: per generator of recordings, the number of frames in its patches that are behind ends of recordings.
    """

    tokens: int
    weight: float
    grids: dict[str, tuple[tuple[int, ...], ...]]
    prefixes: Mapping[str, int] = field(default_factory=dict)
    canvases: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    references: Mapping[str, tuple[tuple[tuple[int, ...], ...], ...]] = field(default_factory=dict)
    learned: int = field(default=0, compare=False)
    padding: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        encoders: Mapping[str, EncoderSpec],
        sizes: Mapping[str, Iterable[tuple[int, ...]]],
        *,
        tokens: int,
        weight: float,
        learned: int = 0,
        references: Mapping[str, Iterable[Iterable[tuple[int, ...]]]] | None = None,
    ) -> SampleMeta:
        """The metadata of a sample whose media have these `sizes`: by encoder, without channels, as `grid` takes them.

        encoders: specs of at least the encoders in `sizes`; leave out of `sizes` an encoder without media. references:
        by generator and medium the sizes of the pictures that it is made from.
        """
        sizes = {name: tuple(sizes_of) for name, sizes_of in sizes.items()}
        grids = {name: tuple(encoders[name].grid(*size) for size in sizes_of) for name, sizes_of in sizes.items()}
        padding = {
            name: sum(encoders[name].padded(side) - side for size in sizes_of for side in size)
            for name, sizes_of in sizes.items()
            if encoders[name].sounds
        }
        prefixes = {name: encoders[name].prefix for name in grids if encoders[name].prefix}
        canvases = {
            name: tuple(map(encoders[name].canvas, of_media))
            for name, of_media in grids.items()
            if encoders[name].canvases
        }
        followed = {
            name: tuple(tuple(encoders[name].grid(*size) for size in of_medium) for of_medium in sizes_of)
            for name, sizes_of in (references or {}).items()
        }
        return cls(
            tokens=tokens,
            weight=weight,
            grids=grids,
            prefixes=prefixes,
            canvases=canvases,
            references={name: of_media for name, of_media in followed.items() if any(of_media)},
            learned=learned,
            padding=padding,
        )

    @property
    def patches(self) -> dict[str, tuple[int, ...]]:
        """Number of patches of each medium, by encoder; an encoder that is not in `grids` is absent."""
        return {name: self.lengths(name) for name in self.grids}

    def lengths(self, module: str) -> tuple[int, ...]:
        """Number of patches of each of a module's media, in order of appearance; (number of tokens,) for "llm".

        Patches of the pictures that one is made from count.
        """
        if module == "llm":
            return (self.tokens,)
        drawn = tuple(map(prod, self.grids.get(module, ())))
        references = self.references.get(module, ((),) * len(drawn))
        return tuple(count + sum(map(prod, grids)) for count, grids in zip(drawn, references, strict=True))

    def segments(self, module: str) -> tuple[int, ...]:
        """Number of positions of each of a module's segments: its prefix, and its length or canvas."""
        lengths = tuple(map(prod, self.canvases[module])) if module in self.canvases else self.lengths(module)
        return tuple(self.prefixes.get(module, 0) + length for length in lengths)


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """Bounds on every sample of a source.

    Attributes:
      tokens: the most LLM tokens of a sample.
      media: the most media of a sample, per encoder.
      patches: the most patches of a medium, per encoder, with those of the pictures that it is made from.
      sides: the most patches along a side of a medium, per encoder.
      least: the fewest patches of a medium, per encoder; an encoder for which that is unknown is left out.
    """

    tokens: int
    media: dict[str, int]
    patches: dict[str, int]
    sides: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training or evaluation example.

    Attributes:
      tokens: int32 [n], placeholders already expanded (one per merged token).
      loss_weights: float32 [n], the weight of predicting tokens[t] from tokens[:t].
      media: per encoder, float32 media in order of appearance: images [h, w, C], recordings [F, M]; sides are multiples
        of patch * merge, except frames of recordings to be made. A video is several media [h, w, frames * C], its
        temporal patches. A sample may have media of every encoder, of some or of none. Per generator, the media to be
        drawn; per generator of codes, at most one array int32 [n, 1] of the codes that speak the last answer.
      question: the text of the (last) question.
      answer: the right answer to it.
      prompt: number of `tokens` before the answer to the last question; they are the prompt of generation.
      prompt_tokens: the prompt of generation where it differs from the first `prompt` tokens, since a folder's template
        writes an unanswered question in another way; else empty.
      prompt_media: per encoder, the number of its media before that answer; all of an encoder that is missing here.
      lead: text of the template in the tokens after `prompt`, before the answer.
      tail: text of the template in the tokens after the answer.
      kind: the kind of the question, where the source knows kinds.
      labels: per encoder and medium, the text that can be read or heard in it, where the source knows.
      media_tokens: the placeholder id of each encoder and generator in `tokens`.
      video_tokens: the placeholder id of videos, of encoders for which it is another one.
      noise: per generator and medium to be drawn, the noise that is mixed into it, of the medium's shape. A generator
        that is missing here is not trained on this sample.
      times: per generator and medium to be drawn, its time in the generator's noise process, such as the share of noise
        in the mixture, in 0…1 (see `Process`).
      dropped: per generator and medium to be drawn, opened or not, whether it is learned without its condition; a
        missing generator for none.
      references: per generator and medium to be drawn, the pictures [h, w, C] that it is made from; a missing generator
        for none.
      broken: if a part of it could not be read, (dataset, name, reason, id, medium); see `skipped.Fault`.
      normalised: the mean that was subtracted from each channel of its images, and the deviation by which they were
        then divided; () for neither.
      tiled: how each image was cut, per encoder with `EncoderSpec.newline`; its media are each image and its tiles.
      video_times: per encoder, where times of videos are positions: for each image and video in order of appearance the
        numbers of its temporal patches along time, from 0, such as (0, 4, 8); () for an image.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    media: dict[str, tuple[np.ndarray, ...]]
    question: str
    answer: str
    prompt: int
    prompt_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prompt_media: Mapping[str, int] = field(default_factory=dict)
    lead: str = ""
    tail: str = ""
    kind: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    media_tokens: dict[str, int] = field(default_factory=dict)
    video_tokens: Mapping[str, int] = field(default_factory=dict)
    noise: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    times: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    dropped: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    references: Mapping[str, tuple[tuple[np.ndarray, ...], ...]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    normalised: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    tiled: Mapping[str, tuple[Tiled, ...]] = field(default_factory=dict)
    video_times: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def placeholders(self, encoder: str) -> np.ndarray:
        """Boolean [n]: the places of the tokens of `encoder`."""
        if encoder not in self.media_tokens:
            return np.zeros(len(self.tokens), bool)
        ids = self.media_tokens[encoder], self.video_tokens.get(encoder, self.media_tokens[encoder])
        return (self.tokens == ids[0]) | (self.tokens == ids[1])


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The packed global rows of one op.

    inputs["<encoder>"]: patches [R, T, frames*P**A*C] float32; segments [R, T] int32 (0 = padding, media numbered from
    1 in a row); positions [R, T, A] int32 (patch row and patch column, or the patch's place in its recording). Special
    positions come before a medium's patches, up to a whole LLM token: -1, -2, … on every axis, patches of zeros.
    inputs["llm"]: tokens, targets, positions, segments [B, S] int32 (segment 0 = padding; positions [B, S, 3] where the
    LLM has M-RoPE, see `mrope`), weights [B, S] float32
    (of the targets), and per encoder "<encoder>_index" [B, S] int32: at placeholders the index into the flattened
    merged tokens of the row's cell, -1 elsewhere. Where an encoder's images end their rows with newlines, -2 stands for
    one; where they may be resized, the index is [B, S, 4], and "<encoder>_shares" [B, S, 4] float32 weighs the tokens.
    Where the LLM's mask has words: is, attends [B, S] uint32, items [B, S] int32 (see `mask_words`).
    inputs["<generator>"]: as an encoder's, but patches are mixed with noise, such as (1 - t) x + t noise; times t
    [R, T] float32 of every patch; targets [R, T, P**A*C], such as the velocity noise - x; weights [R, T], such as 1
    where it is learned (see `Process`), of recordings [R, T, P], one for each frame; and index [R, T/merge**A] int32:
    where each token's placeholder is in the flattened LLM rows of the row's cell, or -1.
    With `EncoderSpec.queries` N: segments [R, N + T] and positions [R, N + T, A], in which the N places of the
    condition come first, and index [R, N]. With `EncoderSpec.references` positions have three numbers, of which the
    first is 0 at the patches of the picture to be drawn, and k at those of the k-th one that it is made from, which
    follow: their patches have no noise, and their targets, times and weights are 0.
    inputs["<generator of codes>"]: as the LLM's, of codes: tokens [R, T] int32 (the code before, 0 before the first),
    targets [R, T] int32, weights [R, T] float32 (0 for padding), positions and segments [R, T] int32; and index [R, T]
    int32: the place of the answer's token that is being spoken in the flattened LLM rows of the row's cell, or -1.
    Where tokens go by lists, inputs of the module that has them: "send_<module that reads them>" [cells, ranks * N]
    int32, indices into its flattened tokens of the cell, -1 at the end; an index is then a place in its rank's list
    (see `send_lists`).
    Where a process reads its own rows only, an input may be `PartialArray`; segments are always whole.
    bucket: the index of the static shape, per encoder and generator; and of the LLM where its rows are packed.
    """

    inputs: dict[str, dict[str, np.ndarray]]
    bucket: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All microbatches of one optimizer step.

    Attributes:
      step: its number, from 0.
      microbatches: its microbatches.
      denominators: by module, the divisor of its losses: the sum of loss weights for the LLM, the count of numbers in
        all patches for a generator, the number of patches for an encoder.
      counts: llm_tokens, llm_tokens_padded, media, samples, "<encoder>_patches", "<encoder>_patches_padded" (the padded
        counts include the padding; positions of class tokens are in neither).
      figures: figures of reordering; see `Reordered`.
      broken: `Sample.broken` of the samples that could not be used.
    """

    step: int
    microbatches: tuple[Microbatch, ...]
    denominators: dict[str, float]
    counts: dict[str, int] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    broken: tuple[tuple[str, ...], ...] = ()

    @property
    def divisors(self) -> dict[str, float]:
        """All counts by which a loss may be divided, by name: `denominators` and `counts`."""
        return {**self.counts, **self.denominators}


class NoBatchError(RuntimeError):
    """No server gives the batch, and it is not prepared here. The message says why, server by server."""
