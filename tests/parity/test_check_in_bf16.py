"""Stages that compute in bf16, of everything that a stage may have: where sums are fp32, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import four, tiny

from mmjax import jaxprs
from mmjax.assembly.assembly import place
from mmjax.pipeline.stage import StageFunctions

# Whatever a stage may have: learned positions of both encoders, features that enter a layer again, a tied embedding on
# two stages, a generator, latent attention with a shared key.
EVERYTHING: dict[str, Any] = {
    "Train.dtype": "bfloat16",
    "vision/ViT.positions": "learned2d",
    "audio/Whisper.positions": "learned",
    "vision/Projector.inject": (0, 2),
    "llm/Decoder.tied": True,
    "llm/Decoder.kv_heads": 8,
    "llm/Decoder.head_dim": 0,
    "llm/Decoder.kv_rank": 10,
    "llm/Decoder.q_rank": 14,
    "llm/Decoder.nope_head_dim": 4,
    "llm/Decoder.rope_head_dim": 6,
    "vision/ViT.remat": "dots",
    "painter/DiT.remat": "full",
}
SUMS = {"reduce_sum", "scatter-add", "scatter_add", "cumsum", "reduce_window_sum"}


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from equations(inner)


@pytest.fixture(scope="module")
def stages() -> dict[str, StageFunctions]:
    """Stage functions with a whole backward and with a split one."""
    parts = place(tiny(**four("1,2,2", "2,1,1", "1,1,1", "1,1,1", **EVERYTHING)))
    shapes = next(iter(parts.shapes.values()))
    whole = parts.placed.trace(shapes).stages
    split = parts.placed.trace(shapes, parts.placed.graph.with_split()).stages
    return {**{f"{n} whole": f for n, f in whole.items()}, **{f"{n} split": f for n, f in split.items()}}


@pytest.mark.long
def test_no_sum_of_a_backward_is_in_bf16(stages: dict[str, StageFunctions]) -> None:
    """But for products, which add in fp32 whatever they are of, and for what tp ranks add."""
    found = {}
    for name, functions in stages.items():
        programs = [(functions.forward, functions.forward_avals), (functions.backward, functions.backward_avals)]
        programs += [(functions.weights, functions.weights_avals)] if functions.deferred_avals else []
        for spmd, avals in programs:
            for eqn in equations(jax.make_jaxpr(spmd)(*avals).jaxpr):
                kind, out = eqn.primitive.name, eqn.outvars[0].aval
                if kind in SUMS and out.dtype == jnp.bfloat16 and eqn.invars[0].aval.size > out.size * (kind[0] == "r"):
                    found.setdefault(name, set()).add((kind, eqn.invars[0].aval.shape, out.shape))
    assert not found


@pytest.mark.long
def test_neither_fp32_logits_nor_fp32_features_nor_choices_for_each_feature_are_kept(
    stages: dict[str, StageFunctions],
) -> None:
    """Beside its layers, which keep what their ``remat`` says, a stage keeps features in bf16 and small things.

    The vocabulary of 263 is padded to 264 by tp = 2 and to nothing by tp = 1.
    """
    kept = {name: [a for a in own.residual_avals if a.size > 1] for name, own in stages.items()}
    wide = [(n.split()[0], a.dtype) for n, own in kept.items() for a in own if {263, 264} & set(a.shape)]
    assert set(wide) == {("llm.1", jnp.dtype(jnp.bfloat16))}, "logits, since remat is 'none'"
    masks = [(n, a.shape) for n, own in kept.items() for a in own if a.dtype == bool and a.shape[-1] != a.shape[-2]]
    assert all(shape[-1] in (2, 128) for _, shape in masks), masks  # a layer's slot, and tokens
    tokens = stages["llm.1 whole"].forward_avals[1]["targets"].shape
    local = (2, tokens[0] // 2, tokens[1], 24)
    after = [a for a in kept["llm.1 whole"] if a.shape == local]
    assert [a.dtype for a in after] == [jnp.bfloat16] * 2, "what enters the last norm, and what leaves it"
