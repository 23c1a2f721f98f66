"""Models of any graph, on several devices: an encoder that feeds two modules, and a generator behind a generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import marks
import numpy as np
import parity
import pytest

from mmjax.mesh.layout import Layout, cell_count
from mmjax.models.dit.config import DiTConfig
from mmjax.models.dit.module import DiffusionTransformer
from mmjax.models.graph import MultimodalModel
from mmjax.models.llama.module import Llama
from mmjax.models.nodes import Edge, Node
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.module import VisionTransformer
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import validate

VIT = ViTConfig(layers=2, width=16, heads=2, mlp=24, patch=2, merge=1, grid=4)
DIT = DiTConfig(layers=2, width=16, heads=2, mlp=24, patch=2, merge=1, frequencies=2)
P = ProjectorConfig(hidden=12)
WEB = MultimodalModel(
    {
        "vision": Node(VisionTransformer(VIT), P),
        "llm": Node(Llama(replace(parity.DECODER, layers=2))),
        "painter": Node(DiffusionTransformer(DIT), P, "start"),
        "printer": Node(DiffusionTransformer(replace(DIT, layers=1, loss_weight=0.5)), P, "start"),
    },
    (
        Edge("vision", "llm", "vision_index", inject=(1,)),
        Edge("vision", "painter", "sights"),
        Edge("llm", "painter", "index"),
        Edge("painter", "printer", "drawn"),
    ),
)
MARKED = replace(
    WEB,
    nodes={
        name: replace(node, callbacks=marks.GENERATOR if node.starts else marks.functions(name))
        for name, node in WEB.nodes.items()
    },
)
"""The same with callbacks everywhere."""
LAYOUTS = {
    "apart": {
        "vision": Layout(dp=2),
        "llm": Layout(tp=2, rank_offset=2),
        "painter": Layout(pp=2, rank_offset=4),
        "printer": Layout(dp=2, rank_offset=6),
    },
    "the encoder's stages below the LLM's": {
        "vision": Layout(pp=2),
        "llm": Layout(pp=2),
        "painter": Layout(tp=2, rank_offset=2),
        "printer": Layout(rank_offset=3),
    },
}
MICROBATCHES, ROWS = 2, 2


def batch(cells: int) -> list[tuple[Any, dict[str, dict[str, np.ndarray]]]]:
    """Microbatches of two rows, in a cell or each in its own, whose tokens are in the same row; all numbers differ."""
    rng, result = np.random.default_rng(0), []
    for _ in range(MICROBATCHES):
        segments = np.ones((ROWS, 4), np.int32)
        places = np.tile(np.arange(4, dtype=np.int32), (ROWS, 1))
        grid = np.stack([places // 2, places % 2], -1)
        normal = lambda *shape: rng.normal(size=(ROWS, 4, *shape)).astype("f4")  # noqa: E731
        own = 4 * np.arange(ROWS)[:, None] * (cells == 1)  # an index is among the tokens of the row's cell

        def index(part: float, own: Any = own) -> np.ndarray:
            there = rng.random((ROWS, 4)) < part
            return np.where(there, own + rng.integers(0, 4, (ROWS, 4)), -1).astype(np.int32)

        def drawn(
            shape: int = 4, *, normal: Any = normal, segments: Any = segments, grid: Any = grid
        ) -> dict[str, Any]:
            return {
                **{"segments": segments, "positions": grid, "patches": normal(shape), "targets": normal(shape)},
                **{"times": np.abs(normal()) % 1, "weights": np.abs(normal())},
            }

        text = {"tokens": rng.integers(0, 30, (ROWS, 4)), "targets": rng.integers(0, 30, (ROWS, 4))}
        given = {
            "vision": {"patches": normal(4), "segments": segments, "positions": grid},
            "llm": {
                **{name: array.astype(np.int32) for name, array in text.items()},
                **{"segments": segments, "positions": places, "weights": np.abs(normal())},
                "vision_index": index(0.6),
            },
            "painter": {**drawn(), "sights": index(0.4), "index": index(0.7).astype(np.int32)},
            "printer": {**drawn(), "drawn": index(0.7)},
        }
        result.append(((), given))
    return result


def trained(
    layouts: Mapping[str, Layout], model: MultimodalModel = WEB, schedule: str = "1f1b"
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of two steps, and the parameters behind them."""
    rates = dict(zip(WEB.modules, np.linspace(1e-3, 5e-3, len(WEB.modules)), strict=True))
    optimizers = {name: OptimizerConfig(learning_rate=float(rate), eps=1e-3) for name, rate in rates.items()}
    settings = Settings(optimizers=optimizers, total_steps=2)
    placed = PlacedModel(model, layouts, parity.world(), settings)
    parts = batch(cell_count(layouts.values()))
    order = make_schedule(schedule, placed.graph, MICROBATCHES, Costs.nominal(placed.graph, move=0.01, once=0.01))
    validate(order)
    executor = Executor(placed, order, dict(parts[:1]))
    executor.compile()
    executor.initialise(3)
    judged = ("llm", "painter", "printer")
    whole = {name: float(sum(part[name]["weights"].sum() for _, part in parts)) for name in judged}
    losses = [executor.step(parts, whole).fetch()[0] for _ in range(2)]
    return losses, parity.logical_leaves(placed, executor.states)


@cache
def alone(*, marked: bool = False) -> tuple[list[float], dict[str, np.ndarray]]:
    return trained(dict.fromkeys(WEB.nodes, Layout()), MARKED if marked else WEB)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_graph_trains_as_on_one_device(name: str) -> None:
    assert_as_on_one_device(*trained(LAYOUTS[name]), *alone())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("apart", "zb-h1"), (list(LAYOUTS)[1], "1f1b")])
def test_any_graph_with_callbacks_trains_as_on_one_device(name: str, schedule: str) -> None:
    plain, marked = alone(), alone(marked=True)
    assert abs(plain[0][0] - marked[0][0]) > 1e-3 and plain[1].keys() == marked[1].keys()
    assert_as_on_one_device(*trained(LAYOUTS[name], MARKED, schedule), *marked)


def assert_as_on_one_device(
    losses: list[float], leaves: dict[str, np.ndarray], want: list[float], expected: dict[str, np.ndarray]
) -> None:
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert losses[1] < losses[0] and leaves.keys() == expected.keys()
    assert {leaf.split("/")[1] for leaf in leaves} == set(WEB.modules)
    for leaf, value in expected.items():
        np.testing.assert_allclose(leaves[leaf], value, rtol=2e-4, atol=2e-6, err_msg=leaf)
        if leaf.startswith("adam_v"):
            assert value.any() or "vocab" in leaf or leaf.endswith(("_bias", "bias")), f"{leaf} has no gradient"
