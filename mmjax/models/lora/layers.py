"""Adapters of a module's layers: their targets, parameters, and combination with a stage's weights.

A stage has the adapters of its layers, stacked as the layers are. tp splits A and B along the dimension that each
shares with the weight: a column-parallel product has a complete A and columns of B, a row-parallel product rows of A
and a complete B. Neither needs another collective in forward.

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
"""The name inside a layer, the inputs and the outputs of each weight with an adapter."""
# A is initialised like many linear layers: uniform with variance 1/(3 D).
_A_INIT = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class _Group(nnx.Module):
    """One level of the nested names of adapters."""


class Adapters(nnx.Module):
    """A ``[D, r]`` and B ``[r, F]`` for weights of one layer; B is initially 0, so adapters start without effect.

    ``sizes`` are a result of ``adapted_sizes``. The parameters of "attn/q" are "attn/q/a" and "attn/q/b".
    """

    def __init__(self, sizes: Sizes, rank: int, rngs: nnx.Rngs):
        for name, inputs, outputs in sizes:
            group: Any = self
            for part in name.split("/"):
                if not hasattr(group, part):
                    setattr(group, part, _Group())
                group = getattr(group, part)
            setattr(group, A, nnx.Param(_A_INIT(rngs.params(), (inputs, rank))))
            setattr(group, B, nnx.Param(jnp.zeros((rank, outputs))))


def adapted_sizes(create: Create, lora: LoraConfig) -> Sizes:
    """Name in the layer, inputs and outputs of the weights of one layer that have an adapter, such as ("attn/q", 64,
    64).
    """
    return tuple((name, *shape) for name, shape in _matrices(create).items() if lora.adapts(name))


def _matrices(create: Create) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a layer by their names in the layer."""
    shapes = {"/".join(path): shape for path, shape in shapes_of(create).items()}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def require_targets(name: str, module: Module, lora: LoraConfig) -> None:
    """Raises `ConfigError` unless each target matches a weight of the module's layers.

    Args:
      name: the module's name, for errors.
      module: the module.
      lora: the settings, with native names as targets.

    Raises:
      ConfigError: a target matches none; the message lists the weights.
    """
    legal = list(dict.fromkeys(weight for group in module.groups for weight in _matrices(group.create)))
    for target in lora.targets:
        fix = f"{target!r} stands for no weight of {name}'s layers; they have {', '.join(legal)}"
        require(any(fnmatchcase(weight, target) for weight in legal), f"{name}/Lora.targets", lora.targets, fix)


def lora_slice(name: str, module: Module, runs: Iterable[LayerRun], lora: LoraConfig, tp: int) -> ModuleSlice | None:
    """A stage's adapters of a module's layers; ``None`` if these layers have none.

    Args:
      name: the module's name; the slice is of "<name>_lora".
      module: the module.
      runs: the layers of the stage.
      lora: settings of the adapters, with a rank above 0.
      tp: the tp degree.
    """
    adapter_runs, axes, module_axes = list[LayerRun](), dict[str, tuple[str, ...]](), module.axes_of(tp)
    for run in runs:
        if sizes := adapted_sizes(run.create, lora):
            create = partial(Adapters, sizes, lora.rank)
            adapter_runs.append(LayerRun(create, run.layers, run.name, stacked=run.stacked))
            axes |= _axes(f"{name}/{run.name}", sizes, module_axes)
    if not adapter_runs:
        return None
    return ModuleSlice(
        lora_name(name), runs=tuple(adapter_runs), vocab_multiple=tp, axes=axes, depth=module.config.layers
    )


def _axes(prefix: str, sizes: Sizes, module_axes: LogicalAxes) -> dict[str, tuple[str, ...]]:
    """Logical axes of adapters, by their names inside a layer."""
    axes: dict[str, tuple[str, ...]] = {}
    for name, inputs, outputs in sizes:
        first, second = logical_axes(f"{prefix}/{name}", (inputs, outputs), module_axes)
        axes |= {f"{name}/{A}": (first, RANK), f"{name}/{B}": (RANK, second)}
    return axes


def with_adapters(weights: Params, adapters: Params, scale: float) -> Params:
    """A copy of a stage's parameters of a module, with adapted weights replaced by ``Adapted``.

    ``adapters`` are the parameters of "<module>_lora": a tree like ``weights`` with {"a", "b"} in place of each weight.
    ``scale`` is alpha / rank.
    """
    return {
        name: _adapted(weight, adapters[name], scale) if name in adapters else weight
        for name, weight in weights.items()
    }


def _adapted(weight: Any, adapters: Params, scale: float) -> Any:
    if isinstance(weight, Mapping):
        return with_adapters(weight, adapters, scale)
    return Adapted(weight=weight, a=adapters[A], b=adapters[B], scale=scale)


# ---- counts, by the rules of ``flops`` -------------------------------------------------------------------------------


def lora_parameters(module: Module, lora: LoraConfig) -> int:
    """The number of parameters of a module's adapters in all layers, whole and not of one rank."""
    sizes = ((group.layers, adapted_sizes(group.create, lora)) for group in module.groups)
    return sum(layers * lora.rank * (inputs + outputs) for layers, group in sizes for _, inputs, outputs in group)


def lora_flops(module: Module, lora: LoraConfig, lengths: Iterable[int]) -> int:
    """Forward FLOPs of a module's adapters over segments of these lengths in tokens or patches; class tokens are added
    here.
    """
    special = module.medium.special if module.medium else 0
    return 2 * sum(int(n) + special for n in lengths) * lora_parameters(module, lora)
