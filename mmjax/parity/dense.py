"""Trains the dense reference on the samples of a comparison, one by one on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmjax import reference
from mmjax.models.graph import MultimodalModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.parity.compare import MOMENTS, Expected, Leaves, module_of, of_kind
from mmjax.parity.samples import Steps


def run_reference(
    model: MultimodalModel,
    optimizers: Mapping[str, OptimizerConfig],
    initial: Mapping[str, np.ndarray],
    samples: Steps,
    clip_norm: float,
    report: Callable[[int], None] | None = None,
    starts: Sequence[Leaves] = (),
) -> Expected:
    """Trains a model with the reference, for as many steps as ``samples`` has entries.

    The result has losses, gradients and norms of every step, and leaves before the first step and after each.

    Args:
      model: the model, as ``build_model(recipe, tokenizer)`` makes it.
      optimizers: by module, such as ``recipe.model.optimizers``.
      initial: initial parameters by logical name without ``params/``, such as "llm/embed".
      samples: the samples of every step, as ``Samples.steps(3)`` of ``mmjax.parity.samples`` gives them.
      clip_norm: largest norm of all modules' gradients together; 0 does not clip.
      report: called after each step with the number of steps done.
      starts: leaves of another run before each step, with their kinds in their names. Later steps begin with these: so
        the rounding of an update, which the next gradients may magnify, is no difference between the runs.
    """
    state = reference.TrainState(leaves=dict(initial))
    factors = reference.rate_factors(initial, model, optimizers)
    result = Expected(losses=[], norms=[], leaves=[_named(state, optimizers)], gradients=[], starts=starts)
    for step, step_samples in enumerate(samples):
        if step and starts:
            state = _state_of(starts[step], step)
        out = reference.step_loss_and_gradients(state.leaves, model, step_samples)
        # Gradients of frozen modules are dropped after the differentiation, which then compiles only once.
        gradients = {name: g for name, g in out.gradients.items() if not optimizers[module_of(name)].frozen}
        rates = {module: reference.learning_rate(o, step, len(samples)) for module, o in optimizers.items()}
        loads = {name: load for name, load in out.loads.items() if not optimizers[module_of(name)].frozen}
        state = reference.adamw_step(
            state,
            gradients,
            optimizers,
            rates,
            clip_norm=clip_norm,
            factors=factors,
            bias_updates=reference.bias_updates(model, loads),
        )
        result.losses.append(out.loss)
        result.norms.append({module: reference.global_norm(gradients, module) for module in optimizers})
        result.gradients.append(gradients)
        result.leaves.append(_named(state, optimizers))
        if report:
            report(step + 1)
    return result


def _state_of(leaves: Leaves, updates: int) -> reference.TrainState:
    """The state that ``leaves`` of a run have after so many updates."""
    params, first, second = (of_kind(leaves, kind) for kind in ("params", *MOMENTS))
    return reference.TrainState(leaves=params, first=first, second=second, updates=updates)


def _named(state: reference.TrainState, optimizers: Mapping[str, OptimizerConfig]) -> Leaves:
    """The state by names of checkpoint leaves; moments that do not exist yet are 0."""
    result = {f"params/{name}": np.asarray(leaf) for name, leaf in state.leaves.items()}
    for name, leaf in state.leaves.items():
        if not optimizers[module_of(name)].frozen:
            for kind, moment in zip(MOMENTS, (state.first, state.second), strict=True):
                result[f"{kind}/{name}"] = np.asarray(moment.get(name, np.zeros_like(leaf)))
    return result
