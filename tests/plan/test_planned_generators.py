"""Plans of generators whose rows are not cut: no ranks of cp, and ranks of tp with all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.plan.planned import planned
from mmjax.plan.work import read_work
from mmjax.planner.candidates import NON_COLOCATED, Candidate

FAMILIES = {
    "dit": ("painter/DiT.queries=2", "painter/DiT.merge=1", "painter/DiT.width=32", "painter/DiT.heads=4"),
    "unet": (
        *("painter/UNet.queries=2", "painter/UNet.canvases=((8, 8), (8, 16))", "painter/UNet.channels=1"),
        *("painter/UNet.widths=(8, 16)", "painter/UNet.heads_by_level=(2, 0)", "painter/UNet.mid_heads=4"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_memory_is_traced_and_tokens_are_not_shared(kind: str, tmp_path: Path) -> None:
    given = (f"Model.generators={{'painter': '{kind}'}}", "Digits.draw=1.0", "painter/Layout.rank_offset=4")
    recipe = load_config((str(write_tiny(tmp_path)),), (*given, "Data.sequence_length=64", *FAMILIES[kind]))
    module = read_work(recipe).modules["painter"]
    assert module.ring == 0 and 0 < module.memory[2].residuals.layer < module.memory[1].residuals.layer
    layouts = {name: Layout(rank_offset=number) for number, name in enumerate(("vision", "llm"))}
    candidate = Candidate(
        mode=NON_COLOCATED, layouts={**layouts, "painter": Layout(tp=2, rank_offset=2)}, microbatches=2
    )
    changed = planned(recipe, candidate).model["painter"].layout
    assert changed.tp == 2 and not changed.sp
