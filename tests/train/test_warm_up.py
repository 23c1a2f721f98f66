"""Warm-up trials: which links they call slow, what they print and write, and when they run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from mmjax.mesh.config import WorldConfig
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.link_trials import LinkTrial
from mmjax.train import warm_up
from mmjax.train.files import RunFiles
from mmjax.train.warm_up import Initializer, Link, WarmUp, compared, is_wanted

MIB = 1 << 20


def link(name: str, rate: float, **changes: Any) -> Link:
    """A link of ``rate`` GB/s, tried with 64 MiB inside process 0 unless `changes` say otherwise."""
    size = changes.pop("bytes", 64 * MIB)
    own = {"kind": "async", "ends": ((0,), (1,)), "processes": ((0,), (0,))} | changes
    return Link(name=name, bytes=size, seconds=size / (rate * 1e9), **own)


def slow(*links: Link) -> list[str]:
    return [one.name for one in compared(links) if one.slow]


def test_slow_is_four_times_below_the_median_of_its_like() -> None:
    quick = [link("a", 10.0), link("b", 12.0), link("c", 9.0)]
    assert slow(*quick, link("d", 2.4)) == ["d"]
    assert slow(*quick, link("d", 2.6)) == []
    assert slow(link("a", 10.0), link("d", 2.0)) == ["d"]
    assert slow(link("d", 2.0)) == [] and compared([link("d", 2.0)])[0].like == 0.0
    (*_, last) = compared([*quick, link("d", 2.4)])
    assert last.like == pytest.approx(10.0)


def test_only_links_that_can_be_compared_are() -> None:
    quick = [link("a", 10.0), link("b", 12.0)]
    assert slow(*quick, link("kind", 2.0, kind="gather")) == []
    assert slow(*quick, link("between processes", 2.0, processes=((0,), (1,)))) == []
    assert slow(*quick, link("small", 2.0, bytes=15 * MIB)) == []
    assert slow(*quick, link("less small", 2.0, bytes=17 * MIB)) == ["less small"]
    assert slow(*quick, link("large", 2.0, bytes=257 * MIB)) == []
    apart = [link(name, 10.0, processes=((0,), (1,))) for name in "ab"]
    assert slow(*quick, *apart, link("d", 2.0, processes=((1,), (2,)))) == ["d"]


def test_a_loss_that_nobody_notices_is_not_slow() -> None:
    quick = [link(name, 10.0, bytes=MIB) for name in "abc"]  # 0.1 ms
    assert slow(*quick, link("d", 1.0, bytes=MIB)) == []
    assert slow(*quick, link("d", 0.4, bytes=MIB)) == ["d"]
    few = [link(name, 10.0, bytes=MIB // 2) for name in "abc"]
    assert slow(*few, link("d", 0.011, bytes=MIB // 2)) == []
    assert slow(*few, link("d", 0.010, bytes=MIB // 2)) == ["d"]


def test_what_is_said() -> None:
    links = compared([link("a forward", 10.0), link("a backward", 1.0), link("llm.0 reduce", 5.0, kind="reduce")])
    first, second = WarmUp(links=links, boundaries=1, collectives=1, hosts=("node7",)).lines()
    assert first == "warm-up: 1 boundary, 1 collective; slowest a backward, 67.1 ms at 1 GB/s"
    where = "rank 0 of process 0 on node7 to rank 1 of process 0 on node7"
    assert second == f"warm-up: a backward is slow: 1 GB/s where its like have 10 GB/s, {where}"
    assert WarmUp(links=(), boundaries=0, collectives=0, hosts=("node7",)).lines() == []


class Elsewhere(World):
    """A world as it looks from one of its processes, on some platform."""

    def __init__(self, processes: int, platform: str, size: int):
        super().__init__(jax.devices()[:size])
        self.processes, self._platform = processes, platform

    @property
    def platform(self) -> str:
        return self._platform


@pytest.mark.parametrize(
    ("processes", "platform", "size", "wanted"),
    [(1, "cpu", 8, False), (2, "cpu", 8, True), (1, "gpu", 8, True), (1, "gpu", 1, False), (16, "gpu", 8, True)],
)
def test_links_are_tried_where_they_can_be_slow(processes: int, platform: str, size: int, wanted: bool) -> None:
    world = Elsewhere(processes, platform, size)
    assert is_wanted(WorldConfig(), world) == wanted
    assert is_wanted(WorldConfig(warm_up="on"), world) and not is_wanted(WorldConfig(warm_up="off"), world)


def test_the_initializer_runs_once_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, sent = World(jax.devices()[:2]), []
    one = LinkTrial(name="a forward", kind="async", bytes=8, ends=((0,), (1,)), make=lambda: 3, send=sent.append)
    # Of two ranks one is another's: this process has no part in it.
    monkeypatch.setattr(warm_up, "link_trials", lambda _: (one, replace(one, name="llm.0 reduce", kind="reduce")))
    initializer = Initializer(WorldConfig(warm_up="on"), world, cast(Executor, None))
    assert initializer.programs() == []
    (line,) = initializer(RunFiles(tmp_path, pytest.fail))
    assert line.startswith("warm-up: 1 boundary, 1 collective; slowest ")
    assert sent == [3] * 2 * (1 + warm_up.TIMES)
    written = json.loads((tmp_path / "warm_up.json").read_text())
    (host,) = written["hosts"]
    first, second = written["links"]
    assert host and (first["name"], second["kind"]) == ("a forward", "reduce")
    assert first["ranks"] == [[0], [1]] and first["processes"] == [[0], [0]] and not first["slow"]
    assert first["gigabytes_per_s"] == pytest.approx(8 / first["seconds"] / 1e9)
    assert initializer(None) == [] and len(sent) == 2 * (1 + warm_up.TIMES)
    assert Initializer(WorldConfig(), world, cast(Executor, None))(None) == []
