"""Waveforms of log-mel frames by the method of Griffin and Lim (1984). NumPy only.

Bins are first made magnitudes of all frequencies: the least squares without negative values, by multiplicative updates
(Lee and Seung 2001, "Algorithms for Non-negative Matrix Factorization", eq. 4). Phases begin at random; each iteration
takes those of the spectrum of the waveform that fits the present ones best, with momentum (Perraudin et al. 2013,
"A Fast Griffin-Lim Algorithm").

Shapes: F frames, M mel bins, K frequencies, N samples of a waveform, L of them with those beyond its ends, W samples of
a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float

from mmjax.data.log_mel import LogMel, hann

_UPDATES = 200
_MOMENTUM = 0.99
_TINY = 1e-12


def waveform(
    frames_FM: Float[np.ndarray, "F M"], log_mel: LogMel, *, iterations: int = 60, seed: int = 0
) -> Float[np.ndarray, " N"]:
    """A waveform, float64, whose log-mel frames are about ``frames_FM``; N is F · ``log_mel.hop``.

    Args:
      frames_FM: the frames, as ``log_mel`` makes them of recordings.
      log_mel: how recordings become frames.
      iterations: number of times that phases are improved.
      seed: of the phases at the beginning.
    """
    magnitudes_FK = _magnitudes(log_mel.sums(np.nan_to_num(frames_FM)), log_mel)
    transform = _Transform(window=log_mel.window, hop=log_mel.hop, frames=len(frames_FM))
    angles_FK = np.random.default_rng(seed).uniform(-np.pi, np.pi, magnitudes_FK.shape)
    phases_FK, before_FK = np.exp(1j * angles_FK), np.zeros_like(magnitudes_FK, complex)
    for _ in range(iterations):
        spectrum_FK = transform.spectrum(transform.waveform(magnitudes_FK * phases_FK))
        moved_FK = spectrum_FK + _MOMENTUM * (spectrum_FK - before_FK)
        phases_FK, before_FK = moved_FK / np.maximum(np.abs(moved_FK), _TINY), spectrum_FK
    return transform.waveform(magnitudes_FK * phases_FK)


def _magnitudes(sums_FM: Float[np.ndarray, "F M"], log_mel: LogMel) -> Float[np.ndarray, "F K"]:
    """Magnitudes whose sums in bins, or those of their squares, are about ``sums_FM``."""
    filters_MK = log_mel.filters
    wanted_FK, gram_KK = sums_FM @ filters_MK, filters_MK.T @ filters_MK
    values_FK = np.maximum(sums_FM @ np.linalg.pinv(filters_MK).T, _TINY)
    for _ in range(_UPDATES):
        values_FK = values_FK * wanted_FK / np.maximum(values_FK @ gram_KK, _TINY)
    return values_FK ** (1 / log_mel.power)


@dataclass(frozen=True, kw_only=True)
class _Transform:
    """The spectra of windows of a waveform, and the waveform whose spectra are nearest to given ones.

    Attributes:
      window, hop: samples under a window, and from one to the next.
      frames: number of windows.
    """

    window: int
    hop: int
    frames: int

    def spectrum(self, samples_N: Float[np.ndarray, " N"]) -> Complex[np.ndarray, "F K"]:
        """The spectrum of each window, which has half of its samples before its frame; there are zeros at the ends."""
        padded_L = np.zeros(self._length)
        padded_L[self._inside] = samples_N[: len(padded_L[self._inside])]
        framed_FW = np.lib.stride_tricks.sliding_window_view(padded_L, self.window)[:: self.hop]
        return np.fft.rfft(framed_FW * hann(self.window))

    def waveform(self, spectrum_FK: Complex[np.ndarray, "F K"]) -> Float[np.ndarray, " N"]:
        """The waveform with the least squared difference of spectra (Griffin and Lim 1984, eq. 6)."""
        window_W = hann(self.window)
        framed_FW = np.fft.irfft(spectrum_FK, self.window) * window_W
        sums_L, weights_L = np.zeros(self._length), np.zeros(self._length)
        places_FW = self.hop * np.arange(self.frames)[:, None] + np.arange(self.window)
        np.add.at(sums_L, places_FW, framed_FW)
        np.add.at(weights_L, places_FW, np.broadcast_to(window_W**2, framed_FW.shape))
        inside = (sums_L / np.maximum(weights_L, _TINY))[self._inside]
        return np.pad(inside, (0, self.frames * self.hop - len(inside)))

    @property
    def _length(self) -> int:
        return (self.frames - 1) * self.hop + self.window

    @property
    def _inside(self) -> slice:
        """The places of the waveform among those of all windows."""
        return slice(self.window // 2, self.window // 2 + self.frames * self.hop)
