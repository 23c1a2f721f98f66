"""A candidate as a configuration: what its rows follow from is packed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.source import Source
from mmjax.mesh.layout import Layout
from mmjax.plan.choice import plan_recipe
from mmjax.plan.planned import exact_rows, gin_text, planned, rows_by_candidate
from mmjax.plan.work import read_work
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import Candidate
from mmjax.planner.choose import PlanChoice
from mmjax.planner.clock import AnalyticClock
from mmjax.planner.estimate import Estimate
from mmjax.recipe import Recipe


def candidate(llm: Layout, vision: Layout, microbatches: int = 2, schedule: str = "1f1b") -> Candidate:
    layouts = {"vision": vision, "llm": llm}
    return Candidate(mode="any", layouts=layouts, microbatches=microbatches, schedule=schedule)


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *bindings: str) -> tuple[Recipe, Source, list[Recipe]]:
    """A configuration, its data, and a list that grows with every packer that is made."""
    from mmjax.plan import planned as module

    config = load_config((str(write_tiny(tmp_path)),), bindings)
    made: list[Recipe] = []
    build: Callable = module.build_packer
    monkeypatch.setattr(
        module, "build_packer", lambda config, *a, **k: (made.append(config), build(config, *a, **k))[1]
    )
    return config, open_source(config, split="train"), made


def test_what_is_packed_alike_is_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, source, made = packed(tmp_path, monkeypatch, "vision/Packing.buckets=2")
    rows_of = rows_by_candidate(config, source)
    alike = [
        candidate(Layout(dp=2), Layout(dp=2, rank_offset=2)),
        candidate(Layout(dp=2, pp=2), Layout(dp=2, rank_offset=4)),
        candidate(Layout(dp=2, pp=2), Layout(dp=1, rank_offset=4), schedule="zb-h1"),
    ]
    found = [rows_of(one) for one in alike]
    assert len(made) == 1 and found[0] == found[1] == found[2]
    others = [
        candidate(Layout(dp=2), Layout(dp=2, rank_offset=2), microbatches=4),
        candidate(Layout(dp=4), Layout(dp=2, rank_offset=4)),
        candidate(Layout(), Layout()),  # one submesh: the microbatches of a step share a bucket
    ]
    for number, one in enumerate(others, start=2):
        want = exact_rows(planned(config, one), source)
        del made[number - 1 :]
        assert rows_of(one) == want and len(made) == number


def test_a_plan_keeps_tokens_in_order_where_a_module_needs_it(tmp_path: Path) -> None:
    """Delta layers refuse another order over cp; and the order of other modules is the plan's."""
    config = load_config((str(write_tiny(tmp_path)),), ("llm/Decoder.delta_heads=2",))
    one = candidate(Layout(cp=2), Layout(cp=2, rank_offset=2))
    layouts = planned(config, one).model.layouts
    assert (layouts["llm"].cp_tokens, layouts["vision"].cp_tokens) == ("contiguous", "lpt")
    with pytest.raises(ConfigError) as error:
        load_config(
            (str(write_tiny(tmp_path)),),
            ("llm/Decoder.delta_heads=2", "llm/Layout.cp=2", "llm/Layout.tp=1", "vision/Layout.rank_offset=2"),
        )
    message = "llm/Layout.cp_tokens='lpt': delta layers (llm/Decoder.delta_heads) go from token to token; set it to"
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_no_plan_cuts_layers_that_belong_together(tmp_path: Path) -> None:
    bindings = ("llm/Decoder.kv_shared_layers=1", "llm/Layout.pp=1", "llm/Layout.tp=1", "vision/Layout.rank_offset=1")
    config = load_config((str(write_tiny(tmp_path)),), bindings)
    with pytest.raises(ConfigError) as error:
        plan_recipe(config, {"h100": 8})
    message = "llm/Decoder.kv_shared_layers=1: its layers cannot be cut anywhere, as plans do; set layouts by hand"
    assert str(error.value) == message


def test_the_order_of_samples_follows_from_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, source, made = packed(tmp_path, monkeypatch, "vision/Packing.buckets=2", "Data.reorder='disttrain'")
    rows_of = rows_by_candidate(config, source)
    one = candidate(Layout(dp=2), Layout(dp=2, rank_offset=2))
    rows_of(one)
    rows_of(replace(one, schedule="gpipe"))
    rows_of(one)
    assert len(made) == 2


def test_buckets_without_room_are_said_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, source, made = packed(tmp_path, monkeypatch)
    rows_of = rows_by_candidate(replace(config, data=config.data.with_settings(sequence_length=4)), source)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"Data\.sequence_length=4 is too short"):
            rows_of(candidate(Layout(), Layout()))
    assert len(made) == 1


@pytest.mark.long
def test_rows_and_gin_files_of_a_plan_with_cp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are as wide as cp wants, so each cp is packed for itself; the file that is written is what was planned."""
    config, source, made = packed(tmp_path, monkeypatch, "Data.sequence_length=51", "llm/Packing.buckets=()")
    rows_of = rows_by_candidate(config, source)
    whole, three, others = (candidate(Layout(cp=cp, rank_offset=3), Layout()) for cp in (1, 3, 1))
    widths = [rows_of(one)["llm"][1] for one in (whole, three, others)]
    assert widths[0] == widths[2] < widths[1] and widths[1] % 3 == 0 and len(made) == 2
    work = read_work(config, source)
    clock = AnalyticClock(work=work, accelerator=H100)
    spread = candidate(Layout(cp=2, cp_way="ring", rank_offset=4), Layout(cp=4))
    one = Estimate(work=work, clock=clock, candidate=spread, rows=rows_of(spread))
    out = tmp_path / "plan.gin"
    out.write_text(gin_text(config, PlanChoice(devices=6, estimates=[one]), one))
    assert "llm/Layout.cp = 2" in out.read_text() and "llm/Layout.cp_way = 'ring'" in out.read_text()
    again = load_config((str(tmp_path / "tiny.gin"), str(out)), ("Data.sequence_length=51",))
    assert again.model.layouts == spread.layouts


def test_the_metadata_of_a_sample_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where candidates are packed differently: long texts and many images take time."""
    config, source, packers = packed(tmp_path, monkeypatch, "vision/Packing.buckets=2")
    read = Counter[int]()
    meta = source.meta
    monkeypatch.setattr(source, "meta", lambda index: (read.update([index]), meta(index))[1])
    rows_of = rows_by_candidate(config, source)
    for microbatches in (1, 2, 4):
        rows_of(candidate(Layout(), Layout(rank_offset=1), microbatches))
    assert len(packers) == 3 and read and set(read.values()) == {1}
