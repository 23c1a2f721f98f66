"""Encoders whose forward takes several microbatches of a window together, with values.

Layouts are written "tp,pp,dp"; see ``test_layouts``.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_layouts import Changes
from tiny import clip, four, redraw, three, tiny

from mmjax.assembly.model import build_model
from mmjax.data.tokenizer import make_tokenizer
from mmjax.parity import check
from mmjax.parity.product import Session, sample_packer
from mmjax.parity.samples import Maker, Samples
from mmjax.parity.shrink import shrink
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import _replay, input_bytes, largest_microbatch
from mmjax.pipeline.watch import measured_residuals

FROZEN: Changes = {"vision/Optimizer.frozen": True}


def together(vision: Changes, llm: Changes, microbatches: int = 4, window: int = 0, **changes: Any) -> Changes:
    """Both on the same ranks; by default an op of the encoder takes all microbatches of a window."""
    layouts = {f"vision/Layout.{name}": value for name, value in ({"microbatches": 0} | vision).items()}
    layouts |= {f"llm/Layout.{name}": value for name, value in llm.items()}
    train = {"Train.schedule": "three-phase", "Train.microbatches": microbatches, "Train.window": window}
    return layouts | train | changes


def all_together(changes: Changes, *encoders: str, microbatches: int = 4) -> Changes:
    """Encoders of a larger model, whose ops take all microbatches."""
    train = {"Train.schedule": "three-phase", "Train.microbatches": microbatches}
    return changes | train | {f"{name}/Layout.microbatches": 0 for name in encoders}


def inside(schedule: str) -> Changes:
    """The LLM's own schedule within each window."""
    return {"Train.inner": schedule}


MATRIX: dict[str, Changes] = {
    "all of a step, dp 4 to 1": together({"dp": 4}, {"pp": 2, "tp": 2}),
    "windows of one": together({"dp": 4}, {"pp": 2, "tp": 2}, window=1),
    "windows of two, the last shorter": together({"dp": 2}, {"pp": 2}, microbatches=3, window=2),
    "windows of three, the last shorter": together({"dp": 8}, {"pp": 2, "tp": 2, "dp": 2}, microbatches=4, window=3),
    "ops of two in windows of four": together(
        {"dp": 8, "microbatches": 2}, {"pp": 4, "tp": 2}, microbatches=6, window=4
    ),
    "two cells": together({"dp": 8}, {"pp": 4, "dp": 2}, microbatches=3),
    "dp that does not divide the rows": together({"dp": 3}, {"pp": 3}, microbatches=4),
    "tp in both": together({"dp": 4, "tp": 2}, {"pp": 2, "tp": 4}, microbatches=2),
    "cp": together({"dp": 2, "cp": 2}, {"pp": 2, "cp": 2}, microbatches=3),
    "an encoder in a pipeline": together({"pp": 2, "dp": 2}, {"pp": 2, "dp": 2}, microbatches=3),
    "buckets": together({"dp": 4}, {"pp": 2, "tp": 2}, window=2) | {"vision/Packing.buckets": ((4, 32), (8, 64))},
    "packed rows of text": together({"dp": 4}, {"pp": 2, "dp": 2}) | {"llm/Packing.buckets": ((8, 128),)},
    "a frozen encoder": together({"dp": 4}, {"pp": 2, "tp": 2}, **FROZEN),
    "frozen, with its projector": together(
        {"dp": 4}, {"pp": 2, "tp": 2}, window=2, **FROZEN, **{"vision_projector/Optimizer.frozen": True}
    ),
    "a frozen LLM": together({"dp": 4}, {"pp": 2, "tp": 2}, **{"llm/Optimizer.frozen": True}),
    "offloaded": together(
        {"dp": 4, "microbatches": 2},
        {"pp": 2, "tp": 2},
        microbatches=8,
        window=6,
        **{"vision/Offload.parameters": True, "vision/Offload.activations": True, "Offload.optimizer": True},
    ),
    "one submesh": together({"dp": 8}, {"dp": 4, "tp": 2}),
    "a single microbatch": together({"dp": 4}, {"pp": 2, "tp": 2}, microbatches=1),
    "moved by collectives": together({"dp": 4}, {"pp": 2, "tp": 2}) | {"World.transport": "collective"},
    "sliced": together({"dp": 2}, {"pp": 2, "tp": 2}) | {"World.route": "sliced"},
    "sharded parameters": together({"dp": 4, "shard": "parameters"}, {"pp": 2, "tp": 2}),
    "recomputed": together({"dp": 4}, {"pp": 2, "tp": 2}) | {"vision/ViT.remat": "full"},
    "zb-h1 inside": together({"dp": 4}, {"pp": 2, "tp": 2}) | inside("zb-h1"),
    "zb-h1 in windows, the last shorter": together({"dp": 4}, {"pp": 4}, microbatches=5, window=2)
    | inside("zb-h1")
    | {"Train.global_batch": 10},
    "chunks inside": together({"dp": 4}, {"pp": 2, "tp": 2, "chunks": 2}) | inside("interleaved"),
    "chunks in windows, sharded": together({"dp": 4, "shard": "parameters"}, {"pp": 2, "dp": 2, "chunks": 2}, window=2)
    | inside("interleaved"),
    "eager inside, microbatch by microbatch": together({"dp": 2, "tp": 2, "microbatches": 1}, {"pp": 4})
    | inside("eager-1f1b"),
    "zb-h1 inside, frozen and offloaded": together({"dp": 4}, {"pp": 2, "tp": 2}, **FROZEN)
    | inside("zb-h1")
    | {"vision/Offload.parameters": True},
    "zb-h1 inside, lanes of the encoder": together({"lanes": 2, "dp": 2, "microbatches": 1}, {"pp": 2, "tp": 2})
    | inside("zb-h1"),
    "zb-h1 inside, a generator": all_together(four("2,2,1", "1,1,4@0", "1,1,4@0", "1,1,2@4"), "vision", "audio")
    | inside("zb-h1"),
    "chunks inside, one encoder beside": all_together(three("2,2,1", "1,1,4@0", "1,1,2@4"), "vision")
    | inside("interleaved")
    | {"llm/Layout.chunks": 2},
    "two encoders": all_together(three("2,2,1", "1,1,4@0", "1,1,4@0"), "vision", "audio"),
    "one of two encoders": all_together(three("2,2,1", "1,1,4@0", "1,1,2@4"), "vision"),
    "two encoders in ops of two sizes": all_together(three("2,2,1", "1,1,4@0", "2,1,2@0"), "vision", microbatches=3)
    | {"audio/Layout.microbatches": 2},
    "a generator": all_together(four("2,2,1", "1,1,4@0", "1,1,4@0", "1,1,2@4"), "vision", "audio"),
    "a generator on the same ranks": all_together(redraw("2,2,1", "1,1,4@0", "2,1,2@0"), "vision"),
    "an encoder that reads it": all_together(clip("2,2,1", "1,1,4@0", "1,1,2@4"), "vision"),
}


def assert_equal(changes: Changes, steps: int = 2) -> None:
    report = check(tiny(**changes), steps=steps, style="silent")
    assert report and report.ok, report and report.numbers()


FAST = "windows of two, the last shorter"


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name == FAST else pytest.mark.long)
        for name, changes in MATRIX.items()
    ],
)
def test_encoders_of_several_microbatches_train_as_one_device_does(changes: Changes) -> None:
    assert_equal(changes)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 0])
def test_every_window_and_width(window: int, dp: int, rows: int) -> None:
    """Encoders of up to eight times the dp of the LLM, which has one or two cells."""
    degrees = {2: {"pp": 2}, 4: {"pp": 2, "tp": 2}, 8: {"pp": 4, "tp": 2}}[dp]
    if rows == 2:  # in place of stages
        degrees = degrees | {"pp": degrees["pp"] // 2, "dp": 2}
    assert_equal(together({"dp": dp}, degrees, microbatches=3 if window != 3 else 4, window=window))


def session(changes: Changes) -> Session:
    """A small run, and its samples."""
    recipe = tiny(**changes)
    tokenizer = make_tokenizer("", recipe.model.media)
    small = shrink(recipe, 1, tokenizer.vocab_size)
    samples = Samples(maker=Maker.of(build_model(small.recipe, tokenizer)), sizes=small.sizes, seed=0)
    return Session(small.recipe, sample_packer(small.recipe, tokenizer, samples), samples)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(together({"dp": 2}, {"pp": 2}, microbatches=3), id="all"),
        pytest.param(together({"dp": 2}, {"pp": 2}, microbatches=3, window=2), id="windows", marks=pytest.mark.long),
        pytest.param(
            together({"dp": 2, "microbatches": 1}, {"pp": 2}, microbatches=3), id="one by one", marks=pytest.mark.long
        ),
    ],
)
def test_live_residuals_are_counted(changes: Changes) -> None:
    """The encoder's activations live for the window; the LLM's rows of it do not."""
    made = session(changes).start()
    executor = made.executor
    assert isinstance(executor, Executor)
    with measured_residuals(executor) as most:
        made.step(0)
    for name, stage in made.placed.stages.items():
        promised = dict.fromkeys(stage.submesh.ranks, made.parts.report.residual_bytes[name])
        assert dict(most[name]) == promised, name
    flow = largest_microbatch(made.placed, made.schedule, made.parts.shapes.values())
    _, left = _replay(made.schedule, flow)
    host = {place: size // 2 for place, size in input_bytes(made.schedule, flow).items()}
    assert {place: size for (place, kind), size in left.items() if kind == "inputs"} == host, "next step's are there"
    assert not any(size for (_, kind), size in left.items() if kind != "inputs")
