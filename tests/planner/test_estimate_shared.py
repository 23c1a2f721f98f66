"""A step on devices that share processors: it takes as long as all of its work, so many devices at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import PassSeconds
from mmjax.planner.estimate import Estimate
from mmjax.planner.work import ModuleWork, Shares, StageMemory, StagePart, Work

F, B, MOVE, GATHER, OP = 3.0, 5.0, 0.25, 0.5, 0.01


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Times that depend on nothing but the layers and the rows."""

    shared: float = 0.0
    source: str = "made up"
    memory: float = 1e9
    node: int = 8
    process: int = 0
    op: float = OP
    peak: float = 0.0
    platform: str = "cpu"

    def of(self, module: str) -> Steady:
        return self

    def computing(self, work: Work) -> Steady:
        return self

    def stage(
        self, module: str, part: StagePart, *, rows: float, width: int, tp: int, expert_share: float = 1.0
    ) -> PassSeconds:
        return PassSeconds(forward=F * part.layers * rows, backward=B * part.layers * rows)

    def temporaries(self, module: str, part: StagePart, *, rows: float, width: int, tp: int) -> float:
        return 0.0

    def move(self, size: float, *, across: bool) -> float:
        return MOVE

    def copy(self, size: float) -> float:
        return 0.0

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        return GATHER

    def all_to_all(self, size: float, ranks: int, *, across: bool) -> float:
        return GATHER


def estimate(layout: Layout, shared: float, *, microbatches: int = 4, rows: float = 2.0) -> Estimate:
    module = ModuleWork(
        name="llm",
        layers=2,
        model_width=4,
        width=8,
        rows=1.0,
        forward=Shares(layer=1.0),
        backward=Shares(layer=2.0),
        parameters=Shares(layer=1.0),
        trained=Shares(layer=1.0),
        memory={tp: StageMemory(residuals=Shares()) for tp in (1, 2)},
    )
    candidate = Candidate(mode="homogeneous", layouts={"llm": layout}, microbatches=microbatches)
    work = Work(modules={"llm": module}, global_batch=8)
    return Estimate(work=work, clock=Steady(shared=shared), candidate=candidate, rows={"llm": (rows, 8)})


def test_a_pipeline_on_one_processor_takes_all_of_its_work() -> None:
    done = estimate(Layout(pp=2), 1.0)
    stages = 4 * 2 * (2.0 * (F + B) + 2 * OP)
    moves = 4 * 2 * (MOVE + OP)
    once = 2 * 3 * OP
    assert done.seconds == pytest.approx(stages + moves + once)
    assert done.seconds == estimate(Layout(pp=2), 2.0).crowded * 2


def test_every_rank_of_a_stage_works_but_the_host_once() -> None:
    plain, cut = estimate(Layout(), 1.0), estimate(Layout(dp=2), 1.0)
    assert plain.seconds == pytest.approx(4 * (2 * 2.0 * (F + B) + 2 * OP) + 3 * OP)
    # Half of the rows on each of two ranks, and one op for both; parameters are gathered and gradients reduced.
    assert cut.seconds - plain.seconds == pytest.approx(2 * 2 * GATHER)


def test_where_the_pipeline_is_longer_it_decides() -> None:
    alone = estimate(Layout(pp=2), 0.0).seconds
    assert estimate(Layout(pp=2), 8.0).seconds == alone
    assert estimate(Layout(pp=2), 1.0).seconds > 1.3 * alone
