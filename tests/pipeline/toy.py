"""A model of a few small products, in place of the real one: stages of every sort whose programs compile in no time.

An "eye" feeds an "ear" and the LLM; the ear feeds the LLM too, so that one activation leaves twice and two arrive
together. Some products keep what they received and some a host input, layers are stacked, no width divides by four.
On several stages the LLM's first lends its last the weights that one starts and the other ends with. A "hand" may be
behind the LLM, on rows of its own: then the LLM's last stage gives a loss and an activation, and there are two losses.
A row has one or two pixels: a bucket each, so that two microbatches of a step may differ in every shape but the LLM's.
``dense_losses`` says the same on one device, in plain JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import parity
from flax import nnx
from function_stage import FunctionStage
from jax import lax

from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.models.graph import MultimodalModel
from mmjax.models.layers import column_parallel, row_parallel
from mmjax.models.module import Loss
from mmjax.models.parameters import LayerRun, ModuleSlice, Part
from mmjax.models.stage_model import StageModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import validate

ROWS, STEPS, SEED = 12, 3, 5
SEEN, WIDTH, HIDDEN = 5, 3, 10
LAYERS, STROKES = 5, 2
LLM_RATES = {"layer_decay": 0.7, "rates": {"layers/002/*": 3.0, "ends/up": 0.5, "layers/*": 1.0}}
MODULES = ("eye", "ear", "llm")
Leaves = dict[str, np.ndarray]
Run = Executor | OneProgramExecutor


class Weights(nnx.Module):
    """A two-layer product and a bias."""

    def __init__(self, wide: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.5)
        self.up = nnx.Param(init(rngs.params(), (wide, HIDDEN)), dims=("embed", "mlp"))
        self.down = nnx.Param(init(rngs.params(), (HIDDEN, WIDTH)), dims=("mlp", "embed"))
        self.bias = nnx.Param(init(rngs.params(), (WIDTH,)), dims=("embed",))


def product(p: Mapping[str, Any], axes: Axes, x: Any) -> Any:
    """``tanh(x · up) · down + bias``, the hidden units over tp."""
    (hidden,) = column_parallel(x, [(p["up"], None)], axes)
    return row_parallel(jnp.tanh(hidden), p["down"], axes, p["bias"])


def _eye(p: Any, given: Any, carry: Any, axes: Axes, cells: int) -> Any:
    return product(p["eye"]["see"], axes, given["pixels"])


def _ear(p: Any, given: Any, carry: Any, axes: Axes, cells: int) -> Any:
    heard = carry["eye.0"]
    return product(p["ear"]["hear"], axes, heard * heard) * given["loud"]


def _llm(first: bool, p: Any, given: Any, carry: Any, axes: Axes, cells: int) -> Any:
    x = next(iter(carry.values()))
    if first:
        x = jnp.sum(carry["eye.0"] - 2 * carry["ear.0"], 1)
        x = x + product(p["llm"]["ends"], axes, x)
    x, _ = lax.scan(lambda x, layer: (x + product(layer, axes, x), None), x, p["llm"]["layers"])
    return x


def _llm_loss(p: Any, given: Any, x: Any, axes: Axes) -> Any:
    off = jnp.square(product(p["llm"]["ends"], axes, x) - given["wanted"])
    edge = jnp.sqrt(x - x)  # whose gradient is not finite: nothing is to come back from a metric
    size, reach = jnp.sum(jnp.square(x)), jnp.sum(jnp.abs(x) + edge)
    return {"loss": jnp.sum(given["weights"] * jnp.sum(off, -1)), "size": size, "reach": reach}


def _hand(source: str, first: bool, p: Any, given: Any, carry: Any, axes: Axes, cells: int) -> Any:
    x = carry[source]
    x = x[:, None] * given["ink"] + product(p["hand"]["hold"], axes, x)[:, None] if first else x
    x, _ = lax.scan(lambda x, layer: (x + product(layer, axes, x * given["ink"]), None), x, p["hand"]["layers"])
    return x


def _hand_loss(p: Any, given: Any, x: Any, axes: Axes) -> Any:
    return {"loss": jnp.sum(given["weights"] * jnp.sum(jnp.square(x - given["wanted"]), (1, 2)))}


LOSSES = {
    "llm": {"loss": Loss(), "size": Loss(weight=0.1, per="rows"), "reach": Loss(weight=0.0, per="rows")},
    "hand": {"loss": Loss()},
}
"""The second of the LLM's is divided by the number of rows; its third is a metric."""


def _slice(module: str, layers: range, part: Part | None) -> ModuleSlice:
    depth, ahead = LAYERS if module == "llm" else STROKES, frozenset(part.declarations if part else ())
    return ModuleSlice(
        module, (LayerRun(partial(Weights, WIDTH), layers),), (part,) if part else (), depth=depth, before_layers=ahead
    )


class Toy:
    """Takes the place of a ``MultimodalModel``."""

    def __init__(self, modules: Sequence[str] = MODULES, hand: float = 1.0):
        self.modules = tuple(modules)
        self.losses = LOSSES | {"hand": {"loss": Loss(weight=hand)}}

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """Eye and ear of one stage, LLM and hand of one or of as many as their layouts say."""
        eye = ModuleSlice("eye", (), (Part(partial(Weights, SEEN), "see"),))
        ear = ModuleSlice("ear", (), (Part(partial(Weights, WIDTH), "hear"),))
        result: list[StageModel] = [
            FunctionStage(name="eye.0", module="eye", slices=(eye,), inputs=("pixels",), run=_eye),
            FunctionStage(name="ear.0", module="ear", sources=("eye.0",), slices=(ear,), inputs=("loud",), run=_ear),
        ]
        depth = layouts["llm"].stages
        for i, layers in enumerate(layouts["llm"].runs(LAYERS)):
            first, last = i == 0, i == depth - 1
            ends = Part(partial(Weights, WIDTH), "ends", tie="" if depth == 1 else "lent" if first else "borrowed")
            run = partial(_llm, first)
            result.append(
                FunctionStage(
                    name=f"llm.{i}",
                    module="llm",
                    index=i,
                    sources=("eye.0", "ear.0") if first else (f"llm.{i - 1}",),
                    slices=(_slice("llm", layers, ends if first or last else None),),
                    inputs=("weights", "wanted") if last else (),
                    run=run,
                    judge=_llm_loss,
                    losses=self.losses["llm"] if last else {},
                )
            )
        return (*result, *(self._hand_stages(layouts["hand"], result[-1].name) if "hand" in self.modules else ()))

    def _hand_stages(self, layout: Layout, source: str) -> list[StageModel]:
        depth, hold = layout.stages, Part(partial(Weights, WIDTH), "hold")
        result: list[StageModel] = []
        for i, layers in enumerate(layout.runs(STROKES)):
            first, last = i == 0, i == depth - 1
            result.append(
                FunctionStage(
                    name=f"hand.{i}",
                    module="hand",
                    index=i,
                    sources=(source,),
                    slices=(_slice("hand", layers, hold if first else None),),
                    inputs=("ink", *(("weights", "wanted") if last else ())),
                    run=partial(_hand, source, first),
                    judge=_hand_loss,
                    losses=self.losses["hand"] if last else {},
                )
            )
            source = f"hand.{i}"
        return result


def dense_losses(leaves: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of a microbatch's losses and metrics, on one device from logical leaves."""

    def plain(name: str, x: Any) -> Any:
        return jnp.tanh(x @ leaves[f"{name}/up"]) @ leaves[f"{name}/down"] + leaves[f"{name}/bias"]

    seen = plain("eye/see", given["eye"]["pixels"])
    x = jnp.sum(seen - 2 * plain("ear/hear", seen * seen) * given["ear"]["loud"], 1)
    x = x + plain("llm/ends", x)
    for layer in range(LAYERS):
        x = x + plain(f"llm/layers/{layer:03d}", x)
    off = jnp.square(plain("llm/ends", x) - given["llm"]["wanted"])
    losses = {"llm/loss": jnp.sum(given["llm"]["weights"] * jnp.sum(off, -1))}
    losses |= {"llm/size": jnp.sum(jnp.square(x)), "llm/reach": jnp.sum(jnp.abs(x))}
    if not any(name.startswith("hand/") for name in leaves):
        return losses
    own = given["hand"]
    x = x[:, None] * own["ink"] + plain("hand/hold", x)[:, None]
    for layer in range(STROKES):
        x = x + plain(f"hand/layers/{layer:03d}", x * own["ink"])
    return losses | {"hand/loss": jnp.sum(own["weights"][:, None, None] * jnp.square(x - own["wanted"]))}


def batch(step: int, buckets: Sequence[int]) -> list[tuple[Any, dict[str, dict[str, np.ndarray]]]]:
    """Microbatches of one step as executors take them, with so many pixels a row each; every number is different.

    Every third row of the hand's has nothing to be drawn, and neither has any row of the second microbatch.
    """
    rng, result = np.random.default_rng(step), []
    drawn = np.random.default_rng([step, 1])
    for index, pixels in enumerate(buckets):
        some = (np.arange(ROWS) % 3 > 0) * (index != 1)
        numbers = {
            "hand": {
                "ink": drawn.normal(size=(ROWS, 2, WIDTH)),
                "weights": drawn.random(ROWS) * some,
                "wanted": drawn.normal(size=(ROWS, 2, WIDTH)),
            },
            "eye": {"pixels": rng.normal(size=(ROWS, pixels, SEEN))},
            "ear": {"loud": rng.normal(size=(ROWS, 1, 1))},
            "llm": {"weights": rng.random(ROWS), "wanted": rng.normal(size=(ROWS, WIDTH))},
        }
        result.append(((("eye", pixels),), jax.tree.map(lambda x: x.astype(np.float32), numbers)))
    return result


def denominators(model: PlacedModel, parts: Sequence[Any]) -> dict[str, float]:
    """Sums of a step's loss weights, by module that gives a loss; and its rows."""
    modules = [node.module for node in model.graph.losses]
    own = {m: float(sum(part[m]["weights"].sum(dtype=np.float64) for _, part in parts)) for m in modules}
    return own | {"rows": float(ROWS * len(parts))}


def optimizers(frozen: Sequence[str] = (), decay: float = 0.0) -> dict[str, OptimizerConfig]:
    """AdamW of each module at its own rate; with a decay also of single leaves, see ``rate_factor``."""
    rates = {"eye": 2e-3, "ear": 5e-3, "llm": 3e-3, "hand": 4e-3}
    own: dict[str, Any] = {"eye": {"rates": {"see/bias": 0.2}}, "llm": LLM_RATES} if decay else {}
    return {
        module: OptimizerConfig(
            learning_rate=rate, weight_decay=decay, eps=1e-3, frozen=module in frozen, **own.get(module, {})
        )
        for module, rate in rates.items()
    }


def rate_factor(name: str, decay: float) -> float:
    """The factor of a leaf's learning rate where the optimizers have this decay, as a table."""
    if not decay:
        return 1.0
    if name.startswith("llm/ends"):
        return 0.7**6 * (0.5 if name == "llm/ends/up" else 1.0)
    of_layers = {"000": 0.7**5, "001": 0.7**4, "002": 0.7**3 * 3.0, "003": 0.7**2, "004": 0.7}
    return of_layers[name.split("/")[2]] if name.startswith("llm/layers") else 0.2 if name == "eye/see/bias" else 1.0


def placed(
    layouts: Mapping[str, Layout], configs: Mapping[str, OptimizerConfig], hand: float = 1.0, **settings: Any
) -> PlacedModel:
    """The toy on the world of these tests; ``hand`` is the weight of the hand's loss."""
    own = Settings(optimizers=configs, total_steps=STEPS, **settings)
    layouts = {name: replace(layout, sp=False) for name, layout in layouts.items()}  # its numbers are no tokens
    return PlacedModel(cast(MultimodalModel, Toy(tuple(layouts), hand)), layouts, parity.world(), own)


def executor(
    model: PlacedModel,
    microbatches: int,
    schedule: str = "1f1b",
    run: type[Run] = Executor,
    window: int = 0,
    split: bool = False,
) -> Run:
    """An executor for either bucket, with initial parameters; ``split`` splits the backward of every trained stage."""
    graph = model.graph.with_split() if split else model.graph
    costs = Costs.nominal(graph, move=0.01, once=0.01)
    order = make_schedule(schedule, graph, microbatches, costs, window=window)
    validate(order)
    result = run(model, order, dict(batch(0, (1, 2))))
    result.initialise(SEED)
    return result


def logical(model: PlacedModel, states: Mapping[str, Any]) -> Leaves:
    """Logical leaves of all stages, on the host."""
    return parity.logical_leaves(model, states)
