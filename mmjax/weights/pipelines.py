"""Pipelines of ``diffusers``: folders with a denoiser, a scheduler and an autoencoder, each in a part of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.json_files import is_there, read_object
from mmjax.weights.folder import PIPELINE

SCHEDULER, SCHEDULER_FILE = "scheduler", "scheduler_config.json"
"""The part with the scheduler's settings, and its file."""
_DENOISERS = ("transformer", "unet")
_AUTOENCODER = "vae"


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's folder.

    Attributes:
      path: the folder, with ``model_index.json``.
      denoiser: the name of the part with the denoiser, "transformer" or "unet".
    """

    path: str
    denoiser: str

    @classmethod
    def find(cls, path: str) -> Pipeline | None:
        """The pipeline in a folder; ``None`` if it is none, such as a folder of one module.

        Raises:
          ConfigError: it has no denoiser, or two; one line.
        """
        if not path or not is_there(Path(path) / PIPELINE):
            return None
        parts = [name for name in _DENOISERS if (Path(path) / name).is_dir()]
        if len(parts) != 1:
            shown = " and ".join(f"{name}/" for name in _DENOISERS) if parts else "no denoiser"
            fix = f"name one of them, such as {Path(path) / _DENOISERS[0]}" if parts else "get the model again"
            raise ConfigError(f"Weights.path={path!r}: it is a pipeline of diffusers with {shown}; {fix}")
        return cls(path, parts[0])

    @property
    def denoiser_folder(self) -> str:
        """The folder of the denoiser, of safetensors."""
        return str(Path(self.path) / self.denoiser)

    @property
    def autoencoder_folder(self) -> str:
        """The folder of the autoencoder; "" if the pipeline has none."""
        folder = Path(self.path) / _AUTOENCODER
        return str(folder) if folder.is_dir() else ""

    @property
    def scheduler_file(self) -> Path:
        """The file with the scheduler's settings, which may be missing."""
        return Path(self.path) / SCHEDULER / SCHEDULER_FILE

    def scheduler(self) -> Mapping[str, Any]:
        """The scheduler's settings; {} if the pipeline has none.

        Raises:
          ConfigError: the file is no JSON object.
        """
        return read_object(self.scheduler_file) if is_there(self.scheduler_file) else {}


def module_folder(path: str) -> str:
    """The folder of safetensors of a module that starts from ``path``: a pipeline's denoiser, else ``path`` itself.

    Raises:
      ConfigError: the pipeline has no denoiser, or two; one line.
    """
    pipeline = Pipeline.find(path)
    return pipeline.denoiser_folder if pipeline else path
