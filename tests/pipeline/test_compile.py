"""Programs are traced one after another and compiled meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

from mmjax.pipeline.compile import compile_all


@dataclass
class Slow:
    """A program whose tracing takes a while."""

    name: str
    events: list[str] = field(repr=False)

    def lower(self) -> None:
        time.sleep(0.05)
        self.events.append(f"traced {self.name}")

    def compile(self) -> None:
        self.events.append(f"compiled {self.name}")


def test_programs_are_reported_while_others_are_traced() -> None:
    """All were traced before any was reported, in half a minute without a word; a repeated one counts once."""
    events: list[str] = []
    programs = [Slow(name=name, events=events) for name in "abcdef"]
    reports: list[tuple[int, int]] = []

    def report(done: int, total: int, name: str) -> None:
        reports.append((done, total))
        events.append(f"reported {name}")

    compile_all(cast("Any", [*programs, programs[0]]), report)
    assert reports == [(done, 6) for done in range(1, 7)]
    assert events.index("reported a") < events.index("traced f")
