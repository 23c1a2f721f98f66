"""The toy of a stage graph: a model whose stages, modules and edges are those of a given graph, a product each.

So a schedule runs on any graph that can be described, those of ``mmjax.schedule.placements`` among them: a module is
what their names say, and each of its stages holds a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import parity
import toy
from jax import lax

from mmjax.mesh.layout import Layout
from mmjax.models.multimodal import MultimodalModel, StageModel
from mmjax.models.parameters import ModuleSlice
from mmjax.optimizer import OptimizerConfig
from mmjax.pipeline.build import PlacedModel, Settings
from mmjax.pipeline.executor import Executor
from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs

ROWS = 12


def _busy(x: Any, turns: int) -> Any:
    """Nothing but time: 0 after so many turns of a loop."""
    return 0 * lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y) + 1, lax.stop_gradient(x)) if turns else 0


def _run(module: str, turns: int, p: Any, given: Mapping[str, Any], carry: Mapping[str, Any], axes: Any) -> Any:
    x = sum(carry.values()) if carry else given["x"]
    x, _ = lax.scan(lambda x, layer: (x + toy.product(layer, axes, x), None), x, p[module]["layers"])
    return x + _busy(x, turns)


def _stage(module: str, turns: int, p: Any, given: Any, carry: Any, axes: Any, cells: int) -> Any:
    return _run(module, turns, p, given, carry, axes)


def _sink(module: str, turns: int, p: Any, given: Any, carry: Any, axes: Any, cells: int) -> Any:
    return jnp.sum(given["weights"] * jnp.sum(jnp.square(_run(module, turns, p, given, carry, axes)), -1))


class GraphToy:
    """Takes the place of a ``MultimodalModel``; layouts are those of ``layouts_of``.

    ``turns``: by module, how long a forward loops for nothing.
    """

    def __init__(self, graph: StageGraph, turns: Mapping[str, int]):
        self.graph, self.modules, self.turns = graph, graph.modules, turns

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """One for each node."""
        return tuple(self._model(node) for node in self.graph.topological)

    def _model(self, node: StageNode) -> StageModel:
        sources, last = tuple(edge.src for edge in self.graph.in_edges(node.name)), node == self.graph.sink
        layer = ModuleSlice(node.module, partial(toy.Weights, toy.WIDTH), range(node.index, node.index + 1))
        forward = partial(_sink if last else _stage, node.module, self.turns.get(node.module, 0))
        inputs = (() if sources else ("x",)) + (("weights",) if last else ())
        return StageModel(
            node.name, node.module, node.index, sources, (layer,), inputs, forward, forward if last else None
        )


def layouts_of(graph: StageGraph) -> dict[str, Layout]:
    """By module: a stage's ranks are its dp, stages on the same ranks are chunks."""
    found = {}
    for module in graph.modules:
        ranks = [node.ranks for node in graph.stages if node.module == module]
        depth = len(set(ranks))
        found[module] = Layout(dp=len(ranks[0]), pp=depth, chunks=len(ranks) // depth, rank_offset=ranks[0][0])
    return found


def placed(graph: StageGraph, turns: Mapping[str, int] | None = None, **settings: Any) -> PlacedModel:
    """The graph on the world of these tests; a module is trained as its stages are."""
    trained = {node.module: node.trainable for node in graph.stages}
    optimizers = {module: OptimizerConfig(learning_rate=1e-3, frozen=not trained[module]) for module in graph.modules}
    own = Settings(optimizers=optimizers, total_steps=1, **settings)
    model = PlacedModel(cast(MultimodalModel, GraphToy(graph, turns or {})), layouts_of(graph), parity.world(), own)
    assert {(n.name, n.ranks, n.backward, n.trainable) for n in model.graph.stages} == {
        (n.name, n.ranks, n.backward, n.trainable) for n in graph.stages
    }
    assert {(e.name, e.gradient) for e in model.graph.edges} == {(e.name, e.gradient) for e in graph.edges}
    return model


def executor(model: PlacedModel, graph: StageGraph, microbatches: int, schedule: str, window: int = 0) -> Executor:
    """Compiled and with initial parameters; ``graph`` is the model's, or the same with split backwards."""
    result = Executor(model, schedule_of(graph, microbatches, schedule, window), dict(batch(graph, 1)))
    result.compile()
    result.initialise(toy.SEED)
    return result


def schedule_of(graph: StageGraph, microbatches: int, schedule: str, window: int = 0) -> Schedule:
    """A schedule with nominal costs."""
    return make_schedule(schedule, graph, microbatches, Costs.nominal(graph, move=0.01, once=0.01), window=window)


def batch(graph: StageGraph, microbatches: int) -> list[tuple[Any, dict[str, dict[str, np.ndarray]]]]:
    """Microbatches of one step as executors take them."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(microbatches):
        given = {
            module: {"x": rng.normal(size=(ROWS, toy.WIDTH)), "weights": rng.random(ROWS)} for module in graph.modules
        }
        made.append(((), {m: {k: v.astype(np.float32) for k, v in own.items()} for m, own in given.items()}))
    return made
