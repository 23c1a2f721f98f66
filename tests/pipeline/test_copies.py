"""Encoders replicated in every pipeline stage of the LLM, against the dense reference in fp32: nothing counts twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity
import pytest
from parity import Case
from test_parity import assert_equal_to_reference

from mmjax.assembly.batches import own_rows
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.schedule.ops import Op
from mmjax.train.dry_run import layout_text

# Each stage of the LLM has an encoder whose dp is not the LLM's.
COPIES = Case(
    vision=Layout(copies=2, dp=2),
    llm=Layout(pp=2, tp=2),
    schedule="encoders-first",
    microbatches=3,
    samples=17,
    clip_norm=0.7,
    weight_decay=0.1,
)
LONG = {
    "dp": COPIES,
    "tp, 1f1b": replace(COPIES, vision=Layout(copies=2, tp=2), schedule="1f1b"),
    "tp, levels into the second stage, optimizer instances": replace(
        COPIES,
        model="levels",
        vision=Layout(copies=2, dp=2, tp=2, optimizer_instances=2),
        llm=Layout(pp=2, dp=2, tp=2),
    ),
}
SLOW = {
    "windows, two encoders": replace(COPIES, model="two", schedule="three-phase", microbatches=4, samples=25),
    "zb-h1, remat, adapters": replace(
        COPIES, model="adapted", frozen=("vision", "llm"), schedule="zb-h1", remat="dots", vision=Layout(copies=2, tp=2)
    ),
    "sliced": replace(COPIES, route="sliced", llm=Layout(pp=2, dp=2), vision=Layout(copies=2, tp=2)),
    "collective": replace(COPIES, transport="collective"),
    "vision frozen": replace(COPIES, frozen=("vision",)),
    "interleaved, tied": replace(
        COPIES, model="chunked and tied", llm=Layout(pp=2, chunks=2, tp=2), schedule="interleaved", microbatches=4
    ),
    "four stages": replace(
        COPIES, model="deep", vision=Layout(copies=4, dp=2), llm=Layout(pp=4, tp=2), microbatches=4, samples=25
    ),
    "dp 3": replace(COPIES, vision=Layout(copies=2, dp=3), llm=Layout(pp=2, dp=3)),
    "generator": replace(
        COPIES, model="drawing", vision=Layout(copies=2), llm=Layout(pp=2), painter=Layout(dp=2, rank_offset=2)
    ),
}
CASES = [
    *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_copies_train_like_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


def test_every_copy_reads_all_rows_and_is_shown() -> None:
    """This process has the second copy alone."""
    optimizers = parity.optimizers(COPIES)
    world = World([PlannedDevice(rank, process_index=1 - rank // 2) for rank in range(4)])
    layouts = {"vision": COPIES.vision, "llm": COPIES.llm}
    placed = PlacedModel(parity.MODELS["plain"], layouts, world, Settings(optimizers=optimizers, total_steps=1))
    rows = own_rows(placed, dict.fromkeys(layouts, ()), 3)
    assert rows and set(rows.cells["vision"].values()) == {(0, 1)}
    lines = [line.split() for line in layout_text(placed, 4)]
    assert ["vision.0", "k0d0", "k0d1", "k1d0", "k1d1"] in lines


def test_a_copy_works_as_long_as_the_encoder_would_on_its_ranks() -> None:
    case = COPIES.config()
    inputs = {name: {"segments": np.zeros((4, 8), np.int32)} for name in case.model}
    placed = [
        PlacedModel(
            parity.MODELS["plain"],
            {"vision": vision, "llm": Layout(pp=2, tp=2)},
            World.planned(4),
            Settings(optimizers=parity.optimizers(COPIES), total_steps=1),
        )
        for vision in (COPIES.vision, Layout(dp=2))
    ]
    copies, alone = (one.nominal_costs(inputs).of(Op("F", "vision.0", 0)) for one in placed)
    assert copies == alone > 0
