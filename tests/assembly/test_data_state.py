"""Runs whose data change between stop and start: the checkpoint knows the records, and the run says what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from trial_runs import ALONE, write_tiny

from mmjax.assembly.data_state import describe_data, known_in, stored_records
from mmjax.assembly.samples import open_source
from mmjax.assembly.serve_flags import main as serve_flags
from mmjax.checkpoint import Checkpointer
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import make_source
from mmjax.eval.__main__ import main as evaluation_command
from mmjax.inspect.__main__ import main as inspect_command
from mmjax.inspect.inspection import inspect
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

RECORDS = 31


def write_records(folder: Path, numbers: Sequence[int], broken: Sequence[object] = ()) -> Path:
    rows = [{"question": "?", "answer": f"no. {number}"} for number in numbers]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *broken]))
    return path


def bindings(folder: Path, *more: str) -> list[str]:
    return [
        *ALONE,
        *("Data.sources={'mine': 1.0}", f"mine/Source.path={str(folder / 'data.jsonl')!r}", "mine/Source.held_out=4"),
        *(f"Data.cache={str(folder / 'cache')!r}", "Train.eval_samples=4", *more),
    ]


def configured(folder: Path, *more: str) -> Recipe:
    return load_config([write_tiny(folder)], bindings(folder, *more))


def answers(recipe: Recipe, split: str) -> set[str]:
    source = open_source(recipe, split=split)
    return {source.sample(index).answer for index in range(len(source))}  # type: ignore[arg-type]


@pytest.mark.long
def test_a_run_goes_on_with_data_that_have_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path, range(RECORDS))
    config, run = configured(tmp_path), tmp_path / "run"
    with Trainer(config, run, style="silent") as trainer:
        assert trainer.data == ()
        trainer.train(steps=2)
        held_out = {sample.answer for sample in trainer.held_out()}
    with Trainer(config, run, style="silent") as trainer:
        assert trainer.data == () and trainer.step == 2

    write_records(tmp_path, [*range(100, 110), *range(RECORDS)])
    assert answers(config, "test") != held_out  # another command has indexed them, and chosen others
    with pytest.raises(ConfigError, match=r"^Data.require_same=True: the records of mine have changed .* 41 of 41"):
        Trainer(configured(tmp_path, "Data.require_same=True"), run, style="silent")
    with Trainer(config, run, style="silent") as trainer:
        assert trainer.data == (
            "mine: the data have changed since the last checkpoint: 31 of 31 records could be used, and now 41 of 41, "
            "some are others or stand elsewhere; 4 records are held out, of 4 when the run began; from here on "
            "samples come in another order",
        )
        assert {sample.answer for sample in trainer.held_out()} == held_out
        trainer.train(steps=4)
    with Trainer(config, run, style="silent") as trainer:
        assert trainer.data == ()
    known = known_in(config, run)
    assert answers(known, "test") == held_out and not answers(known, "train") & held_out
    assert evaluation_command([f"--run_dir={run}", "--json", "--samples=4"]) == 0
    json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_server_gets_what_the_run_holds_out(tmp_path: Path) -> None:
    write_records(tmp_path, range(RECORDS))
    config, run = configured(tmp_path), tmp_path / "run"
    held_out, source = answers(config, "test"), open_source(config, split="train")
    with Checkpointer(run / "checkpoints") as checkpointer:
        checkpointer.save(1, {"params/llm/a": jnp.zeros(1)}, extra=stored_records(source))
    write_records(tmp_path, [*range(100, 110), *range(RECORDS)])
    flags = [f"--gin_file={tmp_path / 'tiny.gin'}", *(f"--gin.{one}" for one in bindings(tmp_path))]
    for run_flags, wanted in (([f"--run_dir={run}"], held_out), ([], answers(config, "test"))):
        here, there = os.pipe()
        assert serve_flags([f"--answer={there}", *flags, *run_flags]) == 0
        with open(here) as answer:
            spec = BatchSpec.from_json(json.load(answer)["spec"])
        served = make_source(spec.data, spec.packer.encoders, seed=spec.seed, split="test")
        assert {served.sample(index).answer for index in range(4)} == wanted
    assert held_out != answers(config, "test")


BROKEN = [
    *({"image": f"{n}.png", "conversations": [{"from": "human", "value": "<image>"}]} for n in range(3)),
    *({"question": "?"} for _ in range(2)),
]


@pytest.mark.long
def test_records_left_out_are_counted_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_records(tmp_path, range(8), BROKEN)
    config = configured(tmp_path)
    line = (
        f"mine: 5 of 13 records cannot be used: 3 × {path}:9: the dialogue has no answer; 2 × {path}:12: answer=None "
        "must be a string; they are left out"
    )
    assert describe_data(config, open_source(config, split="train")) == (line,)
    found = inspect(config, 1)
    monkeypatch.setattr(
        "mmjax.inspect.inspection.inspect", lambda own, _: replace(found, max_broken=own.data.settings.max_broken)
    )
    flags = [f"--gin_file={tmp_path / 'tiny.gin'}", *(f"--gin.{one}" for one in bindings(tmp_path))]
    assert found.max_broken == 0.5 and inspect_command([*flags, "--text=0"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "mine: 5 of 13 records cannot be used and are left out",
        f"       3 × {path}:9: the dialogue has no answer",
        f"       2 × {path}:12: answer=None must be a string",
        "",
    ]

    fewer = "--gin.Data.max_broken=0.3"
    assert inspect_command([*flags, fewer, "--text=0"]) == 1
    assert "these are more than Data.max_broken=0.3 allows: a run is refused" in capsys.readouterr().out
    assert inspect_command([*flags, fewer, "--json"]) == 1
    left_out = json.loads(capsys.readouterr().out)["left_out"]["mine"]
    reasons = [(reason["count"], reason["first"]["name"]) for reason in left_out["reasons"]]
    assert (left_out["records"], left_out["scanned"]) == (5, 13)
    assert reasons == [(3, f"{path}:9"), (2, f"{path}:12")]
    with pytest.raises(
        ConfigError, match=r"^Data.max_broken=0.3: of mine, 5 of 13 records cannot be used: 3 × .*; mend"
    ):
        describe_data(configured(tmp_path, "Data.max_broken=0.3"), open_source(config, split="train"))
