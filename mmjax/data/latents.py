"""Latents of pictures that were made ahead: a folder of safetensors files, read by the content of a picture's file.

``python -m mmjax.latents`` makes them. A folder has ``latents.json``, and files of latents that never change once they
are there. A picture has two tensors ``[h, w, Z]``, the mean of its latent's distribution and the logarithm of the
variance; a sample is drawn at training time.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from mmjax import json_files
from mmjax.configurable import ConfigError, require

DESCRIPTION = "latents.json"
SUFFIX = ".safetensors"
MEAN, LOG_VARIANCE = "mean", "log_variance"
"""The ends of tensors' names, behind a picture's key and a dot."""
FORMAT = 1
Key = str
"""A digest of a picture's file."""


def key_of(data: bytes) -> Key:
    """The key of a picture: a digest of the bytes of its file, 32 hexadecimal digits. Names and places do not count."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Description:
    """How latents were made.

    Attributes:
      autoencoder: the digest of the autoencoder's parameters and settings.
      factor: pixels of a picture along a side of a latent's pixel.
      channels: channels of a latent.
      shift, scale: a generator sees (latent - shift) · scale; a value for each channel.
      dtype: NumPy's name of the dtype of tensors, "float16" or "float32".
      pictures: the settings by which pictures were resized before.
    """

    autoencoder: str
    factor: int
    channels: int
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    dtype: str
    pictures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A digest of all of it, 16 hexadecimal digits; the name of the folder."""
        return hashlib.blake2b(self.text().encode(), digest_size=8).hexdigest()

    def text(self) -> str:
        """The content of ``latents.json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Reads ``latents.json`` of a folder.

        Raises:
          ConfigError: there is none, or it is of another format.
        """
        fix = "make latents with python -m mmjax.latents"
        values = json_files.read_object(folder / DESCRIPTION, fix)
        fields = set(cls.__dataclass_fields__)
        if values.pop("format", 0) != FORMAT or values.keys() != fields:
            raise ConfigError(f"{folder / DESCRIPTION} is of another version of mmjax; {fix}")
        return cls(**{**values, "shift": tuple(values["shift"]), "scale": tuple(values["scale"])})


class LatentStore:
    """Latents of one autoencoder, of pictures that were resized in one way. It can be sent to worker processes.

    Args:
      folder: the folder with ``latents.json``.

    Raises:
      ConfigError: it is no such folder, or a file is damaged; one line that names the file and the fix.
    """

    def __init__(self, folder: Path):
        self.folder, self.description = folder, Description.read(folder)
        self._shift = np.asarray(self.description.shift, np.float32)
        self._scale = np.asarray(self.description.scale, np.float32)
        self._files: dict[Key, str] = {}
        for file in shards(folder):
            self._files |= dict.fromkeys(keys_in(file), file.name)

    @classmethod
    def open(cls, path: str) -> LatentStore:
        """Opens the folder ``path`` with ``latents.json``, or the only such folder in it.

        Raises:
          ConfigError: there are none, or those of several; the message names them.
        """
        return cls(folder_of(path))

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, key: Key) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[Key]:
        """The keys of all pictures, in the order in which they were made."""
        return iter(self._files)

    def size(self, key: Key) -> tuple[int, int]:
        """Height and width of a picture's latent, from the header of its file.

        Raises:
          KeyError: the picture has no latent here.
        """
        height, width, _ = _opened(str(self.folder / self._files[key])).get_slice(f"{key}.{MEAN}").get_shape()
        return height, width

    def latent(self, key: Key, rng: np.random.Generator | None) -> Float[np.ndarray, "h w Z"]:
        """A picture's latent as a generator sees it, fp32: a sample of its distribution.

        Args:
          key: the picture's key, ``key_of(the bytes of its file)``.
          rng: draws the sample; ``None`` takes the mean.

        Raises:
          KeyError: the picture has no latent here.
        """
        mean, deviation = np.split(self.distribution(key), 2, axis=-1)
        return mean if rng is None else mean + deviation * rng.standard_normal(mean.shape, np.float32)

    def distribution(self, key: Key) -> Float[np.ndarray, "h w 2*Z"]:
        """The mean and the deviation of a picture's latent as a generator sees it, fp32, along channels.

        Raises:
          KeyError: the picture has no latent here.
        """
        mean, deviation = self.stored(key, MEAN), np.exp(0.5 * self.stored(key, LOG_VARIANCE))
        return np.concatenate([(mean - self._shift) * self._scale, deviation * self._scale], axis=-1)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the folder's files: of its description, and of latents in the order in which they were made."""
        return (str(self.folder / DESCRIPTION), *map(str, shards(self.folder)))

    def stored(self, key: Key, name: str) -> Float[np.ndarray, "h w Z"]:
        """The tensor ``MEAN`` or ``LOG_VARIANCE`` of a picture, as fp32, not yet as a generator sees it."""
        return _opened(str(self.folder / self._files[key])).get_tensor(f"{key}.{name}").astype(np.float32)


def folder_of(path: str) -> Path:
    """The folder of one autoencoder and size: ``path``, or the only such folder in it.

    Raises:
      ConfigError: there are none, or several; the message names them.
    """
    folder = Path(path)
    if (folder / DESCRIPTION).exists():
        return folder
    inside = sorted(file.parent for file in folder.glob(f"*/{DESCRIPTION}"))
    fix = "it has no latents; make some with python -m mmjax.latents"
    names = ", ".join(str(each) for each in inside)
    fix = f"it has latents of several autoencoders or sizes; name one of {names}" if inside else fix
    require(len(inside) == 1, "Latents.path", path, fix)
    return inside[0]


def shards(folder: Path) -> list[Path]:
    """The files of latents in a folder, in the order in which they were made."""
    return sorted(folder.glob(f"[0-9]*{SUFFIX}"))


def keys_in(file: Path) -> list[Key]:
    """The keys of the pictures in a file.

    Raises:
      ConfigError: the file is damaged.
    """
    try:
        names = list(_opened(str(file)).keys())
    except Exception as error:  # the library has an error type of its own for a torn file
        raise ConfigError(f"{file} is no safetensors file ({error}); remove it, and make latents again") from None
    return [name.removesuffix(f".{MEAN}") for name in names if name.endswith(f".{MEAN}")]


def _opened(place: str) -> Any:
    """A file mapped into memory; a file of latents does not change, but a removed one may be made again."""
    return _mapped(place, Path(place).stat().st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _mapped(place: str, modified: int) -> Any:
    from safetensors import safe_open

    return safe_open(place, framework="numpy")
