"""Residuals that are made of parameters alone: kept, every microbatch in flight would have a copy of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mmjax import jax_compat
from mmjax.configurable import ConfigError
from mmjax.pipeline.trees import by_name

SHARE = 1 / 8
"""Share of a stage's parameters that these residuals may have: scales are less, and matrices more."""


class ResidualError(ConfigError):
    """The backward of a stage would need large copies of its weights."""


def made_of_parameters(
    forward: Callable[..., Any], avals: Sequence[Any], residuals: Callable[[Any], Sequence[Any]]
) -> dict[int, list[str]]:
    """The residuals of a stage that depend on parameters alone, by place: the names of these parameters.

    Args:
      forward: ``(params, inputs, carry) -> (out, residuals)``.
      avals: its arguments.
      residuals: takes them out of what ``forward`` returns.
    """
    flags = jax_compat.dependencies(forward, avals)
    result = jax.tree.structure(jax.eval_shape(forward, *avals))
    names_by_place: dict[int, list[str]] = {}
    for place, used in enumerate(residuals(jax.tree.unflatten(result, flags))):
        params, *activations = jax.tree.unflatten(jax.tree.structure(tuple(avals)), used)
        names = [name for name, is_used in by_name(params).items() if is_used]
        if names and not any(jax.tree.leaves(activations)):
            names_by_place[place] = names
    return names_by_place


def require_small(stage: str, residuals: Mapping[int, Any], names: Mapping[int, list[str]], params: Any) -> None:
    """Refuses large residuals: backward computes them again, those of all layers at once.

    Args:
      stage: its name, for the message.
      residuals: avals of residuals by place, stacked over ranks.
      names: of the parameters that each is made of.
      params: avals of all parameters of the stage.

    Raises:
      ResidualError: together they have more than a share of the parameters' sizes, on one rank.
    """
    sizes = {place: math.prod(residuals[place].shape[1:]) for place in names}
    if sum(sizes.values()) <= SHARE * sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(params)):
        return
    largest = max(sizes, key=lambda place: sizes[place])
    aval = residuals[largest]
    raise ResidualError(
        f"stage {stage}: backward would need {aval.dtype}{list(aval.shape[1:])} for all layers at once, which is made "
        f"of parameters alone ({', '.join(names[largest])}); put what is done with them into a function under "
        "jax.checkpoint, with the activation that they meet as an argument"
    )
