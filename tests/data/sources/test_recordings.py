"""Recordings: every format, every PCM width, several channels and other rates give the frames of the same sound."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from data_sources import AUDIO, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.log_mel import EDGES
from mmjax.data.sources import recordings
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.recordings import Recordings, resample
from mmjax.data.sources.storage import Unusable

soundfile = pytest.importorskip("soundfile")
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
        silence = np.zeros(samples)
        silence[: len(sound)] = sound[:samples]
        alone = replace(LOG_MEL, edges=edges)(silence)
        np.testing.assert_allclose(frames, alone, atol=0.02)  # samples of 16 bits
        # At the very start a mirror image is louder than silence.
        other_edges = replace(LOG_MEL, edges=next(edge for edge in EDGES if edge != edges))(silence)
        assert (other_edges[0].max() < frames[0].max()) == (edges == "reflected")


def wav(samples: np.ndarray, *, code: int, extra: bytes = b"", behind: bytes = b"") -> bytes:
    """A WAV file of samples as they lie in memory."""
    bits = 8 * samples.itemsize
    form = struct.pack("<HHIIHH", code, 1, 4000, 4000 * bits // 8, bits // 8, bits) + extra
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", samples.nbytes) + samples.tobytes() + behind
    return b"RIFF" + struct.pack("<I", len(body)) + body


SHORTS = np.round(SOUND * 32767).astype("<i2")
EXTENSIBLE = struct.pack("<HHI", 22, 16, 4) + struct.pack("<H", 1) + bytes.fromhex("000000001000800000aa00389b71")
PLAIN = wav(SHORTS, code=1)
DATA = PLAIN.index(b"data") + 4
WAVS = {
    "float32": (wav(SOUND.astype("<f4"), code=3, extra=b"\0\0"), SOUND.astype("<f4")),
    "float64": (wav(SOUND.astype("<f8"), code=3, extra=b"\0\0"), SOUND),
    "extensible": (wav(SHORTS, code=0xFFFE, extra=EXTENSIBLE), SHORTS / 2**15),
    "int32": (wav(np.round(SOUND * 2**31).astype("<i4"), code=1), np.round(SOUND * 2**31) / 2**31),
    "bytes": (wav(np.round(SOUND * 127 + 128).astype(np.uint8), code=1), np.round(SOUND * 127) / 128),
    "pipe of ffmpeg": (PLAIN[:4] + b"\xff" * 4 + PLAIN[8:DATA] + b"\xff" * 4 + PLAIN[DATA + 4 :], SHORTS / 2**15),
    "pipe of sox": (PLAIN[:DATA] + b"\0\xf0\xff\x7f" + PLAIN[DATA + 4 :], SHORTS / 2**15),
    "pipe without lengths": (PLAIN[:4] + bytes(4) + PLAIN[8:DATA] + bytes(4) + PLAIN[DATA + 4 :], SHORTS / 2**15),
    "a chunk behind": (wav(SHORTS, code=1, behind=b"LIST\4\0\0\0INFO"), SHORTS / 2**15),
}


@pytest.mark.parametrize("name", list(WAVS))
def test_every_wav_is_the_same_sound(name):
    """To the last digit, whatever its header says of itself."""
    (data, samples), read = WAVS[name], Recordings(SourceConfig(), AUDIO)
    assert np.array_equal(read(data), LOG_MEL(np.asarray(samples, np.float64), AUDIO.block))
    assert read.frames(data) == len(read(data))


@cache
def packed(kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.tile(SOUND, 8), 16000, format=kind, subtype=subtype)
    return file.getvalue()


PACKED = {"FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}


@pytest.mark.parametrize("kind", list(PACKED))
def test_packed_recordings(kind):
    read, data = Recordings(SourceConfig(), AUDIO), packed(kind, PACKED[kind])
    plain = LOG_MEL(resample(np.tile(SOUND, 8), 4000), AUDIO.block)
    frames = read(data)
    assert frames.shape == plain.shape and read.frames(data) == len(frames)
    loud = plain > plain.max() - 0.5
    assert np.abs(frames - plain)[loud].max() < 0.1
    with pytest.raises(Unusable):
        read(data[: len(data) // 2])


def test_a_flac_of_a_pipe_does_not_know_its_length():
    data = bytearray(packed("FLAC", "PCM_16"))
    known = int.from_bytes(data[18:26], "big")
    assert known % 2**36 == 16000
    data[18:26] = (known - 16000).to_bytes(8, "big")
    read = Recordings(SourceConfig(), AUDIO)
    assert np.array_equal(read(bytes(data)), read(packed("FLAC", "PCM_16")))
    assert read.frames(bytes(data)) == read.frames(packed("FLAC", "PCM_16"))
    data[18:26] = (known + 2**35).to_bytes(8, "big")  # half a day at this rate
    with pytest.raises(Unusable, match="truncated"):
        read(bytes(data))


def test_recordings_that_are_none():
    read = Recordings(SourceConfig(), AUDIO)
    spoilt = SOUND.astype("<f4")
    spoilt[7] = np.nan
    aiff = io.BytesIO()
    soundfile.write(aiff, SOUND, 4000, format="AIFF")
    for data, reason in (
        (wav(spoilt, code=3, extra=b"\0\0"), "not finite"),
        (wav(SHORTS[:0], code=1), "0 samples in 1 channels at 4000 a second"),
        (wav(SHORTS[:0], code=1, behind=b"LIST\4\0\0\0INFO"), "0 samples"),
        (aiff.getvalue(), "no WAV, FLAC, OGG or MP3 recording"),
        (b"ID3\4" + bytes(200), "no WAV, FLAC, OGG or MP3 recording"),
        (b"", "no WAV, FLAC"),
    ):
        with pytest.raises(Unusable, match=reason):
            read(data)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    recordings._library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"recordings need the soundfile package .*pip install soundfile"):
            Recordings(SourceConfig(), AUDIO).frames(PLAIN)
    finally:
        recordings._library.cache_clear()


@given(
    kind=st.sampled_from(["WAV", *PACKED]),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 3000)),
)
@settings(max_examples=60, deadline=None)
def test_damaged_headers_are_named_or_harmless(kind, changes, cut):
    data = bytearray(PLAIN if kind == "WAV" else packed(kind, PACKED[kind]))
    for at, value in changes:
        data[at] = value
    read = Recordings(SourceConfig(max_seconds=2.0), AUDIO)
    with contextlib.suppress(Unusable):
        assert len(read(bytes(data[:cut]))) == read.frames(bytes(data[:cut]))
