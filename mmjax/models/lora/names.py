"""Names of a layer's weights: ours, such as "attn/q", and those of Hugging Face, such as "q_proj". Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from mmjax.configurable import ConfigError, require
from mmjax.models.families import Family
from mmjax.models.lora.config import LoraConfig
from mmjax.models.pretrained import family_weights, find_pretrained
from mmjax.weights.folder import read_config
from mmjax.weights.table import Row

LAYER = "layers/{}/"
ALL_LINEAR = "all-linear"
"""What PEFT calls all products of the layers."""


def with_our_names(name: str, lora: LoraConfig, family: Family, settings: Any, folder: str) -> LoraConfig:
    """Adapters whose targets have our names, where they have those of the module's folders.

    Args:
      name: the module's.
      lora: its adapters.
      family: its family.
      settings: its settings.
      folder: the folder that it starts from; "" for none.

    Raises:
      ConfigError: a target stands for no weight of the layers; the message names those that there are.
    """
    if not lora.rank or all("/" in target for target in lora.targets):
        return lora
    weights = dict(weights_of_layers(layer_rows(family, settings, folder)))
    if not weights:
        return lora
    targets: list[str] = []
    for target in lora.targets:
        names = [ours for ours, theirs in weights.items() if _stands_for(target, ours, theirs)]
        if not any(fnmatchcase(ours, target) for ours in weights):
            fix = f"{target!r} stands for no weight of {name}'s layers; they have {_listed(weights.items())}"
            require(bool(names), f"{name}/Lora.targets", lora.targets, fix)
            targets += names
        else:
            targets.append(target)
    return replace(lora, targets=tuple(dict.fromkeys(targets)))


def layer_rows(family: Family, settings: Any, folder: str) -> tuple[Row, ...]:
    """The table of a module's layers, with keys as its folder has them; () where no folder can have the module."""
    try:
        if folder:
            rows = find_pretrained(family, read_config(folder)).rows(settings)
        else:
            rows = family_weights(family).rows(settings, "")
    except (ConfigError, KeyError):  # a tower's names depend on a folder; a module of one's own has no table
        return ()
    return tuple(row for row in rows if row.leaf.startswith(LAYER))


def weights_of_layers(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    """Our names and theirs of the matrices of a layer, such as "attn/q" and "self_attn.q_proj"."""
    for row in rows:
        inside, ending = row.keys[0].partition("{}.")[2].removesuffix(".weight"), row.keys[0].endswith(".weight")
        if ending and (row.view.order == (1, 0)):
            yield row.leaf.removeprefix(LAYER), inside


def _stands_for(target: str, ours: str, theirs: str) -> bool:
    return target == ALL_LINEAR or theirs == target or theirs.endswith(f".{target}") or fnmatchcase(ours, target)


def _listed(weights: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{ours} ({theirs.rpartition('.')[2]})" for ours, theirs in weights)
