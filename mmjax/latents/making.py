"""Encodes the pictures of records that have no latents yet, and writes these in files that appear when complete."""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.latents import DESCRIPTION, LOG_VARIANCE, MEAN, SUFFIX, Description, Key, key_of, keys_in, shards
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.media import Media
from mmjax.data.sources.storage import Unreachable
from mmjax.latents.pictures import BYTES, Broken, Records, Resizing, pixels_of
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.progress import Progress

_AHEAD = 64
"""Pictures that are decoded while others are encoded."""


class _Decoded(NamedTuple):
    """A picture's key, and its pixels unless it has a latent already."""

    key: Key
    pixels: np.ndarray | None


@dataclass(kw_only=True)
class Made:
    """The counts of a run.

    Attributes:
      made: number of latents made.
      there: number of pictures that had latents before.
      broken: records and pictures that cannot be read.
    """

    made: int = 0
    there: int = 0
    broken: list[Broken] = field(default_factory=list)


def description_of(autoencoder: Autoencoder, resizing: Resizing, dtype: str) -> Description:
    """How the latents of pictures that were resized so are made; the dtype is "float16" or "float32"."""
    c = autoencoder.config
    return Description(
        autoencoder=autoencoder.identity,
        factor=c.factor,
        channels=c.latent_channels,
        shift=_by_channel(c, c.means, c.shift),
        scale=_by_channel(c, tuple(1 / deviation for deviation in c.deviations), c.scale),
        dtype=dtype,
        pictures=resizing.stated(),
    )


def _by_channel(c: AutoencoderConfig, values: tuple[float, ...], value: float) -> tuple[float, ...]:
    return values or (value,) * c.latent_channels


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes latents.

    Attributes:
      autoencoder: encodes pictures.
      resizing: how pictures are resized before.
      folder: the folder of latents, which is made.
      dtype: "float16" or "float32".
      batch: pictures of one size that are encoded at a time; the last ones are filled up.
      shard: latents after which a file is written.
    """

    autoencoder: Autoencoder
    resizing: Resizing
    folder: Path
    dtype: str = "float16"
    batch: int = 8
    shard: int = 512

    def make(self, records: Records, *, progress: Progress | None = None) -> Made:
        """Makes the latents of all pictures that have none, and tells how many.

        Raises:
          ConfigError: the folder cannot be written, or another process makes latents in it.
          Unreachable: storage did not answer.
        """
        description = description_of(self.autoencoder, self.resizing, self.dtype)
        with _alone(self.folder):
            for leftover in self.folder.glob("*.partial"):
                leftover.unlink()
            _write(self.folder / DESCRIPTION, description.text().encode())
            known = {key for file in shards(self.folder) for key in keys_in(file)}
            result, new = Made(), dict[str, np.ndarray]()
            for latents in self._encoded(self._decoded(records, known, result, progress)):
                new |= latents
                if len(new) >= 2 * self.shard:
                    self._save(new, result)
            self._save(new, result)
        return result

    def _decoded(
        self, records: Records, known: set[Key], result: Made, progress: Progress | None
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """The new pictures of all records; several threads decode them ahead."""
        pictures = self.resizing.pictures(self.autoencoder.config.channels)

        def decode(media: Media) -> _Decoded | Broken:
            return _decoded(pictures, media, known)

        with ThreadPoolExecutor(thread_name_prefix="pictures") as pool:
            for record in _ahead(pool, decode, records):
                for picture in [record] if isinstance(record, Broken) else [future.result() for future in record]:
                    if isinstance(picture, Broken):
                        result.broken.append(picture)
                    elif picture.pixels is None or picture.key in known:
                        result.there += 1
                    else:
                        known.add(picture.key)
                        yield picture.key, picture.pixels
                if progress:
                    progress.advance()

    def _encoded(self, pictures: Iterable[tuple[Key, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        """The tensors of a batch of pictures of one size, by name."""
        waiting: dict[tuple[int, ...], list[tuple[Key, np.ndarray]]] = defaultdict(list)
        for key, pixels in pictures:
            same = waiting[pixels.shape]
            same.append((key, pixels))
            if len(same) == self.batch:
                yield self._tensors(waiting.pop(pixels.shape))
        for same in waiting.values():
            yield self._tensors(same)

    def _tensors(self, batch: Sequence[tuple[Key, np.ndarray]]) -> dict[str, np.ndarray]:
        # A batch has always the same size: one compiled program, and latents that do not depend on where a run began.
        filled = [pixels for _, pixels in batch] + [batch[0][1]] * (self.batch - len(batch))
        latents = self.autoencoder.encode(np.stack(filled))
        tensors: dict[str, np.ndarray] = {}
        for at, (key, _) in enumerate(batch):
            tensors[f"{key}.{MEAN}"] = latents.mean[at].astype(self.dtype)
            tensors[f"{key}.{LOG_VARIANCE}"] = latents.log_variance[at].astype(self.dtype)
        return tensors

    def _save(self, tensors: dict[str, np.ndarray], result: Made) -> None:
        """Writes a file of latents, whose number follows on those that are there; empties ``tensors``."""
        if not tensors:
            return
        from safetensors.numpy import save_file

        number = max((int(file.stem) for file in shards(self.folder)), default=-1) + 1
        partial = self.folder / f"{number:06d}.partial"
        try:
            save_file(tensors, partial, {"format": "np"})
            partial.chmod(0o644)
            _settle(partial, self.folder / f"{number:06d}{SUFFIX}")
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        result.made += len(tensors) // 2
        tensors.clear()


def _ahead(
    pool: ThreadPoolExecutor, decode: Callable[[Media], _Decoded | Broken], records: Records
) -> Iterator[list[Future[_Decoded | Broken]] | Broken]:
    """Each record's pictures, or why it is broken, with the next ones already in the pool."""
    waiting: list[list[Future[_Decoded | Broken]] | Broken] = []
    source = iter(records)
    while True:
        for record in islice(source, max(0, _AHEAD - len(waiting))):
            pictures = record if isinstance(record, Broken) else [pool.submit(decode, media) for media in record]
            waiting.append(pictures)
        if not waiting:
            return
        yield waiting.pop(0)


def _decoded(pictures: Pictures, media: Media, known: set[Key]) -> _Decoded | Broken:
    try:
        data = media.read(BYTES)
        key = key_of(data)
        return _Decoded(key, None if key in known else pixels_of(pictures, data))
    except Unreachable:
        raise
    except Exception as error:  # decoders may raise anything on broken files
        return Broken.of(media.name, error)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context in which no other process makes latents in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out: another process makes latents in {folder}; wait for it") from None
        yield


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        _settle(partial, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from None


def _settle(partial: Path, path: Path) -> None:
    """Gives a complete file its name, once its bytes are on the disk."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    cause = error.strerror or type(error).__name__
    return ConfigError(f"--out={str(folder)!r}: cannot be written ({cause}); name another directory")
