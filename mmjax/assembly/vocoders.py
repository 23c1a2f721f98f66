"""Vocoders in a run: waveforms and WAV files of the frames that generators make."""

from __future__ import annotations

import functools
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from mmjax.configurable import ConfigError, require
from mmjax.data.config import VocoderConfig
from mmjax.data.griffin_lim import waveform
from mmjax.data.log_mel import LogMel
from mmjax.models.vocoder.config import HifiGanConfig
from mmjax.recipe import Recipe
from mmjax.weights.folder import read_config

if TYPE_CHECKING:
    from mmjax.models.vocoder.hifigan import HifiGan


class Recording(NamedTuple):
    """A recording that was made.

    Attributes:
      samples: float [N], about -1…1.
      rate: samples a second.
    """

    samples: np.ndarray
    rate: int

    def write(self, path: Path) -> None:
        """Writes a WAV file of 16 bits and one channel; samples beyond -1…1 are cut off."""
        levels = np.round(np.clip(np.nan_to_num(self.samples), -1, 1) * 32767).astype("<i2")
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self.rate)
            file.writeframes(levels.tobytes())


@dataclass(frozen=True)
class Vocoders:
    """Makes waveforms of the log-mel frames that generators make.

    Attributes:
      log_mels: how recordings become frames, by generator of recordings.
      settings: the vocoder of each.
    """

    log_mels: Mapping[str, LogMel]
    settings: Mapping[str, VocoderConfig]

    @classmethod
    def of(cls, recipe: Recipe) -> Vocoders:
        """The vocoders of a run's generators of recordings.

        Raises:
          ConfigError: the folder of one cannot be read, or is of other frames than the generator's.
        """
        nodes = {
            name: node
            for name, node in recipe.model.nodes.items()
            if node.role == "generator" and node.settings.medium == "recording"
        }
        media = {name: node.module().medium for name, node in nodes.items()}
        vocoders = cls(
            log_mels={name: medium.log_mel for name, medium in media.items() if medium.log_mel},
            settings={name: node.vocoder for name, node in nodes.items()},
        )
        for name, log_mel in vocoders.log_mels.items():
            _require_fitting(name, vocoders.settings[name].path, log_mel)
        return vocoders

    def recording(self, name: str, frames_FM: Float[np.ndarray, "F M"]) -> Recording:
        """The recording of the frames that the generator ``name`` made."""
        log_mel, settings = self.log_mels[name], self.settings[name]
        if settings.path:
            samples = _hifigan(settings.path).waveform(log_mel.logs(frames_FM))
        else:
            samples = waveform(frames_FM, log_mel, iterations=settings.iterations)
        return Recording(samples, log_mel.sample_rate)


def _require_fitting(name: str, path: str, log_mel: LogMel) -> None:
    """Raises ``ConfigError`` unless the vocoder in the folder ``path``, if one is named, takes these frames."""
    if not path:
        return
    field = f"{name}/Vocoder.path"
    try:
        config = HifiGanConfig.of(read_config(path))
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    expected = {"mels": config.mels, "sample_rate": config.sample_rate, "hop": config.hop}
    for key, value in expected.items():
        fix = f"{name!r} has {key} {getattr(log_mel, key)}, and the vocoder {value}; train with that, or name another"
        require(getattr(log_mel, key) == value, field, path, fix)
    fix = f"{name!r} makes frames of log='whisper', and vocoders read logarithms of magnitudes; leave it out"
    require(log_mel.log != "whisper", field, path, fix)


@functools.lru_cache(maxsize=2)
def _hifigan(path: str) -> HifiGan:
    from mmjax.models.vocoder.hifigan import HifiGan

    return HifiGan.read(path)
