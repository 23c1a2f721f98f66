"""Sharded parameters and gradients against the dense reference, under every layout and schedule, in fp32.

Padding and small vectors are sharded too: else most leaves of these models would be repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import parity
import pytest
from parity import Case
from test_parity import assert_equal_to_reference

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import SHARDS, Layout
from mmjax.models.handles import Transposed
from mmjax.pipeline.gathers import Composed, Gather
from mmjax.pipeline.memory import count_state_bytes
from mmjax.pipeline.residuals import from_parameters_alone

APART = Case(
    vision=Layout(dp=4, rank_offset=4, shard="parameters"), llm=Layout(dp=2, tp=2, shard="parameters"), clip_norm=0.7
)
SUMS = Case(
    vision=Layout(dp=4, rank_offset=4, shard="gradients"), llm=Layout(dp=2, tp=2, shard="gradients"), clip_norm=0.7
)
PIPELINED = Case(
    model="tied",
    vision=Layout(dp=4, rank_offset=4, shard="parameters"),
    llm=Layout(dp=2, pp=2, shard="parameters"),
    clip_norm=0.7,
)
COLOCATED = Case(
    vision=Layout(dp=8, optimizer_instances=2, shard="parameters"),
    llm=Layout(tp=2, dp=4, shard="parameters"),
    clip_norm=0.7,
)
CP = Case(
    vision=Layout(cp=2, tp=2, rank_offset=4, shard="parameters"),
    llm=Layout(dp=2, cp=2, shard="parameters"),
    clip_norm=0.7,
)
CHUNKED = Case(
    model="chunked and tied",
    vision=Layout(dp=2, pp=2, chunks=2, rank_offset=4, shard="parameters"),
    llm=Layout(dp=2, pp=2, chunks=2, shard="parameters"),
    microbatches=4,
    samples=25,
)
DRAWING = Case(
    model="drawing",
    vision=Layout(dp=2, rank_offset=4, shard="parameters"),
    llm=Layout(dp=2, pp=2, shard="parameters"),
    painter=Layout(dp=2, rank_offset=6, shard="parameters"),
    clip_norm=0.7,
)
ADAPTED = replace(APART, model="adapted", frozen=("vision", "llm"), clip_norm=0.3)
SINGLE = Case(
    vision=Layout(dp=4, shard="parameters"),
    llm=Layout(dp=2, pp=2, shard="parameters"),
    lowering="single",
    microbatches=3,
    samples=17,
    clip_norm=0.7,
)
PARAMETERS_A_STEP: dict[str, Any] = {"shard": "parameters", "gather": "step"}

FAST = {
    "parameters": replace(APART, remat="dots"),
    "gradients": SUMS,
    "parameters, tied over two stages, zb-h1": replace(PIPELINED, schedule="zb-h1", remat="dots", microbatches=3),
    "parameters, colocated, 2 instances": COLOCATED,
    "parameters, cp": CP,
    "parameters, generator": DRAWING,
    "parameters, adapters of frozen modules": ADAPTED,
}
SHORT = ("gradients",)
"""Of the fast cases, those of `make test`."""
SLOW = {
    "parameters, remat none": APART,
    "parameters, remat full": replace(APART, remat="full"),
    "parameters, once a step": Case(
        vision=Layout(dp=4, rank_offset=4, **PARAMETERS_A_STEP),
        llm=Layout(dp=2, tp=2, **PARAMETERS_A_STEP),
        clip_norm=0.7,
    ),
    "parameters, no image on some ranks": replace(APART, microbatches=1, samples=7, text_only=4),
    "parameters, no image at all": replace(APART, text_only=13),
    "parameters, vision frozen": replace(APART, frozen=("vision",)),
    "parameters, llm frozen": replace(APART, frozen=("llm",)),
    "parameters, projector alone": replace(APART, frozen=("vision", "llm")),
    "parameters of vision alone": replace(APART, llm=Layout(dp=2, tp=2)),
    "parameters of the llm, gradients of vision": replace(SUMS, llm=APART.llm),
    "parameters, decayed": replace(APART, weight_decay=0.1),
    "parameters, families": replace(APART, model="families"),
    "parameters, fewer key/value heads than tp": replace(
        APART, vision=Layout(dp=8, shard="parameters"), llm=Layout(dp=2, tp=4, shard="parameters"), model="tied"
    ),
    "gradients, fewer key/value heads than tp, zb-h1": Case(
        vision=Layout(dp=8, shard="gradients"),
        llm=Layout(dp=2, tp=4, shard="gradients"),
        schedule="zb-h1",
    ),
    "parameters, fewer key/value heads than tp, zb-h1": Case(
        vision=Layout(dp=8, shard="parameters"),
        llm=Layout(dp=2, tp=4, shard="parameters"),
        schedule="zb-h1",
    ),
    "parameters, families, tied, zb-h1": replace(APART, model="families, tied", schedule="zb-h1"),
    "parameters, masks of words": replace(APART, model="masked"),
    "parameters, learned positions": replace(APART, model="learned"),
    "parameters, levels": replace(APART, model="levels"),
    "parameters, two encoders": replace(APART, model="two"),
    "parameters, adapters, zb-h1": replace(ADAPTED, schedule="zb-h1", remat="dots"),
    "gradients, adapters, zb-h1": replace(SUMS, model="adapted", schedule="zb-h1", remat="dots"),
    "parameters, tied over two stages": PIPELINED,
    "parameters, tied on one stage": replace(APART, model="tied"),
    "gradients, tied over two stages": replace(
        PIPELINED, vision=SUMS.vision, llm=Layout(dp=2, pp=2, shard="gradients")
    ),
    "gradients, tied over two stages, zb-h1": replace(
        PIPELINED, vision=SUMS.vision, llm=Layout(dp=2, pp=2, shard="gradients"), schedule="zb-h1"
    ),
    "parameters, interleaved chunks": replace(CHUNKED, schedule="interleaved"),
    "parameters, chunks, zb-h1": replace(CHUNKED, schedule="zb-h1"),
    "parameters, colocated, program per op": replace(COLOCATED, lowering="ops"),
    "gradients, colocated, 2 instances": Case(
        vision=Layout(dp=8, optimizer_instances=2, shard="gradients"), llm=Layout(tp=2, dp=4, shard="gradients")
    ),
    "parameters, colocated, no sp": replace(COLOCATED, llm=Layout(tp=2, dp=4, sp=False, shard="parameters")),
    "parameters, colocated, frozen vision": replace(COLOCATED, frozen=("vision",)),
    "gradients, cp": replace(
        CP, vision=Layout(cp=2, tp=2, rank_offset=4, shard="gradients"), llm=Layout(dp=2, cp=2, shard="gradients")
    ),
    "parameters, cp, 2 instances": Case(
        vision=Layout(dp=8), llm=Layout(dp=4, cp=2, optimizer_instances=2, shard="parameters"), lowering="ops"
    ),
    "parameters, copies": Case(
        vision=Layout(dp=2, copies=2, shard="parameters"), llm=Layout(dp=2, pp=2, shard="parameters")
    ),
    "parameters, one program": SINGLE,
    "parameters, one program, tied": replace(SINGLE, model="tied"),
    "gradients, one program, zb-h1": replace(
        SINGLE, vision=Layout(dp=4, shard="gradients"), llm=Layout(dp=2, pp=2, shard="gradients"), schedule="zb-h1"
    ),
    "parameters once a step, lanes": Case(
        vision=Layout(dp=1, lanes=2, rank_offset=4, **PARAMETERS_A_STEP),
        llm=Layout(dp=2, pp=2, shard="parameters"),
        microbatches=4,
        samples=25,
        schedule="gpipe",
    ),
    "parameters, the generator's alone, zb-h1": replace(
        DRAWING, vision=Layout(dp=2, rank_offset=4), llm=Layout(dp=2, pp=2), schedule="zb-h1"
    ),
    "gradients, generator": replace(
        DRAWING,
        vision=Layout(dp=2, rank_offset=4, shard="gradients"),
        painter=Layout(dp=2, rank_offset=6, shard="gradients"),
    ),
}
pytestmark = pytest.mark.usefixtures("small_leaves_are_sharded")
CASES = [
    *(pytest.param(case, id=name, marks=() if name in SHORT else pytest.mark.long) for name, case in FAST.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_dense_reference(case: Case) -> None:
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


@pytest.mark.long
def test_frozen_modules_in_bf16_train_adapters_as_whole_ones_do() -> None:
    """A shard is gathered in its storage's dtype, and widened behind it."""
    case = replace(ADAPTED, frozen_dtype="bfloat16")
    whole = replace(case, vision=Layout(dp=4, rank_offset=4), llm=Layout(dp=2, tp=2))
    got, want = parity.run(case), parity.run(whole)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
    parity.assert_close(
        parity.of_kind(got.leaves[-1], "adam_m"), parity.of_kind(want.leaves[-1], "adam_m"), 1e-5, "moments"
    )


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("case", [APART, SUMS], ids=["parameters", "gradients"])
def test_no_residual_is_made_of_gathered_weights(case: Case, remat: str) -> None:
    placed = parity.Session(replace(case, remat=remat)).placed
    (functions, *_) = [f for key, f in placed._functions.items() if key[0] == "llm.0"]
    assert functions.state.gathers.keys() >= {"llm/embed", "llm/head", "llm/layer_000/attn/q"}
    made = from_parameters_alone(functions.forward, functions.forward_avals, lambda result: result[1])
    assert not any(made.values())


@pytest.mark.long
def test_bytes_of_sharded_states() -> None:
    """Compute parameters and sums of a device, in bf16: matrices in shards, vectors whole."""
    counts = {}
    for shard in SHARDS:
        layout = Layout(dp=4, shard=shard)
        case = Case(vision=Layout(dp=4, rank_offset=4), llm=layout, dtype="bfloat16")
        counts[shard] = count_state_bytes(parity.Session(case).placed.stages["llm.0"].state)
    states, gradients, parameters = (counts[shard] for shard in SHARDS)
    assert states.copies == gradients.copies == pytest.approx(4 * parameters.copies, rel=0.02)
    assert states.sums == pytest.approx(4 * gradients.sums, rel=0.02)
    assert gradients.sums == parameters.sums
    assert (gradients.reduced, parameters.reduced) == (0, 0)
    assert states.reduced == parameters.sums


def test_one_rank_shares_nothing() -> None:
    assert not Layout(shard="parameters").gathers_layers
    assert Layout(shard="parameters").idle().keys() >= {"shard", "gather"}
    assert "gather" in Layout(dp=2, shard="gradients").idle()
    assert Layout(dp=2, shard="parameters").idle().keys().isdisjoint({"shard", "gather"})


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"shard": "weights"}, "Layout.shard='weights'"),
        ({"gather": "stage"}, "Layout.gather='stage': .*set it to 'step'"),
        ({"lanes": 2, "shard": "parameters"}, "Layout.shard='parameters': with Layout.lanes=2 .*gather to 'pull'"),
        ({"lanes": 2, "shard": "gradients"}, "Layout.shard='gradients': with Layout.lanes=2 .*set it to 'states'"),
    ],
)
def test_what_cannot_be_sharded_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Layout(**fields)


def test_equal_gathers_make_equal_programs() -> None:
    gather = Gather(axes=("dp",), dimension=0, size=8, padded=False, scatters=True)
    assert Composed((gather,)) == Composed((replace(gather),))
    assert hash(Transposed(gather)) == hash(Transposed(replace(gather)))
