"""Processes that read different parts of the same step agree on it, and open no media but their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sources import ENCODERS, TOKENIZER, encoded, opened, pixels, recorded

from mmjax.data.config import DataConfig
from mmjax.data.loader import StepMaker, make_packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Media
from mmjax.data.types import StepBatch

CELLS, GLOBAL_BATCH, RECORDS = 2, 8, 16
BROKEN = {2: "2a.png", 5: "5b.png", 7: "7.wav", 11: "11a.png"}
TEXT = ("tokens", "targets", "weights", "vision_index", "audio_index")


def own_rows(cell: int, *, encoders: tuple[str, ...] = (), llm: tuple[str, ...] = ()) -> ProcessRows:
    wanted = {name: {"patches": (cell,), "positions": (cell,), "segments": (cell,)} for name in encoders}
    return ProcessRows(cells={**wanted, "llm": dict.fromkeys(llm, (cell,))})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = []
    for n in range(RECORDS):
        for at in "ab":
            (tmp_path / f"{n}{at}.png").write_bytes(encoded(pixels(16, 24, n)))
        (tmp_path / f"{n}.wav").write_bytes(recorded(np.sin(np.arange(1200) * (n + 1) / 20)))
        rows.append({
            "images": [f"{n}a.png", f"{n}b.png"], "audio": f"{n}.wav",
            "question": "<image><audio>", "answer": f"{n}: <image>",
        })  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def maker(folder: Path, process_rows: ProcessRows | None = None, strict: bool = False) -> StepMaker:
    source = opened(folder, SourceConfig(path=str(folder / "data.jsonl"), max_patches=0, strict=strict), split="test")
    config = DataConfig(sequence_length=96)
    packer = make_packer(
        config, ENCODERS, source, TOKENIZER, global_batch=GLOBAL_BATCH, microbatches=2, cells=CELLS, one_bucket=True
    )
    return StepMaker(source=source, packer=packer, global_batch=GLOBAL_BATCH, process_rows=process_rows)


def truncate(folder: Path) -> None:
    """Cuts the files' last bytes off, which headers do not show. The index stays as it is."""
    for name in BROKEN.values():
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])


@pytest.fixture
def read(monkeypatch) -> Counter:
    """How often each medium is opened."""
    opened: Counter = Counter()
    read_medium = Media.read

    def noted(self: Media, *arguments: Any) -> bytes:
        opened[Path(self.path).name] += 1
        return read_medium(self, *arguments)

    monkeypatch.setattr(Media, "read", noted)
    return opened


def assert_agree(part: StepBatch, all_rows: StepBatch, cell: int, inputs: dict[str, tuple[str, ...]]) -> None:
    assert (part.denominators, part.counts) == (all_rows.denominators, all_rows.counts)
    for a, b in zip(part.microbatches, all_rows.microbatches, strict=True):
        for module, names in inputs.items():
            for name in names:
                expected = b.inputs[module][name]
                rows = slice(cell * len(expected) // CELLS, (cell + 1) * len(expected) // CELLS)
                assert np.array_equal(a.inputs[module][name][rows], expected[rows]), (module, name)


def broken_maker(data: Path, process_rows: ProcessRows | None = None) -> StepMaker:
    """With the index of whole media and then broken ones."""
    for name in BROKEN.values():
        (data / name).write_bytes(encoded(pixels(16, 24, 1)) if name.endswith("png") else recorded(np.zeros(1200)))
    step_maker = maker(data, process_rows)
    truncate(data)
    return step_maker


@pytest.mark.parametrize("cell", range(CELLS))
def test_a_corrupt_medium_is_the_same_empty_slot_to_all(data, cell):
    all_rows = broken_maker(data)
    parts = {
        "encoder": (own_rows(cell, encoders=("vision",)), {"vision": ("patches", "positions")}),
        "both": (own_rows(cell, encoders=tuple(ENCODERS)), dict.fromkeys(ENCODERS, ("patches", "positions"))),
        "first stage": (own_rows(cell, llm=("tokens", *TEXT[3:])), {"llm": ("tokens", *TEXT[3:])}),
        "last stage": (own_rows(cell, llm=("targets", "weights")), {"llm": ("targets", "weights")}),
        "all": (own_rows(cell, encoders=("audio",), llm=TEXT), {"audio": ("patches",), "llm": TEXT}),
    }
    makers = {name: (broken_maker(data, rows), inputs) for name, (rows, inputs) in parts.items()}
    masked = []
    for step in range(RECORDS // GLOBAL_BATCH):
        wanted = all_rows(step)
        for make, inputs in makers.values():
            assert_agree(make(step), wanted, cell, inputs)
        weights = np.concatenate([np.asarray(m.inputs["llm"]["weights"]) for m in wanted.microbatches])
        segments = np.concatenate([np.asarray(m.inputs["llm"]["segments"]) for m in wanted.microbatches])
        masked += [bool(s.any() and not w.any()) for w, s in zip(weights, segments, strict=True)]
        # The denominator is the metadata's, whatever turns out to be broken.
        per_sample = [all_rows.source.meta(step * GLOBAL_BATCH + n).weight for n in range(GLOBAL_BATCH)]
        assert wanted.denominators["llm"] == sum(per_sample)
    assert [n for n, is_masked in enumerate(masked) if is_masked] == sorted(BROKEN)


def test_each_process_opens_its_own_media_alone(data, read):
    all_rows = maker(data)
    all_rows(0)
    cells = {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}  # two microbatches of two cells of two rows
    for cell, rows in cells.items():
        images = {f"{n}{at}.png" for n in rows for at in "ab"}
        sounds = {f"{n}.wav" for n in rows}
        for process_rows, expected in (
            (own_rows(cell, encoders=("vision",)), images),
            (own_rows(cell, encoders=("audio",)), sounds),
            (own_rows(cell, llm=("tokens", "vision_index", "audio_index")), set()),
            # Whether a sample is learned depends on whether all of it can be read.
            (own_rows(cell, llm=("targets", "weights")), images | sounds),
        ):
            make = maker(data, process_rows)
            read.clear()
            make(0)
            assert dict(read) == dict.fromkeys(expected, 1)


def test_where_a_broken_medium_ends_the_run_only_ones_own_are_opened(data, read):
    make = maker(data, own_rows(0, encoders=("audio",), llm=TEXT), strict=True)
    read.clear()
    make(0)
    assert set(read) == {f"{n}.wav" for n in (0, 1, 4, 5)}
