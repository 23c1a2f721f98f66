"""Recordings to be made out of a user's data: their forms, their frames, and what is no such record."""

from __future__ import annotations

import io
import json
import tarfile
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.patches import patch_inputs
from mmjax.data.types import Sample
from mmjax.recipe import Recipe
from mmjax.recipe.targets import require_targets

pytest.importorskip("soundfile")
RATE = 4000
BINDINGS = (
    *("Model.encoders={}", "Model.generators={'talker': 'sound-dit'}", "Data.sources={'mine': 1.0}"),
    *("mine/Source.template='chatml'", "Data.workers=0", "talker/SoundDiT.mels=6", "talker/SoundDiT.patch=3"),
    *("talker/SoundDiT.sample_rate=4000", "talker/SoundDiT.window=128", "talker/SoundDiT.hop=40"),
    *("Train.global_batch=2", "Train.microbatches=1", "llm/Decoder.layers=1", "mine/Source.strict=True"),
)
VOICE = tuple(line.replace("talker/", "voice/") for line in BINDINGS if line.startswith("talker/"))
AUDIO = {"type": "audio", "audio": "a.wav", "generate": True}


def samples_of(number: int) -> np.ndarray:
    """A tone of 0.1 seconds and some more."""
    return 0.5 * np.sin(2 * np.pi * (400 + 100 * number) * np.arange(400 + 40 * number) / RATE)


def wav(number: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(RATE)
        recording.writeframes(np.round(samples_of(number) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def dialogue(*parts: Any, role: str = "assistant") -> dict[str, Any]:
    answers = [{"role": "assistant", "content": "ok"}] if role != "assistant" else []
    return {"messages": [{"role": "user", "content": "say a"}, {"role": role, "content": [*parts]}, *answers]}


def recipe(folder: Path, records: list[dict[str, Any]], *changes: str) -> Recipe:
    """The configuration for records beside a.wav and b.wav."""
    for number, name in enumerate("ab"):
        (folder / f"{name}.wav").write_bytes(wav(number))
    (folder / "data.json").write_text(json.dumps(records))
    return configured(folder, "llava", folder / "data.json", *changes)


def configured(folder: Path, kind: str, path: Path, *changes: str) -> Recipe:
    paths = (f"mine/Source.kind={kind!r}", f"mine/Source.path={str(path)!r}", f"Data.cache={str(folder / 'cache')!r}")
    kept = [line for line in BINDINGS if not (line.startswith("talker/") and set(VOICE) <= set(changes))]
    return load_config([], [*kept, *paths, *changes])


def first(of: Recipe) -> Sample:
    return open_source(of, split="train").sample(0)


FORMS = {
    "a part of a message": dialogue(AUDIO),
    "a target": {"question": "say a", "targets": ["a.wav"]},
    "a target and words": {"question": "say a", "answer": "a <drawing>", "target": "a.wav"},
    "a caption": {"caption": "say a", "audio": "a.wav"},
    "its generator": {"question": "say a", "targets": "a.wav", "generator": "talker"},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_json(form: str, tmp_path: Path) -> None:
    of = recipe(tmp_path, [FORMS[form]], "mine/Source.draw=True")
    sample, spec = first(of), encoder_specs(of)["talker"]
    assert spec.log_mel is not None
    (frames_FM,) = sample.media["talker"]
    np.testing.assert_allclose(frames_FM, spec.log_mel(samples_of(0)), atol=2e-2)
    assert frames_FM.shape == (10, 6) and sample.placeholders("talker").sum() == 4
    assert sample.noise["talker"][0].shape == (10, 6) and 0 <= sample.times["talker"][0] <= 1


def test_a_folder_and_a_tar(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    tar = tarfile.open(tmp_path / "a.tar", "w")  # noqa: SIM115
    for number, name in enumerate("ab"):
        for suffix, data in (("wav", wav(number)), ("txt", f"say {name}".encode())):
            (folder / f"{name}.{suffix}").write_bytes(data)
            member = tarfile.TarInfo(f"{name}.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    tar.close()
    changes = ("mine/Source.draw=True", "mine/Source.held_out=0")
    for kind, path in (("pictures", folder), ("webdataset", tmp_path / "a.tar")):
        source = open_source(configured(tmp_path, kind, path, *changes), split="train")
        media = [source.sample(number).media["talker"][0] for number in range(2)]
        assert sorted(map(len, media)) == [10, 11], kind


def test_frames_behind_the_end_have_no_weight(tmp_path: Path) -> None:
    of = recipe(tmp_path, [FORMS["a target"], {"question": "say b", "targets": ["b.wav"]}])
    sample, spec = first(of), encoder_specs(of)["talker"]
    inputs, frames = patch_inputs(sample, "talker", 0, spec), len(sample.media["talker"][0])
    assert inputs["weights"].shape == (4, 3)
    assert inputs["weights"].ravel().tolist() == [1.0] * frames + [0.0] * (12 - frames)
    for name in ("patches", "targets"):
        assert not inputs[name].reshape(12, 6)[frames:].any() and inputs[name].reshape(12, 6)[:frames].all()
    source, encoders = open_source(of, split="train"), {"talker": replace(spec, buckets=((2, 8),))}
    packer = Packer(encoders=encoders, sequence_length=96, microbatches=1, cells=1, pad=0)
    plan = packer.plan(0, [source.meta(number) for number in range(2)])
    assert plan.denominators["talker"] == 6 * 21.0  # numbers of 10 and of 11 frames


WRONG = {
    "a picture": (
        {"question": "say a", "targets": ["a.png"]},
        "it has a picture to be made, and no generator of the model makes one ('talker' of other media): set "
        "Model.generators to {'painter': 'dit'}",
    ),
    "missing": ({"question": "say a", "targets": ["c.wav"]}, "c.wav"),
    "both": (
        {"question": "say a", "targets": ["a.wav", "b.png"]},
        "it has a picture to be made, and no generator of the model makes one ('talker' of other media)",
    ),
    "a question": (dialogue(AUDIO, role="user"), "media are made in the assistant's turns: move the recording there"),
    "a video": (dialogue({"type": "video", "video": "a.mp4", "generate": True}), "a video is to be made (generate)"),
    "another generator": (
        {"question": "say a", "targets": ["a.wav"], "generator": "painter"},
        "generator='painter' makes no recordings in the model; name 'talker'",
    ),
    "no caption's medium": ({"caption": "say a"}, "a caption without the picture or recording that is to be made"),
}


def test_a_record_has_a_picture_and_a_recording(tmp_path: Path) -> None:
    """Each kind of generator makes its own, in the order of the text, by parts or by marks."""
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "p.png")
    picture = {"type": "image", "image": "p.png", "generate": True}
    records = [
        dialogue(AUDIO, {"type": "text", "text": " then "}, picture),
        {"question": "say a", "answer": "<drawing> <drawing>", "targets": ["p.png", "a.wav"]},
    ]
    painter = ("Model.generators={'talker': 'sound-dit', 'painter': 'dit'}", "painter/DiT.channels=3")
    sized = ("mine/Source.drawn_size=(8, 8)", "mine/Source.held_out=0")
    of = recipe(tmp_path, records, *painter, *sized)
    source, specs = open_source(of, split="train"), encoder_specs(of)
    for number, order in enumerate((("talker", "painter"), ("painter", "talker"))):
        sample = source.sample(number)
        assert sample.media["talker"][0].shape == (10, 6) and sample.media["painter"][0].shape == (8, 8, 3)
        places = [np.flatnonzero(sample.placeholders(name)) for name in order]
        assert places[0].max() < places[1].min(), "in the order of the text"
        assert [len(of_one) for of_one in places] == [
            specs[name].tokens(*sample.media[name][0].shape[:-1]) for name in order
        ]
        assert dict(source.meta(number).grids) == {"talker": ((4,),), "painter": ((4, 4),)}


@pytest.mark.parametrize("form", WRONG)
def test_wrong_records(form: str, tmp_path: Path) -> None:
    record, line = WRONG[form]
    with pytest.raises(ConfigError) as caught:
        open_source(recipe(tmp_path, [record], "mine/Source.draw=True"), split="train")
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_no_recording_at_all(tmp_path: Path) -> None:
    of = recipe(tmp_path, [{"question": "say a", "answer": "a"}])
    with pytest.raises(ConfigError) as caught:
        require_targets(of, media=())
    assert "the data have no recording for 'talker' to make" in str(caught.value)


def test_two_generators_take_what_they_make(tmp_path: Path) -> None:
    records = [{"question": "say", "targets": ["a.wav"]}, {"question": "draw", "targets": ["a.png"]}]
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    of = recipe(tmp_path, records, "Model.generators={'brush': 'dit', 'voice': 'sound-dit'}", *VOICE)
    source = open_source(of, split="train")
    assert sorted(next(iter(source.sample(number).media)) for number in range(2)) == ["brush", "voice"]
