"""Recordings: every PCM width, several channels, and other rates give the frames of the same sound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from data_sources import AUDIO, recorded

from mmjax.data.log_mel import EDGES
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.recordings import Recordings, resample
from mmjax.data.sources.storage import Unusable

assert AUDIO.log_mel is not None
LOG_MEL = AUDIO.log_mel
SOUND = 0.4 * np.sin(2 * np.pi * 440 * np.arange(2000) / 4000) + 0.1 * np.sin(2 * np.pi * 1200 * np.arange(2000) / 4000)


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 3)])
def test_pcm(width, channels):
    read, data = Recordings(SourceConfig(), AUDIO), recorded(SOUND, width=width, channels=channels)
    frames = read(data)
    loud = LOG_MEL(SOUND, AUDIO.block)
    assert frames.shape == (read.frames(data), 8) == loud.shape
    heard = loud > loud.max() - (0.5 if width == 1 else 2.0)  # below is the noise of rounding
    assert heard.any() and np.abs(frames - loud)[heard].max() < 0.02


def test_other_rates():
    data = recorded(0.4 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000), rate=16000)
    read = Recordings(SourceConfig(), AUDIO)
    tone = LOG_MEL(0.4 * np.sin(2 * np.pi * 440 * np.arange(2000) / 4000), AUDIO.block)
    frames = read(data)
    assert frames.shape == tone.shape
    assert np.abs(frames[4:-4].max(1) - tone[4:-4].max(1)).max() < 0.02
    assert (frames[4:-4].argmax(1) == tone[4:-4].argmax(1)).all()


def test_resampling_keeps_what_both_rates_can_hold():
    time = np.arange(600) / 600
    wave = np.sin(2 * np.pi * 7 * time)
    assert np.allclose(resample(wave, 300), wave[::2], atol=1e-9)
    assert np.allclose(resample(wave, 1200)[::2], wave, atol=1e-9)


def test_long_ones_are_cut_and_broken_ones_refused():
    read = Recordings(SourceConfig(max_seconds=0.25), AUDIO)
    data = recorded(SOUND)
    assert len(read(data)) == read.frames(data) == LOG_MEL.frames(1000, AUDIO.block)
    with pytest.raises(Unusable, match="truncated"):
        Recordings(SourceConfig(), AUDIO)(data[:-100])
    with pytest.raises(Unusable, match="at 1 a second"):
        read.frames(recorded(SOUND, rate=1))


@pytest.mark.parametrize("edges", EDGES)
def test_short_and_long_ones_have_as_many_frames_where_they_are_padded(edges):
    padded = replace(AUDIO, log_mel=replace(LOG_MEL, chunk=8 * AUDIO.block, edges=edges))
    read, samples = Recordings(SourceConfig(), padded), 8 * AUDIO.block * LOG_MEL.hop
    for sound in (SOUND[: samples // 3], np.tile(SOUND, -(-2 * samples // len(SOUND)))):
        data = recorded(sound)
        frames = read(data)
        assert len(frames) == read.frames(data) == 8 * AUDIO.block
        whole = np.zeros(samples)
        whole[: len(sound)] = sound[:samples]
        alone = replace(LOG_MEL, edges=edges)(whole)
        np.testing.assert_allclose(frames, alone, atol=0.02)  # samples of 16 bits
        # At the very start a mirror image is louder than silence.
        other = replace(LOG_MEL, edges=next(one for one in EDGES if one != edges))(whole)
        assert (other[0].max() < frames[0].max()) == (edges == "reflected")
