"""Turns encoded recordings (WAV, FLAC, OGG, MP3) into log-mel frames: one channel, at the encoder's rate.

One library, soundfile, reads all formats under every Python. It is imported when a recording is read: training on text
and images does not need it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.media import Media, begins_recording
from mmjax.data.sources.sound_tracks import read_track, track_of
from mmjax.data.sources.storage import Unusable
from mmjax.data.types import EncoderSpec

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
"""Soundfile's names; WAVEX is WAV with an EXTENSIBLE header."""
_MOST_CHUNKS = 1 << 12
_RATES, _MOST_CHANNELS = range(1000, 768_001), 64
_BLOCK = 1 << 16
"""Samples of all channels that are decoded at a time: a header may promise any number of them."""
_KNOWN = 1 << 48
"""From this number of samples on, the length of a file is unknown: it was written to a pipe."""
_PIPED = 0x7FFF_F000
"""Programs that write a WAV to a pipe give its data this length or more, or none."""


class Recordings:
    """Makes media of a source's recordings for an encoder, or for a generator that is to make them.

    Call it with the bytes of a recording. Silence follows it up to whole LLM tokens of an encoder; a generator's media
    end with the recording.

    Args:
      config: the source; `max_seconds` limits a recording.
      spec: the encoder's spec, which has `log_mel`.
    """

    def __init__(self, config: SourceConfig, spec: EncoderSpec):
        assert spec.log_mel is not None
        self.spec, self._log_mel, self._seconds = spec, spec.log_mel, config.max_seconds
        self._config, self._multiple = config, 1 if spec.sounds else spec.block

    def frames(self, data: bytes) -> int:
        """Number of frames F of the medium of a recording, from its header. Raises Unusable if it cannot be read."""
        with _opened(data) as file:
            return self._log_mel.frames(self._resampled(self._count(file), file.samplerate), self._multiple)

    def __call__(self, data: bytes) -> np.ndarray:
        """Log-mel frames [F, M] of a recording, float32; F is `frames(data)`. Raises Unusable if it is damaged."""
        with _opened(data) as file:
            count = self._count(file)
            length = self._resampled(count, file.samplerate)
        with _opened(data) as file:
            samples = np.concatenate([*_blocks(file, count), np.zeros(0)])
        if len(samples) != count:
            raise Unusable("the recording is truncated")
        if not np.isfinite(samples).all():
            raise Unusable("the recording has samples that are not finite")
        return self._log_mel(resample(samples, length), self._multiple)

    def track_frames(self, media: Media) -> int:
        """Number of frames F of the medium of a video's sound track, from its header. Raises Unusable as `track_of`."""
        return self._log_mel.frames(self._resampled(*track_of(media, self._config)), self._multiple)

    def track(self, media: Media) -> np.ndarray:
        """Log-mel frames [F, M] of a video's sound track, float32. Raises Unusable as `read_track`."""
        track, samples = read_track(media, self._config)
        return self._log_mel(resample(samples, self._resampled(*track)), self._multiple)

    def _count(self, file: Any) -> int:
        """Number of samples that are read."""
        rate, channels, count = file.samplerate, file.channels, file.frames
        most = max(1, int(rate * self._seconds))
        if rate in _RATES and channels <= _MOST_CHANNELS and count >= _KNOWN:
            count = sum(map(len, _blocks(file, most)))
        if rate not in _RATES or channels > _MOST_CHANNELS or count < 1:
            raise Unusable(f"{count} samples in {channels} channels at {rate} a second")
        return min(count, most)

    def _resampled(self, samples: int, rate: int) -> int:
        """Number of samples after resampling, of so many at ``rate`` a second."""
        return -(-samples * self._log_mel.sample_rate // rate)


@cache
def _library() -> tuple[Any, type[Any]]:
    """soundfile, and a class of it for files that are read once from start to end."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # the package, or the library that it loads
        fix = "pip install soundfile, or leave recordings out of the data"
        raise ConfigError(f"recordings need the soundfile package ({error}): {fix}") from None

    class Stream(soundfile.SoundFile):
        def seekable(self) -> bool:
            """False: soundfile seeks after each block of a seekable file, which fails for an unknown length."""
            return False

    return soundfile, Stream


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Opens a recording to be read by blocks. Raises Unusable if it is none, or breaks off."""
    soundfile, stream = _library()
    if not begins_recording(data):
        raise Unusable("no WAV, FLAC, OGG or MP3 recording")
    try:
        with stream(io.BytesIO(_mended(data))) as file:
            if file.format not in FORMATS:
                raise Unusable(f"a recording of format {file.format}; WAV, FLAC, OGG and MP3 can be read")
            yield file
    except soundfile.LibsndfileError as error:  # whose whole message names an address in memory
        raise Unusable(f"no WAV, FLAC, OGG or MP3 recording ({error.error_string.rstrip('.')})") from None


def _blocks(file: Any, most: int) -> Iterator[np.ndarray]:
    """At most `most` of the following samples, in -1 to 1, averaged over channels."""
    block = max(1, _BLOCK // file.channels)
    while most > 0:
        samples = file.read(min(block, most), dtype="float64", always_2d=True).mean(1)
        if not len(samples):
            return
        most -= len(samples)
        yield samples


def _mended(data: bytes) -> bytes:
    """Writes the length of a WAV's data into its header, if a pipe left it open. Raises Unusable if it is cut off."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return data
    at = 12
    for _ in range(_MOST_CHUNKS):
        size, begin = int.from_bytes(data[at + 4 : at + 8], "little"), at + 8
        if data[at : at + 4] != b"data" or begin > len(data):
            at = begin + size + size % 2
            continue
        left = len(data) - begin
        if (size > left and size >= _PIPED) or (size == 0 and left and not _is_chunk(data[begin:])):
            lengths = (length.to_bytes(4, "little") for length in (len(data) - 8, left))
            return data[:4] + next(lengths) + data[8 : begin - 4] + next(lengths) + data[begin:]
        if size > left:
            raise Unusable("the recording is truncated")
        break
    return data


def _is_chunk(data: bytes) -> bool:
    """Whether `data` begins with a chunk of a WAV, and is at least as long as its header says."""
    name, size = data[:4], int.from_bytes(data[4:8], "little")
    return len(data) >= 8 and name.isascii() and name.decode().isprintable() and 8 + size <= len(data)


def resample(samples_N: np.ndarray, length: int) -> np.ndarray:
    """Resamples `samples_N` to `length` samples of the same duration: cuts its spectrum, or continues it with zeros.

    The result is float64 [length]; `samples_N` itself, which has at least one sample, if it has this length already.
    """
    count = len(samples_N)
    if count == length:
        return samples_N
    spectrum = np.fft.rfft(samples_N)
    resized = np.zeros(length // 2 + 1, complex)
    most = min(len(spectrum), len(resized))
    resized[:most] = spectrum[:most]
    return np.fft.irfft(resized, length) * (length / count)
