"""The study `cornstarch`: predictions are what the published stage times say."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies import cornstarch


def test_cornstarch_is_predicted_from_its_stage_times() -> None:
    large = next(model for model in cornstarch.MODELS if model.name == "LLM-M VLM-L")
    assert large.published == pytest.approx(1.54, abs=0.01)
    # By hand, as Eq. 1 and 2: (4 · 101.22 + 5 · 98.44 + 23 · 101.22) ms and (4 · 70.57 + 5 · 194.37 + 23 · 194.37) ms.
    by_hand = (4 * 70.57 + 28 * 194.37) / (27 * 101.22 + 5 * 98.44)
    assert large.same_stages == pytest.approx(by_hand, rel=0.02)


@pytest.mark.slow
def test_rows_and_table_of_cornstarch() -> None:
    models = {model.name: model for model in cornstarch.MODELS}
    assert len(models) == 18
    errors = {name: abs(model.same_stages / model.published - 1) for name, model in models.items()}
    assert max(error for name, error in errors.items() if "LLM-S" not in name) < 0.16
    assert sum(error < 0.1 for error in errors.values()) >= 10
    rows = list(cornstarch.rows())
    assert len(rows) == 54 and all(row.ok for row in rows)
    (table,) = cornstarch.tables().values()
    assert table in (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    lines = table.splitlines()
    assert len(lines) == 20 and all(line.count("|") == 7 for line in lines)


def test_the_small_llm_contradicts_its_own_stage_times() -> None:
    """A cut whose stages are all shorter is published as slower: no model of a pipeline gives that."""
    small = next(model for model in cornstarch.MODELS if model.name == "LLM-S VLM-S")
    longest = [max(map(sum, zip(case.forward, case.backward, strict=True))) for case in (small.aware, small.unaware)]
    assert longest[0] < longest[1] and small.published < 1 < small.same_stages
