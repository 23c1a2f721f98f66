"""Log-mel spectrograms, the input of audio encoders. NumPy only.

As in Whisper (Radford et al. 2022, §2.2), step by step, for samples x at a rate of r per second:

  frame t      N samples around sample t·hop; beyond its ends the recording has zeros, or itself, mirrored at its first
               sample, and at the last of the silence that fills its last frame.
  window       Hann, periodic: w[n] = 1/2 − 1/2 · cos(2πn / N).
  power        P[t, k] = |Σ_n w[n] · x[t·hop − N/2 + n] · exp(−2πi·kn / N)|², k = 0 … N/2, at k·r/N hertz.
  mel scale    linear below 1000 Hz, m(f) = 3f / 200; logarithmic above, m(f) = 15 + 27 · ln(f / 1000) / ln 6.4
               (Slaney 1998, "Auditory Toolbox"). M + 2 points at equal distances from m(0) to m(r/2).
  filters      bin j rises from point j to j + 1 and falls to j + 2, linearly in hertz, with an area of 1 hertz.
  log          L = log10(max(filters · P, 1e-10)), no more than 8 below the largest L of the recording; (L + 4) / 4.

The number of frames follows from the number of samples alone. With mirrored ends and ``chunk`` frames, the result is
that of ``WhisperFeatureExtractor`` of ``transformers``, which has filters up to 8 kHz at any rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

_BREAK_HERTZ, _BREAK_MEL = 1000.0, 15.0
_STEP = np.log(6.4) / 27.0
_RANGE, _SHIFT = 8.0, 4.0
LOGS = {"whisper": 1e-10, "log10": 1e-5, "ln": 1e-5}
"""The ways to take logarithms, each with the smallest number of which one is taken."""
EDGES = ("silent", "reflected")
"""The continuation of a recording beyond its ends: zeros, or its mirror image."""


@dataclass(frozen=True, kw_only=True)
class LogMel:
    """How a recording becomes frames.

    Call it with a recording to get its frames.

    sample_rate: samples per second. window, hop: samples under a frame's window, and from one frame to the next.
    mels: bins of a frame. edges: one of ``EDGES``. chunk: frames of every recording, which is cut or followed by
    silence; 0 = according to its length. low, high: hertz from which and to which bins reach; high 0 = half the sample
    rate. log: one of ``LOGS``: "whisper" takes log10 of the power within 8 of the highest bin, plus 4, by 4; "log10"
    and "ln" take logarithms of the magnitude, as SpeechT5 and HiFi-GAN. mean, std: what is subtracted from these, and
    what they are then divided by.
    """

    sample_rate: int
    window: int
    hop: int
    mels: int
    edges: str = "silent"
    chunk: int = 0
    low: float = 0.0
    high: float = 0.0
    log: str = "whisper"
    mean: float = 0.0
    std: float = 1.0

    @property
    def filters(self) -> Float[np.ndarray, "M K"]:
        """The weights of frequencies in bins, see `mel_filters`."""
        return mel_filters(self.sample_rate, self.window, self.mels, low=self.low, high=self.high)

    @property
    def power(self) -> int:
        """The power of the magnitudes that bins add up: 2 for "whisper", else 1."""
        return 2 if self.log == "whisper" else 1

    def frames(self, samples: int, multiple: int = 1) -> int:
        """Number of frames of a recording of `samples` samples: `chunk`, or one for each `hop` if `chunk` is 0.

        It is rounded up to a multiple of `multiple` above 0, since silence follows the recording.
        """
        frames = self.chunk or -(-samples // self.hop)
        return multiple * max(1, -(-frames // multiple))

    def __call__(self, samples_N: Float[np.ndarray, " N"], multiple: int = 1) -> Float[np.ndarray, "F M"]:
        """The log-mel frames of a recording, float32: F is `frames(N, multiple)`, M is `mels`."""
        frames = self.frames(len(samples_N), multiple)
        padded = self._beyond_its_ends(samples_N[: self.chunk * self.hop or None], frames)
        framed_FN = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop]
        sums_FM = np.abs(np.fft.rfft(framed_FN * hann(self.window))) ** self.power @ self.filters.T
        bounded_FM = np.maximum(sums_FM, LOGS[self.log])
        log_FM = np.log(bounded_FM) if self.log == "ln" else np.log10(bounded_FM)
        if self.log == "whisper":
            log_FM = (np.maximum(log_FM, log_FM.max() - _RANGE) + _SHIFT) / _SHIFT
        return ((log_FM - self.mean) / self.std).astype(np.float32)

    def logs(self, frames_FM: Float[np.ndarray, "F M"]) -> Float[np.ndarray, "F M"]:
        """The logarithms of frames: without ``mean`` and ``std``, and of "whisper" without its range, float64."""
        values_FM = np.asarray(frames_FM, np.float64) * self.std + self.mean
        return values_FM * _SHIFT - _SHIFT if self.log == "whisper" else values_FM

    def sums(self, frames_FM: Float[np.ndarray, "F M"]) -> Float[np.ndarray, "F M"]:
        """The sums over frequencies, of magnitudes or of their squares, of which these are frames, float64."""
        logs_FM = self.logs(frames_FM)
        return np.exp(logs_FM) if self.log == "ln" else 10.0**logs_FM

    def _beyond_its_ends(self, samples_N: np.ndarray, frames: int) -> np.ndarray:
        """The samples that `frames` frames see, float64, from half a window before the first sample on."""
        before, length = self.window // 2, (frames - 1) * self.hop + self.window
        if self.edges == "reflected":
            extended = np.zeros(frames * self.hop)
            extended[: len(samples_N)] = samples_N
            return np.pad(extended, before, mode="reflect")[:length]
        padded = np.zeros(length)
        present = samples_N[: length - before]
        padded[before : before + len(present)] = present
        return padded


def hann(length: int) -> Float[np.ndarray, " N"]:
    """The periodic Hann window of `length` samples, float64."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)


def hertz_to_mel(hertz: np.ndarray) -> np.ndarray:
    """The place of each frequency on the mel scale: 3f / 200 below 1000 hertz, else 15 + 27 · ln(f / 1000) / ln 6.4.

    The result, float64, has the shape of ``hertz``.
    """
    above = np.log(np.maximum(hertz, _BREAK_HERTZ) / _BREAK_HERTZ) / _STEP
    return np.where(hertz < _BREAK_HERTZ, hertz * _BREAK_MEL / _BREAK_HERTZ, _BREAK_MEL + above)


def mel_to_hertz(mel: np.ndarray) -> np.ndarray:
    """The frequency in hertz of each place on the mel scale, such as 1000.0 for 15.0: the inverse of `hertz_to_mel`.

    The result, float64, has the shape of ``mel``.
    """
    above = _BREAK_HERTZ * np.exp(_STEP * (np.maximum(mel, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _BREAK_HERTZ / _BREAK_MEL, above)


@lru_cache(maxsize=8)
def mel_filters(
    sample_rate: int, window: int, mels: int, *, low: float = 0.0, high: float = 0.0
) -> Float[np.ndarray, "M K"]:
    """Triangles over the frequencies of a transform of ``window`` samples, each of area 1 hertz, float64.

    M is ``mels``, K is ``window // 2 + 1``; column k is the frequency k · ``sample_rate`` / ``window`` in hertz. The
    triangles overlap by half, at equal distances on the mel scale from ``low`` to ``high`` hertz, of which 0 is half
    the ``sample_rate`` (samples per second). The array is cached: do not write into it.
    """
    hertz_K = np.arange(window // 2 + 1) * sample_rate / window
    bottom, top = (float(hertz_to_mel(np.asarray(hertz))) for hertz in (low, high or sample_rate / 2))
    points = mel_to_hertz(np.linspace(bottom, top, mels + 2))
    below, middle, above = points[:-2, None], points[1:-1, None], points[2:, None]
    rising, falling = (hertz_K - below) / (middle - below), (above - hertz_K) / (above - middle)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (above - below)
