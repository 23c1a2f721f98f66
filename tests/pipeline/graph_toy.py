"""The toy of a stage graph: a model whose stages, modules and edges are those of a given graph, a product each.

So a schedule runs on any graph that can be described, those of ``mmjax.schedule.placements`` among them: a module is
what their names say, and each of its stages holds a layer. Two stages with a tie both begin with a product of its
weights. ``dense_gradients`` says the same on one device, in NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import parity
import toy
from function_stage import FunctionStage
from jax import lax

from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel
from mmjax.models.module import Loss
from mmjax.models.parameters import LayerRun, ModuleSlice, Part
from mmjax.models.stage_model import StageModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs

ROWS = 12


def _busy(x: Any, turns: int) -> Any:
    """Nothing but time: 0 after so many turns of a loop."""
    return 0 * lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y) + 1, lax.stop_gradient(x)) if turns else 0


def _run(
    module: str, turns: int, p: Any, given: Mapping[str, Any], carry: Mapping[str, Any], axes: Any, cells: int
) -> Any:
    x = sum(carry.values()) if carry else given["x"]
    if "ends" in p[module]:
        x = x + toy.product(p[module]["ends"], axes, x)
    x, _ = lax.scan(lambda x, layer: (x + toy.product(layer, axes, x), None), x, p[module]["layers"])
    return x + _busy(x, turns)


def _loss(p: Any, given: Any, x: Any, axes: Any) -> Any:
    return {"loss": jnp.sum(given["weights"] * jnp.sum(jnp.square(x), -1))}


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
        sources, last = tuple(edge.src for edge in self.graph.in_edges(node.name)), self.graph.gives_loss(node.name)
        ties: dict[str, Any] = {
            end: tie for tie in self.graph.ties for end, tie in ((tie.src, "lent"), (tie.dst, "borrowed"))
        }
        ends = (Part(partial(toy.Weights, toy.WIDTH), "ends", tie=ties[node.name]),) if node.name in ties else ()
        run = LayerRun(partial(toy.Weights, toy.WIDTH), range(node.index, node.index + 1))
        forward = partial(_run, node.module, self.turns.get(node.module, 0))
        inputs = (() if sources else ("x",)) + (("weights",) if last else ())
        return FunctionStage(
            name=node.name,
            module=node.module,
            index=node.index,
            sources=sources,
            slices=(ModuleSlice(node.module, (run,), ends),),
            inputs=inputs,
            run=forward,
            judge=_loss,
            losses={"loss": Loss()} if last else {},
        )


def layouts_of(graph: StageGraph) -> dict[str, Layout]:
    """By module: a stage's ranks, or those of its lane, are its dp; stages on the same ranks are chunks."""
    found = {}
    for module in graph.modules:
        nodes = [node for node in graph.stages if node.module == module]
        ranks, lanes = [node.ranks for node in nodes], nodes[0].lanes
        depth = len(set(ranks))
        found[module] = Layout(
            dp=len(ranks[0]) // lanes, lanes=lanes, pp=depth, chunks=len(ranks) // depth, rank_offset=ranks[0][0]
        )
    return found


def optimizers(graph: StageGraph) -> dict[str, OptimizerConfig]:
    """AdamW by module, which is trained as its stages are."""
    trained = {node.module: node.trainable for node in graph.stages}
    return {
        module: OptimizerConfig(learning_rate=1e-3, eps=1e-3, frozen=not trained[module]) for module in graph.modules
    }


def placed(
    graph: StageGraph,
    turns: Mapping[str, int] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    **settings: Any,
) -> PlacedModel:
    """The graph on the world of these tests; ``layouts`` where they are more than dp."""
    own = Settings(optimizers=optimizers(graph), total_steps=1, **settings)
    toy_model = cast(MultimodalModel, GraphToy(graph, turns or {}))
    # Its numbers are no tokens.
    placed_at = {name: replace(layout, sp=False) for name, layout in (layouts or layouts_of(graph)).items()}
    model = PlacedModel(toy_model, placed_at, parity.world(), own)
    assert {(n.name, n.ranks, n.lanes, n.backward, n.trainable) for n in model.graph.stages} == {
        (n.name, n.ranks, n.lanes, n.backward, n.trainable) for n in graph.stages
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


def denominators(graph: StageGraph, parts: Sequence[Any]) -> dict[str, float]:
    """Sums of a step's loss weights, by module that gives a loss."""
    modules = [node.module for node in graph.losses]
    return {m: float(sum(part[m]["weights"].sum(dtype=np.float64) for _, part in parts)) for m in modules}


def dense_gradients(graph: StageGraph, leaves: toy.Leaves, part: Mapping[str, Any]) -> tuple[float, toy.Leaves]:
    """The sum of a microbatch's weighted losses and its gradients, in double precision."""
    products = {node.name: [f"{node.module}/layers/{node.index:03d}"] for node in graph.stages}
    for tie in graph.ties:
        for end in (tie.src, tie.dst):
            products[end].insert(0, f"{graph.stage(end).module}/ends")
    weights = {name: leaf.astype(np.float64) for name, leaf in leaves.items()}
    out: dict[str, np.ndarray] = {}
    seen: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for node in graph.topological:
        sources = [out[edge.src] for edge in graph.in_edges(node.name)] or [part[node.module]["x"].astype(np.float64)]
        x, seen[node.name] = np.sum(sources, 0), []
        for name in products[node.name]:
            hidden = np.tanh(x @ weights[f"{name}/up"])
            seen[node.name].append((x, hidden))
            x = x + hidden @ weights[f"{name}/down"] + weights[f"{name}/bias"]
        out[node.name] = x
    (sink,) = graph.losses
    last, rows = out[sink.name], part[sink.module]["weights"].astype(np.float64)
    back = {sink.name: 2 * rows[:, None] * last}
    gradients = {name: np.zeros_like(leaf) for name, leaf in weights.items()}
    for node in reversed(graph.topological):
        dy = back[node.name]
        for name, (x, hidden) in zip(reversed(products[node.name]), reversed(seen[node.name]), strict=True):
            inner = dy @ weights[f"{name}/down"].T * (1 - hidden**2)
            gradients[f"{name}/bias"] += dy.sum(0)
            gradients[f"{name}/down"] += hidden.T @ dy
            gradients[f"{name}/up"] += x.T @ inner
            dy = dy + inner @ weights[f"{name}/up"].T
        for edge in graph.in_edges(node.name):
            back[edge.src] = back.get(edge.src, 0) + dy
    loss = float(rows @ np.square(last).sum(1))
    return loss, {name: gradient.astype(np.float32) for name, gradient in gradients.items()}
