"""Modules with lanes, nested into the LLM's schedule or around it, against the dense reference in fp32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity
import pytest
from parity import Case
from test_parity import assert_equal_to_reference

from mmjax.mesh.layout import Layout

# An encoder in two lanes, one on each stage of the LLM; five microbatches leave one lane with fewer.
NESTED = Case(
    vision=Layout(dp=2, lanes=2),
    llm=Layout(pp=2, tp=2),
    schedule="nested",
    microbatches=5,
    samples=29,
    clip_norm=0.7,
)
FIRST = replace(NESTED, schedule="encoders-first")
DRAWING = replace(NESTED, model="drawing", painter=Layout(tp=2, lanes=2))
CHUNKED = replace(
    NESTED, model="chunked and tied", llm=Layout(pp=2, chunks=2, tp=2), inner="interleaved", microbatches=6, samples=35
)

LONG = {
    "zb-h1, remat": replace(NESTED, inner="zb-h1", remat="dots"),
    "generator": DRAWING,
    "chunks, interleaved, tied": CHUNKED,
    "encoders first": FIRST,
}
SLOW = {
    "one microbatch": replace(NESTED, microbatches=1, samples=7),
    "eager, seven microbatches": replace(NESTED, inner="eager-1f1b", microbatches=7, samples=41),
    "no images in most of the first microbatches": replace(NESTED, text_only=15),
    "buckets": replace(NESTED, buckets=((1, 32), (3, 32)), text_only=7),
    "vision frozen": replace(NESTED, frozen=("vision",)),
    "vision and projector frozen": replace(NESTED, frozen=("vision", "vision_projector")),
    "llm frozen": replace(NESTED, frozen=("llm",), inner="zb-h1"),
    "projector alone": replace(NESTED, frozen=("vision", "llm")),
    "tied, zb-h1": replace(NESTED, model="tied", inner="zb-h1", weight_decay=0.1),
    "two encoders": replace(NESTED, model="two"),
    "levels into later layers": replace(NESTED, model="levels", llm=Layout(pp=2, dp=2)),
    "adapters, zb-h1": replace(NESTED, model="adapted", frozen=("vision", "llm"), inner="zb-h1"),
    "families": replace(NESTED, model="families"),
    "unrolled": replace(NESTED, unroll=True),
    "callbacks": replace(NESTED, model="marked"),
    "two lanes for each stage": replace(NESTED, vision=Layout(lanes=4), llm=Layout(pp=2, dp=2)),
    "four stages": replace(
        NESTED, model="deep", vision=Layout(dp=2, lanes=4), llm=Layout(pp=4, tp=2), microbatches=6, samples=35
    ),
    "dp 3": replace(NESTED, vision=Layout(dp=3, lanes=2), llm=Layout(pp=2, dp=3)),
    "dp 3 and 1": replace(NESTED, vision=Layout(lanes=6), llm=Layout(pp=2, dp=3), microbatches=8, samples=47),
    "collective, weights whole": replace(
        NESTED, transport="collective", vision=Layout(dp=2, lanes=2, optimizer_instances=4), llm=Layout(pp=2, dp=2)
    ),
    "sliced": replace(NESTED, route="sliced", vision=Layout(tp=2, lanes=2), llm=Layout(pp=2, dp=2)),
    "two optimizer instances": replace(NESTED, vision=Layout(dp=2, lanes=2, optimizer_instances=2)),
    "chunks, zb-h1": replace(CHUNKED, inner="zb-h1"),
    "chunks, five microbatches": replace(CHUNKED, microbatches=5, samples=29, frozen=("vision",)),
    "generator, zb-h1, tied": replace(DRAWING, model="drawing, tied", inner="zb-h1"),
    "generator, eager": replace(DRAWING, inner="eager-1f1b"),
    "generator, its dp neither's": replace(
        DRAWING, vision=Layout(lanes=4), painter=Layout(dp=2, lanes=2), llm=Layout(pp=2, tp=2), microbatches=4
    ),
    "generator alone is spread": replace(DRAWING, vision=Layout(dp=2, rank_offset=4)),
    "encoder alone is spread": replace(DRAWING, painter=Layout(dp=2, rank_offset=4)),
    "generator, frozen": replace(DRAWING, frozen=("painter", "painter_projector", "vision")),
    "generator, llm frozen": replace(DRAWING, frozen=("llm",)),
    "generator, chunks": replace(
        DRAWING, model="drawing, chunked", llm=Layout(pp=2, chunks=2, tp=2), inner="interleaved", microbatches=6
    ),
    "generator, encoders first": replace(DRAWING, schedule="encoders-first"),
    "gpipe, one microbatch": replace(DRAWING, schedule="gpipe", microbatches=1, samples=7),
    "gpipe, lanes on ranks of their own": replace(
        NESTED, schedule="gpipe", vision=Layout(tp=2, lanes=2, rank_offset=4), frozen=("vision",)
    ),
    "three-phase in windows": replace(FIRST, schedule="three-phase"),
}
CASES = [
    pytest.param(NESTED, id="encoder"),
    *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_lanes_train_like_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.long
@pytest.mark.parametrize("case", [NESTED, FIRST], ids=["nested", "encoders first"])
def test_no_bit_changes_where_activations_wait_in_host_memory(case: Case) -> None:
    home, away = (parity.run(replace(case, stash=stash)) for stash in (False, True))
    assert (home.losses, home.norms) == (away.losses, away.norms)
    for before, after in zip(home.leaves, away.leaves, strict=True):
        for name, leaf in before.items():
            np.testing.assert_array_equal(after[name], leaf, err_msg=name)
