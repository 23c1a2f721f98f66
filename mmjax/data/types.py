"""What the data side hands to the rest: samples, packed microbatches and the batch of one step. NumPy only.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
P patch edge, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What data code must know of an encoder: how its images become patches, and patches become LLM tokens.

    patch: patch edge in pixels; merge: edge of the block of patches that becomes one LLM token; channels: 1 (grayscale)
    or 3 (RGB); buckets: the static (rows per cell, patches per row) shapes, smallest first, () = derived;
    grid: the most patches along a side of an image, 0 = any.
    """

    patch: int
    merge: int = 1
    channels: int = 1
    buckets: tuple[tuple[int, int], ...] = ()
    grid: int = 0

    @property
    def block(self) -> int:
        """Edge in pixels of what becomes one LLM token; image heights and widths are multiples of it."""
        return self.patch * self.merge

    def patches(self, height: int, width: int) -> int:
        """Number of patches of an image of `height` × `width` pixels (multiples of `block`)."""
        return (height // self.patch) * (width // self.patch)

    def tokens(self, height: int, width: int) -> int:
        """Number of LLM tokens of an image of `height` × `width` pixels (multiples of `block`)."""
        return (height // self.block) * (width // self.block)


@dataclass(frozen=True, kw_only=True)
class SampleMeta:
    """What packing and reordering need to know of a sample, computable without decoding a pixel.

    tokens: length of `Sample.tokens`; patches: per encoder, the patches of each image in order of appearance.
    """

    tokens: int
    patches: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """Bounds on every sample of a source.

    tokens: of the LLM; per encoder, images: of a sample, patches: of an image, sides: patches along a side of an image.
    """

    tokens: int
    images: dict[str, int]
    patches: dict[str, int]
    sides: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training or evaluation example.

    tokens: int32 [n], placeholders already expanded (one per merged token).
    loss_weights: float32 [n], the weight of predicting tokens[t] from tokens[:t].
    media: per encoder, images [h, w, C] float32 in order of appearance; h and w are multiples of patch * merge.
    question, answer: the text of the (last) question and its right answer.
    prompt: length of the part of `tokens` that a model is given before it answers the last question.
    labels: per image, what is written in it, where the source knows.
    media_tokens: the placeholder id of each encoder in `tokens`.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    media: dict[str, tuple[np.ndarray, ...]]
    question: str
    answer: str
    prompt: int
    labels: tuple[str, ...] = ()
    media_tokens: dict[str, int] = field(default_factory=dict)

    def placeholders(self, encoder: str) -> np.ndarray:
        """Boolean [n]: where the tokens of `encoder` go."""
        if encoder not in self.media_tokens:
            return np.zeros(len(self.tokens), bool)
        return self.tokens == self.media_tokens[encoder]


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The packed global rows of one op.

    inputs["<encoder>"]: patches [R, T, P*P*C] float32; segments [R, T] int32 (0 = padding, images numbered from 1 in
    a row); positions [R, T, 2] int32 (patch row, patch column).
    inputs["llm"]: tokens, targets, positions, segments [B, S] int32 (segment 0 = padding), weights [B, S] float32
    (of the targets), and per encoder "<encoder>_index" [B, S] int32: at placeholders the index into the flattened
    merged tokens of the row's cell, -1 elsewhere.
    bucket: per encoder, the index of its static shape.
    """

    inputs: dict[str, dict[str, np.ndarray]]
    bucket: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All microbatches of one optimizer step.

    denominator: sum of the loss weights of the step. counts: llm_tokens, llm_tokens_padded, images, samples,
    "<encoder>_patches", "<encoder>_patches_padded" (the padded counts include the padding).
    """

    step: int
    microbatches: tuple[Microbatch, ...]
    denominator: float
    counts: dict[str, int] = field(default_factory=dict)
