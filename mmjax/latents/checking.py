"""Checks latents that were made: whole files, a latent for each picture, and some made again and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmjax.data.latents import LOG_VARIANCE, MEAN, LatentStore, key_of, shards
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.media import Media
from mmjax.latents.pictures import BYTES, Broken, Records, Resizing, pixels_of
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.progress import Progress

AGAIN = 8
"""Pictures that are encoded again."""
TOLERANCE = {"float16": 4e-3, "float32": 1e-3}
"""The largest difference of a latent that is made again, relative to the largest number; GPUs differ from CPUs."""


def faults(
    autoencoder: Autoencoder, resizing: Resizing, folder: Path, records: Records, progress: Progress | None = None
) -> Iterator[str]:
    """A line for each fault of the latents of these records.

    Args:
      autoencoder: that of the latents.
      resizing: how pictures are resized before.
      folder: the folder of the latents.
      records: the records.
      progress: advanced by each record.

    Raises:
      ConfigError: there are no latents, or a file cannot be read.
    """
    store = LatentStore(folder)
    for file in shards(folder):
        yield from _faults_of_file(file, store)
    pictures = resizing.pictures(autoencoder.config.channels)
    every = max(1, len(records) // AGAIN)
    for number, record in enumerate(records):
        for media in [] if isinstance(record, Broken) else record:
            yield from _faults_of(media, store, pictures, autoencoder if number % every == 0 else None)
        if progress:
            progress.advance()


def _faults_of_file(file: Path, store: LatentStore) -> Iterator[str]:
    from safetensors.numpy import load_file

    tensors = load_file(file)
    for name, tensor in tensors.items():
        key, _, _ = name.partition(".")
        shapes = {tensors[f"{key}.{part}"].shape for part in (MEAN, LOG_VARIANCE) if f"{key}.{part}" in tensors}
        if tensor.ndim != 3 or tensor.shape[-1] != store.description.channels or shapes != {tensor.shape}:
            yield f"{file}: {name} is {list(tensor.shape)}, and its pair {sorted(shapes)}"
        if f"{key}.{MEAN}" not in tensors or f"{key}.{LOG_VARIANCE}" not in tensors:
            yield f"{file}: {name} has no pair"
        if tensor.dtype.name != store.description.dtype:
            yield f"{file}: {name} is {tensor.dtype.name}, and latents.json says {store.description.dtype}"
        if not np.isfinite(tensor).all():
            yield f"{file}: {name} is not finite"


def _faults_of(media: Media, store: LatentStore, pictures: Pictures, again: Autoencoder | None) -> Iterator[str]:
    """Faults of a picture's latent; one that cannot be read has none. ``again`` encodes it for a comparison."""
    try:
        data = media.read(BYTES)
        pixels = pixels_of(pictures, data)
    except Exception:  # a run that makes latents reports it
        return
    key = key_of(data)
    if key not in store:
        yield f"{media.name}: it has no latent"
        return
    size = tuple(side // store.description.factor for side in pixels.shape[:2])
    if store.size(key) != size:
        yield f"{media.name}: its latent is {list(store.size(key))}, and must be {list(size)}"
    elif again:
        latents = again.encode(pixels[None])
        for name, array in ((MEAN, latents.mean), (LOG_VARIANCE, latents.log_variance)):
            difference = np.abs(store.stored(key, name) - array[0]).max() / np.abs(array).max()
            if not difference < TOLERANCE[store.description.dtype]:
                yield f"{media.name}: {name} differs from the autoencoder's by {difference:.1e} of the largest"
