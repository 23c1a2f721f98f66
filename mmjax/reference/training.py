"""Training: learning rates, clipping and AdamW."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmjax.reference.arithmetic import Leaves, dense_leaves, module_of
from mmjax.reference.model import step_loss_and_gradients

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel
    from mmjax.optimizer_config import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of training with AdamW.

    Attributes:
      leaves: by name.
      first, second: AdamW's moments of all leaves that were updated, by name.
      updates: the number of updates without skipped ones.
    """

    leaves: dict[str, np.ndarray]
    first: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    second: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    updates: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The result of `train_steps`.

    Attributes:
      losses: the loss of each step.
      gradient_norms: for each step, the global norm before clipping.
      module_gradient_norms: for each step, the norm of each module that is not frozen, by module.
      state: the final state.
    """

    losses: list[float]
    gradient_norms: list[float]
    module_gradient_norms: list[dict[str, float]]
    state: TrainState


def global_norm(gradients: Leaves, module: str | None = None) -> float:
    """Euclidean norm over all elements of the gradients, or of those of one module, such as "llm".

    `gradients` are by leaf, such as "llm/embed".
    """
    chosen = [leaf for name, leaf in gradients.items() if module in (None, module_of(name))]
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in chosen))


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of a run of `total_steps`.

    The first `warmup` steps rise linearly ((step + 1) / (warmup + 1) of `learning_rate`). Step `warmup` has
    `learning_rate`, which the schedule keeps or decays to `final_learning_rate` at `total_steps`.
    """
    peak, final = optimizer.learning_rate, optimizer.final_learning_rate
    if step < optimizer.warmup:
        return peak * (step + 1) / (optimizer.warmup + 1)
    progress = min(1.0, (step - optimizer.warmup) / max(1, total_steps - optimizer.warmup))
    if optimizer.schedule == "constant":
        return peak
    if optimizer.schedule == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def rate_factors(
    names: Iterable[str], model: MultimodalModel, optimizers: Mapping[str, OptimizerConfig]
) -> dict[str, float]:
    """The factor of each leaf's learning rate, by leaf, from patterns of names and from its layer: {"llm/embed": 1.0}.

    `names` are names of leaves, such as "llm/embed"; `optimizers` has one for each of their modules, by module, whose
    `rates` and `layer_decay` are read. `model` is as `build_model(recipe, tokenizer)` gives it.
    """
    factors = {}
    for leaf in names:
        module, _, name = leaf.partition("/")
        optimizer = optimizers[module]
        node = model.nodes.get(module) or model.nodes.get(module.removesuffix("_lora"))
        layer = re.match(r"layers/(\d+)/", name)
        if layer and node:
            power = node.config.layers - int(layer[1])
        else:
            first = node.module.parts(first=True, last=False) if node and module in model.nodes else ()
            power = node.config.layers + 1 if node and any(name in part.declarations for part in first) else 0
        matches = [factor for pattern, factor in optimizer.rates.items() if fnmatch.fnmatchcase(name, pattern)]
        factors[leaf] = (matches[0] if matches else 1.0) * optimizer.layer_decay**power
    return factors


def adamw_step(
    state: TrainState,
    gradients: Mapping[str, np.ndarray],
    optimizers: Mapping[str, OptimizerConfig],
    rates: Mapping[str, float],
    *,
    clip_norm: float,
    factors: Mapping[str, float] | None = None,
    bias_updates: Mapping[str, np.ndarray] | None = None,
) -> TrainState:
    """The state after one AdamW update (Loshchilov and Hutter 2019), each module with its own optimizer and learning
    rate.

    Gradients are scaled by min(1, clip_norm / norm) with the norm over all modules (clip_norm 0: no clipping). Decay is
    decoupled, multiplied by the learning rate, and not applied to leaves with one dimension. Gradients that are not
    finite change nothing. Leaves without a gradient (frozen modules) do not change.

    Args:
      state: the state before, which is not modified; at first `TrainState(leaves=leaves)`.
      gradients: by leaf, such as "llm/embed".
      optimizers, rates: settings and learning rate of each module, by module: {"llm": 1e-3}.
      clip_norm: bound of the global gradient norm; 0 for none.
      factors: factors of the learning rates of single leaves, by leaf; a missing one is 1.
      bias_updates: by leaf of a router's bias, what is added to it in place of AdamW's update, see `bias_updates`.
    """
    norm = global_norm(gradients)
    if not math.isfinite(norm):
        return state
    scale = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    count = state.updates + 1
    leaves, first, second = dict(state.leaves), dict(state.first), dict(state.second)
    for name, gradient in gradients.items():
        optimizer, rate = optimizers[module_of(name)], rates[module_of(name)] * (factors or {}).get(name, 1.0)
        g, p, zero = gradient * scale, leaves[name], np.zeros_like(gradient)
        m = first[name] = optimizer.b1 * first.get(name, zero) + (1 - optimizer.b1) * g
        v = second[name] = optimizer.b2 * second.get(name, zero) + (1 - optimizer.b2) * g * g
        update = (m / (1 - optimizer.b1**count)) / (np.sqrt(v / (1 - optimizer.b2**count)) + optimizer.eps)
        if p.ndim > 1:
            update = update + optimizer.weight_decay * p
        leaves[name] = p - rate * update
    for name, update in (bias_updates or {}).items():
        leaves[name] = state.leaves[name] + update
    return TrainState(leaves=leaves, first=first, second=second, updates=count)


def bias_updates(model: MultimodalModel, loads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The change of each router's bias in a step, by leaf: its rate times the sign of the mean load minus each load.

    Source: Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", algorithm 1.

    `loads` are by leaf, such as "llm/layers/000/experts/router_bias"; `model` is as `build_model(recipe, tokenizer)`
    gives it.
    """
    rates = {name: model.nodes[module_of(name)].config.router_bias_rate for name in loads}
    return {
        name: (rates[name] * np.sign(load.sum() - load.size * load)).astype(np.float32) for name, load in loads.items()
    }


def train_steps(
    leaves: Leaves,
    model: MultimodalModel,
    optimizers: Mapping[str, OptimizerConfig],
    steps: Sequence[Sequence[Sample]],
    *,
    clip_norm: float,
    total_steps: int | None = None,
) -> Training:
    """Trains on the samples of each step in turn.

    Args:
      leaves: logical leaves to start from, by name such as "llm/embed"; they are not modified.
      model: the model, as `build_model(recipe, tokenizer)` gives it.
      optimizers: one per module ("vision", "vision_projector", "llm"); frozen modules are neither differentiated, nor
        counted in the norm, nor decayed.
      steps: the samples of every step.
      clip_norm: bound of the global gradient norm; 0 for none.
      total_steps: length of the run for the learning rate schedules; by default the number of `steps`.

    Raises:
      ValueError: a module has no optimizer, or as `step_loss_and_gradients` does.
    """
    state = TrainState(leaves={name: np.asarray(leaf) for name, leaf in dense_leaves(leaves).items()})
    modules = sorted({module_of(name) for name in state.leaves})
    if missing := [module for module in modules if module not in optimizers]:
        raise ValueError(f"optimizers: none for {missing}; give every module an Optimizer")
    frozen = [module for module in modules if optimizers[module].frozen]
    losses, norms, module_norms = [], [], []
    for step, samples in enumerate(steps):
        result = step_loss_and_gradients(state.leaves, model, samples, frozen=frozen)
        rates = {m: learning_rate(optimizers[m], step, total_steps or len(steps)) for m in modules}
        factors = rate_factors(state.leaves, model, optimizers)
        updates = bias_updates(model, result.loads)
        state = adamw_step(
            state,
            result.gradients,
            optimizers,
            rates,
            clip_norm=clip_norm,
            factors=factors,
            bias_updates=updates,
        )
        losses.append(result.loss)
        norms.append(global_norm(result.gradients))
        module_norms.append({m: global_norm(result.gradients, m) for m in modules if m not in frozen})
    return Training(losses=losses, gradient_norms=norms, module_gradient_norms=module_norms, state=state)
