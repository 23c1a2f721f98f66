"""AdamW and its learning rate, one configuration per module.

The update of an element reads that element alone, so it may be applied to any shard of any leaf: a tp slice, a
ZeRO-1 shard, or layers stacked along a new first dimension. A mask says which leaves are decayed. Global-norm clipping
spans modules and happens before.

AdamW: Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2, with the decay multiplied
by the learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from mmjax.configurable import require
from mmjax.optimizer_config import OptimizerConfig


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates done before: ``learning_rate(config, 100)(0)`` is the
    first.

    Update 0 has `learning_rate / (warmup + 1)`, and update `warmup` has `learning_rate`. The schedule reaches
    `final_learning_rate` at update `total_steps`, one after the last, so that the last update still changes parameters.
    A frozen module has 0. `config` has the module's settings, and `total_steps` are the updates of the whole run.

    Raises:
      ConfigError: the warm-up does not end before the run.
    """
    if config.frozen:
        return optax.constant_schedule(0.0)
    peak, warmup = config.learning_rate, config.warmup
    require(
        warmup == 0 or warmup < total_steps,
        "Optimizer.warmup",
        warmup,
        f"must be below Train.steps = {total_steps}, such as {max(total_steps, 0) // 10}",
    )
    decay_steps = max(total_steps - warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_learning_rate / peak)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, config.final_learning_rate, decay_steps)
    else:
        main = optax.constant_schedule(peak)
    if not warmup:
        return main
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rising, main], [warmup])


def make_optimizer(
    config: OptimizerConfig, total_steps: int, decay_mask: Any | Callable[[Any], Any]
) -> optax.GradientTransformation:
    """AdamW for one module's parameters, in any tree and any shards.

    Args:
      config: the module's configuration, of which `rates` and `layer_decay` are not read.
      total_steps: updates in the whole run.
      decay_mask: a tree of booleans like the parameters', true where weight decay applies (`Leaf.decayed`), or a
        function that makes it from the parameters.

    Returns:
      A transformation of optax whose updates are to be added. A frozen module's updates are zero and its state is
        empty.

    Raises:
      ConfigError: the warm-up does not end before the run.
    """
    schedule = learning_rate(config, total_steps)
    if config.frozen:
        return optax.set_to_zero()
    parts = [optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)]
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    parts.append(optax.scale_by_learning_rate(schedule))
    if config.ema:
        parts.append(_keep_mean())
    return optax.chain(*parts)


class _MeanState(NamedTuple):
    """A running mean of the parameters, a tree like theirs."""

    mean: Any


def _keep_mean() -> optax.GradientTransformation:
    """Keeps a running mean in the state, which `with_mean` replaces after each update."""

    def init(params: Any) -> Any:
        return _MeanState(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, state

    return optax.GradientTransformation(init, update)


def mean_of(state: optax.OptState) -> Any | None:
    """The running mean of the parameters in a state of `make_optimizer`, without a copy; `None` without one."""
    found = next(filter(_is_mean, jax.tree.leaves(state, is_leaf=_is_mean)), None)
    return None if found is None else found.mean


def with_mean(state: optax.OptState, mean: Any) -> optax.OptState:
    """A copy of a state of `make_optimizer` with another running mean; the state itself if it has none."""
    return jax.tree.map(lambda node: _MeanState(mean) if _is_mean(node) else node, state, is_leaf=_is_mean)


def next_mean(mean: Any, params: Any, decay: float) -> Any:
    """The running mean after an update: decay · mean + (1 - decay) · params."""
    return jax.tree.map(lambda average, new: average + (1 - decay) * (new - average), mean, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """The part of an optimizer's state that is saved.

    Attributes:
      m: first moments, a tree like the parameters'.
      v: second moments, likewise.
      count: the number of updates in the moments.
    """

    m: Any
    v: Any
    count: jax.Array


def moments(state: optax.OptState) -> Moments | None:
    """Reads the moments (m, v and count) out of a state of `make_optimizer`, without a copy; `None` if frozen."""
    adam = _adam(state)
    return None if adam is None else Moments(m=adam.mu, v=adam.nu, count=jnp.asarray(adam.count))


def with_moments(state: optax.OptState, new: Moments, updates: jax.Array | None = None) -> optax.OptState:
    """A copy of a state of `make_optimizer` with other moments and count, such as restored ones.

    Args:
      state: a state with any moments.
      new: the moments, trees m and v like the parameters and the count of updates in them. They may be younger than the
        run if the module was frozen before.
      updates: updates done by the run, on which the learning rate depends; by default `new.count`.

    Raises:
      ValueError: the state is a frozen module's.
    """
    if _adam(state) is None:
        raise ValueError("a frozen module has no moments")
    state = optax.tree.set(state, count=new.count if updates is None else updates)
    adam = optax.ScaleByAdamState(count=new.count, mu=new.m, nu=new.v)
    return jax.tree.map(lambda node: adam if _is_adam(node) else node, state, is_leaf=_is_adam)


def _adam(state: optax.OptState) -> optax.ScaleByAdamState | None:
    return next(filter(_is_adam, jax.tree.leaves(state, is_leaf=_is_adam)), None)


def _is_mean(node: Any) -> TypeGuard[_MeanState]:
    return isinstance(node, _MeanState)


def _is_adam(node: Any) -> TypeGuard[optax.ScaleByAdamState]:
    return isinstance(node, optax.ScaleByAdamState)
