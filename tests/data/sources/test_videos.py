"""Videos: frames, pixels and tokens are those of transformers (``oracles/make_video.py``); odd files are named."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.drawn_videos import VIDEOS, drawn_video, named_video
from PIL import Image
from video_files import decoded, write_video

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.mrope import sample_positions
from mmjax.data.processor.image_rules import image_settings
from mmjax.data.processor.video_rules import video_settings
from mmjax.data.sample import prompt_only
from mmjax.data.sources.clips import Clip, seconds_of, taken_frames
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import open_sources
from mmjax.data.sources.frame_resizing import resize_frame
from mmjax.data.sources.media import Media
from mmjax.data.sources.record import Unusable
from mmjax.data.sources.videos import Videos
from mmjax.data.tasks.task import TaskContext
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.types import EncoderSpec, Sample

pytest.importorskip("av")

ORACLES = Path(__file__).parents[2] / "oracles" / "video"
FOLDER, STRIDE = ORACLES / "folder", 5
SPEC = EncoderSpec(patch=16, merge=2, channels=3, frames=2)


def rules(**more: Any) -> SourceConfig:
    """The settings of the folder."""
    image = image_settings(str(FOLDER))
    return SourceConfig(**{**image, **video_settings(str(FOLDER), image), **more})


def settings_of(name: str) -> dict[str, Any]:
    """Our names of what a video's processor has beside the folder's rules."""
    more, found = VIDEOS[name][4], {}
    if more.get("fps"):
        found["fps"] = float(more["fps"])
    if more.get("num_frames"):
        found["frames"] = more["num_frames"]
    if more.get("cap_pixels_per_frame"):
        found["frame_pixels"] = more["max_video_tokens"] * SPEC.block**2
    return found


@cache
def values(name: str = "values") -> dict[str, Any]:
    with np.load(ORACLES / f"{name}.npz") as file:
        return dict(file)


def rules_of_qwen2(folder: Path, **more: Any) -> SourceConfig:
    """The settings of a folder of Qwen2.5-VL, whose only rules are those for images."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 4}}')
    size = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 12}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **size})
    )
    image = image_settings(str(folder))
    return SourceConfig(**{**image, **video_settings(str(folder), image), **more})


def folder_of(path: Path, frames: Any) -> Media:
    path.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(path / f"{number:04d}.png")
    return Media(name="video", path=str(path), is_video=True)


def file_of(path: Path) -> Media:
    return Media(name="video", path=str(path), is_video=True)


@pytest.mark.parametrize("name", VIDEOS)
def test_pixels_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    """Bit for bit before they are normalised; from a folder of frames and from a lossless file."""
    config = rules(folder_fps=VIDEOS[name][3], **settings_of(name))
    maker, wanted = Videos("own", config, SPEC), values()
    for media in (
        folder_of(tmp_path / "frames", named_video(name)),
        file_of(write_video(tmp_path / "a.mkv", named_video(name), VIDEOS[name][3], lossless=True)),
    ):
        measure = maker.measure(media)
        assert measure.clip and taken_frames(measure.clip, config) == wanted[f"{name}/frames"].tolist()
        made = maker.media(media, measure)
        assert [medium.shape[:2] for medium in made] == measure.media
        assert np.stack(made).shape == tuple(wanted[f"{name}/shape"])
        assert np.abs(np.stack(made)[:, ::STRIDE, ::STRIDE] - wanted[f"{name}/pixels"]).max() < 1e-6


@pytest.mark.parametrize("name", VIDEOS)
def test_pixels_and_times_are_those_of_qwen2_vl(name: str, tmp_path: Path) -> None:
    """Frames by another rule, each of them between two numbers of pixels; times are positions."""
    more = {key: value for key, value in settings_of(name).items() if key != "frame_pixels"}
    config = rules_of_qwen2(tmp_path, folder_fps=VIDEOS[name][3], **more)
    assert (config.video, config.time_positions, config.video_pixels) == ("positions", 4.0, (1568, 9408))
    maker, wanted = Videos("own", config, replace(SPEC, patch=14)), values("positions")
    media = folder_of(tmp_path / "frames", named_video(name))
    measure = maker.measure(media)
    assert measure.clip and taken_frames(measure.clip, config) == wanted[f"{name}/frames"].tolist()
    made = maker.media(media, measure)
    assert np.stack(made).shape == tuple(wanted[f"{name}/shape"])
    assert np.abs(np.stack(made)[:, ::STRIDE, ::STRIDE] - wanted[f"{name}/pixels"]).max() < 1e-6
    assert maker.numbers(measure.clip) == tuple(wanted[f"{name}/numbers"]) and maker.seconds(measure.clip) == ()


def test_frames_are_there_where_transformers_names_one_too_many() -> None:
    """Of 14 of 17 frames its arithmetic names a fifteenth, behind the last."""
    taken = taken_frames(Clip(17, 1.0), SourceConfig(video="positions", frames=14))
    assert taken == [number * 17 // 14 for number in range(14)] and taken[-1] == 15
    assert len(taken_frames(Clip(3, 1.0), SourceConfig(video="positions"))) == 2


@pytest.mark.parametrize("ending", ["mp4", "avi", "mkv"])
def test_a_compressed_file_has_the_pixels_of_its_decoded_frames(ending: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"a.{ending}", named_video("odd")[:, :64, :64], 4.0)
    config = rules(folder_fps=4.0)
    maker = Videos("own", config, SPEC)
    made = [
        maker.media(media, maker.measure(media)) for media in (file_of(path), folder_of(tmp_path / "f", decoded(path)))
    ]
    assert len(made[0]) == 2
    np.testing.assert_array_equal(np.stack(made[0]), np.stack(made[1]))


def test_bilinear_frames_keep_a_plane_flat_and_a_ramp_straight() -> None:
    ramp = np.repeat(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(8, axis=0)
    small = resize_frame(ramp, (4, 30), "bilinear")
    assert small.shape == (4, 30, 3) and np.ptp(small, axis=0).max() == 0
    assert set(np.diff(small[0, 1:-1, 0].astype(int)).tolist()) == {8}
    assert (resize_frame(np.full((9, 7, 3), 77, np.uint8), (20, 3), "bicubic") == 77).all()


def test_times_are_means_of_a_temporal_patch() -> None:
    config = rules(frames=5)
    assert taken_frames(Clip(9, 4.0), config) == [0, 2, 4, 6, 8]
    assert seconds_of(Clip(9, 4.0), config, 2) == (0.25, 1.25, 2.0)


# ---- records ---------------------------------------------------------------------------------------------------------


def source(folder: Path, rows: list[Any], config: SourceConfig, *, length: int = 512, spec: EncoderSpec = SPEC) -> Any:
    """A dataset of these records, with the tokenizer and template of the oracle's folder."""
    (folder / "data.json").write_text(json.dumps(rows))
    data = DataConfig(sources={"own": 1.0}, sequence_length=length, cache=str(folder / "cache"), tokenizer=str(FOLDER))
    tokenizer = make_tokenizer(str(FOLDER), ("vision",), "vision")
    config = replace(config, path=str(folder / "data.json"))
    context = TaskContext(
        data=data, encoders={"vision": spec}, tokenizer=tokenizer, seed=0, split="test", sources={"own": config},
        skipped=str(folder / "skipped.jsonl"),
    )  # fmt: skip
    return open_sources(context)


def messages_of(folder: Path, turns: list[list[str]]) -> list[dict[str, Any]]:
    """Messages of a dialogue, whose media are written into the folder."""
    messages = []
    for number, turn in enumerate(turns):
        parts: list[dict[str, str]] = []
        for part in turn:
            if part in VIDEOS:
                write_video(folder / f"{part}.mkv", named_video(part), VIDEOS[part][3], lossless=True)
                parts.append({"type": "video", "video": f"{part}.mkv"})
            elif part == "image":
                Image.fromarray(drawn_video(90, 1, 64, 96)[0]).save(folder / "image.png")
                parts.append({"type": "image", "image": "image.png"})
            else:
                parts.append({"type": "text", "text": part})
        messages.append({"role": "assistant" if number % 2 else "user", "content": parts})
    return messages


@pytest.mark.parametrize("name", ["one", "several"])
def test_tokens_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    """Times between temporal patches; videos and an image in one question; media in the order of the text."""
    wanted = json.loads((ORACLES / "dialogues.json").read_text("utf-8"))[name]
    mixture = source(tmp_path, [{"messages": messages_of(tmp_path, wanted["turns"])}], rules(template="folder"))
    (sample,) = [mixture.sample(0)]
    assert sample.tokens.tolist() == wanted["ids"] and not sample.broken
    assert sample.tokens[: sample.prompt].tolist() == wanted["prompt"]
    names = [part for turn in wanted["turns"] for part in turn if part in (*VIDEOS, "image")]
    frames = [len(values()[f"{name}/frames"]) if name in VIDEOS else 0 for name in names]
    channels = [c for count in frames for c in ([6] * -(-count // 2) if count else [3])]
    assert [medium.shape[-1] for medium in sample.media["vision"]] == channels
    assert len({*sample.media_tokens.values(), *sample.video_tokens.values()}) == 2
    counts = [height * width // 1024 for height, width, _ in (medium.shape for medium in sample.media["vision"])]
    assert sample.placeholders("vision").sum() == sum(counts)
    assert len(mixture.meta(0).grids["vision"]) == len(channels)
    assert not any(w for w, seen in zip(sample.loss_weights, sample.placeholders("vision"), strict=True) if seen)


def test_a_video_whose_times_are_positions_stands_in_one_piece(tmp_path: Path) -> None:
    """Without a folder's template too; a blank in place of a broken one, and a prompt, have its times."""
    asked = ["see ", "odd", " and ", "image", " or ", "long", "what?"]
    messages = messages_of(tmp_path, [asked, ["x"], ["again?"], ["y"]])
    config = replace(rules_of_qwen2(tmp_path / "rules", time_positions=2.0), max_pixels=0)
    mixture = source(tmp_path, [{"messages": messages}], config, spec=replace(SPEC, patch=14))
    sample = mixture.sample(0)
    assert sample.video_times == {"vision": ((0, 2), (), (0, 2, 4, 6, 8))}
    assert [medium.shape[-1] for medium in sample.media["vision"]] == [6, 6, 3, 6, 6, 6, 6, 6]
    runs = np.flatnonzero(np.diff(sample.placeholders("vision").astype(int))).reshape(-1, 2)
    counts = [height * width // 28**2 for height, width, _ in (medium.shape for medium in sample.media["vision"])]
    assert (runs[:, 1] - runs[:, 0]).tolist() == [sum(counts[:2]), counts[2], sum(counts[3:])]
    positions = sample_positions(sample, mixture.meta(0).grids, {"vision": replace(SPEC, patch=14)})
    first, last = runs[2]
    assert sorted(set(positions[first + 1 : last + 1, 0] - positions[first + 1, 0])) == [0, 2, 4, 6, 8]
    assert positions[last + 1, 0] + 1 == positions[last + 2, 0]
    assert prompt_only(sample).video_times == sample.video_times
    (tmp_path / "odd.mkv").write_bytes(b"gone")
    broken = mixture.sample(0)
    assert broken.broken and broken.video_times == sample.video_times
    sample_positions(broken, mixture.meta(0).grids, {"vision": replace(SPEC, patch=14)})


def test_a_prompt_has_the_times_of_its_own_videos() -> None:
    ids: Any = {
        "question": "",
        "answer": "",
        "media_tokens": {"vision": 9},
        "video_times": {"vision": ((0, 1), (), (0,))},
    }
    media = {"vision": tuple(np.zeros((28, 28, 3), np.float32) for _ in range(4))}
    tokens = np.array([9, 9, 1, 9, 2, 9], np.int32)
    of = Sample(tokens=tokens, loss_weights=np.ones(6), media=media, prompt=5, prompt_media={"vision": 3}, **ids)
    assert prompt_only(of).video_times == {"vision": ((0, 1), ())}


def test_positions_of_times_need_an_axis_for_them() -> None:
    with pytest.raises(ConfigError, match=r"own/Source.video='positions': the LLM's positions have no axis of time"):
        SourceConfig(video="positions").check_axes("own", "")
    SourceConfig(video="positions").check_axes("own", "rope_sections")
    SourceConfig(video="timestamps").check_axes("own", "")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"cap_pixels_per_frame": True}, "has cap_pixels_per_frame=True: it bounds all frames together"),
        ({"size": "large"}, "has values that no processor writes"),
        ({"do_resize": False}, "has do_resize=False"),
    ],
)
def test_rules_of_qwen2_vl_that_are_not_there_are_refused(rules: Any, reason: str, tmp_path: Path) -> None:
    image = {"mean": rules_of_qwen2(tmp_path).mean, "std": rules_of_qwen2(tmp_path).std, "resample": "bicubic"}
    written = {"video_processor_type": "Qwen2VLVideoProcessor", **rules}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError) as refusal:
        video_settings(str(tmp_path), image)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_broken_video_is_named_and_the_others_stay(tmp_path: Path) -> None:
    frames = named_video("odd")
    whole = write_video(tmp_path / "good.mp4", frames[:, :64, :64], 4.0).read_bytes()
    (tmp_path / "torn.mp4").write_bytes(whole[:-900])
    (tmp_path / "text.mp4").write_bytes(b"no video" * 90)
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\ngood.mp4\n")
    write_video(tmp_path / "still.mp4", frames[:1, :64, :64], 4.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "frames").mkdir()
    Image.fromarray(frames[0]).save(tmp_path / "frames" / "0.png")
    cases = {
        "none.mp4": "does not exist: put it at",
        "torn.mp4": "no video that FFmpeg reads",
        "text.mp4": "no video that FFmpeg reads",
        "list.m3u8": "no video that FFmpeg reads",
        "still.mp4": "a video of 1 frame: the encoder's patches have 2; give it as an image",
        "empty": "a folder without frames",
        "frames": "set Source.folder_fps to their rate",
    }
    rows = [{"id": name, "video": name, "question": "what?", "answer": "x"} for name in ("good.mp4", *cases)]
    mixture = source(tmp_path, rows, rules())
    assert len(mixture) == 1 and len(mixture.sample(0).media["vision"]) == 2
    lines = {row["id"]: row for row in map(json.loads, (tmp_path / "skipped.jsonl").read_text().splitlines())}
    assert lines.keys() == cases.keys()
    for name, reason in cases.items():
        assert reason in lines[name]["reason"] and lines[name]["medium"].endswith(name), lines[name]


def test_a_video_that_breaks_later_becomes_blank_and_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", named_video("long"), 8.0)
    rows = [{"id": "a", "video": "a.mkv", "question": "what?", "answer": "x"}]
    mixture = source(tmp_path, rows, rules())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    sample = mixture.sample(0)
    assert "breaks off after" in sample.broken[2] or "damaged" in sample.broken[2], sample.broken
    assert not sample.loss_weights.any() and not any(medium.any() for medium in sample.media["vision"])
    assert [medium.shape[-1] for medium in sample.media["vision"]] == [6] * 5
    assert len(sample.tokens) == mixture.meta(0).tokens


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pixel_limit": 1000}, "64x64 pixels; Source.pixel_limit is 1000"),
        ({"frame_limit": 8}, "frames or more; Source.frame_limit is 8"),
        ({"frames": 12}, "a video of 9 frames; Source.frames is 12"),
        (
            {"video": ""},
            "it has a video, and Source.video='' takes none; set it to 'timestamps'",
        ),
    ],
)
@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_bombs_and_refused_videos_are_named(settings: Any, reason: str, ending: str, tmp_path: Path) -> None:
    """An mp4 has a count of frames in its header, an mkv's packets are counted."""
    write_video(tmp_path / f"a.{ending}", named_video("odd")[:, :64, :64], 4.0)
    rows = [{"video": f"a.{ending}", "question": "what?", "answer": "x"}]
    with pytest.raises(ConfigError) as refusal:
        source(tmp_path, rows, replace(rules(), **settings))
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_encoder_of_single_frames_takes_no_video(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", named_video("odd")[:, :64, :64], 4.0)
    rows = [{"video": "a.mp4", "question": "what?", "answer": "x"}]
    with pytest.raises(ConfigError, match=r"it has a video, and vision has patches of a single frame; name an encoder"):
        source(tmp_path, rows, rules(), spec=replace(SPEC, frames=1))


def test_a_header_that_lies_about_its_frames_is_noticed(tmp_path: Path) -> None:
    """The folder's second frame is larger than its first."""
    media = folder_of(tmp_path / "f", named_video("odd"))
    Image.fromarray(np.zeros((700, 900, 3), np.uint8)).save(tmp_path / "f" / "0003.png")
    maker = Videos("own", rules(folder_fps=4.0), SPEC)
    with pytest.raises(Unusable, match=r"0003.png has 900x700 pixels, not 90x70"):
        maker.media(media, maker.measure(media))


def test_memory_holds_one_frame_of_the_files_size(tmp_path: Path) -> None:
    """96 frames of 480x640 pixels: 88 MB in the file's size, less than a tenth of it in memory beside the media."""
    frames = [np.full((480, 640, 3), number, np.uint8) for number in range(96)]
    media = file_of(write_video(tmp_path / "a.mp4", frames, 8.0))
    maker = Videos("own", rules(frames=96, video_pixels=(1024, 96 * 32 * 32 * 4)), SPEC)
    measure = maker.measure(media)
    tracemalloc.start()
    made = maker.media(media, measure)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = sum(medium.nbytes for medium in made)
    assert len(made) == 48 and most - held < 12e6, (most, held)


def test_marks_and_keys_of_videos(tmp_path: Path) -> None:
    """A `<video>` mark is a video's place; without a mark a video comes first; without videos the mark is refused."""
    write_video(tmp_path / "a.mp4", named_video("odd")[:, :64, :64], 4.0)
    write_video(tmp_path / "b.mp4", 255 - named_video("odd")[:, :64, :64], 4.0)
    rows: list[Any] = [
        {"videos": ["a.mp4", "b.mp4"], "conversations": talk("first <video>\nthen <video>")},
        {"video": "a.mp4", "conversations": talk("what?")},
        {"id": "none", "conversations": talk("<video>\nwhat?")},
        {"id": "more", "video": "a.mp4", "conversations": talk("<video>\nis there a <video> mark?")},
    ]
    mixture = source(tmp_path, rows, rules(), length=400)
    first, second = (mixture.sample(number) for number in range(2))
    assert len(first.media["vision"]) == 4 and len(second.media["vision"]) == 2
    np.testing.assert_array_equal(first.media["vision"][0], second.media["vision"][0])
    assert np.abs(first.media["vision"][0] - first.media["vision"][2]).max() > 0.5
    faults = {
        row["id"]: row["reason"] for row in map(json.loads, (tmp_path / "skipped.jsonl").read_text().splitlines())
    }
    assert faults == {
        "none": "the dialogue has 1 <video> marks for 0 videos: name 1",
        "more": "the dialogue has 2 <video> marks for 1 videos: name 2",
    }


@pytest.mark.parametrize(
    ("key", "fix"),
    [("fps", "set Source.fps"), ("nframes", "set Source.frames")],
)
def test_keys_of_a_part_that_are_not_read_are_refused(key: str, fix: str, tmp_path: Path) -> None:
    part = {"type": "video", "video": "a.mp4", key: 1}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(ConfigError) as refusal:
        source(tmp_path, [{"messages": turns}], rules())
    assert f"a video has {key}=1, which is not read" in str(refusal.value) and fix in str(refusal.value)


def talk(question: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "x"}]


def test_settings_of_videos_are_checked() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"video": "whole"}, "Source.video='whole'"),
        ({"frames": 1}, "Source.frames=1"),
        ({"max_frames": 2}, "Source.max_frames=2"),
        ({"video_pixels": (9, 3)}, "Source.video_pixels=(9, 3)"),
        ({"video": "timestamps", "resample": "box"}, "Source.resample='box'"),
    ]
    for settings, named in cases:
        with pytest.raises(ConfigError) as refusal:
            SourceConfig(**settings)
        assert str(refusal.value).startswith(named) and "\n" not in str(refusal.value)


def test_bytes_in_place_of_a_file(tmp_path: Path) -> None:
    data = write_video(tmp_path / "a.mp4", named_video("odd")[:, :64, :64], 4.0).read_bytes()
    maker = Videos("own", rules(), SPEC)
    media = Media(name="video", data=data, is_video=True)
    assert len(maker.media(media, maker.measure(media))) == 2
