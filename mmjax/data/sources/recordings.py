"""Turns encoded recordings (WAV, PCM of 8 to 32 bits) into log-mel frames: one channel, at the encoder's rate."""

from __future__ import annotations

import io
import wave

import numpy as np

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.storage import Unusable
from mmjax.data.types import EncoderSpec

_RATES = range(1000, 768_001)


class Recordings:
    """Recordings of a source for an encoder."""

    def __init__(self, config: SourceConfig, spec: EncoderSpec):
        assert spec.log_mel is not None
        self.spec, self._log_mel, self._seconds = spec, spec.log_mel, config.max_seconds

    def frames(self, data: bytes) -> int:
        """How many frames a recording becomes, from its header."""
        with wave.open(io.BytesIO(data)) as file:
            return self._log_mel.frames(self._length(file)[1], self.spec.block)

    def __call__(self, data: bytes) -> np.ndarray:
        """Log-mel frames [F, M]."""
        with wave.open(io.BytesIO(data)) as file:
            read, length = self._length(file)
            width, channels = file.getsampwidth(), file.getnchannels()
            raw = file.readframes(read)
        if len(raw) != read * width * channels:
            raise Unusable("the recording is truncated")
        return self._log_mel(resample(_mono(raw, width, channels), length), self.spec.block)

    def _length(self, file: wave.Wave_read) -> tuple[int, int]:
        """How many samples are read, and how many there are after resampling."""
        rate, count = file.getframerate(), file.getnframes()
        if rate not in _RATES or count < 1 or not 1 <= file.getsampwidth() <= 4 or file.getnchannels() > 64:
            raise Unusable(f"{count} samples of {file.getsampwidth()} bytes at {rate} a second")
        read = min(count, max(1, int(rate * self._seconds)))
        return read, -(-read * self._log_mel.sample_rate // rate)


def _mono(raw: bytes, width: int, channels: int) -> np.ndarray:
    """Samples in -1 to 1, the mean of all channels; input is unsigned for one byte, else signed, little-endian."""
    if width == 1:
        samples = (np.frombuffer(raw, np.uint8).astype(np.float64) - 128.0) / 128.0
    else:
        # Moved to the upper bytes of 32 bits, so that 24 bits need no case of their own.
        wide = np.zeros((len(raw) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
        samples = wide.view("<i4")[:, 0] / 2.0**31
    return samples.reshape(-1, channels).mean(1)


def resample(samples_N: np.ndarray, length: int) -> np.ndarray:
    """`samples_N` resampled to `length` samples: its spectrum is cut or continued with zeros."""
    count = len(samples_N)
    if count == length:
        return samples_N
    spectrum = np.fft.rfft(samples_N)
    kept = np.zeros(length // 2 + 1, complex)
    most = min(len(spectrum), len(kept))
    kept[:most] = spectrum[:most]
    return np.fft.irfft(kept, length) * (length / count)
