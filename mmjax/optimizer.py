"""AdamW and its learning rate, one configuration per module.

The update of an element reads that element alone, so it may be applied to any shard of any leaf: a tp slice, a
ZeRO-1 shard, or layers stacked along a new first dimension. What an element cannot know, whether its leaf is
decayed, comes as a mask; global-norm clipping spans modules and happens before.

AdamW: Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2, with the decay multiplied
by the learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mmjax.configurable import configurable, not_negative, one_of, positive, require

SCHEDULES = ("constant", "cosine", "linear")


@configurable("Optimizer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW of one module.

    Attributes:
      learning_rate: the highest one.
      final_learning_rate: where "cosine" and "linear" end, as an absolute value.
      warmup: updates with a rising learning rate before the first with the full one.
      schedule: "constant", "cosine" or "linear", from the end of the warm-up to the last step.
      weight_decay: decoupled; applies to matrices only.
      b1: decay of the gradient's running mean.
      b2: decay of the squared gradient's running mean.
      eps: added to the root of the squared gradient's running mean.
      frozen: the module's parameters stay as they are; no moments are held.
    """

    learning_rate: float = 1e-3
    final_learning_rate: float = 0.0
    warmup: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    frozen: bool = False

    def __post_init__(self) -> None:
        positive("Optimizer.learning_rate", self.learning_rate)
        not_negative("Optimizer.final_learning_rate", self.final_learning_rate)
        not_negative("Optimizer.warmup", self.warmup)
        one_of("Optimizer.schedule", self.schedule, SCHEDULES)
        not_negative("Optimizer.weight_decay", self.weight_decay)
        require(0 <= self.b1 < 1, "Optimizer.b1", self.b1, "must be at least 0 and below 1, such as 0.9")
        require(0 <= self.b2 < 1, "Optimizer.b2", self.b2, "must be at least 0 and below 1, such as 0.95")
        positive("Optimizer.eps", self.eps)


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate by number of updates done before.

    The first update has `learning_rate / (warmup + 1)`; update `warmup` has `learning_rate`; at `total_steps`, which
    no update reaches, stands `final_learning_rate`, so that the last update still moves. 0 for a frozen module.

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
      config: of the module.
      total_steps: updates in the whole run.
      decay_mask: a tree of booleans like the parameters', true where weight decay applies (`Leaf.decayed`), or a
        function that makes it from the parameters.

    Returns:
      A transformation whose updates are to be added. A frozen module's updates are zero and its state is empty.

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
    return optax.chain(*parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """What of an optimizer's state has to be saved: both moments, like the parameters' tree, and updates done."""

    m: Any
    v: Any
    count: jax.Array


def moments(state: optax.OptState) -> Moments | None:
    """Reads the moments out of a state of `make_optimizer`; `None` for a frozen module."""
    adam = _adam(state)
    return None if adam is None else Moments(m=adam.mu, v=adam.nu, count=jnp.asarray(adam.count))


def with_moments(state: optax.OptState, new: Moments) -> optax.OptState:
    """A state of `make_optimizer` with other moments and count, such as restored ones.

    Raises:
      ValueError: the state is a frozen module's.
    """
    if _adam(state) is None:
        raise ValueError("a frozen module has no moments")
    return optax.tree.set(state, mu=new.m, nu=new.v, count=new.count)


def _adam(state: optax.OptState) -> optax.ScaleByAdamState | None:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    return next((leaf for leaf in leaves if isinstance(leaf, optax.ScaleByAdamState)), None)
