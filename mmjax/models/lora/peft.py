"""Low-rank adapters in folders of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``. Imports no JAX.

A *path* is the name of a weight's module in the model that PEFT adapts, such as "model.layers.0.self_attn.q_proj".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmjax.configurable import ConfigError, require
from mmjax.models.families import Family
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.names import EXPERTS, LAYER, weights_of_layers
from mmjax.weights.folder import ADAPTER_CONFIG, WeightsFolder
from mmjax.weights.table import TRANSPOSED, Row

_BEGIN = "base_model.model."
_ENDS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
_PATH = re.compile(rf"{re.escape(_BEGIN)}(.*?)\.(\d+)\.(.+)\.lora_A\.weight")
_IN_MEMORY = ("model.language_model.", "model.visual.", "model.vision_tower.")
"""Prefixes of paths in composite models of ``transformers`` 5."""
_TOWERS = (".visual.", "vision_tower.", "vision_model.")
_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias"), (False, None)),
    **dict.fromkeys(("modules_to_save", "rank_pattern", "alpha_pattern", "megatron_config"), (None, {}, [])),
    **dict.fromkeys(
        ("trainable_token_indices", "target_parameters", "layer_replication", "kasa_config"), (None, {}, [])
    ),
    "bias": ("none", None),
}
"""Values of keys of ``adapter_config.json`` that are equivalent to a missing key."""


@dataclass(frozen=True, kw_only=True)
class AdaptedModule:
    """A module with adapters.

    Attributes:
      name: the module's name, such as "llm".
      layers: the number of its layers.
      rows: the weights table of its layers.
      lora: settings of its adapters.
      medium: "image" for a tower, else "".
    """

    name: str
    layers: int
    rows: tuple[Row, ...]
    lora: LoraConfig
    medium: str = ""


def adapter_settings(name: str, values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a module's ``LoraConfig`` from its PEFT folder, by name; {} if all fields are set, or no folder.

    They are such as {"rank": 8, "alpha": 16.0, "targets": ("self_attn.q_proj",)}.

    Args:
      name: the module's name, for errors, such as "llm".
      values: fields that are set, by name; "path" is the folder, such as {"path": "adapters/mine"}.
      family: the module's family, such as ``FAMILIES["llama"]``.

    Raises:
      ConfigError: the folder cannot be used, or contradicts a field that is set.
    """
    path = str(values.get("path", ""))
    if not path or values.keys() >= {field.name for field in fields(LoraConfig)}:
        return {}
    try:
        from_folder = read_settings(path, family.medium or "")
    except ConfigError as error:
        raise ConfigError(f"{name}/Lora.path={path!r}: {error}") from None
    for key in from_folder.keys() & values.keys():
        fix = f"{path} has {from_folder[key]!r}; leave the setting out"
        require(values[key] == from_folder[key], f"{name}/Lora.{key}", values[key], fix)
    return from_folder


def read_settings(path: str, medium: str) -> dict[str, Any]:
    """The fields "rank", "alpha" and "targets" of ``LoraConfig`` from a PEFT folder.

    They are such as {"rank": 8, "alpha": 16.0, "targets": ("self_attn.q_proj",)}; targets have the folder's names.

    Args:
      path: the folder.
      medium: "image" for the adapters of a tower, else "".

    Raises:
      ConfigError: it is no PEFT folder, or its adapters are of another kind; the message does not name the folder.
    """
    folder = WeightsFolder.open(path)
    peft_config = folder.config
    kind = str(peft_config.get("peft_type"))
    if kind.upper() != "LORA":
        raise ConfigError(f"{ADAPTER_CONFIG}: peft_type={kind!r}: mmjax reads 'LORA' alone")
    for key, legal in _WITHOUT.items():
        if peft_config.get(key, legal[0]) not in legal:
            raise ConfigError(
                f"{ADAPTER_CONFIG}: {key}={peft_config[key]!r}: mmjax has no such adapters; merge them with PEFT"
            )
    rank, alpha = int(peft_config.get("r", 8)), float(peft_config.get("lora_alpha", 8))
    paths = (_PATH.fullmatch(key) for key in folder.tensors if _of(key, medium))
    targets = tuple(dict.fromkeys(path[3] for path in paths if path))
    if not targets:
        raise ConfigError(f"it has no adapters of layers of {'an image tower' if medium else 'a language model'}")
    return {
        "rank": rank,
        "alpha": alpha * (math.sqrt(rank) if peft_config.get("use_rslora") else 1),
        "targets": targets,
    }


def _of(key: str, medium: str) -> bool:
    """Whether a key belongs to an image tower, or for medium "" to another module."""
    return any(part in key for part in _TOWERS) == (medium == "image")


def adapter_rows(module: AdaptedModule) -> tuple[Row, ...]:
    """The weights table of a module's adapters, with PEFT's keys: for each weight a row for A, then one for B.

    Such a ``Row`` has the ``leaf`` "layers/{}/attn/q/a", the possible ``keys`` of its tensor, such as
    ("base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight",), and its ``view`` of the tensor, the transpose.

    ``module`` is such as ``adapted_module(recipe, "llm")``, with the weights table of its layers and its
    ``LoraConfig``.

    Raises:
      ConfigError: a weight is part of a larger tensor, whose adapter PEFT cannot split, or of a router or experts.
    """
    for row in module.rows:
        if row.leaf.startswith(EXPERTS) and module.lora.adapts(row.leaf.removeprefix(LAYER)):
            fix = "PEFT adapts linear layers; export with --merge_lora, or adapt other weights"
            raise ConfigError(f"{row.leaf.removeprefix(LAYER)} is of routers or experts: {fix}")
    adapted = {name: None for name, _ in weights_of_layers(module.rows) if module.lora.adapts(name)}
    return tuple(_rows(row for row in module.rows if row.leaf.removeprefix(LAYER) in adapted))


def _rows(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        paths = sorted(
            (key.removesuffix(".weight") for key in row.keys), key=lambda path: not path.startswith(_IN_MEMORY)
        )
        if row.view.rows:
            fix = "export with --merge_lora, or adapt other weights"
            raise ConfigError(f"{row.leaf.removeprefix(LAYER)} is a part of {paths[0]}, which PEFT adapts whole; {fix}")
        for part, ending in _ENDS.items():
            keys = tuple(f"{_BEGIN}{path}{ending}" for path in paths)
            yield Row(f"{row.leaf}/{part}", keys, TRANSPOSED, layers=row.layers)


def adapter_config(module: AdaptedModule, base: str) -> dict[str, Any]:
    """The contents of an ``adapter_config.json``, as PEFT reads them: "r", "lora_alpha", "target_modules" and so on.

    "target_modules" are complete names without prefix, such as "model.layers.0.self_attn.q_proj", of all layers.

    Args:
      module: the module with its adapters, as ``adapted_module(recipe, "llm")`` gives it.
      base: the folder of the base model; "" for none.

    Raises:
      ConfigError: a weight is part of a larger tensor, whose adapter PEFT cannot split.
    """
    adapted = adapter_rows(module)[::2]
    targets = [
        row.keys[0].removeprefix(_BEGIN).removesuffix(_ENDS["a"]).replace("{}", str(layer))
        for layer in range(module.layers)
        for row in adapted
        if row.layers is None or layer in row.layers
    ]
    alpha = module.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": None if module.medium else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": module.lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }
