"""A length in epochs becomes a number of steps by the records of the data, and settings in steps have to fit it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from trial_runs import ALONE, write_tiny

from mmjax.assembly.epochs import describe_epochs, with_steps
from mmjax.assembly.samples import open_source
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.train.dry_run import dry_run

RECORDS, HELD_OUT, BATCH = 37, 4, 8


@pytest.fixture
def bindings(tmp_path: Path) -> list[str]:
    for name, count in (("mine", RECORDS), ("other", 20)):
        rows = [{"question": "?", "answer": f"{name} {number}"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(binding for binding in ALONE if "Train.steps" not in binding),
        *("Data.sources={'mine': 1.0}", f"mine/Source.held_out={HELD_OUT}", f"Train.global_batch={BATCH}"),
        *(f"mine/Source.path={str(tmp_path / 'mine.jsonl')!r}", f"Data.cache={str(tmp_path / 'cache')!r}"),
    ]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2, 9), (0.5, 3), (0.01, 1), (8, 33), (0.1, 1)])
def test_every_training_record_is_seen_so_often(tmp_path: Path, bindings: list[str], epochs: float, steps: int) -> None:
    config = load_config([write_tiny(tmp_path, Train_epochs=float(epochs), Optimizer_warmup=0)], bindings)
    source = open_source(config, split="train")
    config = with_steps(config, source)
    assert config.train.steps == steps == max(1, -(-epochs * (RECORDS - HELD_OUT) // BATCH))
    seen = Counter(source.sample(index).answer for index in range(steps * BATCH))
    if epochs >= 1:
        assert len(seen) == RECORDS - HELD_OUT and min(seen.values()) >= epochs
        assert sum(seen.values()) - len(seen) * epochs < BATCH
    assert describe_epochs(config, source) == (
        f"Train.epochs={float(epochs)!r}: {steps} steps, as 33 records are 4.125 steps of 8",
    )
    # What the run directory says gives the same run.
    (tmp_path / "config.gin").write_text(operative_config(config))
    assert with_steps(load_config([tmp_path / "config.gin"]), source) == config


def test_an_epoch_of_a_mixture_is_all_records_of_all_sources(tmp_path: Path, bindings: list[str]) -> None:
    more = ["Data.sources={'mine': 1.0, 'other': 3.0}", f"other/Source.path={str(tmp_path / 'other.jsonl')!r}"]
    config = load_config([write_tiny(tmp_path, Train_epochs=2.0)], [*bindings, *more])
    assert with_steps(config, open_source(config, split="train")).train.steps == -(-2 * (33 + 20) // BATCH)


def test_what_does_not_fit_the_steps_is_refused(tmp_path: Path, bindings: list[str]) -> None:
    gin = write_tiny(tmp_path)
    for setting, message in (
        ("Optimizer.warmup=9", r"vision/Optimizer.warmup=9: must be below Train.steps \(9\)"),
        ("Train.profile_steps=(2, 10)", r"Train.profile_steps=\(2, 10\): .*1 to Train.steps \(9\)"),
    ):
        config = load_config([gin], [*bindings, "Train.epochs=2", setting])
        with pytest.raises(ConfigError, match=message):
            with_steps(config, open_source(config, split="train"))
    long = load_config(
        [gin], [*bindings, "Train.epochs=500", "Optimizer.warmup=1100", "Train.profile_steps=(1400, 1401)"]
    )
    assert with_steps(long, open_source(long, split="train")).train.steps == 2063
    with pytest.raises(ConfigError, match=r"^Train.epochs=2.0: the samples of Data.task='digits' have no end"):
        dry_run(load_config([gin], [*(one for one in ALONE if "Train.steps" not in one), "Train.epochs=2"]))


def test_a_flags_steps_count(tmp_path: Path) -> None:
    gin = write_tiny(tmp_path, Train_epochs=2.0)
    config = load_config([gin], ["Train.steps=30"])
    assert (config.train.steps, config.train.epochs) == (30, 0.0)
    (line,) = config.fitted
    assert line.startswith(f"Train.steps=30: Train.epochs is 0.0 and not 2.0, so that the steps count ({gin}:")
    with pytest.raises(ConfigError, match=r"^Train.epochs=3: it sets the steps; leave Train.steps=30 out, or this"):
        load_config([gin], ["Train.steps=30", "Train.epochs=3"])
