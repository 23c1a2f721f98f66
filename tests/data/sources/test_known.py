"""Data that change under a run: what was held out stays so, what was trained on is never held out, and it is said."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from data_sources import ENCODERS, TOKENIZER, encoded, opened, pixels

from mmjax.configurable import ConfigError
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_packer, make_source
from mmjax.data.service.identity import difference, identity
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.sources.mixture import Mixture
from mmjax.data.spec import DataSpec

Known = dict[str, KnownRecords]

RECORDS, HELD_OUT = 31, 5
Row = dict[str, str]


def rows(first: int, count: int) -> list[Row]:
    return [{"question": "?", "answer": f"answer {number}"} for number in range(first, first + count)]


def write(folder: Path, records: Sequence[Row]) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def mixture(folder: Path, split: str = "train", known: Known | None = None, seed: int = 0, **changes: Any) -> Mixture:
    source = SourceConfig(**{"path": str(folder / "data.jsonl"), "held_out": HELD_OUT, **changes})
    return opened(folder, source, split=split, seed=seed, known=known)


def answers(source: Mixture, count: int = 0) -> list[str]:
    return [source.sample(index).answer for index in range(count or len(source))]


def both(folder: Path, known: Known | None = None, **changes: Any) -> tuple[set[str], set[str]]:
    """The records of an epoch of training, and those held out."""
    trained, held_out = (set(answers(mixture(folder, split, known, **changes))) for split in ("train", "test"))
    return trained, held_out


def shuffled(records: list[Row]) -> list[Row]:
    return random.Random(0).sample(records, len(records))


@pytest.fixture
def known(tmp_path: Path) -> Known:
    """The records as a checkpoint has them, read back from JSON."""
    write(tmp_path, rows(0, RECORDS))
    stored = json.loads(json.dumps({name: asdict(records) for name, records in mixture(tmp_path).known().items()}))
    return {name: KnownRecords(**records) for name, records in stored.items()}


CHANGES: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "appended": (lambda old: old + rows(100, 13), "and now 44 of 44, 13 were appended"),
    "in front": (lambda old: rows(100, 13) + old, "and now 44 of 44, some are others or stand elsewhere"),
    "shuffled": (shuffled, "and now 31 of 31, some are others or stand elsewhere"),
    "removed": (lambda old: old[7:], "and now 24 of 24, 7 or more are gone"),
    "doubled": (lambda old: old + old[::-1], "and now 62 of 62, 31 were appended"),
    "broken": (lambda old: [{"question": "?"}, *old[1:]], "and now 30 of 31, 1 or more are gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_held_out_records_stay_so_and_no_others_join_them(tmp_path: Path, known: Known, change: str) -> None:
    trained, held_out = both(tmp_path)
    assert len(held_out) == HELD_OUT and len(trained) == RECORDS - HELD_OUT and not trained & held_out
    changed, words = CHANGES[change]
    write(tmp_path, changed(rows(0, RECORDS)))
    source = mixture(tmp_path, known=known)
    present = {row["answer"] for row in changed(rows(0, RECORDS)) if "answer" in row}
    assert both(tmp_path, known) == (present - held_out, present & held_out)
    assert source.changes() == {"own": f"31 of 31 records could be used, {words}"}
    # What the next checkpoint has still names the records that are gone.
    again = source.known()
    assert again["own"].held_out == known["own"].held_out
    write(tmp_path, rows(0, RECORDS))
    assert both(tmp_path, again) == (trained, held_out)


@pytest.mark.parametrize("seed", range(3))
def test_data_that_have_not_changed_give_the_same_samples(tmp_path: Path, known: Known, seed: int) -> None:
    for split in ("train", "test"):
        count = 3 * RECORDS if split == "train" else 0
        new, goes_on = (mixture(tmp_path, split, before, seed=seed) for before in (None, known))
        assert answers(goes_on, count) == answers(new, count) and goes_on.changes() == {}
        assert goes_on.known() == new.known() == known


def test_copies_that_were_there_are_trained_on_and_later_ones_held_out(tmp_path: Path) -> None:
    same = [{"question": "?", "answer": "yes"}]
    write(tmp_path, [*rows(0, 4), *same, *rows(4, 4), *same])  # numbers 0 and 5 are held out: the first of each kind
    known = mixture(tmp_path, held_out=2).known()
    trained, held_out = (answers(mixture(tmp_path, split, held_out=2)) for split in ("train", "test"))
    assert "yes" in trained and held_out == ["answer 0", "answer 4"]
    write(tmp_path, [*same, *rows(0, 9), *same])
    known["own"] = replace(known["own"], count=2)
    assert "yes" in answers(mixture(tmp_path, known=known, held_out=2))

    write(tmp_path, [*same, *rows(0, 4), *same, *rows(4, 4)])
    known = mixture(tmp_path, held_out=1).known()
    assert answers(mixture(tmp_path, "test", held_out=1)) == ["yes"]
    for copies in (1, 3):
        write(tmp_path, [*rows(20, 3), *same, *rows(0, 8), *copies * same])
        assert answers(mixture(tmp_path, "test", known, held_out=1)) == copies * ["yes"]
        assert answers(mixture(tmp_path, known=known, held_out=1)).count("yes") == 1


def test_records_are_the_same_under_other_settings(tmp_path: Path) -> None:
    """A held-out caption stays so when what is asked about it, and the template, are others."""
    (tmp_path / "a.png").write_bytes(encoded(pixels(8, 8)))
    write(tmp_path, [{"image": "a.png", "caption": f"caption {number}"} for number in range(RECORDS)])
    known = mixture(tmp_path, question="What?").known()
    before = both(tmp_path, question="What?")
    changes: Any = {"question": "Which?", "template": "vicuna"}
    assert both(tmp_path, known, **changes) == before
    assert mixture(tmp_path, known=known, **changes).changes() == {}


def test_a_change_of_text_of_the_same_length_is_one(tmp_path: Path, known: Known) -> None:
    before = mixture(tmp_path).identity
    write(tmp_path, [*rows(0, RECORDS - 1), {"question": "?", "answer": "answer 99"}])
    assert mixture(tmp_path, known=known).changes() and mixture(tmp_path).identity != before


def test_another_number_of_held_out_records_is_refused(tmp_path: Path, known: Known) -> None:
    for count in (0, HELD_OUT + 1):
        with pytest.raises(
            ConfigError, match=rf"^own/Source.held_out={count}: .* but the 5 held out .* set it to 5 or"
        ):
            mixture(tmp_path, known=known, held_out=count)
    write(tmp_path, rows(100, RECORDS))
    with pytest.raises(ConfigError, match="none of the records that the run holds out is in the data any more"):
        mixture(tmp_path, known=known)


def test_a_server_that_does_not_know_the_run_is_told_apart(tmp_path: Path, known: Known) -> None:
    write(tmp_path, rows(0, RECORDS + 9))
    source, data = mixture(tmp_path, known=known), DataConfig(sources={"own": 1.0}, cache=str(tmp_path / "cache"))
    packer = make_packer(data, ENCODERS, source, TOKENIZER, global_batch=4, microbatches=1, cells=1)
    sources = {"own": SourceConfig(path=str(tmp_path / "data.jsonl"), held_out=HELD_OUT)}
    spec = BatchSpec(data=DataSpec(data, sources=sources, known=known), packer=packer, seed=0, global_batch=4)
    received = BatchSpec.from_json(json.loads(json.dumps(spec.to_json())))
    trainer, told, untold = (
        identity(of_spec, make_source(of_spec.data, ENCODERS, seed=0, split="train"))
        for of_spec in (spec, received, replace(spec, data=replace(spec.data, known={})))
    )
    assert told == trainer and received.data.known == known
    assert "the records held out (of a run: mmjax.serve --run_dir) is" in difference(trainer, untold)
