"""The same data in every layout makes the same batches; each layout's own forms are read."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sources import AUDIO, VISION, encoded, opened, pixels, recorded, text_of

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepLoader, StepMaker, make_packer, make_source
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Entry, Media, Record
from mmjax.data.sources.writers import write_all
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.digits.dialogues import digit_dialogues
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import StepBatch

SPECS = {"vision": VISION}
KINDS = ("llava", "webdataset", "array_record", "parquet")
"""The layouts that can hold dialogues."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("data"), digit_dialogues(30, 1), per_shard=8)


def batches(paths: dict[str, Path], *kinds: str, workers: int = 0, start: int = 0) -> list[StepBatch]:
    """Reads six steps of batches from one format, or from a mixture of several."""
    settings: dict[str, Any] = {"template": "vicuna", "max_patches": 64, "preset": "clip"}
    sources = {kind: SourceConfig(kind=kind, path=str(paths[kind]), **settings) for kind in kinds}
    folder = paths["llava"].parents[1]
    config = DataConfig(sources=dict.fromkeys(kinds, 1.0), sequence_length=256, cache=str(folder / "cache"))
    mixture = make_source(DataSpec(config, sources=sources), SPECS, seed=3, split="train")
    sizes: Any = {"global_batch": 8, "microbatches": 2, "cells": 2}
    packer = make_packer(config, SPECS, mixture, ByteTokenizer(("vision",)), **sizes)
    maker = StepMaker(source=mixture, packer=packer, global_batch=8)
    with StepLoader(maker, steps=6, start_step=start, workers=workers) as stream:
        return list(stream)


def assert_equal(got: list[StepBatch], wanted: list[StepBatch]) -> None:
    assert [b.step for b in got] == [b.step for b in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert a.counts == b.counts
        for x, y in zip(a.microbatches, b.microbatches, strict=True):
            assert x.bucket == y.bucket
            for module, arrays in x.inputs.items():
                for name, array in arrays.items():
                    assert np.array_equal(np.asarray(array), np.asarray(y.inputs[module][name])), (module, name)


def test_four_layouts_make_equal_batches(paths):
    batches_by_kind = {kind: batches(paths, kind) for kind in KINDS}
    assert set(paths) == set(KINDS)
    for kind in KINDS:
        assert_equal(batches_by_kind[kind], batches_by_kind["llava"])
    counts = batches_by_kind["llava"][0].counts
    assert counts["media"] and counts["samples"] == 8
    steps = [m.inputs["llm"]["tokens"].tobytes() for b in batches_by_kind["llava"] for m in b.microbatches]
    assert len(set(steps)) == 12


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_batches_do_not_depend_on_workers_nor_on_where_a_run_begins(paths, workers):
    wanted = batches(paths, *KINDS)
    assert_equal(batches(paths, *KINDS, workers=workers, start=2), wanted[2:])


def test_metadata_equal_samples_and_the_worst_case_bounds_them(paths):
    mixture = opened(paths["llava"].parent, SourceConfig(path=str(paths["llava"]), max_patches=64))
    worst = mixture.worst_case()
    metas, samples = zip(*((mixture.meta(at), mixture.sample(at)) for at in range(30)), strict=True)
    assert sum(not meta.grids for meta in metas) and sum(len(meta.grids.get("vision", ())) > 1 for meta in metas)
    for meta, sample in zip(metas, samples, strict=True):
        assert (meta.tokens, meta.weight) == (len(sample.tokens), float(sample.loss_weights[1:].sum()))
        grids = tuple(VISION.grid(*medium.shape[:2]) for medium in sample.media.get("vision", ()))
        assert meta.grids.get("vision", ()) == grids
        assert int(sample.placeholders("vision").sum()) * 4 == sum(meta.patches.get("vision", ()))
    assert worst.tokens == max(meta.tokens for meta in metas)
    assert worst.patches == {"vision": max(max(meta.patches["vision"]) for meta in metas if meta.grids)}
    sides = [max(grid) for meta in metas for grid in meta.grids.get("vision", ())]
    assert (worst.media, worst.sides) == ({"vision": 3}, {"vision": max(sides)})


def write_json(folder: Path, rows: list, name: str = "data.json") -> SourceConfig:
    folder.mkdir(exist_ok=True)
    lines = name.endswith("l")
    (folder / name).write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, ensure_ascii=False))
    return SourceConfig(path=str(folder / name), max_patches=0)


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_dialogues_of_all_sorts(tmp_path, name):
    (tmp_path / "a.png").write_bytes(encoded(pixels(8, 8, 1)))
    (tmp_path / "b.webp").write_bytes(encoded(pixels(16, 8, 2), "WEBP", lossless=True))
    (tmp_path / "c.wav").write_bytes(recorded(np.sin(np.arange(640))))
    rows = [
        {"image": "a.png", "conversations": [
            {"from": "human", "value": "<image>\nwas ist «das»?"}, {"from": "gpt", "value": "ä"},
        ]},
        {"images": ["a.png", "b.webp"], "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "x<image>y"}, {"role": "assistant", "content": "1"},
            {"role": "user", "content": "<image>"}, {"role": "assistant", "content": "2"},
        ]},
        {"question": "no image?", "answer": "none"},
        {"audio": "c.wav", "conversations": [
            {"from": "human", "value": "<audio> what?"}, {"from": "gpt", "value": "beep"},
        ]},
        {"image": "a.png", "caption": "seen"},
        {"images": ["a.png", "b.webp"], "text": "one <image> two <image> three"},
    ]  # fmt: skip
    mixture = opened(tmp_path, write_json(tmp_path, rows, name), split="test")
    samples = [mixture.sample(at) for at in range(len(mixture))]
    assert [text_of(sample.tokens) for sample in samples] == [
        "<v>\nwas ist «das»? ä$",
        "be x<v>y 1$<v> 2$",
        "no image? none$",
        "<a> what? beep$",
        "1:<v> seen$",
        " one <v> two <v> three$",
    ]
    assert np.allclose(samples[0].media["vision"][0] * 255, pixels(8, 8, 1), atol=1e-3)
    assert np.allclose(samples[1].media["vision"][1] * 255, pixels(16, 8, 2), atol=1e-3)
    assert samples[3].media["audio"][0].shape == (16, 8) and samples[2].media == {}
    learned = [text_of(s.tokens[s.loss_weights > 0]) for s in samples]
    assert learned == ["ä$", "1$2$", "none$", "beep$", "seen$", "one  two  three$"]


def parts(*contents: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Hugging Face's: a text each, or a medium."""
    return [{"type": "text", "text": content} if isinstance(content, str) else content for content in contents]


def dialogue(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


PLACE = {"type": "image"}


@pytest.mark.parametrize("kind", ["data.json", "data.jsonl", "data.parquet"])
def test_dialogues_in_parts(tmp_path, kind):
    """As TRL and Hugging Face's data sets have them, beside LLaVA's records."""
    for seed, name in enumerate("abc"):
        (tmp_path / f"{name}.png").write_bytes(encoded(pixels(8, 8, seed)))

    def image(name: str, key: str = "image") -> dict[str, Any]:
        return {"type": "image", key: f"{name}.png"}

    rows = [
        ({"images": ["b.png"], "messages": dialogue(parts(PLACE, "what?"), parts("b"))}, "<v>what? b$", "b"),
        ({"images": ["a.png", "b.png"], "messages": dialogue(parts("x", PLACE, "y", PLACE), parts("z"))},
         "x<v>y<v> z$", "ab"),
        ({"messages": dialogue(parts(image("c"), " and ", image("a", "url")), parts("n"))}, "<v> and <v> n$", "ca"),
        ({"images": ["a.png"], "messages": [{"role": "system", "content": parts("be")},
         *dialogue(parts("p", image("c")), parts("q"), parts("r", PLACE), parts("s"))]}, "be p<v> q$r<v> s$", "ca"),
        # As Hugging Face's Arrow files unify parts, and with numbers of images.
        ({"images": ["a.png", "b.png"], "messages": dialogue(
            [{"type": "image", "text": None, "index": 1}, {"type": "text", "text": "k", "index": None},
             {"type": "image", "text": None, "index": 0}], parts("l"))}, "<v>k<v> l$", "ba"),
        ({"images": ["a.png"], "messages": dialogue("plain", "text")}, "1:<v>plain text$", "a"),
        ({"image": "a.png", "conversations": [
            {"from": "human", "value": "<image>\nLLaVA?"}, {"from": "gpt", "value": "yes"}]}, "<v>\nLLaVA? yes$", "a"),
        ({"images": ["b.png"], "messages": dialogue("<image>m", "n")}, "<v>m n$", "b"),
        ({"messages": dialogue(parts("no ", "image"), parts(""))}, "no image $", ""),
    ]  # fmt: skip
    if kind == "data.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        # One type a column: parts everywhere, and images with a path or with bytes.
        rows = [row for row in rows if isinstance((row[0].get("messages") or [{"content": ""}])[0]["content"], list)]
        files = {f"{name}.png": (tmp_path / f"{name}.png").read_bytes() for name in "abc"}
        table = [
            {**row, "images": [{"path": n} if n == "a.png" else {"bytes": files[n]} for n in row.get("images", ())]}
            for row, _, _ in rows
        ]
        pq.write_table(pa.Table.from_pylist(table), tmp_path / kind)
        config = SourceConfig(kind="parquet", path=str(tmp_path / kind), max_patches=0)
    else:
        config = write_json(tmp_path, [row for row, _, _ in rows], kind)
    mixture = opened(tmp_path, config, split="test")
    assert not mixture.sources[0].index.left_out()
    for at, (_, text, names) in enumerate(rows):
        sample = mixture.sample(at)
        assert text_of(sample.tokens) == text
        media = sample.media.get("vision", ())
        wanted = [pixels(8, 8, "abc".index(name)) for name in names]
        assert len(media) == len(wanted)
        assert all(
            np.allclose(medium * 255, expected, atol=1e-3) for medium, expected in zip(media, wanted, strict=True)
        )


def test_wrong_parts_are_named(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded(pixels(8, 8)))
    (tmp_path / "torn.png").write_bytes(encoded(pixels(8, 8))[:40])
    image = {"type": "image", "image": "a.png"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": dialogue(parts(PLACE, "x"), "y")}, "0 images beside the dialogue for 1 places in it", ""),
        ({"images": ["a.png", "b.png"], "messages": dialogue(parts(PLACE), "y")}, "2 images beside the dialogue", ""),
        ({"images": ["a.png"], "messages": dialogue(parts(image), "y")}, "1 images beside the dialogue for 0", ""),
        ({"images": ["a.png"], "messages": dialogue(parts({**PLACE, "index": 1}), "y")}, "1 images beside the d", ""),
        ({"messages": dialogue(parts({"type": "video"}), "y")}, "0 videos beside the dialogue for 1 places in it", ""),
        ({"messages": dialogue(["x"], "y")}, "turn 1: a part of content must be an object, not str", ""),
        ({"question": "q", "answer": "y", "video": "x.mp4"}, "it has a video, and vision has patches of a", ""),
        ({"messages": dialogue("x", parts({"type": "text"}))}, "turn 2: text=None must be a string", ""),
        ({"messages": [{"role": "system", "content": [PLACE]}]}, "turn 1: a part of content is of type 'image'", ""),
        ({"messages": dialogue(parts({**image, "image": "http://h/x.png"}), "y")}, "is a URL; media are", "http://h/x.png"),
        ({"messages": dialogue(parts({**image, "image": "../x.png"}), "y")}, "leads out of the folder", "../x.png"),
        ({"messages": dialogue(parts({**image, "image": "none.png"}), "y")}, "does not exist", f"{tmp_path}/none.png"),
        ({"images": ["a.png", "torn.png"], "messages": dialogue(parts(PLACE, PLACE), "y")}, "", f"{tmp_path}/torn.png"),
        ({"question": "q", "answer": 3}, "answer=3 must be a string", ""),
        ({"question": "q", "answer": "a"}, "", ""),
    ]  # fmt: skip
    config = write_json(tmp_path, [{"id": f"no-{at}", **row} for at, (row, _, _) in enumerate(cases)])
    mixture = opened(tmp_path, config, split="test", skipped=tmp_path / "skipped.jsonl")
    for at in range(len(mixture)):
        mixture.sample(at)
    rows = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: int(row["id"].removeprefix("no-")))
    assert len(rows) == len(cases) - 1
    for at, (row, (_, reason, medium)) in enumerate(zip(rows, cases, strict=False)):
        assert row["name"] == f"{tmp_path}/data.json[{at}]" and row["id"] == f"no-{at}"
        assert reason in row["reason"] and row.get("medium", "") == medium, row


def tar_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def test_shards_in_laions_layout(tmp_path):
    meta = json.dumps({"url": "x", "caption": "unused", "width": 8}).encode()
    files = {
        "000/1.jpg": encoded(pixels(8, 8), "JPEG"), "000/1.txt": b"ein Bild", "000/1.json": meta,
        "000/2.webp": encoded(pixels(8, 8), "WEBP"), "000/2.json": meta,
        "000/3.10.png": encoded(pixels(16, 8)), "000/3.2.png": encoded(pixels(8, 8)), "000/3.txt": b"two",
        "long" * 30 + ".txt": b"a long name", "long" * 30 + ".png": encoded(pixels(8, 8)),
    }  # fmt: skip
    (tmp_path / "00000.tar").write_bytes(tar_of(files))
    (tmp_path / "00001.tar").write_bytes(tar_of({"4.txt": b"text", "4.json": b'{"question": "q", "answer": "a"}'}))
    config = SourceConfig(kind="webdataset", path=str(tmp_path / "{00000..00001}.tar"), question="what is it?")
    mixture = opened(tmp_path, config, split="test")
    samples = [mixture.sample(at) for at in range(len(mixture))]
    question = "what is it? "
    assert [text_of(s.tokens) for s in samples] == [
        f"1:<v>{question}ein Bild$", f"1:<v>{question}unused$", f"1:<v>2:<v>{question}two$",
        f"1:<v>{question}a long name$", "q a$",
    ]  # fmt: skip
    assert [m.shape[0] for m in samples[2].media["vision"]] == [8, 16]  # 2.png before 10.png


CAPTION = SourceConfig(kind="webdataset", question="Describe the image.", max_patches=0)


def test_images_of_every_ending_in_shards(tmp_path):
    """Endings in capitals, Pillow's rarer formats, and a member that is named `image` by its data set."""
    kinds = {
        "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "JPG": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF",
        "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "avif": "AVIF", "image": "PNG",
    }  # fmt: skip
    files = {}
    for number, (ending, kind) in enumerate(kinds.items()):
        files |= {f"{number}.{ending}": encoded(pixels(8, 16, number), kind), f"{number}.txt": ending.encode()}
    (tmp_path / "0.tar").write_bytes(tar_of(files))
    mixture = opened(tmp_path, replace(CAPTION, path=str(tmp_path / "0.tar")), split="test")
    samples = [mixture.sample(at) for at in range(len(mixture))]
    assert [text_of(sample.tokens) for sample in samples] == [f"1:<v>Describe the image. {ending}$" for ending in kinds]
    for number, kind in enumerate(kinds.values()):
        (medium,) = samples[number].media["vision"]
        near = 0.3 if kind in ("JPEG", "WEBP", "AVIF", "GIF") else 1e-6
        assert medium.shape == (8, 16, 3) and np.abs(medium - pixels(8, 16, number) / 255).mean() < near


def test_a_caption_without_its_medium_is_no_sample(tmp_path):
    """Members that are missing, empty or of unknown endings; columns that are null; keys that name nothing."""
    image, lost = encoded(pixels(8, 8)), json.dumps({"caption": "x", "status": "failed_to_download"}).encode()
    files = {
        "0.txt": b"alone", "1.json": lost, "2.heic": image, "2.txt": b"heic", "3.jpg": image, "3.txt": b" \n",
        "4.jpg": image, "4.json": b'{"width": 3}', "5.jpg": image, "5.txt": b"good", "6.txt": b"", "6.jpg": image,
    }  # fmt: skip
    (tmp_path / "0.tar").write_bytes(tar_of(files))
    mixture = opened(tmp_path, replace(CAPTION, path=str(tmp_path / "0.tar")), split="test")
    assert [text_of(mixture.sample(at).tokens) for at in range(len(mixture))] == ["1:<v>Describe the image. good$"]
    faults = {fault.name.rpartition(":")[2]: fault.reason for fault in mixture.sources[0].index.left_out()}
    alone = "without its medium: it has no image, no video and no recording"
    reasons = {
        "0": alone, "1": alone, "2": "its caption is of 'heic', which ends as no image", "3": "says nothing",
        "4": "has no conversations", "6": "says nothing",
    }  # fmt: skip
    assert faults.keys() == reasons.keys() and all(reasons[name] in reason for name, reason in faults.items()), faults

    (tmp_path / "a.png").write_bytes(image)
    empty: list[Any] = [None, "", [""], [None], [], {"bytes": None, "path": None}]
    rows = [*({"image": value, "caption": "no"} for value in empty), {"text": "no"}, {"images": [], "text": "no"}]
    rows += [{"image": "a.png", "text": "yes"}, {"image": None, "question": "q", "answer": "text alone"}]
    config = replace(write_json(tmp_path, rows), question="Describe the image.")
    mixture = opened(tmp_path, config, split="test")
    texts = ["1:<v>Describe the image. yes$", "q text alone$"]
    assert [text_of(mixture.sample(at).tokens) for at in range(len(mixture))] == texts
    # Without a question text alone is text; with a key for media it is still a caption that lacks them.
    mixture = opened(tmp_path, write_json(tmp_path, rows), split="test")
    assert [text_of(mixture.sample(at).tokens) for at in range(len(mixture))] == [" no$", "1:<v> yes$", "q text alone$"]

    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs: list[Any] = [{"bytes": image}, None, {"bytes": None}, {"bytes": b""}, {"path": ""}]
    table = {"image": pa.array(structs, kind), "caption": ["yes", "1", "2", "3", "4"]}
    pq.write_table(pa.table(table), tmp_path / "data.parquet")
    config = replace(CAPTION, kind="parquet", path=str(tmp_path / "data.parquet"))
    mixture = opened(tmp_path, config, split="test")
    assert [text_of(mixture.sample(at).tokens) for at in range(len(mixture))] == ["1:<v>Describe the image. yes$"]


def test_files_behind_urls(tmp_path, paths):
    import fsspec

    system = fsspec.filesystem("memory")
    for path in (p for p in paths["llava"].parents[1].rglob("*") if p.is_file() and "cache" not in p.parts):
        system.pipe_file(f"/sources/{path.relative_to(paths['llava'].parents[1])}", path.read_bytes())
    ends = {"llava": "llava/data.json", "webdataset": "webdataset/*.tar", "array_record": "data.array_record"}
    for kind, end in {**ends, "parquet": "data.parquet"}.items():
        local = opened(tmp_path, SourceConfig(kind=kind, path=str(paths[kind])))
        remote = opened(tmp_path, SourceConfig(kind=kind, path=f"memory://sources/{end}"))
        for at in (0, 7, 29):
            assert local.meta(at) == remote.meta(at)
            a, b = local.sample(at), remote.sample(at)
            assert np.array_equal(a.tokens, b.tokens)
            assert all(map(np.array_equal, a.media.get("vision", ()), b.media.get("vision", ())))


@dataclass
class Counting:
    """A reader as a user may write it."""

    config: SourceConfig

    def files(self):
        return ()

    def scan(self):
        return (Entry(name=f"number {n}", place=(n,)) for n in range(5))

    def read(self, place):
        image = Media(name="image", data=encoded(np.full((8, 8, 3), place[0], np.uint8)))
        return Record(turns=((f"<image>{self.config.path}?", str(place[0])),), images=(image,))


def test_a_reader_of_ones_own(tmp_path):
    mixture = opened(tmp_path, SourceConfig(kind="test_formats:Counting", path="how many"), split="test")
    assert [text_of(mixture.sample(n).tokens) for n in range(5)] == [f"<v>how many? {n}$" for n in range(5)]
    assert np.allclose(mixture.sample(3).media["vision"][0], 3 / 255)


def test_mixtures(tmp_path):
    rows = {name: [{"question": name, "answer": str(n)} for n in range(10)] for name in "ab"}
    sources = {name: write_json(tmp_path / name, records) for name, records in rows.items()}
    mixture = opened(tmp_path, sources, {"a": 0.7, "b": 0.3})
    drawn = [mixture.sample(index) for index in range(100)]
    for first in range(0, 100, 10):
        assert [s.question for s in drawn[first : first + 10]].count("a") == 7
    assert sorted(s.answer for s in drawn if s.question == "b") == sorted([str(n) for n in range(10)] * 3)
    test = opened(tmp_path, sources, {"a": 0.7, "b": 0.3}, split="test")
    assert [test.sample(index).question for index in range(4)] == ["a", "b", "a", "b"] and len(test) == 20


def test_held_out_records_are_not_trained_on(tmp_path):
    rows = [{"question": "q", "answer": str(n)} for n in range(20)]
    config = SourceConfig(path=write_json(tmp_path, rows).path, held_out=4)
    test, train = (opened(tmp_path, config, split=split) for split in ("test", "train"))
    held_out = {test.sample(index).answer for index in range(len(test))}
    trained = {train.sample(index).answer for index in range(48)}
    assert (len(test), len(train), len(held_out), len(trained)) == (4, 16, 4, 16) and not held_out & trained


def test_long_dialogues_are_left_out_or_cut(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(pixels(8, 8)))
    turns = [
        ("human", "<image>1"),
        ("gpt", "a"),
        ("human", "22<image>"),
        ("gpt", "b"),
        ("human", "3" * 90),
        ("gpt", "c"),
    ]
    conversations = [{"from": speaker, "value": text} for speaker, text in turns]
    rows = [{"images": ["a.png"] * 2, "conversations": conversations}, {"question": "q", "answer": "a"}]
    config = write_json(tmp_path, rows)
    skipped = tmp_path / "skipped.jsonl"
    left = opened(tmp_path, config, split="test", sequence_length=40, skipped=skipped)
    assert len(left) == 1
    (row,) = map(json.loads, skipped.read_text().splitlines())
    assert row["name"].endswith("data.json[0]") and "Data.sequence_length is 40" in row["reason"]
    for length, text in ((40, "<v>1 a$22<v> b$"), (10, "<v>1 a$")):
        cut = opened(tmp_path, SourceConfig(path=config.path, cut=True), split="test", sequence_length=length)
        sample = cut.sample(0)
        assert text_of(sample.tokens) == text and len(sample.media["vision"]) == text.count("<v>")
        assert cut.meta(0).tokens == len(sample.tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, r"own/Source\.path='': name the file"),
        ({"path": "nowhere.json"}, r"own/Source\.path='nowhere\.json': .* does not exist"),
        ({"kind": "webdataset", "path": "none*.tar"}, r"own/Source\.path='none\*\.tar': no file is called so"),
        ({"kind": "no_such.module:X"}, r"own/Source\.kind='no_such\.module:X': No module named"),
        ({"kind": "json:Reader"}, r"own/Source\.kind='json:Reader': json has no function or class 'Reader'"),
        ({"kind": "collections:OrderedDict"}, r"own/Source\.kind=.*what it makes has no files\(\)"),
    ],
)
def test_what_cannot_be_opened(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    config = SourceConfig(**changes) if "collections" not in str(changes) else SourceConfig(kind="test_formats:nothing")
    with pytest.raises(ConfigError, match=message.replace("collections:OrderedDict", "test_formats:nothing")):
        opened(tmp_path, config)


def nothing(config):
    return object()


def test_encoders_that_are_not_there(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(pixels(8, 8)))
    config = write_json(tmp_path, [{"image": "a.png", "caption": "c"}, {"question": "q", "answer": "a"}])
    mixture = opened(tmp_path, config, encoders={"audio": AUDIO}, split="test")
    assert len(mixture) == 1 and "no encoder of the model takes one" in mixture.sources[0].index.left_out()[0].reason
