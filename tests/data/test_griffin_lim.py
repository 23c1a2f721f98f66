"""Waveforms of log-mel frames: their frames are those that they were made of."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.data.griffin_lim import waveform
from mmjax.data.log_mel import LogMel

FRAMES = {
    "log10": LogMel(
        sample_rate=4000, window=128, hop=40, mels=24, low=600.0, high=1600.0, log="log10", mean=-2.0, std=2.0
    ),
    "ln": LogMel(sample_rate=8000, window=256, hop=80, mels=40, log="ln"),
    "whisper": LogMel(sample_rate=8000, window=256, hop=64, mels=40),
    "reflected": LogMel(sample_rate=4000, window=256, hop=64, mels=40, edges="reflected", log="log10"),
}


def tones(rate: int) -> np.ndarray:
    """Half a second of two tones, of which one ends early, in noise."""
    seconds = np.arange(rate // 2) / rate
    noise = np.random.default_rng(0).normal(size=len(seconds))
    low, high = (np.sin(2 * np.pi * hertz * seconds) for hertz in (697, 1209))
    return 0.3 * low * (seconds < 0.25) + 0.3 * high + 0.02 * noise


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_of_the_waveform_are_those_that_it_was_made_of(kind: str) -> None:
    log_mel = FRAMES[kind]
    frames_FM = log_mel(tones(log_mel.sample_rate))
    made_N = waveform(frames_FM, log_mel)
    assert len(made_N) == len(frames_FM) * log_mel.hop
    again_FM = log_mel(made_N)
    wanted, got = log_mel.sums(frames_FM), log_mel.sums(again_FM)
    assert np.linalg.norm(got - wanted) < 0.15 * np.linalg.norm(wanted)
    # Phases at random give other frames.
    random_FM = log_mel(waveform(frames_FM, log_mel, iterations=0))
    assert np.linalg.norm(log_mel.sums(random_FM) - wanted) > 2 * np.linalg.norm(got - wanted)


def test_logarithms_are_those_of_the_sums() -> None:
    for log_mel in FRAMES.values():
        frames_FM = log_mel(tones(log_mel.sample_rate))
        sums_FM = log_mel.sums(frames_FM)
        logs_FM = np.log(sums_FM) if log_mel.log == "ln" else np.log10(sums_FM)
        np.testing.assert_allclose(log_mel.logs(frames_FM), logs_FM, atol=1e-6)
