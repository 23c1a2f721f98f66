"""The configurable part of the data side: `Data` (what is trained on) and `Packing` (static shapes per encoder).

`Source`, a dataset of `Data.sources`, is in `mmjax.data.sources.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.configurable import configurable, not_negative, one_of, positive, require
from mmjax.data.reorder import METHODS
from mmjax.data.service.addresses import check_address, is_path

FALLBACKS = ("error", "local")
TASKS = ("digits", "folder")
IMAGE_QUESTIONS, CALL_QUESTIONS, JOINT_QUESTIONS = ("read", "count", "sum"), ("hear",), ("both", "same")
DRAW = "draw"
QUESTION_KINDS = (*IMAGE_QUESTIONS, *CALL_QUESTIONS, *JOINT_QUESTIONS, DRAW)
MOST_MEDIA, MOST_DIGITS = 4, 6
MOST_BUCKETS = 64
_HERE: dict[str, Any] = {"here": True}
"""Metadata of fields that say where and how batches are prepared; the batches' content does not depend on them."""


@configurable("Data")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data that the model is trained on. All ranges are inclusive.

    sources: datasets by name and the share of the samples that each gives, such as {'instruct': 0.7, 'captions': 0.3};
    each has a Source, such as instruct/Source.path; {} = task.
    task: "digits" (bundled handwritten digits, and digits dialled) or "folder" (images and a data.jsonl).
    folder: path of the folder. cache: directory of the metadata of sources and folders; "" = ~/.cache/mmjax/index.
    sequence_length: tokens of one LLM row, at most.
    workers: processes that prepare batches (0 = in this process). prefetch: steps that each worker prepares ahead.
    tokenizer: path of a tokenizer.json ("" = bytes). image_encoder: name of the encoder that sees the images.
    reorder: of the samples of a step among its microbatches and dp ranks: "none", "disttrain" (Zhang et al.) or "best".
    audio_encoder: name of the encoder that hears the calls. generator: name of the generator that draws. max_pixels:
    larger images of a folder are scaled down.

    servers: addresses of data servers, or the path of a file that lists them, read again during the run; () = none.
    fallback: what follows when no server answers, "error" or "local" (batches are prepared here until one does).
    patience: seconds without an answer of any server before that. token_file: file of the servers' token ("" = the
    environment's MMJAX_DATA_TOKEN). tls_ca: certificates (PEM) that servers' are checked against ("" = the system's).

    Digits only. images, calls: how many images and telephone calls a sample has. digits: how many digits an image has
    and a call. scale: height of a digit, in units of its 8 pixels. aspect: extra horizontal stretch of a row.
    distortion: strength of the random affine map of each training digit (0.1 = up to 10 % of stretch and shear, 5 % of
    shift). tone, gap: seconds of a dialled key and of the silence around it. level: amplitude of a call. noise: of
    white noise, in units of that. read, count, sum: relative frequencies of the questions about an image.
    hear: of that about a call. both, same: of those about an image and a call (what they say; whether it is the same).
    draw: of drawing the digits of an image or a call, as others have written them, and saying them.
    turns: questions asked about each training sample (evaluation asks one).
    curriculum: pairs (from this training sample on, at most so many digits), ascending; () = none.
    """

    sources: Mapping[str, float] = field(default_factory=dict, metadata={"example": {"mine": 1.0}})
    task: str = "digits"
    sequence_length: int = 96
    workers: int = field(default=1, metadata=_HERE)
    prefetch: int = field(default=2, metadata=_HERE)
    reorder: str = "none"
    servers: tuple[str, ...] | str = field(default=(), metadata={**_HERE, "example": ("grpc+tls://host:8815",)})
    fallback: str = field(default="error", metadata=_HERE)
    patience: float = field(default=60.0, metadata=_HERE)
    token_file: str = field(default="", metadata=_HERE)
    tls_ca: str = field(default="", metadata=_HERE)
    tokenizer: str = ""
    image_encoder: str = "vision"
    audio_encoder: str = "audio"
    generator: str = "painter"
    folder: str = ""
    cache: str = field(default="", metadata=_HERE)
    max_pixels: int = 65536
    images: tuple[int, int] = (2, 2)
    calls: tuple[int, int] = (0, 0)
    digits: tuple[int, int] = (1, 4)
    scale: tuple[float, float] = (1.0, 1.5)
    aspect: tuple[float, float] = (0.8, 1.25)
    distortion: float = 0.0
    tone: tuple[float, float] = (0.06, 0.12)
    gap: tuple[float, float] = (0.03, 0.08)
    level: tuple[float, float] = (0.1, 1.0)
    noise: tuple[float, float] = (0.0, 0.2)
    read: float = 1.0
    count: float = 0.0
    sum: float = 0.0
    hear: float = 0.0
    both: float = 0.0
    same: float = 0.0
    draw: float = 0.0
    turns: int = 1
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        one_of("Data.task", self.task, TASKS)
        one_of("Data.reorder", self.reorder, METHODS)
        one_of("Data.fallback", self.fallback, FALLBACKS)
        positive("Data.patience", self.patience, 60.0)
        if not is_path(self.servers):
            for address in (self.servers,) if isinstance(self.servers, str) else self.servers:
                check_address("Data.servers", address)
        for name, share in self.sources.items():
            require(name.isidentifier(), "Data.sources", name, "must be a name, such as 'mine'")
            positive(f"Data.sources[{name!r}]", share, 1.0)
        for name in ("sequence_length", "prefetch", "max_pixels", "turns"):
            positive(f"Data.{name}", getattr(self, name))
        for name in ("workers", "distortion", *QUESTION_KINDS):
            not_negative(f"Data.{name}", getattr(self, name))
        for name in ("image_encoder", "audio_encoder", "generator"):
            value, what = getattr(self, name), "a generator" if name == "generator" else "an encoder"
            example = "painter" if name == "generator" else "vision"
            require(bool(value), f"Data.{name}", value, f"name {what} of the model, such as {example!r}")
        for name, least, most in (("images", 0, MOST_MEDIA), ("calls", 0, MOST_MEDIA), ("digits", 1, MOST_DIGITS)):
            low, high = self._pair(name)
            require(least <= low <= high <= most, f"Data.{name}", (low, high), f"must ascend within {least} to {most}")
        for name in ("scale", "aspect", "tone", "gap", "level"):
            low, high = self._pair(name)
            require(0 < low <= high, f"Data.{name}", (low, high), "must ascend from above 0, such as (0.8, 1.25)")
        low, high = self._pair("noise")
        require(0 <= low <= high, "Data.noise", (low, high), "must ascend from 0 or more, such as (0.0, 0.2)")
        self._check_questions()
        self._check_curriculum()

    def kinds(self, images: int, calls: int) -> tuple[str, ...]:
        """The kinds of questions that may be asked about a sample with so many images and calls."""
        possible = (
            *(IMAGE_QUESTIONS if images else ()),
            *(CALL_QUESTIONS if calls else ()),
            *(JOINT_QUESTIONS if images and calls else ()),
            DRAW,
        )
        return tuple(kind for kind in possible if getattr(self, kind) > 0)

    def check_encoders(self, media: Mapping[str, str]) -> None:
        """Requires that the encoders named here are there for what they are to encode.

        media: by encoder of the model, "image" or "recording". Raises ConfigError.
        """
        folder = self.task == "folder"
        wanted = {"image_encoder": folder or self.images[1] > 0, "audio_encoder": not folder and self.calls[1] > 0}
        for (name, needed), medium in zip(wanted.items(), ("image", "recording"), strict=True):
            legal = [encoder for encoder, own in media.items() if own == medium]
            if self.sources:  # what they hold is seen when they are read
                needed = bool(legal)
            fix = f"no encoder of the model takes {medium}s; add one to Model.encoders"
            if needed:
                require(bool(legal), f"Data.{name}", getattr(self, name), fix)
                one_of(f"Data.{name}", getattr(self, name), legal)

    def check_generators(self, media: Mapping[str, str]) -> None:
        """Requires that the generator named here is there if something is to be drawn.

        media: by generator of the model, what it makes. Raises ConfigError.
        """
        if not self.sources and self.task == "digits" and self.draw > 0:
            legal = [name for name, own in media.items() if own == "image"]
            fix = "nothing in the model draws; set it to 0.0, or Model.generators to {'painter': 'dit'}"
            require(bool(legal), "Data.draw", self.draw, fix)
            one_of("Data.generator", self.generator, legal)

    def _check_questions(self) -> None:
        images, calls = self.images[0], self.calls[0]
        require(images + calls > 0, "Data.images", self.images, "a sample may be empty; set it to (1, 1)")
        kind = "read" if images else "hear"
        fix = f"nothing can be asked about a sample of {images} images and {calls} calls; set it to 1.0"
        require(bool(self.kinds(images, calls)), f"Data.{kind}", getattr(self, kind), fix)

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
    """Static shapes of a module's input.

    buckets: a number chooses so many from the data, such that the least of their compute is padding. Or the (rows of a
    microbatch, patches per row) of each, whatever the layouts, each cell with its share of the rows; where none holds
    the largest cell, one that does is added. () makes one from the worst case of the data. The LLM's are (rows of a
    microbatch, tokens per row), and samples are packed into the rows; () gives each sample a row of its own.
    """

    buckets: tuple[tuple[int, int], ...] | int = 2

    def __post_init__(self) -> None:
        if isinstance(self.buckets, int):
            fix = f"must be 1 to {MOST_BUCKETS}, such as 4: every bucket is compiled"
            require(0 < self.buckets <= MOST_BUCKETS, "Packing.buckets", self.buckets, fix)
            return
        legal = all(len(bucket) == 2 and min(bucket) > 0 for bucket in self.buckets)
        require(
            legal, "Packing.buckets", self.buckets, "must be (rows of a microbatch, positions per row) pairs, or ()"
        )

    @property
    def given(self) -> tuple[tuple[int, int], ...]:
        """The buckets; () where they are still to be chosen."""
        return () if isinstance(self.buckets, int) else self.buckets
