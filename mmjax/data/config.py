"""The configurable part of the data side: `Data` (the training data) and `Packing` (static shapes per encoder).

`Source`, a dataset of `Data.sources`, is in `mmjax.data.sources.config`; the tasks of `Data.task` are in
`mmjax.data.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmjax.configurable import configurable, not_negative, one_of, positive, require
from mmjax.data.reorder import METHODS
from mmjax.data.service.addresses import check_address, is_path
from mmjax.data.tasks.registry import TASKS
from mmjax.user_code import CODE, names_code, replace_by_name

FALLBACKS = ("error", "local")
MOST_BUCKETS = 64
_LOCAL: dict[str, Any] = {"local": True}
"""Metadata of settings of this host: where and how batches are prepared. The content of batches does not depend on
them."""


@configurable("Data")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data that the model is trained on.

    sources: datasets by name and the share of the samples that each gives, such as {'instruct': 0.7, 'captions': 0.3};
    each has a Source, such as instruct/Source.path; {} = task.
    task: a task that comes with mmjax, such as "folder" (images and a data.jsonl), or "package.module:Class" for one of
    your own, which needs --allow_code.
    folder: path of the folder. cache: directory of the metadata of sources and folders; "" = ~/.cache/mmjax/index.
    sequence_length: tokens of one LLM row, at most.
    workers: processes that prepare batches (0 = in this process). prefetch: steps that each worker prepares ahead.
    tokenizer: path of a tokenizer.json ("" = bytes). new_tokens: texts that become tokens of their own behind the
    tokenizer's; left out, those of llm/Weights.new_tokens.
    image_encoder: name of the encoder that sees the images.
    reorder: of the samples of a step among its microbatches and dp ranks: "none", "disttrain" (Zhang et al.) or "best".
    audio_encoder: name of the encoder that hears the recordings. generator: name of the generator that draws,
    unless a record names another.
    speaker: name of the generator that makes recordings, unless a record names another, or that speaks answers in
    codes, if the model has one.
    max_pixels: larger images of a folder are scaled down.
    require_same: whether a run that goes on is refused where a dataset's records have changed; else it is warned.
    max_broken: share of a dataset's records; a run whose data have more that cannot be used is refused.

    servers: addresses of data servers, or the path of a file that lists them, read again during the run; () = none.
    fallback: what follows when no server answers, "error" or "local" (batches are prepared here until one does).
    patience: seconds without an answer of any server before that. token_file: file of the servers' token ("" = the
    environment's MMJAX_DATA_TOKEN). tls_ca: certificates (PEM) that servers' are checked against ("" = the system's).
    """

    sources: Mapping[str, float] = field(default_factory=dict, metadata={"example": {"mine": 1.0}})
    task: str = field(default=next(iter(TASKS)), metadata=CODE)
    sequence_length: int = 96
    workers: int = field(default=1, metadata=_LOCAL)
    prefetch: int = field(default=2, metadata=_LOCAL)
    reorder: str = "none"
    servers: tuple[str, ...] | str = field(default=(), metadata={**_LOCAL, "example": ("grpc+tls://host:8815",)})
    fallback: str = field(default="error", metadata=_LOCAL)
    patience: float = field(default=60.0, metadata=_LOCAL)
    token_file: str = field(default="", metadata=_LOCAL)
    tls_ca: str = field(default="", metadata=_LOCAL)
    tokenizer: str = ""
    new_tokens: tuple[str, ...] = field(default=(), metadata={"example": ("<tool>", "</tool>")})
    image_encoder: str = "vision"
    audio_encoder: str = "audio"
    generator: str = "painter"
    speaker: str = "talker"
    folder: str = ""
    cache: str = field(default="", metadata=_LOCAL)
    max_pixels: int = 65536
    require_same: bool = field(default=False, metadata=_LOCAL)
    max_broken: float = field(default=0.5, metadata=_LOCAL)

    def __post_init__(self) -> None:
        replace_by_name(self, "task")
        if not names_code(self.task):
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
        for name in ("sequence_length", "prefetch", "max_pixels"):
            positive(f"Data.{name}", getattr(self, name))
        not_negative("Data.workers", self.workers)
        require(
            0 <= self.max_broken <= 1, "Data.max_broken", self.max_broken, "must be a share from 0 to 1, such as 0.5"
        )
        drawing, speaking, encoding = ("a generator", "painter"), ("a generator", "talker"), ("an encoder", "vision")
        for name in ("image_encoder", "audio_encoder", "generator", "speaker"):
            kind, example = {"generator": drawing, "speaker": speaking}.get(name, encoding)
            value = getattr(self, name)
            require(bool(value), f"Data.{name}", value, f"name {kind} of the model, such as {example!r}")


@configurable("Latents")
@dataclass(frozen=True, kw_only=True)
class LatentsConfig:
    """Latents of an autoencoder, which a generator makes in place of pictures.

    path: the folder of latents that ``python -m mmjax.latents`` has made of all pictures; "" for none.
    autoencoder: the autoencoder's folder, as diffusers writes it, which makes pictures of what is drawn; "" shows none.
    """

    path: str = ""
    autoencoder: str = ""


@configurable("Vocoder")
@dataclass(frozen=True, kw_only=True)
class VocoderConfig:
    """The vocoder with which recordings of a generator are heard; training does not read it.

    path: the folder of a HiFi-GAN, as transformers writes a SpeechT5HifiGan; "" makes waveforms by Griffin and Lim's
    method.
    iterations: of that method.
    """

    path: str = ""
    iterations: int = 60

    def __post_init__(self) -> None:
        positive("Vocoder.iterations", self.iterations, 60)

    def idle(self) -> dict[str, str]:
        """The settings without effect, given the others, each with the reason."""
        return {"iterations": f"Vocoder.path={self.path!r} names a vocoder"} if self.path else {}


@configurable("Packing")
@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Static shapes of a module's input.

    buckets: a number chooses that many buckets from the data, with the least padding in their compute. A list gives
    (rows of a microbatch, patches per row) for each bucket, whatever the layouts; each cell has its share of the rows,
    and a bucket is added if none holds the largest cell. () makes one bucket from the worst case of the data. The LLM's
    buckets are (rows of a microbatch, tokens per row), and samples are packed into the rows; () gives each sample its
    own row.
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
        """The configured (rows of a microbatch, positions per row) pairs; () if the setting is a number of buckets."""
        return () if isinstance(self.buckets, int) else self.buckets
