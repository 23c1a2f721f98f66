"""Every step of the digits configurations has a plan; the bench makes those of 20,000 steps."""

from __future__ import annotations

import pytest

from benchmarks import data_plans
from benchmarks.data_plans import DATA, plan_all
from mmjax.data import buckets


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose from; with so few, the buckets are further from what later steps need."""
    monkeypatch.setattr(buckets, "_STEPS", (8, 8))
    monkeypatch.setattr(data_plans, "NUMBERS", (2, 6))


@pytest.mark.long
@pytest.mark.parametrize(
    "data", [pytest.param(name, marks=pytest.mark.long) if at else name for at, name in enumerate(DATA)]
)
def test_every_step_has_a_plan(data: str) -> None:
    found = plan_all(DATA[data][-1:] if data == "digits" else DATA[data], 60)
    assert len(found) >= 3 and any("one program" in case for case in found)
    assert {case: own.wrong for case, own in found.items()} == dict.fromkeys(found, 0)
