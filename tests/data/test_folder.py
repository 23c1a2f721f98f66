"""A folder of images: what is in the files is what the sample holds, and what is wrong is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_source
from mmjax.data.sources.mixture import Mixture
from mmjax.data.spec import DataSpec
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec

GRAY, COLOR = EncoderSpec(patch=4, merge=2), EncoderSpec(patch=4, merge=2, channels=3)
TOKENIZER = ByteTokenizer(("vision",))


def write(folder: Path, records: list[dict[str, object]], images: dict[str, np.ndarray]) -> Path:
    for name, pixels in images.items():
        Image.fromarray(pixels).save(folder / name)
    (folder / "data.jsonl").write_text("\n\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return folder


def source(folder: Path, spec: EncoderSpec = GRAY, *, max_pixels: int = 4096, split: str = "test") -> Mixture:
    config = DataConfig(task="folder", folder=str(folder), cache=str(folder / "cache"), max_pixels=max_pixels)
    return make_source(DataSpec(config), {"vision": spec}, seed=0, split=split)  # type: ignore[return-value]


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (10, 20, 3), np.uint8)


def test_pixels_and_text_arrive(tmp_path, pixels):
    records = [{"images": ["a.png", "b.png"], "question": "où?", "answer": "là"}, {"question": "none?", "answer": ""}]
    records_of = source(write(tmp_path, records, {"a.png": pixels, "b.png": pixels[:8, :8]}), COLOR)
    sample = records_of.sample(0)
    first, second = sample.media["vision"]
    assert first.shape == (16, 24, 3) and second.shape == (8, 8, 3) and first.dtype == np.float32
    assert np.allclose(first[:10, :20] * 255, pixels, atol=1e-4)
    assert not first[10:].any() and not first[:, 20:].any()
    assert np.allclose(second * 255, pixels[:8, :8], atol=1e-4)
    assert TOKENIZER.decode(sample.tokens[: sample.prompt]) == "1:2:où? "
    assert int(sample.placeholders("vision").sum()) == 6 + 1
    assert len(records_of) == 2 and records_of.sample(1).media == {} and records_of.meta(1).patches == {}


def test_gray_encoders_get_luminance(tmp_path, pixels):
    folder = source(write(tmp_path, [{"images": ["a.png"], "question": "q", "answer": "a"}], {"a.png": pixels}))
    luminance = pixels @ np.array([0.299, 0.587, 0.114])
    assert np.allclose(folder.sample(0).media["vision"][0][:10, :20, 0] * 255, luminance, atol=0.51)


def test_large_images_shrink_and_keep_their_aspect(tmp_path):
    pixels = np.full((64, 128, 3), 255, np.uint8)
    folder = source(
        write(tmp_path, [{"images": ["a.png"], "question": "q", "answer": "a"}], {"a.png": pixels}), max_pixels=2048
    )
    image = folder.sample(0).media["vision"][0]
    assert image.shape == (32, 64, 1) and np.allclose(image, 1.0, atol=1e-6)


def test_metadata_equals_samples_and_worst_case_bounds_them(tmp_path, pixels):
    records = [
        {"images": names, "question": "q" * n, "answer": "a"} for n, names in ((3, ["a.png"]), (1, ["a.png"] * 2))
    ]
    folder = source(write(tmp_path, records, {"a.png": pixels}))
    metas = [folder.meta(i) for i in range(2)]
    for i, meta in enumerate(metas):
        sample = folder.sample(i)
        assert meta.tokens == len(sample.tokens)
        assert meta.patches == {"vision": tuple(GRAY.patches(*x.shape[:2]) for x in sample.media["vision"])}
    bound = folder.worst_case()
    assert (bound.tokens, bound.media, bound.patches) == (max(m.tokens for m in metas), {"vision": 2}, {"vision": 24})
    limited = source(tmp_path, spec=EncoderSpec(patch=4, merge=2, longest=9)).worst_case()
    assert limited.sides == {"vision": max(folder.sample(0).media["vision"][0].shape[:2]) // 4}


def test_training_reshuffles_every_epoch(tmp_path):
    folder = source(write(tmp_path, [{"question": str(n), "answer": ""} for n in range(20)], {}), split="train")
    epochs = [[folder.sample(20 * epoch + i).question for i in range(20)] for epoch in (0, 1, 0)]
    assert sorted(epochs[0], key=int) == sorted(epochs[1], key=int) == [str(n) for n in range(20)]
    assert epochs[0] != epochs[1] and epochs[0] == epochs[2]
    assert [source(tmp_path).sample(i).question for i in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:2: not JSON \(.* column 2\)"),
        ("[]", r"data\.jsonl:2: must be an object, not list"),
        ('{"question": "q"}', r"data\.jsonl:2: answer=None must be a string"),
        ('{"question": "q", "answer": "a", "images": 3}', r"data\.jsonl:2: image '3' must be the name of a file"),
        ('{"question": "q", "answer": "a", "images": ["../b"]}', r"data\.jsonl:2: '\.\./b' leads out of the folder"),
        ('{"question": "q", "answer": "a", "images": ["b.png"]}', r"data\.jsonl:2: image 'b\.png' does not exist"),
        ('{"question": "<image> q", "answer": "a"}', r"data\.jsonl:2: the dialogue has 1 <image> marks for 0 images"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text('{"question": "q", "answer": "a"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        source(tmp_path)


def test_unreadable_image_and_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Data\.folder=.* has no data\.jsonl"):
        source(tmp_path)
    (tmp_path / "a.png").write_text("no image")
    write(tmp_path, [{"images": ["a.png"], "question": "q", "answer": "a"}], {})
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: .*no JPEG, PNG"):
        source(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no samples"):
        source(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: is not UTF-8 text"):
        source(tmp_path)


def test_make_source_follows_the_config(tmp_path):
    write(tmp_path, [{"question": "q", "answer": "a"}], {})
    config = DataConfig(task="folder", folder=str(tmp_path), cache=str(tmp_path / "cache"))
    assert make_source(DataSpec(config), {"vision": GRAY}, seed=0, split="test").sample(0).question == "q"
    with pytest.raises(ConfigError, match=r"Data\.image_encoder='vision'"):
        make_source(DataSpec(config), {"sight": GRAY}, seed=0, split="test")
