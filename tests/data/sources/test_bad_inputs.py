"""Wrong inputs: each is left out or leaves an empty slot, by name; the good ones beside them come out whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_inputs import BAD_IMAGES, GOOD, bad_line, bad_tars, cut, garbage, good_image, member, tar_of
from data_sources import opened, text_of

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.writers import Dialogue, write_array_record, write_parquet

FEW, MANY = 2, 14
"""Rounds of every kind of wrong input; with MANY they are more than a thousand."""
DIALOGUE = Dialogue(turns=(("<image>?", "good"),), images=(("png", good_image()),))
LONGEST = 20.0
"""Seconds that one wrong input may take."""


def outcome(folder: Path, **source: Any) -> tuple[int, dict[str, str]]:
    """How many samples come out whole, and the reasons for the others by name, as they are in skipped.jsonl."""
    skipped = folder / "skipped.jsonl"
    mixture = opened(folder, SourceConfig(max_patches=64, byte_limit=1 << 20, **source), split="test", skipped=skipped)
    good = 0
    for at in range(len(mixture)):
        begin, meta, sample = time.monotonic(), mixture.meta(at), mixture.sample(at)
        assert time.monotonic() - begin < LONGEST
        assert len(sample.tokens) == meta.tokens
        sizes = {name: [medium.shape[:-1] for medium in arrays] for name, arrays in sample.media.items()}
        grids = {"vision": 4, "audio": 1}
        assert {
            k: tuple(tuple(n // grids[k] for n in size) for size in arrays) for k, arrays in sizes.items()
        } == meta.grids
        if sample.loss_weights.any():
            assert text_of(sample.tokens) in ("<v>? good$", "1:<v> good$") and meta.weight == 5
            assert abs(sample.media["vision"][0].std() - 0.29) < 0.05
            good += 1
        else:
            assert not any(medium.any() for arrays in sample.media.values() for medium in arrays)
    rows = [json.loads(line) for line in skipped.read_text().splitlines()] if skipped.exists() else []
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["reason"] and "\n" not in row["reason"] and len(row["reason"]) <= 200 for row in rows)
    return good, {row["name"]: row["reason"] for row in rows}


def each_round(rounds: int) -> Iterator[np.random.Generator]:
    return (np.random.default_rng([7, number]) for number in range(rounds))


def lines(folder: Path, rounds: int) -> int:
    """Wrong lines between good ones."""
    (folder / "folder").mkdir()
    (folder / "good.png").write_bytes(good_image())
    bad = [bad_line(rng) for rng in each_round(rounds) for _ in range(20)]
    good = json.dumps(GOOD).encode()
    (folder / "data.jsonl").write_bytes(b"\n".join(line for wrong in bad for line in (wrong, good)))
    answers, skipped = outcome(folder, path=str(folder / "data.jsonl"))
    assert answers == len(bad) and set(skipped) == {f"{folder / 'data.jsonl'}:{2 * n + 1}" for n in range(len(bad))}
    return len(bad)


def images(folder: Path, rounds: int) -> int:
    """Wrong image files."""
    rows, bad = [GOOD], 0
    (folder / "good.png").write_bytes(good_image())
    for number, rng in enumerate(each_round(rounds)):
        for kind, make in BAD_IMAGES.items():
            name = f"{kind} {number}.png"
            (folder / name).write_bytes(make(rng))
            rows += [{**GOOD, "image": name}, GOOD]
            bad += 1
    with open(folder / "large.png", "wb") as file:
        file.write(good_image())
        os.ftruncate(file.fileno(), 1 << 40)  # a file of a terabyte, without the blocks
    os.mkfifo(folder / "pipe.png")
    os.symlink("loop.png", folder / "loop.png")
    rows += [{**GOOD, "image": name} for name in ("large.png", "pipe.png", "loop.png")]
    (folder / "data.json").write_text(json.dumps(rows))
    answers, skipped = outcome(folder, path=str(folder / "data.json"))
    assert (answers, len(skipped)) == (bad + 1, bad + 3)
    return bad + 3


def json_lists(folder: Path, rounds: int) -> int:
    """Lists of JSON that end too early, or have something else in them."""
    (folder / "good.png").write_bytes(good_image())
    good, bad, good_texts = json.dumps(GOOD), 0, 0
    for number, rng in enumerate(each_round(rounds)):
        texts = [f"[{good}, {good[: int(rng.integers(1, len(good)))]}", f"[{good}, 3]", f"[{good}, {'[' * 10**5}"]
        texts += [f"[{good}, {bad_line(rng).decode('latin-1')[:200]}\x00", f"[{good},\n", "[", "\ufeff[[]", "[[]]"]
        for at, text in enumerate(texts):
            (folder / f"{number}-{at}.json").write_text(text, encoding="utf-8")
            bad, good_texts = bad + 1, good_texts + (good in text)
        (folder / f"{number}-x.json").write_bytes(b"[" + garbage(rng) + b"\xff")
        bad += 1
    answers, skipped = outcome(folder, path=str(folder / "*.json"), media=str(folder))
    assert answers == good_texts and len({name.partition(".json")[0] for name in skipped}) == bad
    return bad


def shards(folder: Path, rounds: int) -> int:
    """Wrong tar files beside good ones."""
    good = tar_of([member("g.png", good_image()), member("g.txt", b"good")])
    bad = []
    for number, rng in enumerate(each_round(rounds)):
        for at, (kind, data) in enumerate(bad_tars(rng)):
            bad.append(folder / f"{number:03}-{at:03}-{kind}.tar")
            bad[-1].write_bytes(data)
        (folder / f"{number:03}-good.tar").write_bytes(good)
    answers, skipped = outcome(folder, kind="webdataset", path=str(folder / "*.tar"))
    named = {name.partition(".tar")[0] + ".tar" for name in skipped}
    assert answers == rounds and named == {str(path) for path in bad}
    return len(bad)


def array_records(folder: Path, rounds: int) -> int:
    """Wrong ArrayRecord files, and wrong records in a good one."""
    from array_record.python.array_record_module import ArrayRecordWriter

    intact = write_array_record(folder / "whole", [DIALOGUE] * 3).read_bytes()
    (folder / "good.array_record").write_bytes(intact)
    bad: list[Path] = []
    for number, rng in enumerate(each_round(rounds)):
        texts = [
            b"",
            garbage(rng),
            cut(intact, rng),
            bytes(len(intact)),
            rng.bytes(len(intact)),
            intact[: -int(rng.integers(1, 60000))],
        ]
        for at, text in enumerate(texts):
            bad.append(folder / f"{number}-{at}.array_record")
            bad[-1].write_bytes(text)
    writer, records = ArrayRecordWriter(str(folder / "records.array_record"), "group_size:1"), 0
    for rng in each_round(rounds):
        for text in (
            b"",
            b"{",
            b'{"a": 1}',
            b'{"image": "x", "caption": "y"}',
            garbage(rng),
            *(t for _, t in bad_tars(rng)),
        ):
            writer.write(text)
            records += 1
    writer.close()
    answers, skipped = outcome(folder, kind="array_record", path=str(folder / "*.array_record"))
    whole_names = {name for name in skipped if "records.array_record" not in name}
    assert answers == 3 and len(skipped) - len(whole_names) == records
    assert {name.partition(".array_record")[0] + ".array_record" for name in whole_names} == {str(p) for p in bad}
    return len(bad) + records


def tables(folder: Path, rounds: int) -> int:
    """Wrong Parquet files, and wrong rows in good ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    intact = write_parquet(folder / "whole", [DIALOGUE] * 3).read_bytes()
    (folder / "good.parquet").write_bytes(intact)
    bad: list[Path] = []
    for number, rng in enumerate(each_round(rounds)):
        texts = [
            b"",
            garbage(rng),
            b"PAR1" + garbage(rng) + b"PAR1",
            cut(intact, rng),
            intact[:-1],
            b"PAR1\xff\xff\xff\x7fPAR1",
        ]
        for at, text in enumerate(texts):
            bad.append(folder / f"{number}-{at}.parquet")
            bad[-1].write_bytes(text)
        image = BAD_IMAGES[("bomb", "garbage", "truncated png")[rng.integers(3)]](rng)
        columns: list[dict[str, Any]] = [
            {"images": [[3]], "conversations": [["x"]]},
            {"image": [1.5], "caption": ["y"]},
            {"question": [b"\xff"], "answer": [3]},
            {"other": ["z"]},
            {"image": [{"path": "../good.png"}], "caption": ["y"]},
            {"image": [{"bytes": image}], "caption": ["y"]},
        ]
        for at, column in enumerate(columns):
            bad.append(folder / f"{number}-c{at}.parquet")
            pq.write_table(pa.table(column), bad[-1])
    answers, skipped = outcome(folder, kind="parquet", path=str(folder / "*.parquet"))
    assert answers == 3 and {name.partition(".parquet")[0] + ".parquet" for name in skipped} == {str(p) for p in bad}
    return len(bad)


def repeated(value: Any, count: int) -> Any:
    """A column of one value, which the file holds once."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


KINDS = (lines, images, json_lists, shards, array_records, tables)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_wrong_inputs_are_skipped_by_name(kind, tmp_path):
    assert kind(tmp_path, FEW) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_wrong_inputs(tmp_path):
    counts = {}
    for kind in KINDS:
        (tmp_path / kind.__name__).mkdir()
        counts[kind.__name__] = kind(tmp_path / kind.__name__, MANY)
    assert sum(counts.values()) > 1000, counts


@pytest.mark.long
def test_tables_that_are_large_in_memory_alone(tmp_path):
    """Kilobytes that would be gigabytes: each is refused by name before it is decoded; one that is not is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def said(text: str, turns: int) -> Any:
        """One row of so many turns that say the same."""
        columns = [repeated("user", turns), repeated(text, turns)]
        return pa.ListArray.from_arrays(
            pa.array([0, turns], pa.int32()), pa.StructArray.from_arrays(columns, ["role", "content"])
        )

    tables: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "list": ({"messages": said("hi" * 500, 3_000_000)}, {}, "a row group of 1 rows in"),
        "row": ({"messages": said("hi" * 9999, 5000)}, {}, "the row takes 10"),
        "zeros": (
            {"image": [bytes(100 << 20)], "caption": ["a"]},
            {"compression": "zstd", "use_dictionary": False},
            "a row group of 1 rows in",
        ),
        "rows": ({"question": repeated("q" * 999, 200_000), "answer": repeated("a", 200_000)}, {}, "200000 rows in"),
        "prefixes": (
            {"caption": ["c" * 99] * 9},
            {"use_dictionary": False, "column_encoding": {"caption": "DELTA_BYTE_ARRAY"}},
            "DELTA_BYTE_ARRAY is an encoding that is not read",
        ),
        "good": ({"question": repeated("q" * 99, 500), "answer": repeated("a" * 99, 500)}, {}, ""),
    }
    for name, (columns, options, _) in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet", **options)
        assert (tmp_path / f"{name}.parquet").stat().st_size < 50_000
    pool = pa.default_memory_pool()
    peak = pool.max_memory() or 0  # of writing them
    mixture = opened(tmp_path, SourceConfig(kind="parquet", path=str(tmp_path / "*.parquet")), split="test")
    assert len(mixture) == 500 and (pool.max_memory() or 0) < peak + (50 << 20)
    faults = mixture.sources[0].index.left_out()
    left = {Path(fault.name.partition(".parquet")[0]).name: fault.reason for fault in faults}
    assert set(left) == set(tables) - {"good"}
    assert all(tables[name][2] in reason for name, reason in left.items()), left


def flipped(rng: np.random.Generator, intact: bytes) -> bytes:
    """A few bytes changed anywhere."""
    data = bytearray(intact)
    for at in rng.integers(0, len(data), int(rng.integers(1, 6))):
        data[at] = int(rng.integers(256))
    return bytes(data)


@pytest.mark.parametrize("rounds", [6, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["webdataset", "array_record", "parquet", "llava"])
def test_bytes_changed_anywhere_harm_nothing_else(kind, rounds, tmp_path):
    """A changed file may still be legal, so the test only asks that no other file is blamed or harmed."""
    good = tar_of([member("g.png", good_image()), member("g.txt", b"good")])
    intact = {
        "webdataset": lambda: good,
        "array_record": lambda: write_array_record(tmp_path / "w", [DIALOGUE]).read_bytes(),
        "parquet": lambda: write_parquet(tmp_path / "w", [DIALOGUE]).read_bytes(),
        "llava": lambda: json.dumps(GOOD).encode(),
    }[kind]()
    suffix = {"webdataset": "tar", "llava": "jsonl"}.get(kind, kind)
    (tmp_path / "good.png").write_bytes(good_image())
    (tmp_path / f"0.{suffix}").write_bytes(intact)
    for number, rng in enumerate(each_round(rounds), 1):
        (tmp_path / f"{number}.{suffix}").write_bytes(flipped(rng, intact))
    skipped = tmp_path / "skipped.jsonl"
    source = SourceConfig(kind=kind, path=str(tmp_path / f"*.{suffix}"), media=str(tmp_path), byte_limit=1 << 20)
    mixture = opened(tmp_path, source, split="test", skipped=skipped)
    for at in range(len(mixture)):
        begin, meta, sample = time.monotonic(), mixture.meta(at), mixture.sample(at)
        assert len(sample.tokens) == meta.tokens and time.monotonic() - begin < LONGEST
    assert text_of(mixture.sample(0).tokens).endswith(" good$")
    named = [json.loads(line)["name"] for line in skipped.read_text().splitlines()] if skipped.exists() else []
    assert not any(name.startswith(str(tmp_path / f"0.{suffix}")) for name in named)
