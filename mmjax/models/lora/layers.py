"""Adapters of a module's layers: which weights have one, its parameters, and how a stage's weights carry it.

Adapters lie where the weights lie: a stage holds those of its layers, stacked as the layers are. tp splits A and B
along the dimension that each shares with the weight, so that a column-parallel product has a whole A and columns of B,
and a row-parallel one rows of A and a whole B; both need no further collective forward.

Shapes: D inputs, F outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mmjax.configurable import require
from mmjax.models.config import lora_name
from mmjax.models.handles import Adapted
from mmjax.models.layers import Params
from mmjax.models.lora.config import LoraConfig
from mmjax.models.module import Module
from mmjax.models.parameters import Create, LayerRun, LogicalAxes, ModuleSlice, logical_axes, shapes_of

A, B, RANK = "a", "b", "rank"
Sizes = tuple[tuple[str, int, int], ...]
"""Name inside a layer, inputs and outputs of each weight with an adapter."""
# A is drawn as the weights of a linear layer often are: uniform with variance 1/(3 D).
_A_INIT = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class _Group(nnx.Module):
    """Adapters by name, one level of it."""


class Adapters(nnx.Module):
    """A ``[D, r]`` and B ``[r, F]`` for weights of one layer; B is 0, so that an adapter starts without effect."""

    def __init__(self, sizes: Sizes, rank: int, rngs: nnx.Rngs):
        for name, inputs, outputs in sizes:
            at: Any = self
            for part in name.split("/"):
                if not hasattr(at, part):
                    setattr(at, part, _Group())
                at = getattr(at, part)
            setattr(at, A, nnx.Param(_A_INIT(rngs.params(), (inputs, rank))))
            setattr(at, B, nnx.Param(jnp.zeros((rank, outputs))))


def adapted_sizes(create: Create, lora: LoraConfig) -> Sizes:
    """Sizes of the weights of one layer that have an adapter."""
    named = _matrices(create)
    return tuple((n, *shape) for n, shape in named.items() if any(fnmatchcase(n, one) for one in lora.targets))


def _matrices(create: Create) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a layer by their names in it."""
    found = {"/".join(path): shape for path, shape in shapes_of(create).items()}
    return {name: (shape[0], shape[1]) for name, shape in found.items() if len(shape) == 2}


def require_targets(name: str, module: Module, lora: LoraConfig) -> None:
    """Requires that each of the targets stands for a weight of the module's layers.

    Raises:
      ConfigError: one stands for none; the message names those that there are.
    """
    legal = list(dict.fromkeys(own for group in module.groups for own in _matrices(group.create)))
    for target in lora.targets:
        fix = f"{target!r} stands for no weight of {name}'s layers; they have {', '.join(legal)}"
        require(any(fnmatchcase(own, target) for own in legal), f"{name}/Lora.targets", lora.targets, fix)


def lora_slice(name: str, module: Module, runs: Iterable[LayerRun], lora: LoraConfig, tp: int) -> ModuleSlice | None:
    """The adapters of some of a module's layers; ``None`` where these have none."""
    own, axes, named = [], dict[str, tuple[str, ...]](), module.axes_of(tp)
    for run in runs:
        if sizes := adapted_sizes(run.create, lora):
            create = partial(Adapters, sizes, lora.rank)
            own.append(LayerRun(create, run.layers, run.name, stacked=run.stacked))
            axes |= _axes(f"{name}/{run.name}", sizes, named)
    return ModuleSlice(lora_name(name), tuple(own), (), tp, axes, module.config.layers) if own else None


def _axes(prefix: str, sizes: Sizes, own: LogicalAxes) -> dict[str, tuple[str, ...]]:
    """Names of the dimensions of adapters, by their names inside a layer."""
    found: dict[str, tuple[str, ...]] = {}
    for name, inputs, outputs in sizes:
        first, second = logical_axes(f"{prefix}/{name}", (inputs, outputs), own)
        found |= {f"{name}/{A}": (first, RANK), f"{name}/{B}": (RANK, second)}
    return found


def with_adapters(weights: Params, adapters: Params, scale: float) -> Params:
    """A stage's parameters of a module in which the weights that have an adapter carry it."""
    return {name: _adapted(own, adapters[name], scale) if name in adapters else own for name, own in weights.items()}


def _adapted(own: Any, adapters: Params, scale: float) -> Any:
    if isinstance(own, Mapping):
        return with_adapters(own, adapters, scale)
    return Adapted(weight=own, a=adapters[A], b=adapters[B], scale=scale)


# ---- counts, by the rules of ``flops`` -------------------------------------------------------------------------------


def lora_parameters(module: Module, lora: LoraConfig) -> int:
    """Parameters of a module's adapters."""
    sizes = ((group.layers, adapted_sizes(group.create, lora)) for group in module.groups)
    return sum(layers * lora.rank * (inputs + outputs) for layers, own in sizes for _, inputs, outputs in own)


def lora_flops(module: Module, lora: LoraConfig, lengths: Iterable[int]) -> int:
    """Forward FLOPs of a module's adapters over segments of so many tokens or patches, which all weights see."""
    special = module.medium.special if module.medium else 0
    return 2 * sum(int(n) + special for n in lengths) * lora_parameters(module, lora)
