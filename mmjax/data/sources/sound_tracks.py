"""Sound tracks of videos, as recordings of an encoder of sound: their places in a dialogue, and their samples.

A track is a recording like any other, right behind its video. Its length follows from the file's header, or where that
has none from its packets, and samples are decoded up to `Source.max_seconds` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.media import Media
from mmjax.data.sources.places import IMAGE, RECORDING, VIDEO
from mmjax.data.sources.record import Record
from mmjax.data.sources.storage import Unusable
from mmjax.data.sources.video_files import opened_container

_MARKS = re.compile("|".join(map(re.escape, (IMAGE, VIDEO, RECORDING))))
_MISSING = 0.5
"""Seconds by which a track may be shorter than its header says: codecs begin and end with samples that nobody hears."""


class Track(NamedTuple):
    """A sound track as its file describes it.

    Attributes:
      samples: the number of its samples that are read.
      rate: samples a second.
    """

    samples: int
    rate: int


def with_sound_tracks(record: Record, *, every: bool) -> Record:
    """The record with the sound track of each heard video among its recordings, and its mark behind the video's.

    A video is heard if its part of a message says so, or with ``every``. Tracks of videos without a mark come first.
    """
    if not any(_is_heard(medium, every=every) for medium in record.images):
        return record
    turns, texts = record.dialogue, list[str]()
    marks = [mark for turn in turns for mark in _MARKS.findall(turn.text)]
    unmarked = len(record.images) - len(marks) + marks.count(RECORDING)
    recordings = [_track_of(medium) for medium in record.images[:unmarked] if _is_heard(medium, every=every)]
    before = len(record.recordings) - marks.count(RECORDING)
    recordings += record.recordings[:before]
    seen, others = iter(record.images[unmarked:]), iter(record.recordings[before:])

    def marked(match: re.Match[str]) -> str:
        if match[0] == RECORDING:
            recordings.append(next(others))
            return RECORDING
        medium = next(seen)
        if not _is_heard(medium, every=every):
            return match[0]
        recordings.append(_track_of(medium))
        return match[0] + RECORDING

    for turn in turns:
        texts.append(_MARKS.sub(marked, turn.text))
    written = tuple(replace(turn, text=text) for turn, text in zip(turns, texts, strict=True))
    return replace(record, turns=written, recordings=tuple(recordings))


def _is_heard(medium: Media, *, every: bool) -> bool:
    return medium.is_video and (medium.is_heard or every)


def _track_of(video: Media) -> Media:
    return replace(video, is_video=False, is_heard=False, is_track=True)


def track_of(media: Media, config: SourceConfig) -> Track:
    """The sound track of a video, from its header; of no more than `Source.max_seconds`.

    Raises Unusable if the video has none, or its length is unknown.
    """
    with opened_container(media, config) as container:
        return _described(container, config)


def read_track(media: Media, config: SourceConfig) -> tuple[Track, np.ndarray]:
    """A video's sound track, and its samples in -1 to 1, averaged over channels: float64 [`Track.samples`].

    Raises Unusable as `track_of`, and if the track is damaged.
    """
    with opened_container(media, config) as container:
        track = _described(container, config)
        blocks, left = list[np.ndarray](), track.samples
        for block in _blocks(container):
            blocks.append(block[:left])
            left -= len(blocks[-1])
            if left <= 0:
                break
    if left > _MISSING * track.rate:
        seconds = (track.samples - left) / track.rate
        raise Unusable(f"the sound track breaks off after {seconds:.1f} of {track.samples / track.rate:.1f} seconds")
    samples_N = np.concatenate([*blocks, np.zeros(max(0, left))])
    if not np.isfinite(samples_N).all():
        raise Unusable("the sound track has samples that are not finite")
    return track, samples_N


def _described(container: Any, config: SourceConfig) -> Track:
    if not container.streams.audio:
        raise Unusable("the video has no sound track; leave use_audio_in_video out, or set Source.video_sound to False")
    stream = container.streams.audio[0]
    rate, ticks = int(stream.rate or 0), int(stream.duration or 0)
    if not ticks:  # as in Matroska
        for packet in container.demux(stream):
            ticks = max(ticks, (packet.pts or 0) + (packet.duration or 0) if packet.size else 0)
        container.seek(0)
    seconds = float(ticks * stream.time_base) if stream.time_base else 0.0
    samples = min(round(seconds * rate), max(1, int(rate * config.max_seconds)))
    if rate < 1 or samples < 1:
        raise Unusable(f"a sound track of {seconds:g} seconds at {rate} samples a second")
    return Track(samples, rate)


def _blocks(container: Any) -> Iterator[np.ndarray]:
    """The decoded samples of a track, block by block, averaged over channels."""
    from av import AudioResampler

    stream = container.streams.audio[0]
    stream.codec_context.thread_count = 1  # data workers are processes
    planar = AudioResampler(format="dblp")
    for frame in container.decode(stream):
        for converted in planar.resample(frame):
            yield converted.to_ndarray().mean(axis=0)
