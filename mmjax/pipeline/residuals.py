"""Residuals, and those that depend only on parameters: if forward kept them, each microbatch would have a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mmjax import jaxprs
from mmjax.configurable import ConfigError
from mmjax.pipeline.trees import by_name

SHARE = 1 / 8
"""Largest size of these residuals, as a share of the stage's parameters: scales are smaller, matrices are larger."""


@dataclass(frozen=True)
class Residual:
    """Aval with sharding, and spec, of a residual: local values stacked over the axes over which they vary."""

    aval: Any
    spec: PartitionSpec


class ResidualError(ConfigError):
    """A stage's backward would need large copies of its weights."""


def from_parameters_alone(
    forward: Callable[..., Any], avals: Sequence[Any], residuals: Callable[[Any], Sequence[Any]]
) -> dict[int, list[str]]:
    """Names of the parameters of each residual that depends only on parameters, by the residual's position: {2:
    ["llm/norm"]}; [] for a number that depends on nothing, such as the size of a mean.

    Args:
      forward: ``(params, inputs, carry) -> (out, residuals)``.
      avals: its arguments as trees of ``ShapeDtypeStruct``, (params, inputs, carry); params are nested dicts by module.
      residuals: selects a flat sequence of residuals from ``forward``'s result, such as ``lambda result: result[1]``;
        they are numbered from 0.
    """
    flags, result = jaxprs.dependencies(forward, avals), jax.eval_shape(forward, *avals)
    used = residuals(jax.tree.unflatten(jax.tree.structure(result), flags))
    names_by_position: dict[int, list[str]] = {}
    for position, (is_read, residual) in enumerate(zip(used, residuals(result), strict=True)):
        params, *activations = jax.tree.unflatten(jax.tree.structure(tuple(avals)), is_read)
        names = [name for name, is_used in by_name(params).items() if is_used]
        is_number = math.prod(residual.shape[1:]) == 1
        if (names or is_number) and not any(jax.tree.leaves(activations)):
            names_by_position[position] = names
    return names_by_position


def require_small(stage: str, residuals: Mapping[int, Any], names: Mapping[int, list[str]], params: Any) -> None:
    """Refuses large residuals of parameters, because backward recomputes those of all layers at once.

    Args:
      stage: name of the stage, for the message.
      residuals: avals (``ShapeDtypeStruct``) of the residuals by position, stacked over ranks along the first
        dimension.
      names: names of the parameters of each such residual by position, as ``from_parameters_alone`` gives them.
      params: avals, with shardings, of all parameters of the stage.

    Raises:
      ResidualError: on one rank they are larger than ``SHARE`` of the parameters.
    """
    sizes = {position: math.prod(residuals[position].shape[1:]) for position in names}
    if sum(sizes.values()) <= SHARE * sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(params)):
        return
    largest = max(sizes, key=lambda position: sizes[position])
    aval = residuals[largest]
    raise ResidualError(
        f"stage {stage}: backward would need {aval.dtype}{list(aval.shape[1:])} for all layers at once, which is made "
        f"of parameters alone ({', '.join(names[largest])}); put what is done with them into a function under "
        "jax.checkpoint, with the activation that they meet as an argument"
    )
