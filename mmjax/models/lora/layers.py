"""Adapters of a module's layers: their targets, parameters, and combination with a stage's weights.

A stage has the adapters of its layers, stacked as the layers are. tp splits A and B along the dimension that each
shares with the weight: a column-parallel product has a complete A and columns of B, a row-parallel product rows of A
and a complete B. Neither needs another collective in forward.

The weight ``[E, D, F]`` of E experts has an adapter for each expert.

Shapes: E experts, D inputs, F outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mmjax.configurable import require
from mmjax.models.config import lora_name
from mmjax.models.handles import Adapted
from mmjax.models.layers import Params
from mmjax.models.lora.config import LoraConfig, is_target
from mmjax.models.module import Module
from mmjax.models.parameters import Create, Declaration, LayerRun, ModuleSlice, declarations

A, B, RANK = "a", "b", "rank"
Weights = tuple[tuple[str, Declaration], ...]
"""The name inside a layer and the declaration of each weight with an adapter."""
# A is initialised like many linear layers: uniform with variance 1/(3 D).
_A_INIT = partial(nnx.initializers.variance_scaling, 1 / 3, "fan_in", "uniform")
_EXPERTS = "experts"
"""The first dimension of weights of experts."""
_TAPS = "taps"
"""The last dimension of filters, which are no weights of products."""


class _Group(nnx.Module):
    """One level of the nested names of adapters."""


class Adapters(nnx.Module):
    """A ``[D, r]`` and B ``[r, F]`` for weights of one layer; B is initially 0, so adapters start without effect.

    For weights of experts they are ``[E, D, r]`` and ``[E, r, F]``.

    ``weights`` are a result of ``adapted_weights``. The parameters of "attn/q" are "attn/q/a" and "attn/q/b".
    """

    def __init__(self, weights: Weights, rank: int, rngs: nnx.Rngs):
        for name, weight in weights:
            *experts, inputs, outputs = weight.shape
            *batch, first, second = weight.dims
            group: Any = self
            for part in name.split("/"):
                if not hasattr(group, part):
                    setattr(group, part, _Group())
                group = getattr(group, part)
            a = _A_INIT(batch_axis=tuple(range(len(experts))))(rngs.params(), (*experts, inputs, rank))
            b = jnp.zeros((*experts, rank, outputs))
            setattr(group, A, nnx.Param(a, dims=(*batch, first, RANK), kv_heads=weight.kv_heads))
            setattr(group, B, nnx.Param(b, dims=(*batch, RANK, second), kv_heads=weight.kv_heads))


def adapted_weights(create: Create, lora: LoraConfig) -> Weights:
    """The weights of one layer that have an adapter: the name in the layer, such as "attn/q", and the declaration.

    Args:
      create: creates the parameters of one layer, such as ``create`` of a ``LayerGroup`` among ``module.groups``.
      lora: its targets are native names or patterns, such as ("attn/q", "mlp/*").

    Returns:
      Pairs in the order of their names; a ``Declaration`` has ``shape`` and ``dims``. () if none has an
      adapter.
    """
    return tuple((name, weight) for name, weight in _matrices(create).items() if lora.adapts(name))


def _matrices(create: Create) -> dict[str, Declaration]:
    """The matrices of a layer, and the lists of matrices of its experts, by their names in the layer."""
    return {
        name: weight
        for name, weight in declarations(create).items()
        if len(weight.shape) == 2 + (weight.dims[0] == _EXPERTS) and weight.dims[-1] != _TAPS
    }


def require_targets(name: str, module: Module, lora: LoraConfig) -> None:
    """Raises `ConfigError` unless each target matches a weight of the module's layers.

    Args:
      name: the module's name, for errors, such as "llm".
      module: the module, such as ``module_of(DecoderConfig())``.
      lora: the settings, with native names as targets, such as ``LoraConfig(rank=8, targets=("attn/q",))``.

    Raises:
      ConfigError: a target matches none; the message lists the weights.
    """
    legal = list(dict.fromkeys(weight for group in module.groups for weight in _matrices(group.create)))
    for target in lora.targets:
        fix = f"{target!r} stands for no weight of {name}'s layers; they have {', '.join(legal)}"
        require(any(is_target(weight, target) for weight in legal), f"{name}/Lora.targets", lora.targets, fix)


def lora_slice(name: str, module: Module, runs: Iterable[LayerRun], lora: LoraConfig, tp: int) -> ModuleSlice | None:
    """A stage's adapters of a module's layers; ``None`` if these layers have none.

    Args:
      name: the module's name; the slice is of "<name>_lora".
      module: the module.
      runs: the layers of the stage: the first of each pair of ``layer_runs(module, range(4))``.
      lora: settings of the adapters, with a rank above 0.
      tp: the tp degree.

    Returns:
      A ``ModuleSlice``, whose ``leaves()`` are such as {"layers": {"attn": {"q": {"a": leaf, "b": leaf}}}}.
    """
    adapter_runs = list[LayerRun]()
    for run in runs:
        if weights := adapted_weights(run.create, lora):
            create = partial(Adapters, weights, lora.rank)
            adapter_runs.append(LayerRun(create, run.layers, run.name, stacked=run.stacked))
    if not adapter_runs:
        return None
    return ModuleSlice(lora_name(name), runs=tuple(adapter_runs), tp=tp, depth=module.config.layers)


def with_adapters(weights: Params, adapters: Params, scale: float) -> Params:
    """A copy of a stage's parameters of a module, with adapted weights replaced by ``Adapted``.

    Args:
      weights: the module's parameters, a nested dict of arrays or handles.
      adapters: the parameters of "<module>_lora": a dict like ``weights`` with {"a": …, "b": …} in place of each
        weight, such as {"layers": {"attn": {"q": {"a": …, "b": …}}}}, without the weights that have no adapter.
      scale: alpha / rank.
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
    """The number of parameters of a module's adapters in all layers, whole and not of one rank.

    ``module`` is such as ``module_of(DecoderConfig())``, ``lora`` such as ``LoraConfig(rank=8, targets=("attn/q",))``.
    """
    weights = ((group.layers, adapted_weights(group.create, lora)) for group in module.groups)
    return sum(layers * lora.rank * _edge(weight, experts=None) for layers, group in weights for _, weight in group)


def _edge(weight: Declaration, experts: int | None) -> int:
    """Inputs and outputs of a weight together, times the number of experts; ``experts`` of them, if it is set."""
    *batch, inputs, outputs = weight.shape
    return (inputs + outputs) * (1 if not batch else experts or batch[0])


def lora_flops(module: Module, lora: LoraConfig, lengths: Iterable[int]) -> int:
    """Forward FLOPs of a module's adapters over segments of these lengths, in tokens or patches without class tokens.

    ``module`` is such as ``module_of(DecoderConfig())``, ``lora`` such as ``LoraConfig(rank=8, targets=("attn/q",))``.
    """
    per_token = getattr(module.config, "experts_per_token", None)
    lengths, flops = [int(length) for length in lengths], 0
    for group in module.groups:
        for name, weight in adapted_weights(group.create, lora):
            positions = sum(module.positions_of(name, length) for length in lengths)
            flops += 2 * positions * group.layers * lora.rank * _edge(weight, per_token)
    return flops
