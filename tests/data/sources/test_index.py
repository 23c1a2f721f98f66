"""The index is made once, found again, trusted only when whole and fresh, and what is unreadable is listed in it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from data_sources import Heard, encoded, opened, pixels

from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.skipped import Fault, Skipped
from mmjax.data.sources.storage import Unreachable


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = []
    for n in range(6):
        (tmp_path / f"{n}.png").write_bytes(encoded(pixels(8 * (n % 3 + 1), 16, n)))
        rows.append({"image": f"{n}.png", "question": "<image>?", "answer": str(n)})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def source(folder: Path, heard: Heard | None = None, **changes):
    config = SourceConfig(path=str(folder / "data.jsonl"), max_patches=0, **changes)
    return opened(folder, config, split="test", observer=heard)


def index_file(folder: Path) -> Path:
    (path,) = (folder / "cache").glob("*.index")
    return path


def test_made_once_with_a_bar_and_found_again(data):
    first, second = Heard(), Heard()
    records = source(data, first)
    again = source(data, second)
    assert first.lines == ["indexing own 6"] and first.counted == 6 and second.lines == []
    assert [again.meta(n) for n in range(6)] == [records.meta(n) for n in range(6)]
    assert not list((data / "cache").glob("*.index.[0-9]*"))


@pytest.mark.parametrize("change", ["text", "image", "new image", "touch", "shard"])
def test_made_again_when_the_data_have_changed(data, change):
    config = SourceConfig(path=str(data / "*.jsonl"), media=str(data), max_patches=0)
    if change == "new image":
        (data / "5.png").unlink()
    before = opened(data, config, split="test")
    if change == "text":
        (data / "data.jsonl").write_text((data / "data.jsonl").read_text().replace('"0"', '"seven"'))
    elif change in ("image", "new image"):
        (data / "5.png").write_bytes(encoded(pixels(40, 40)))
    elif change == "touch":
        os.utime(data / "3.png", ns=(1, 1))
    else:
        (data / "more.jsonl").write_text('{"question": "q", "answer": "a"}')
    heard = Heard()
    after = opened(data, config, split="test", observer=heard)
    assert heard.lines[0] == "own: the data has changed since it was indexed; its index is made again"
    assert len(after) - len(before) == {"shard": 1, "new image": 1}.get(change, 0)
    if "image" in change:
        assert after.meta(5).grids == {"vision": ((10, 10),)}


def test_other_settings_have_an_index_of_their_own(data):
    source(data)
    for changes in ({"template": "vicuna"}, {"cut": True}, {"resize": "fixed", "size": (16, 16)}):
        heard = Heard()
        source(data, heard, **changes)
        assert heard.lines == ["indexing own 6"]
    heard = Heard()
    source(data, heard, held_out=2)
    assert heard.lines == []  # counts do not depend on it


def test_a_damaged_index_is_never_used(data):
    wanted = [source(data).meta(n) for n in range(6)]
    path = index_file(data)
    intact = path.read_bytes()
    rng = np.random.default_rng(0)
    flips = [int(at) for at in rng.integers(0, len(intact), 12)]
    damaged = [intact[:at] + bytes([intact[at] ^ 1 << int(rng.integers(8))]) + intact[at + 1 :] for at in flips]
    damaged += [intact.replace(key, b"x" * len(key), 1) for key in (b'files"', b'made_for"')]
    for text in [*damaged, b"", intact[:50], intact[:-1], intact + b"x", b"\x80\x04.", b"{}\n", b"[]\n", b"1\n" * 9]:
        path.write_bytes(text)
        heard = Heard()
        records = source(data, heard)
        assert [records.meta(n) for n in range(6)] == wanted
        assert path.read_bytes() == intact and heard.lines


def test_an_index_that_is_made_again_during_a_run_is_noticed(data):
    records = source(data)
    state = pickle.dumps(records.sources[0])
    assert pickle.loads(state).sample(2).answer == "2"
    path = index_file(data)
    (data / "0.png").write_bytes(encoded(pixels(16, 64)))
    source(data)
    with pytest.raises(Unreachable, match="made again during the run"):
        pickle.loads(state)
    path.unlink()
    with pytest.raises(Unreachable, match="cannot be read"):
        pickle.loads(state)


def _make(folder: Path, answers) -> None:
    heard = Heard()
    answers.put((heard.lines, source(folder, heard).meta(3).tokens))


@pytest.mark.long
def test_several_processes_make_it_once(data):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    makers = [context.Process(target=_make, args=(data, answers)) for _ in range(3)]
    for maker in makers:
        maker.start()
    heard = [answers.get(timeout=60) for _ in makers]
    for maker in makers:
        maker.join()
    assert sorted(len(lines) for lines, _ in heard) == [0, 0, 1] and len({tokens for _, tokens in heard}) == 1


def test_what_is_changed_behind_the_index_leaves_an_empty_slot(data):
    skipped = data / "run" / "skipped.jsonl"
    config = SourceConfig(path=str(data / "data.jsonl"), max_patches=0)
    mixture = opened(data, config, split="test", skipped=skipped)
    metas = [mixture.meta(n) for n in range(6)]
    (data / "0.png").unlink()
    (data / "1.png").write_bytes((data / "1.png").read_bytes()[:60])
    (data / "2.png").write_bytes(encoded(pixels(80, 80)))
    (data / "3.png").write_bytes(b"")
    for n in (0, 1, 2, 3, 2, 1, 0):
        sample = mixture.sample(n)
        assert not sample.loss_weights.any() and not sample.media["vision"][0].any()
        assert len(sample.tokens) == metas[n].tokens
        assert sample.media["vision"][0].shape[:2] == tuple(4 * side for side in metas[n].grids["vision"][0])
        assert int(sample.placeholders("vision").sum()) * 4 == metas[n].patches["vision"][0]
    assert mixture.sample(0, media=()).media == {} and not mixture.sample(0, media=()).loss_weights.any()
    assert mixture.sample(4).loss_weights.any() and mixture.sample(4, media=()).media == {}
    rows = [json.loads(line) for line in skipped.read_text().splitlines()]
    assert [row["name"].rpartition(":")[2] for row in rows] == ["1", "2", "3", "4"]
    assert "does not exist" in rows[0]["reason"] and "not what it was" in rows[2]["reason"]
    assert [row["medium"] for row in rows] == [str(data / f"{n}.png") for n in range(4)]
    again = opened(data, SourceConfig(path=str(data / "data.jsonl"), max_patches=0), split="test").sources[0]
    assert len(again) == 4  # made again: two cannot be used; that one is truncated is only seen when it is decoded


def test_nothing_usable_is_an_error_that_names_the_first(data):
    (data / "data.jsonl").write_text('{"question": 1}\n{"answer": 2}\n')
    with pytest.raises(ConfigError, match=r"own/Source\.path=.*: none of 2 records .* first, .*:1: question=1 must be"):
        source(data)
    (data / "data.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="it holds no samples"):
        source(data)


def test_a_strict_source_ends_the_run(data):
    (data / "4.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"data\.jsonl:5: .*no JPEG, PNG"):
        source(data, strict=True)
    (data / "4.png").write_bytes(encoded(pixels(8, 16)))
    records = source(data, strict=True)
    (data / "4.png").unlink()
    with pytest.raises(ConfigError, match=r"data\.jsonl:5: image '4\.png' does not exist"):
        records.sample(4)


def test_held_out_leaves_something_to_train_on(data):
    with pytest.raises(ConfigError, match=r"own/Source\.held_out=6: of 6 usable records"):
        source(data, held_out=6)


def test_storage_that_does_not_answer_ends_the_run_and_skips_nothing(data, monkeypatch):
    records = source(data)
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))
    attempts = []

    def fails(path, start, end):
        attempts.append(path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "_read", fails)
    with pytest.raises(Unreachable, match=r"data\.jsonl cannot be reached: .*Input/output error"):
        records.sample(0)
    assert len(attempts) == 3 and records.sources[0].skipped.count() == 0


def test_a_pipe_is_no_file_and_is_not_waited_for(data):
    os.mkfifo(data / "pipe.png")
    (data / "data.jsonl").write_text('{"image": "pipe.png", "caption": "x"}\n{"question": "q", "answer": "a"}')
    begin = time.monotonic()
    assert len(source(data)) == 1 and time.monotonic() - begin < 5


def test_each_name_is_written_once_whoever_finds_it(tmp_path):
    path = tmp_path / "run" / "skipped.jsonl"
    for _ in range(2):
        Skipped(path=path).add("a", [Fault("x", "one"), Fault("y", "two")])
    path.write_bytes(path.read_bytes() + b'{"source": "a", "na')  # a killed process
    writer = Skipped(path=path)
    writer.add("b", [Fault("x", "three", "7", "a.png")])
    writer.add("b", [Fault("x", "three")])
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(row["source"], row["name"]) for row in rows] == [("a", "x"), ("a", "y"), ("b", "x")]
    assert writer.count() == 3
    assert rows[0] == {"source": "a", "name": "x", "reason": "one"}
    assert rows[2] == {"source": "b", "name": "x", "id": "7", "medium": "a.png", "reason": "three"}


def test_a_cache_that_cannot_be_written(data):
    (data / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Data\.cache='.*file/cache': cannot be written"):
        opened(data / "file", SourceConfig(path=str(data / "data.jsonl")))
