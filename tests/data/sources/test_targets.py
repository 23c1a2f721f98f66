"""Pictures that a generator is to make, in every layout of records: their places, sizes, values, noise and batches."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sources import ENCODERS, VISION, encoded, opened, pixels
from PIL import Image

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepLoader, StepMaker, make_packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.datasets import open_sources
from mmjax.data.sources.mixture import Mixture
from mmjax.data.tasks.task import TaskContext
from mmjax.data.tokenizer import ByteTokenizer, make_tokenizer
from mmjax.data.types import EncoderSpec, Sample, StepBatch

PAINTER = EncoderSpec(patch=2, merge=2, channels=3, drawn=True)
SPECS = {"vision": VISION, "painter": PAINTER}
TOKENIZER = ByteTokenizer(tuple(SPECS))
MARKS = {TOKENIZER.media_token("vision"): "I", TOKENIZER.media_token("painter"): "D", TOKENIZER.eos: "$"}


def folder_of(path: Path, *records: Any) -> Path:
    """A folder with pictures a.png, b.png and c.png of 9x13, 12x12 and 20x30 pixels, and a data.jsonl."""
    path.mkdir(exist_ok=True)
    for seed, (name, size) in enumerate({"a": (9, 13), "b": (12, 12), "c": (20, 30)}.items()):
        (path / f"{name}.png").write_bytes(encoded(pixels(*size, seed)))
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path


def source_of(path: Path, *records: Any, split: str = "train", specs: Any = SPECS, **settings: Any) -> Mixture:
    config = SourceConfig(path=str(folder_of(path, *records) / "data.jsonl"), **{"strict": True, **settings})
    return opened(path, config, split=split, encoders=specs)


def text_of(sample: Sample, places: np.ndarray | None = None) -> str:
    """Tokens as text: runs of an image's placeholders as I, of a picture to be made as D, and the end as $."""
    text, last = "", -1
    for token in sample.tokens if places is None else sample.tokens[places]:
        if token < 256:
            text += chr(token)
        elif token in MARKS and token != last:
            text += MARKS[int(token)]
        last = token
    return text


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def image(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": f"{name}.png", **more}


MADE = {"generate": True}
FORMS: dict[str, tuple[Any, str, str]] = {
    "parts of messages": (
        {"messages": [message("user", "redder: ", image("a")), message("assistant", "so ", image("b", **MADE), "!")]},
        "redder: I so D!$",
        "so !$",
    ),
    "a part that takes the next target": (
        {
            "messages": [message("user", "cat"), message("assistant", {"type": "image", "generate": True})],
            "targets": ["b.png"],
        },
        "cat D$",
        "$",
    ),
    "not generated": (
        {"messages": [message("user", "x"), message("assistant", image("a", generate=False), "y")], "target": "b.png"},
        "x IyD$",
        "y$",
    ),
    "a mark": (
        {
            "conversations": [{"from": "human", "value": "<image> a"}, {"from": "gpt", "value": "x <drawing> y"}],
            **{"image": "a.png", "targets": "b.png"},
        },
        "I a x D y$",
        "x  y$",
    ),
    "no mark": (
        {
            "conversations": [
                *({"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}),
                *({"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}),
            ],
            "targets": ["b.png", "b.png"],
        },
        "a b$c dDD$".replace("DD", "D"),
        "b$d$",
    ),
    "an edit": ({"image": "a.png", "instruction": "redder", "target": "b.png"}, "1:Iredder D$", "$"),
    "a question": ({"question": "a cat?", "targets": "b.png", "generator": "painter"}, "a cat? D$", "$"),
    "a question and its answer": ({"question": "a?", "answer": "b", "targets": "b.png"}, "a? bD$", "b$"),
    "a caption beside a target": ({"caption": "a cat", "target": "b.png"}, "a cat D$", "$"),
    "no picture to be made": ({"question": "<drawing>?", "answer": "a <drawing>"}, "<drawing>? a <drawing>$", ""),
    "a target that is null": ({"image": "a.png", "caption": "a cat", "target": None}, "1:I a cat$", "a cat$"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_record(form: str, tmp_path: Path) -> None:
    record, text, learned = FORMS[form]
    mixture = source_of(tmp_path, record)
    sample, meta = mixture.sample(0), mixture.meta(0)
    assert text_of(sample) == text
    assert text_of(sample, np.flatnonzero(sample.loss_weights)) == learned or not learned
    count = text.count("D") + ("targets" in record and form == "no mark")
    assert meta.tokens == len(sample.tokens) and meta.grids.get("painter", ()) == ((6, 6),) * count
    assert (
        sample.placeholders("painter").sum() == 9 * count
        and not sample.loss_weights[sample.placeholders("painter")].any()
    )
    assert len(sample.noise.get("painter", ())) == len(sample.times.get("painter", ())) == count
    if count:
        np.testing.assert_array_equal(sample.media["painter"][0], pixels(12, 12, 1) / np.float32(127.5) - 1)


@pytest.mark.parametrize("template", ["vicuna", "llama2", "chatml"])
def test_templates_put_it_in_the_assistants_turn(template: str, tmp_path: Path) -> None:
    sample = source_of(tmp_path, FORMS["an edit"][0], template=template).sample(0)
    assert text_of(sample).index("redder") < text_of(sample).index("D") and sample.prompt_media == {
        "vision": 1,
        "painter": 0,
    }
    assert (np.flatnonzero(sample.placeholders("painter")) >= sample.prompt).all()


@pytest.mark.parametrize("name", ["llama3", "qwen2_vl", "gemma3", "llava_next"])
def test_a_folders_template_writes_it_too(name: str, tmp_path: Path) -> None:
    folder = str(Path(__file__).parents[2] / "oracles" / "processors" / name)
    tokenizer = make_tokenizer(folder, tuple(SPECS), "vision")
    records = (FORMS["parts of messages"][0], FORMS["an edit"][0])
    config = SourceConfig(path=str(folder_of(tmp_path, *records) / "data.jsonl"), template="folder", strict=True)
    data = DataConfig(sources={"own": 1.0}, cache=str(tmp_path / "cache"), sequence_length=512, tokenizer=folder)
    context = TaskContext(data=data, encoders=SPECS, tokenizer=tokenizer, seed=0, split="test", sources={"own": config})
    mixture = open_sources(context)
    for at, (answer, words) in enumerate((("so !", ["so", "!"]), ("", []))):
        sample = mixture.sample(at)
        painted = np.flatnonzero(sample.placeholders("painter"))
        assert len(painted) == 9 and (painted >= sample.prompt).all() and (np.diff(painted) == 1).all()
        assert not sample.loss_weights[painted].any() and sample.loss_weights[painted[-1] + 1 :].any()
        assert sample.answer.strip() == answer and sample.prompt_media["painter"] == 0
        before = tokenizer.decode(sample.tokens[sample.prompt : painted[0]]).strip()
        assert before == "".join(words[:1]) and np.flatnonzero(sample.placeholders("vision"))[-1] < sample.prompt


WRONG: dict[str, tuple[Any, str]] = {
    "a picture in a question": (
        {"messages": [message("user", image("a", **MADE)), message("assistant", "x")]},
        "turn 1: pictures are made in the assistant's turns: move the picture there, or leave out generate",
    ),
    "a mark in a question": (
        {"question": "a <drawing>", "targets": "b.png"},
        "a mark <drawing> stands in a question: pictures are made in the assistant's turns; move it to the answer",
    ),
    "too many marks": (
        {"question": "a", "answer": "<drawing> <drawing>", "targets": "b.png"},
        "its answers have 2 <drawing> marks for 1 pictures to be made: write 1",
    ),
    "too few pictures for parts": (
        {"messages": [message("user", "x"), message("assistant", {"type": "image", **MADE})]},
        "0 drawings beside the dialogue for 1 places in it",
    ),
    "a missing picture": ({"question": "a", "targets": "none.png"}, "drawing 'none.png' does not exist: put it at"),
    "a broken one": ({"question": "a", "targets": "data.jsonl"}, "no JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF image"),
    "one outside": ({"question": "a", "targets": "../x.png"}, "'../x.png' leads out of the folder of media"),
    "a recording": (
        {"messages": [message("user", "x"), message("assistant", {"type": "audio", "audio": "a.wav", **MADE})]},
        "turn 2: a recording is to be made (generate), and generators of pictures are all there are",
    ),
    "a video": (
        {"messages": [message("user", "x"), message("assistant", {"type": "video", "video": "a.mp4", **MADE})]},
        "turn 2: a video is to be made (generate), and generators of pictures are all there are",
    ),
    "no boolean": (
        {"messages": [message("user", "x"), message("assistant", image("a", generate="yes"))]},
        "turn 2: generate='yes' must be true or false",
    ),
    "of weight 0": (
        {"messages": [message("user", "x"), {**message("assistant", image("a", **MADE)), "weight": 0}]},
        "an answer of weight 0 has a picture to be made: leave out its weight, or generate",
    ),
    "another generator": (
        {"question": "a", "targets": "b.png", "generator": "drawer"},
        "generator='drawer' makes no pictures in the model; name 'painter'",
    ),
    "another generator of a part": (
        {
            "messages": [message("user", "x"), message("assistant", image("a", **MADE, generator="a"))],
            "generator": "painter",
        },
        "generator='a' makes no pictures in the model; name 'painter'",
    ),
    "fewer generators than pictures": (
        {"question": "a", "targets": ["b.png", "c.png", "a.png"], "generator": ["painter", "painter"]},
        "generator=['painter', 'painter'] names 2 for 3 pictures to be made: name one, or 3",
    ),
    "generators beside and in parts": (
        {
            "messages": [message("user", "x"), message("assistant", image("a", **MADE, generator="painter"))],
            "generator": ["painter"],
        },
        "generator=['painter'] and a part of its messages name generators: leave out one of them",
    ),
    "a generator that is no name": (
        {"question": "a", "targets": "b.png", "generator": {"name": "painter"}},
        "must be the name of a generator",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_forms_are_named_in_one_line(case: str, tmp_path: Path) -> None:
    record, reason = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        source_of(tmp_path, {"question": "a", "targets": "b.png"}, record)
    assert reason in str(raised.value) and "\n" not in str(raised.value) and "data.jsonl:2" in str(raised.value)
    source = source_of(tmp_path, {"question": "a", "targets": "b.png"}, record, strict=False, split="test")
    assert len(source) == 1 and source.left_out()[0].faults[0].name.endswith("data.jsonl:2")


def test_models_without_a_generator_of_pictures(tmp_path: Path) -> None:
    record = {"question": "a", "targets": "b.png"}
    with pytest.raises(ConfigError, match=r"no generator of the model makes one: set Model.generators to \{'painter'"):
        source_of(tmp_path, record, specs={"vision": VISION})
    latent = {"painter": replace(PAINTER, channels=4)}
    with pytest.raises(
        ConfigError, match=r"'painter' makes 4 channels, and a picture has 1 or 3: set painter/DiT.channels"
    ):
        source_of(tmp_path, record, specs=latent)
    two = {"first": PAINTER, "second": replace(PAINTER, channels=1)}
    with pytest.raises(
        ConfigError, match=r"Data\.generator='painter' makes no pictures in the model; name 'first' or 'second'"
    ):
        source_of(tmp_path, record, specs=two)


def test_a_record_names_one_of_several_generators(tmp_path: Path) -> None:
    specs = {"painter": PAINTER, "second": replace(PAINTER, channels=1, patch=4)}
    records = [
        {"question": "a", "targets": "b.png"},
        {"question": "a", "targets": ["c.png"] * 2, "generator": "second"},
    ]
    mixture = source_of(tmp_path, *records, specs=specs, split="test")
    assert [list(mixture.meta(at).grids) for at in (0, 1)] == [["painter"], ["second"]]
    assert [list(mixture.sample(at).noise) for at in (0, 1)] == [["painter"], ["second"]]
    assert mixture.sample(1).media["second"][0].shape == (16, 32, 1)
    worst = mixture.worst_case()
    assert worst.media == {"painter": 1, "second": 2} and worst.patches == {"painter": 36, "second": 32}
    only = source_of(tmp_path, records[0], specs={"drawer": PAINTER}, split="test")
    assert list(only.meta(0).grids) == ["drawer"], "the only generator, whatever Data.generator says"


def test_a_record_has_pictures_of_several_generators(tmp_path: Path) -> None:
    """Each generator has its pictures, noise and placeholders; marks are in the order of the text."""
    specs = {"painter": PAINTER, "second": replace(PAINTER, channels=1, patch=4)}
    answer = (image("a", **MADE), "then ", image("b", **MADE, generator="second"), image("c", **MADE))
    records: list[dict[str, Any]] = [
        {"messages": [message("user", "x"), message("assistant", *answer)]},
        {"question": "x", "answer": "<drawing>then <drawing><drawing>", "targets": ["a.png", "b.png", "c.png"]},
    ]
    records[1]["generator"] = ["painter", "second", "painter"]
    earlier = [message("assistant", image("b", **MADE, generator="second")), message("user", "again")]
    records.append({"messages": [message("user", "x"), *earlier, message("assistant", *answer)]})
    mixture = source_of(tmp_path, *records, specs=specs, split="test")
    tokenizer = ByteTokenizer(tuple(specs))
    marks = {tokenizer.media_token(name): name[0] for name in specs}
    for number, wanted in enumerate(("psp", "psp", "spsp")):
        sample = mixture.sample(number)
        runs = [marks[token] for token in sample.tokens.tolist() if token in marks]
        assert "".join(name for at, name in enumerate(runs) if runs[at - 1 : at] != [name]) == wanted
        for name, spec in specs.items():
            sizes = [medium.shape[:2] for medium in sample.media[name]]
            assert len(sizes) == len(sample.noise[name]) == len(mixture.meta(number).grids[name])
            assert runs.count(name[0]) == sum(spec.tokens(*size) for size in sizes)
        assert [medium.shape for medium in sample.media["painter"]] == [(8, 12, 3), (20, 32, 3)]
        assert [medium.shape for medium in sample.media["second"]] == [(16, 16, 1)] * wanted.count("s")
    assert dict(mixture.sample(2).prompt_media) == {"painter": 0, "second": 1}
    assert mixture.worst_case().media == {"painter": 2, "second": 2}
    (part,) = StepMaker(
        source=mixture,
        packer=make_packer(DATA, specs, mixture, tokenizer, global_batch=3, microbatches=1, cells=1),
        global_batch=3,
    )(0).microbatches
    tokens = part.inputs["llm"]["tokens"].ravel()
    for name in specs:
        index = part.inputs[name]["index"]
        assert set(tokens[index[index >= 0]]) == {tokenizer.media_token(name)}
        assert np.count_nonzero(index >= 0) == np.count_nonzero(tokens == tokenizer.media_token(name))


def test_captions_lead_to_pictures_in_every_layout(tmp_path: Path) -> None:
    folder, names = folder_of(tmp_path / "folder"), ("a", "b", "c")
    rows = [{"file_name": f"{name}.png", "text": f"the {name}"} for name in names]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for name in names:
            (folder / f"{name}.txt").write_text(f"the {name}\n")
            for suffix in ("png", "txt"):
                tar.add(folder / f"{name}.{suffix}", f"{name}.{suffix}")
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [{"image": {"bytes": (folder / f"{name}.png").read_bytes()}, "caption": f"the {name}"} for name in names]
    pq.write_table(pa.Table.from_pylist(table), folder / "table.parquet")
    layouts = {
        "llava": "metadata.jsonl",
        "webdataset": "shard.tar",
        "parquet": "table.parquet",
        "pictures": "",
        "pictures of a pattern": "*.png",
    }
    drawn: dict[str, np.ndarray] = {}
    for kind, path in layouts.items():
        settings: Any = {"kind": kind.split()[0], "path": str(folder / path), "question": "Draw", "template": "chatml"}
        mixture = opened(folder, SourceConfig(**settings, draw=True, drawn_size=(8, 8)), split="test", encoders=SPECS)
        for number, name in enumerate(names):
            sample = mixture.sample(number)
            assert f"user\nDraw the {name}" in text_of(sample).strip() and "assistant\nD" in text_of(sample), kind
            assert sample.media["painter"][0].shape == (8, 8, 3) and "vision" not in sample.media
            assert (sample.question.strip(), sample.answer) == (f"Draw the {name}", "")
            first = drawn.setdefault(name, sample.media["painter"][0])
            np.testing.assert_array_equal(sample.media["painter"][0], first, err_msg=kind)
        seen = opened(folder, SourceConfig(**settings), split="test", encoders=SPECS).sample(0)
        assert "vision" in seen.media and "painter" not in seen.media and seen.answer.strip() == "the a"
    (folder / "b.txt").unlink()
    (folder / "c.png").unlink()
    settings = {"kind": "pictures", "path": str(folder), "draw": True}
    left = opened(folder, SourceConfig(**settings), split="test", encoders=SPECS)
    assert len(left) == 1 and [f.reason for f in left.left_out()[0].faults] == [
        f"it has no caption: write {folder}/b.txt"
    ]
    (folder / "none.jsonl").write_text(json.dumps({"text": "a cat"}))
    with pytest.raises(ConfigError, match="a text without the picture that is to be made of it"):
        opened(folder, SourceConfig(path=str(folder / "none.jsonl"), draw=True), encoders=SPECS)


def test_edits_in_tars(tmp_path: Path) -> None:
    path, edit = tmp_path / "edits.tar", {"instruction": "redder", "target": "target.png"}
    files = {
        "1.json": json.dumps(edit).encode(),
        "1.source.png": encoded(pixels(8, 8)),
        "1.target.png": encoded(pixels(12, 12, 1)),
    }
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    sample = opened(tmp_path, SourceConfig(kind="webdataset", path=str(path), strict=True), encoders=SPECS).sample(0)
    assert text_of(sample) == "1:Iredder D$" and sample.media["vision"][0].shape == (8, 8, 3)
    np.testing.assert_array_equal(sample.media["painter"][0], pixels(12, 12, 1) / np.float32(127.5) - 1)


def expected(picture: Image.Image, size: tuple[int, int], mode: str) -> np.ndarray:
    """A picture that covers a size, cut in the middle, by Pillow alone."""
    (height, width), scale = size, max(size[0] / picture.height, size[1] / picture.width)
    over = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    left, top = (over[0] - width) // 2, (over[1] - height) // 2
    box = (left, top, left + width, top + height)
    whole = np.asarray(picture.convert(mode).resize(over, Image.Resampling.BICUBIC).crop(box), np.float32)
    return whole.reshape(height, width, -1) / 127.5 - 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"drawn_size": (16, 8)}, (16, 8)),
        ({"drawn_size": (40, 40)}, (40, 40)),
        ({}, (20, 32)),  # of its own size: 20 x 30
        ({"drawn_pixels": 256}, (12, 16)),
        ({"drawn_pixels": 16}, (4, 4)),
    ],
)
def test_sizes_and_values(settings: Any, size: tuple[int, int], channels: int, tmp_path: Path) -> None:
    specs = {"painter": replace(PAINTER, channels=channels)}
    sample = source_of(tmp_path, {"question": "a", "targets": "c.png"}, specs=specs, **settings).sample(0)
    wanted = expected(Image.open(tmp_path / "c.png"), size, "L" if channels == 1 else "RGB")
    assert sample.media["painter"][0].shape == (*size, channels)
    np.testing.assert_allclose(sample.media["painter"][0], wanted, atol=2.1 / 127.5)  # parts are resized with margins
    assert np.mean(np.abs(sample.media["painter"][0] - wanted)) < 0.1 / 127.5


def test_upright_and_transparent_pictures(tmp_path: Path) -> None:
    folder, colours = folder_of(tmp_path), pixels(8, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "turned.png").write_bytes(encoded(colours, exif=exif))
    see_through = Image.fromarray(np.dstack([colours, np.zeros((8, 12), np.uint8)]))
    (folder / "clear.png").write_bytes(encoded(see_through))
    names = ("turned", "clear")
    mixture = source_of(tmp_path, *({"question": "a", "targets": f"{name}.png"} for name in names), split="test")
    turned, clear = (mixture.sample(at).media["painter"][0] for at in (0, 1))
    np.testing.assert_array_equal(turned, np.rot90(colours, -1) / np.float32(127.5) - 1)
    assert clear.shape == (8, 12, 3) and (clear == 1).all()


@pytest.mark.parametrize(
    ("settings", "message_"),
    [
        (
            {"drawn_size": (30, 32)},
            r"own/Source.drawn_size=\(30, 32\): 'painter' makes sides of multiples of 4 pixels; .* as \(32, 32\)",
        ),
        (
            {"drawn_pixels": 15},
            "own/Source.drawn_pixels=15: 'painter' makes pictures of at least 4 by 4 pixels; .* 16 or more",
        ),
    ],
)
def test_sizes_that_no_generator_makes(settings: Any, message_: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message_):
        source_of(tmp_path, {"question": "a", "targets": "b.png"}, **settings)
    for wrong in ((0, 4), (-4, 4), (4,)):
        with pytest.raises(ConfigError, match=r"Source.drawn_size=.*: must be \(height, width\), or \(0, 0\)"):
            SourceConfig(drawn_size=wrong)  # type: ignore[arg-type]


def test_queries_and_canvases(tmp_path: Path) -> None:
    """A generator with queries has as many placeholders for any picture, which its largest canvas holds."""
    canvases = {"canvases": ((2, 2), (4, 6)), "bounded_by": "painter/DiT.canvases"}
    painter = replace(PAINTER, queries=3, special=3, merge=1, multiple=2, **canvases)
    records = [{"question": "a", "targets": f"{name}.png"} for name in "abc"]
    mixture = source_of(tmp_path, *records, specs={"painter": painter}, split="test")
    grids = [mixture.meta(at).grids["painter"] for at in range(3)]
    assert grids == [((4, 6),), ((4, 4),), ((4, 6),)]  # 9 x 13, 12 x 12 and 20 x 30 pixels within 8 x 12
    for at in range(3):
        sample = mixture.sample(at)
        assert sample.placeholders("painter").sum() == 3 and mixture.meta(at).tokens == len(sample.tokens)
        assert sample.media["painter"][0].shape == (*(2 * side for side in grids[at][0]), 3)
    step = maker_of(source_of(tmp_path, *records, specs={"painter": painter}), {"painter": painter})(0)
    assert step.denominators["painter"] > 0
    with pytest.raises(ConfigError, match=r"painter/DiT\.canvases=.* hold no picture of 16 x 8 pixels"):
        source_of(tmp_path, *records, specs={"painter": painter}, drawn_size=(16, 8))


def test_bombs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"30x20 pixels; Source.pixel_limit is 500"):
        source_of(tmp_path, {"question": "a", "targets": "c.png"}, pixel_limit=500)


def target_of(sample: Sample) -> tuple[np.ndarray, np.ndarray, float]:
    """The only picture to be made, its noise and its time."""
    (picture,), (noise,), (time,) = sample.media["painter"], sample.noise["painter"], sample.times["painter"]
    return picture, noise, time


EDITS = [{"image": "a.png", "instruction": f"edit {at}", "target": f"{'abc'[at % 3]}.png"} for at in range(6)]
DATA = DataConfig(sources={"own": 1.0}, sequence_length=256)


def maker_of(mixture: Any, specs: Any = SPECS) -> StepMaker:
    packer = make_packer(DATA, specs, mixture, TOKENIZER, global_batch=4, microbatches=2, cells=1)
    return StepMaker(source=mixture, packer=packer, global_batch=4)


def test_noise_is_a_function_of_seed_split_and_index(tmp_path: Path) -> None:
    mixture = source_of(tmp_path, *EDITS)
    for index in range(13):
        sample, rng = mixture.sample(index), np.random.default_rng([0, 0, index, 2])
        picture, noise, time = target_of(sample)
        np.testing.assert_array_equal(noise, rng.standard_normal(picture.shape, np.float32))
        assert time == rng.random() and 0 <= time < 1
    again = {mixture.record(index)[1]: index for index in range(12)}
    first = next(index for index in range(6) if again[mixture.record(index)[1]] != index)
    other = again[mixture.record(first)[1]]
    assert mixture.sample(first).times != mixture.sample(other).times, "another epoch has other noise"
    held = source_of(tmp_path, *EDITS, split="test")
    assert held.sample(2).times["painter"] == (
        (lambda rng: (rng.standard_normal(held.sample(2).media["painter"][0].shape, np.float32), rng.random())[1])(
            np.random.default_rng([0, 1, 2, 2])
        ),
    )


def assert_same(actual: StepBatch, wanted: StepBatch) -> None:
    assert (actual.counts, actual.denominators) == (wanted.counts, wanted.denominators)
    for part, other in zip(actual.microbatches, wanted.microbatches, strict=True):
        for module, inputs in other.inputs.items():
            for name, array in inputs.items():
                np.testing.assert_array_equal(part.inputs[module][name], array, err_msg=f"{module} {name}")


def test_batches_equal_a_plain_loop(tmp_path: Path) -> None:
    """Every patch of every drawing, in rows of the packer's own choice, found again by a loop over pixels."""
    mixture = source_of(tmp_path, *EDITS, split="train")
    batch, drawn = maker_of(mixture)(1), 0
    for number, part in enumerate(batch.microbatches):
        rows, llm = part.inputs["painter"], part.inputs["llm"]
        flat = {
            name: rows[name].reshape(-1, *rows[name].shape[2:]) for name in ("patches", "targets", "times", "weights")
        }
        index, tokens = rows["index"].reshape(-1), llm["tokens"].reshape(-1)
        width, used = rows["patches"].shape[1], np.zeros(len(flat["weights"]), bool)
        for at in range(2):
            sample = mixture.sample(4 + 2 * number + at)
            picture, noise, time = target_of(sample)
            row, column = next(
                (r, c)
                for r in range(rows["segments"].shape[0])
                for c in range(0, width, 4)
                if rows["times"][r, c] == np.float32(time)
            )
            place, placeholders = row * width + column, np.flatnonzero(sample.placeholders("painter"))
            start = np.flatnonzero(llm["segments"][at])[0] + at * llm["tokens"].shape[1]
            for token, (y, x) in enumerate(np.ndindex(picture.shape[0] // 4, picture.shape[1] // 4)):
                assert index[place // 4 + token] == start + placeholders[token]
                assert tokens[start + placeholders[token]] == TOKENIZER.media_token("painter")
                for inside, (dy, dx) in enumerate(np.ndindex(2, 2)):
                    one, top, left = place + 4 * token + inside, 4 * y + 2 * dy, 4 * x + 2 * dx
                    cut = (slice(top, top + 2), slice(left, left + 2))
                    clean, dirty = picture[cut].reshape(-1), noise[cut].reshape(-1)
                    t = np.float32(time)
                    np.testing.assert_allclose(flat["patches"][one], (1 - t) * clean + t * dirty, rtol=1e-6, atol=1e-6)
                    np.testing.assert_array_equal(flat["targets"][one], dirty - clean)
                    assert flat["times"][one] == t and flat["weights"][one] == 1 and not used[one]
                    used[one], drawn = True, drawn + 1
        assert not flat["weights"][~used].any()
    assert batch.counts["painter_patches"] == drawn and batch.denominators["painter"] == drawn * 12


def test_batches_do_not_depend_on_workers_nor_on_where_a_run_begins(tmp_path: Path) -> None:
    maker = maker_of(source_of(tmp_path, *EDITS))
    wanted = [maker(step) for step in range(3)]
    with StepLoader(maker, steps=3, start_step=1, workers=1) as stream:
        for actual, batch in zip(stream, wanted[1:], strict=True):
            assert_same(actual, batch)
    assert_same(pickle.loads(pickle.dumps(maker))(2), wanted[2])
    assert_same(maker_of(source_of(tmp_path, *EDITS))(2), wanted[2])


def test_a_generator_learns_nothing_of_a_broken_record(tmp_path: Path) -> None:
    """Whichever part is broken, and whichever modules' media a process opens."""
    mixture = source_of(tmp_path, *EDITS, strict=False)
    (tmp_path / "c.png").write_bytes(b"\x89PNG")  # the target of every third edit
    metas = [mixture.meta(index) for index in range(6)]
    broken = [index for index in range(6) if metas[index].grids["painter"] == ((10, 16),)]
    for index in range(6):
        for media in (None, {"painter"}, {"painter", "vision"}):
            sample = mixture.sample(index, media, learned=media is None)
            assert ("painter" in sample.noise) == (index not in broken) == (not sample.broken)
            assert [medium.shape for medium in sample.media["painter"]] == [
                (*(2 * n for n in grid), 3) for grid in metas[index].grids["painter"]
            ]
    step = maker_of(mixture)
    batches = [step(0), step(1)]
    dead = sum(float((m.inputs["painter"]["weights"] == 1).sum()) for batch in batches for m in batch.microbatches)
    assert len(broken) == 2 and dead < sum(batch.counts["painter_patches"] for batch in batches)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")  # every edit's source, which the generator does not see
    assert not any(mixture.sample(index, {"painter"}, learned=False).noise for index in range(6))


@pytest.mark.parametrize("names", [("patches", "weights", "times"), ("targets", "index")])
def test_a_process_reads_the_rows_of_its_generators(names: tuple[str, ...], tmp_path: Path) -> None:
    """Also of a record whose image is broken, which a process with the generator's rows alone does not need."""
    mixture = source_of(tmp_path, *EDITS, strict=False)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    packer = make_packer(DATA, SPECS, mixture, TOKENIZER, global_batch=4, microbatches=1, cells=2)
    cells = ProcessRows(cells={"painter": dict.fromkeys((*names, "segments", "positions"), (1,))})
    whole = StepMaker(source=mixture, packer=packer, global_batch=4)(0)
    of_process = StepMaker(source=mixture, packer=packer, global_batch=4, process_rows=cells)(0)
    for name in names:
        actual, wanted = (of.microbatches[0].inputs["painter"][name] for of in (of_process, whole))
        per_cell = len(wanted) // 2
        np.testing.assert_array_equal(actual[per_cell:], wanted[per_cell:], err_msg=name)
    assert not whole.microbatches[0].inputs["painter"]["weights"].any(), "every edit has the broken image"


def test_the_index_knows_when_a_target_has_changed(tmp_path: Path) -> None:
    mixture = source_of(tmp_path, {"question": "a", "targets": "b.png"})
    before = mixture.meta(0).grids["painter"]
    (tmp_path / "b.png").write_bytes(encoded(pixels(16, 8)))
    assert "it is not what it was" in opened_again(mixture).sample(0).broken[2]
    folder = tmp_path / "data.jsonl"
    new = opened(tmp_path, SourceConfig(path=str(folder), strict=True), encoders=SPECS)
    assert before == ((6, 6),) and new.meta(0).grids["painter"] == ((8, 4),)


def test_captions_beside_pictures_may_change(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "folder")
    config = SourceConfig(kind="pictures", path=str(folder), draw=True, drawn_size=(8, 8))
    (folder / "a.txt").write_text("a cat")
    assert text_of(opened(tmp_path, config, encoders=SPECS, split="test").sample(0)).startswith("a cat D")
    (folder / "a.txt").write_text("a dog and a cat")
    (folder / "b.txt").write_text("b")
    changed = opened(tmp_path, config, encoders=SPECS, split="test")
    assert [text_of(changed.sample(at)) for at in range(len(changed))] == ["a dog and a cat D$", "b D$"]


def opened_again(mixture: Mixture) -> Mixture:
    """The same index, of records that may be left out."""
    for source in mixture.sources:
        source.config = replace(source.config, strict=False)
    return mixture


def test_cut_dialogues_lose_the_pictures_of_their_last_turns(tmp_path: Path) -> None:
    turns = [m for at in range(4) for m in (message("user", f"q{at} " * 10), message("assistant", image("b", **MADE)))]
    config = SourceConfig(path=str(folder_of(tmp_path, {"messages": turns}) / "data.jsonl"), cut=True)
    mixture = opened(tmp_path, config, encoders=SPECS, sequence_length=100)
    sample = mixture.sample(0)
    assert len(sample.media["painter"]) == 2 == len(mixture.meta(0).grids["painter"]) and len(sample.tokens) <= 100
    assert sample.placeholders("painter").sum() == 18


def test_inputs_alone_are_as_before(tmp_path: Path) -> None:
    """A generator in the model changes nothing of records without pictures to be made."""
    record = {"question": "<image>?", "answer": "a", "image": "a.png"}
    plain = source_of(tmp_path, record, specs=ENCODERS).sample(0)
    with_painter = source_of(tmp_path, record, specs={**ENCODERS, "painter": PAINTER}).sample(0)
    np.testing.assert_array_equal(plain.tokens, with_painter.tokens)
    assert not with_painter.noise and set(with_painter.media) == {"vision"}
