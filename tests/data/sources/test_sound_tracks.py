"""Sound tracks of videos: their samples are those that were written, and they stand behind their videos."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_files import write_sound_film, write_video

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.log_mel import LogMel
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import open_sources
from mmjax.data.sources.media import Media
from mmjax.data.sources.recordings import Recordings, resample
from mmjax.data.sources.sound_tracks import read_track, track_of
from mmjax.data.sources.storage import Unusable
from mmjax.data.tasks.task import TaskContext
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec

pytest.importorskip("av")

RATE = 16_000
LOG_MEL = LogMel(sample_rate=8000, window=256, hop=80, mels=8)
VISION = EncoderSpec(patch=16, channels=3, frames=2)
AUDIO = EncoderSpec(patch=4, channels=8, axes=1, log_mel=LOG_MEL)
CONFIG = SourceConfig(video="timestamps", video_pixels=(1024, 4096), max_seconds=3.0, resample="bilinear")
FRAMES = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3), np.uint8)


def tone(hertz: float, seconds: float = 1.0, channels: int = 2) -> np.ndarray:
    """Samples [C, N] of a tone, each channel louder than the one before."""
    wave_N = np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)
    return 0.3 * np.arange(1, channels + 1)[:, None] * wave_N


def film(path: Path, samples_CN: np.ndarray, codec: str = "pcm_s16le") -> Media:
    write_sound_film(path, FRAMES, 4.0, samples_CN, samples_a_second=RATE, codec=codec)
    return Media(name=path.name, path=str(path), is_track=True)


@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_those_that_were_written(channels: int, tmp_path: Path) -> None:
    written = tone(440.0, 1.3, channels)
    medium = film(tmp_path / "a.mkv", written)
    assert track_of(medium, CONFIG) == (len(written[0]), RATE)
    np.testing.assert_allclose(read_track(medium, CONFIG)[1], written.mean(axis=0), atol=2**-14)
    medium = replace(medium, data=(tmp_path / "a.mkv").read_bytes(), path="")
    np.testing.assert_allclose(read_track(medium, CONFIG)[1], written.mean(axis=0), atol=2**-14)


def test_a_track_is_cut_and_becomes_frames(tmp_path: Path) -> None:
    """Frames are those of the same samples in a recording; a longer track ends after ``max_seconds``."""
    written = tone(700.0, 4.0, 1)
    medium, recordings = film(tmp_path / "a.mkv", written), Recordings(CONFIG, AUDIO)
    frames = recordings.track(medium)
    assert recordings.track_frames(medium) == len(frames) == 300
    samples_N = np.round(written[0, : 3 * RATE] * 2**15) / 2**15
    np.testing.assert_allclose(frames, LOG_MEL(resample(samples_N, 3 * 8000), 4), atol=2e-3)


def test_a_compressed_track_sounds_the_same(tmp_path: Path) -> None:
    written = tone(440.0, 1.3, 2)
    medium = film(tmp_path / "a.mp4", written, "aac")
    samples_N = read_track(medium, CONFIG)[1]
    assert abs(len(samples_N) - len(written[0])) <= 2048
    spectrum = np.abs(np.fft.rfft(samples_N[:RATE]))
    assert abs(int(spectrum.argmax()) - 440) <= 1 and samples_N.std() == pytest.approx(0.45 * 0.5**0.5, rel=0.1)


def source(folder: Path, rows: list[Any], config: SourceConfig = CONFIG, *, hears: bool = True) -> Any:
    (folder / "data.json").write_text(json.dumps(rows))
    encoders = {"vision": VISION} | ({"audio": AUDIO} if hears else {})
    config = replace(config, path=str(folder / "data.json"))
    context = TaskContext(
        data=DataConfig(sources={"own": 1.0}, sequence_length=2000, cache=str(folder / "cache")),
        encoders=encoders, tokenizer=ByteTokenizer(tuple(encoders)), seed=0, split="test", sources={"own": config},
        skipped=str(folder / "skipped.jsonl"),
    )  # fmt: skip
    return open_sources(context)


def faults(folder: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())}


def video(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": name, **more}


def talk(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


def test_a_heard_video_is_followed_by_its_track(tmp_path: Path) -> None:
    """Of three videos and a recording the first and the last video are heard, each behind itself."""
    for name, hertz in (("a", 300.0), ("b", 500.0), ("c", 900.0)):
        film(tmp_path / f"{name}.mkv", tone(hertz))
    recordings = Recordings(CONFIG, AUDIO)
    import soundfile

    soundfile.write(tmp_path / "d.wav", tone(1500.0, 0.5)[0], RATE)
    heard = {"use_audio_in_video": True}
    parts = (video("a.mkv", **heard), video("b.mkv", use_audio_in_video=False), {"type": "audio", "audio": "d.wav"})
    mixture = source(tmp_path, [talk("x", *parts, "and", video("c.mkv", load_audio_from_video=True), "?")])
    sample = mixture.sample(0)
    tracks = [Media(name=name, path=str(tmp_path / name), is_track=True) for name in ("a.mkv", "c.mkv")]
    expected = [recordings.track(tracks[0]), recordings((tmp_path / "d.wav").read_bytes()), recordings.track(tracks[1])]
    for made, wanted in zip(sample.media["audio"], expected, strict=True):
        np.testing.assert_array_equal(made, wanted)
    assert len(sample.media["vision"]) == 3 * 2
    # Runs of media in the text: patches of a video have their times between them.
    kinds = np.select([sample.placeholders("vision"), sample.placeholders("audio")], [1, 2])
    runs = [int(kind) for kind, before in zip(kinds[1:], kinds, strict=False) if kind and kind != before]
    assert runs == [1, 1, 2, 1, 1, 2, 1, 1, 2]
    assert mixture.meta(0).tokens == len(sample.tokens)


def test_a_source_may_hear_every_video(tmp_path: Path) -> None:
    film(tmp_path / "a.mkv", tone(300.0))
    write_video(tmp_path / "silent.mp4", FRAMES, 4.0)
    (tmp_path / "frames").mkdir()
    rows = [{"id": name, "video": name, "question": "what?", "answer": "x"} for name in ("a.mkv", "silent.mp4")]
    assert len(source(tmp_path, rows)) == 2 and "audio" not in source(tmp_path, rows).sample(0).media
    mixture = source(tmp_path, rows, replace(CONFIG, video_sound=True))
    assert len(mixture) == 1 and len(mixture.sample(0).media["audio"]) == 1
    assert faults(tmp_path).keys() == {"silent.mp4"} and "has no sound track" in faults(tmp_path)["silent.mp4"]


def test_refused_in_one_line(tmp_path: Path) -> None:
    film(tmp_path / "a.mkv", tone(300.0))
    with pytest.raises(ConfigError, match=r"own/Source.video_sound=True: no encoder of the model takes recordings"):
        source(tmp_path, [talk(video("a.mkv"), "?")], replace(CONFIG, video_sound=True), hears=False)
    with pytest.raises(ConfigError, match="it has a sound, and no encoder of the model takes one"):
        source(tmp_path, [talk(video("a.mkv", use_audio_in_video=True), "?")], hears=False)
    with pytest.raises(ConfigError, match="use_audio_in_video=yes: it must be true or false"):
        source(tmp_path, [talk(video("a.mkv", use_audio_in_video="yes"), "?")])
    with pytest.raises(Unusable, match="a folder of frames has no sound track"):
        track_of(Media(name="x", path=str(tmp_path)), CONFIG)


def test_a_track_that_breaks_later_becomes_blank_and_is_named(tmp_path: Path) -> None:
    path = Path(film(tmp_path / "a.mkv", tone(300.0, 2.0)).path)
    mixture = source(tmp_path, [talk(video("a.mkv", use_audio_in_video=True), "?")])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    sample = mixture.sample(0, ["audio"])
    assert sample.broken[4].endswith("a.mkv") and not sample.loss_weights.any()
    assert [array.shape for array in sample.media["audio"]] == [(200, 8)] and not sample.media["audio"][0].any()
