"""Libraries' kernels in whole models, against the dense reference; plain kernels stand for them, see `stand_ins`."""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
from parity import Case
from stand_ins import stand_in
from test_parity import assert_equal_to_reference

from mmjax.attention.backends import Backend
from mmjax.mesh.layout import Layout
from mmjax.models.module_stage import ModuleStage

MASKED = Case(model="masked", vision=Layout(cp=2, rank_offset=6), llm=Layout(cp=3, pp=2), clip_norm=0.7)
CROSSED = Case(
    model="tied", vision=Layout(dp=2, rank_offset=4), llm=Layout(cp=2, pp=2, cp_way="all-to-all"), clip_norm=0.7
)
CASES = [
    pytest.param("tokamax", MASKED, id="intervals, cp, words", marks=pytest.mark.long),
    pytest.param("cudnn", CROSSED, id="cudnn, all-to-all"),
    pytest.param("cudnn", Case(one_bucket=True), id="cudnn, one program", marks=pytest.mark.long),
    pytest.param(
        "tokamax",
        replace(
            CROSSED,
            model="masked, prefix",
            painter=Layout(rank_offset=6),
            schedule="zb-h1",
            remat="dots",
            microbatches=3,
        ),
        id="intervals, all-to-all, prefix, zb-h1",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "tokamax",
        replace(MASKED, llm=Layout(cp=3, pp=2, cp_way="need", cp_tokens="contiguous")),
        id="intervals, need",
        marks=pytest.mark.slow,
    ),
    pytest.param("tokamax", replace(MASKED, llm=Layout(tp=2), remat="full"), id="words, tp", marks=pytest.mark.slow),
    pytest.param("cudnn", replace(MASKED, model="plain", llm=Layout(tp=2)), id="cudnn, tp", marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "case"), CASES)
def test_training_equals_the_dense_reference(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = parity.expected(case)
    stand_in(monkeypatch)
    taken: list[str] = []

    def backend(stage: ModuleStage) -> Backend:
        # cuDNN does not support cp_way 'gather': there "auto" chooses blockwise attention.
        split = stage.module == "vision" and case.vision.cp > 1
        taken.append("auto" if name == "cudnn" and split else name)
        return Backend(taken[-1], max_runs=stage.max_runs)

    monkeypatch.setattr(ModuleStage, "_backend", property(backend))
    assert_equal_to_reference(parity.run(case), wanted, case)
    assert name in taken
