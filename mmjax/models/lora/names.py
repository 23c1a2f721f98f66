"""Names of a layer's weights: native, such as "attn/q", and of Hugging Face, such as "q_proj". Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from mmjax.configurable import ConfigError, require
from mmjax.models.families import Family
from mmjax.models.lora.config import ATTENTION, LoraConfig, is_target
from mmjax.models.pretrained import family_weights, find_pretrained
from mmjax.weights.folder import read_config
from mmjax.weights.table import Row

LAYER = "layers/{}/"
EXPERTS = f"{LAYER}experts/"
"""The beginning of the leaves of routers and experts."""
ALL_LINEAR = "all-linear"
"""PEFT's name for the weights of all products of the layers."""


def with_native_names(name: str, lora: LoraConfig, family: Family, settings: Any, folder: str) -> LoraConfig:
    """Adapter settings whose targets are native names; Hugging Face's names and "all-linear" are converted.

    The settings themselves are returned if nothing is to be converted, or for a module without a table of weights.

    Args:
      name: the module's name, for errors, such as "llm".
      lora: settings of its adapters, such as ``LoraConfig(rank=8, targets=("q_proj",))``, whose targets become
        ("attn/q",).
      family: the module's family, such as ``FAMILIES["llama"]``.
      settings: the module's settings, such as a ``DecoderConfig``.
      folder: the folder of its pretrained weights; "" for none.

    Raises:
      ConfigError: a target matches no weight of the layers; the message lists the weights.
    """
    if not lora.rank or all("/" in target or target == ATTENTION for target in lora.targets):
        return lora
    rows = layer_rows(family, settings, folder)
    weights = dict(weights_of_layers(rows))
    if not weights:
        return lora
    experts = [row.leaf.removeprefix(LAYER) for row in rows if row.leaf.startswith(EXPERTS)]
    targets: list[str] = []
    for target in lora.targets:
        names = [weight for weight, hf_name in weights.items() if _matches(target, weight, hf_name)]
        if not any(is_target(weight, target) for weight in (*weights, *experts)):
            fix = f"{target!r} stands for no weight of {name}'s layers; they have {_listed(weights.items())}"
            require(bool(names), f"{name}/Lora.targets", lora.targets, fix)
            targets += names
        else:
            targets.append(target)
    return replace(lora, targets=tuple(dict.fromkeys(targets)))


def layer_rows(family: Family, settings: Any, folder: str) -> tuple[Row, ...]:
    """The weights table of a module's layers, with the folder's keys; () for a module without a table.

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", the possible ``keys`` of its tensor, today's first, such as
    ("model.layers.{}.self_attn.q_proj.weight",), and its ``view`` of the tensor. "{}" is the layer's number.

    Args:
      family: the module's family, such as ``FAMILIES["llama"]``.
      settings: the module's, an instance of the family's configurable class, such as ``DecoderConfig()``.
      folder: the path of its pretrained weights; for "" the keys are those of a folder of the module alone.
    """
    try:
        if folder:
            rows = find_pretrained(family, read_config(folder)).rows(settings)
        else:
            rows = family_weights(family).rows(settings, "")
    except (ConfigError, KeyError):  # a tower's keys depend on a folder; a user's module has no table
        return ()
    return tuple(row for row in rows if row.leaf.startswith(LAYER))


def weights_of_layers(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    """Native and Hugging Face's name of each matrix of a layer, such as ("attn/q", "self_attn.q_proj"), in the order of
    ``rows``.

    ``rows`` are a result of ``layer_rows``; norms and biases are left out, and routers and experts, which are no linear
    layers in transformers.
    """
    for row in rows:
        key = row.keys[0]
        if row.leaf.startswith(EXPERTS):
            continue
        if key.endswith(".weight") and row.view.order == (1, 0):
            yield row.leaf.removeprefix(LAYER), key.partition("{}.")[2].removesuffix(".weight")


def _matches(target: str, weight: str, hf_name: str) -> bool:
    return target == ALL_LINEAR or hf_name == target or hf_name.endswith(f".{target}") or fnmatchcase(weight, target)


def _listed(weights: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{weight} ({hf_name.rpartition('.')[2]})" for weight, hf_name in weights)
