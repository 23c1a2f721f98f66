"""Log-mel frames: against the formula written out, and by what is known of tones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.data.log_mel import LogMel, hann, hertz_to_mel, mel_filters, mel_to_hertz

SMALL = LogMel(sample_rate=8000, window=64, hop=20, mels=6)
USUAL = LogMel(sample_rate=8000, window=256, hop=80, mels=40)


def dense(c: LogMel, samples: np.ndarray, frames: int) -> np.ndarray:
    """The formula of the module, sum by sum."""
    n, points = c.window, mel_to_hertz(np.linspace(0.0, float(hertz_to_mel(np.asarray(c.sample_rate / 2))), c.mels + 2))
    energies = np.zeros((frames, c.mels))
    for t in range(frames):
        read = lambda i: samples[i] if 0 <= i < len(samples) else 0.0  # noqa: E731
        windowed = [(0.5 - 0.5 * np.cos(2 * np.pi * k / n)) * read(t * c.hop - n // 2 + k) for k in range(n)]
        for k in range(n // 2 + 1):
            power = abs(sum(windowed[i] * np.exp(-2j * np.pi * k * i / n) for i in range(n))) ** 2
            hertz = k * c.sample_rate / n
            for j in range(c.mels):
                low, middle, high = points[j : j + 3]
                if low < hertz < high:
                    side = (hertz - low) / (middle - low) if hertz <= middle else (high - hertz) / (high - middle)
                    energies[t, j] += power * side * 2 / (high - low)
    logs = np.log10(np.maximum(energies, 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


@pytest.mark.parametrize("samples", [1, 33, 60, 101])
def test_frames_are_the_formula(samples: int) -> None:
    waveform = np.random.default_rng(samples).normal(size=samples)
    got = SMALL(waveform)
    assert got.shape == (-(-samples // 20), 6) and got.dtype == np.float32
    np.testing.assert_allclose(got, dense(SMALL, waveform, len(got)), atol=1e-5)


@settings(deadline=None, derandomize=True)
@given(samples=st.integers(0, 5000), multiple=st.integers(1, 12))
def test_length_follows_from_the_number_of_samples(samples: int, multiple: int) -> None:
    frames = USUAL.frames(samples, multiple)
    assert frames % multiple == 0 and frames > 0
    assert frames * USUAL.hop >= samples > (frames - multiple) * USUAL.hop or (samples == 0 and frames == multiple)
    assert USUAL(np.ones(samples), multiple).shape == (frames, 40)


def test_what_follows_a_recording_is_silence() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(800) / 8000)
    padded, alone = USUAL(tone, 16), USUAL(tone)
    np.testing.assert_array_equal(padded[:10], alone)
    assert (padded[13:] == padded.min()).all() and padded.max() - padded.min() == pytest.approx(2.0)


@pytest.mark.parametrize("hertz", [300.0, 697.0, 1209.0, 1477.0, 3000.0])
def test_a_tone_is_loudest_in_the_bin_of_its_frequency(hertz: float) -> None:
    frames = USUAL(np.sin(2 * np.pi * hertz * np.arange(4000) / 8000))
    points = mel_to_hertz(np.linspace(0, float(hertz_to_mel(np.asarray(4000.0))), 42))
    assert np.abs(points[1:-1] - hertz).argmin() == frames[20].argmax()


def test_twice_as_loud_is_as_much_more_in_every_bin() -> None:
    waveform = np.random.default_rng(0).normal(size=2000)
    np.testing.assert_allclose(USUAL(2 * waveform) - USUAL(waveform), np.log10(4) / 4, atol=1e-5)


def test_scale_filters_and_window() -> None:
    np.testing.assert_allclose(hertz_to_mel(np.array([0.0, 200, 1000, 6400])), [0, 3, 15, 42])
    np.testing.assert_allclose(mel_to_hertz(hertz_to_mel(np.array([10.0, 999, 1001, 7000]))), [10, 999, 1001, 7000])
    filters = mel_filters(16000, 4000, 20)
    np.testing.assert_allclose(filters.sum(1) * 4.0, 1.0, rtol=2e-2)  # bins are 4 hertz wide
    np.testing.assert_allclose(hann(4), [0, 0.5, 1, 0.5])
