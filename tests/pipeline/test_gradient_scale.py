"""Gradients are sums over all rows, whatever dp the modules have: encoder dp 4 and LLM dp 2 give 4.0 and 200.0.

The encoder multiplies each of four rows of 1 by its weight, 50; the LLM multiplies that by its weight, 1; the loss is
the sum of all rows. So the encoder's gradient is 4 rows · 1 · 1 = 4.0, and the LLM's is 4 rows · 50 · 1 = 200.0.

Where gradients are normalised by the wrong dp these are the numbers that change, while losses fall all the same: an
average over the encoder's four replicas makes 4.0 into 1.0; a sum that counts each of the LLM's rows once for every
encoder replica makes 200.0 into 800.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import parity
import pytest
from flax import nnx
from function_stage import FunctionStage

from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.models.graph import MultimodalModel
from mmjax.models.module import Loss
from mmjax.models.parameters import ModuleSlice, Part
from mmjax.models.stage_model import StageModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs

ROWS, WEIGHTS = 4, {"encoder": 50.0, "llm": 1.0}


class Weight(nnx.Module):
    """One number, as a matrix."""

    def __init__(self, value: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.full((1, 1), value), dims=("input", "output"))


def _stage(module: str, source: str, p: Any, given: Any, carry: Any, axes: Axes, cells: int) -> Any:
    x = carry[source] if source else given["rows"]
    return x @ p[module]["kernel"]


def _loss(p: Any, given: Any, x: Any, axes: Axes) -> Any:
    return {"loss": jnp.sum(x)}


class TwoWeights:
    """Takes the place of a ``MultimodalModel``."""

    modules = tuple(WEIGHTS)

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """One stage of each module."""
        parts = {name: (ModuleSlice(name, (), (Part(partial(Weight, value)),)),) for name, value in WEIGHTS.items()}
        llm = partial(_stage, "llm", "encoder.0")
        return (
            FunctionStage(
                name="encoder.0",
                module="encoder",
                slices=parts["encoder"],
                inputs=("rows",),
                run=partial(_stage, "encoder", ""),
            ),
            FunctionStage(
                name="llm.0",
                module="llm",
                sources=("encoder.0",),
                slices=parts["llm"],
                run=llm,
                judge=_loss,
                losses={"loss": Loss()},
            ),
        )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "layouts",
    [
        {"encoder": Layout(dp=4, rank_offset=2), "llm": Layout(dp=2)},
        {"encoder": Layout(dp=4), "llm": Layout(dp=2, tp=2, sp=False)},
        {"encoder": Layout(dp=2), "llm": Layout(dp=4, rank_offset=2)},
    ],
    ids=["fan-in", "colocated", "fan-out"],
)
def test_encoder_dp_4_and_llm_dp_2(layouts: dict[str, Layout], microbatches: int) -> None:
    settings = Settings(optimizers={name: OptimizerConfig(b1=0.5) for name in WEIGHTS}, total_steps=1)
    placed = PlacedModel(cast(MultimodalModel, TwoWeights()), layouts, parity.world(), settings)
    schedule = make_schedule("1f1b", placed.graph, microbatches, Costs.nominal(placed.graph, move=0.01, once=0.01))
    # As many rows in all: more microbatches hold smaller ones.
    rows = np.full((ROWS, 1), 1.0 / microbatches, np.float32)
    batch = [((), {"encoder": {"rows": rows}, "llm": {}})] * microbatches
    executor = Executor(placed, schedule, dict(batch))
    executor.initialise(0)
    loss, norms = executor.step(batch, {"llm": 1.0}).fetch()
    assert loss == 200.0 and norms == {"encoder": 4.0, "llm": 200.0}
    moments = parity.logical_leaves(placed, executor.states)
    for name, gradient in (("encoder", 4.0), ("llm", 200.0)):  # the first moment is half of the gradient
        np.testing.assert_allclose(moments[f"adam_m/{name}/kernel"], gradient / 2, rtol=1e-6)
