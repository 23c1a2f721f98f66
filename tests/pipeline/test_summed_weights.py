"""Products that add the gradients of their weights to the sums of gradients.

bf16 weights are trained so. Here fp32 weights are too, so that the dense reference's results can be told apart from
those of a weight that is counted twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import parity
import pytest
from parity import Case
from test_parity import COLOCATED, FAN_IN, RINGS, TIED, assert_equal_to_reference

from mmjax.mesh.layout import Layout
from mmjax.pipeline import weight_uses
from mmjax.pipeline.stage import StageFunctions
from mmjax.pipeline.trees import by_name

UNROLLED = replace(FAN_IN, unroll=True, remat="dots", clip_norm=0.7)
CASES = {
    "layers of three stages": UNROLLED,
    "the head alone, layers are stacked": replace(FAN_IN, vision=Layout(rank_offset=4)),
    "one device, one program": Case(unroll=True, remat="full"),
    "tied on one stage, adapted, split backward": replace(
        UNROLLED, model="adapted, tied", llm=Layout(tp=2), schedule="zb-h1"
    ),
    "rings, tokens shared, tied on two stages": replace(
        TIED, vision=replace(RINGS, dp=2, rank_offset=4), llm=replace(RINGS, pp=2), unroll=True, remat="dots"
    ),
    "tokens of all ranks on each": replace(COLOCATED, llm=Layout(tp=2, dp=4, sp=False), unroll=True, model="families"),
    "one program for all stages": replace(
        TIED, vision=Layout(pp=2), llm=Layout(pp=2), lowering="single", unroll=True, remat="dots"
    ),
    "a generator, an encoder's tokens split": replace(
        UNROLLED, model="drawing", vision=Layout(cp=2, rank_offset=4), llm=Layout(tp=2), painter=Layout(rank_offset=6)
    ),
}

SHORT = ("tied on one stage, adapted, split backward",)


@pytest.fixture
def fp32_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All dtypes are added by products, and no other test reads programs that were traced meanwhile."""
    parity._assembled.cache_clear()
    monkeypatch.setattr(weight_uses, "adds_to_sum", lambda dtype: True)
    yield
    parity._assembled.cache_clear()


def traced(case: Case) -> dict[str, StageFunctions]:
    """The functions of a case's stages, by stage."""
    parts = parity._parts(case)
    return dict(parts.placed.trace(next(iter(parts.shapes.values())), parts.schedule.graph).stages)


@pytest.mark.long
@pytest.mark.usefixtures("fp32_too")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in SHORT else pytest.mark.long) for name, case in CASES.items()],
)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.long
def test_which_weights_have_their_sums() -> None:
    """bf16 weights of one product, and an untied head: no tables, norms, stacks, frozen or fp32 weights."""
    layer = ["attn/k", "attn/o", "attn/q", "attn/v", "mlp/down", "mlp/gate", "mlp/up"]
    first = [f"llm/layer_{layer_index:03d}/{name}" for layer_index in (0, 1) for name in layer]
    last = [f"llm/layer_002/{name}" for name in layer]
    stages = traced(replace(UNROLLED, dtype="bfloat16", frozen=("vision",)))
    assert sorted(stages["llm.0"]._summed) == first
    assert sorted(stages["llm.1"]._summed) == ["llm/head", *last]
    assert {name.split("/")[0] for name in stages["vision.0"]._summed} == {"vision_projector"}
    tied = traced(replace(UNROLLED, dtype="bfloat16", model="tied", llm=Layout(tp=2)))
    assert "llm/embed" not in tied["llm.0"]._summed and len(tied["llm.0"]._summed) == 21
    assert not traced(replace(UNROLLED, remat="none"))["llm.0"]._summed
    split = traced(replace(UNROLLED, dtype="bfloat16", schedule="zb-h1"))["llm.1"]
    assert split._summed == ["llm/head"] and len(by_name(split.weights_avals[0])) == len(layer)
