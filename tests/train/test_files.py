"""A run that continues from an earlier step drops every row written after that step."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.train.files import RunFiles


def test_rows_after_the_restored_step_are_dropped(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, pytest.fail)
    for step in (5, 10, 15):
        files.add_evaluation({"step": step, "exact_match": step / 100})
    with files.open_metrics(12, ()) as writer:
        for step in (11, 12, 13):
            writer.write({"step": step})
    assert [row["step"] for row in files.evaluations] == [5, 10]  # 15 is not evaluated yet
    files.open_metrics(11, ()).close()
    assert files.last_step == 11 and [row["exact_match"] for row in files.evaluations] == [0.05, 0.1]
    files.open_metrics(0, ()).close()
    assert files.last_step == 0 and files.evaluations == []


def test_configurations_after_the_restored_step_are_dropped(tmp_path: Path) -> None:
    first, second, third = (load_config([write_tiny(tmp_path)], [f"Train.log_every={n}"]) for n in (1, 2, 3))
    said: list[str] = []
    files = RunFiles(tmp_path / "run", said.append)

    def kept() -> dict[str, str]:
        return {path.name: path.read_text() for path in files.run_dir.glob("*.gin")}

    one, two, three = map(operative_config, (first, second, third))
    for config, step in ((first, 0), (second, 10), (second, 10), (third, 20)):
        files._keep_config(config, step)
    assert kept() == {"config.gin": three, "config-until-10.gin": one, "config-until-20.gin": two}
    assert len(said) == 2 and "after step 20 with other settings: Train.log_every = 2 → 3; " in said[1]
    # The checkpoints of steps 10 and later are damaged: what was set after step 8 has never been.
    files._keep_config(third, 8)
    assert kept() == {"config.gin": three, "config-until-8.gin": one}
    assert said[2:] == []  # `third` is what was tried last
    files._keep_config(first, 8)
    assert kept() == {"config.gin": one}
    # An earlier version wrote the same settings by their old names; those that are newer it did not have.
    newer = ("Digits.drawn_scale", "Digits.say ")
    older = "".join(line for line in one.splitlines(keepends=True) if not line.startswith(newer))
    (files.run_dir / "config.gin").write_text(older.replace("Digits.", "Data."))
    files._keep_config(first, 8)
    assert kept() == {"config.gin": one} and said[2:] == []


@pytest.mark.parametrize("name", ["config.gin", "metrics.jsonl", "eval.jsonl", "skipped.jsonl", "lock"])
@pytest.mark.parametrize("kind", ["folder", "dangling"])
def test_names_of_files_that_are_none(name, kind, tmp_path):
    if kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("nothing")
    said = rf"{name} is a .*; move it away, or name another directory than --run_dir="
    with pytest.raises(ConfigError, match=said):
        RunFiles(tmp_path, print)


def test_binary_files_are_named(tmp_path):
    for name in ("metrics.jsonl", "eval.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\0\n" * 3)
    files = RunFiles(tmp_path, print)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1 is not a JSON object .*; remove the line, or move"):
        _ = files.last_step
    with pytest.raises(ConfigError, match=r"eval\.jsonl:1 is not a JSON object"):
        _ = files.evaluations
