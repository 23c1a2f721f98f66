"""Modules in pretrained folders of other projects: settings from ``config.json``, and weights tables.

A folder has one module, or a composite model whose modules have their own parts of ``config.json`` and their own key
prefixes. A family's weights table is in ``<family>/weights.py``. Imports no JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mmjax.configurable import ConfigError, gin_name, require
from mmjax.models.families import FAMILIES, Family
from mmjax.models.mmdit.weights import CLASS_NAME, PROJECTOR_PREFIX
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import Row, expand, match, renamed

Settings = Mapping[str, Any]
"""A ``config.json``, or a part of it."""


class FamilyWeights(Protocol):
    """The Python module ``weights`` of a family."""

    def settings(self, hf_config: Settings) -> dict[str, Any]:
        """Fields of the family's configurable class, by name, from a ``config.json`` or the module's part of it.

        Raises ConfigError for a model that the family cannot compute.
        """
        ...

    def rows(self, config: Any, model_type: str) -> tuple[Row, ...]:
        """The weights table of a module with these settings, with the keys of a folder of this module alone.

        ``config`` is an instance of the family's configurable class; ``model_type`` is the folder's, or "".
        """
        ...

    def unused(self, config: Any) -> tuple[str, ...]:
        """Regular expressions for the ends of keys that a folder may have although no leaf needs them."""
        ...

    def to_hf_config(self, config: Any, *, model_type: str = "") -> dict[str, Any]:
        """The ``config.json``, as a dict, of a folder of this module alone, with this ``model_type``; "" chooses one.

        Raises ConfigError if there is no such model.
        """
        ...


Prefixes = Mapping[str, tuple[str, ...]]
"""See ``table.renamed``."""


@dataclass(frozen=True)
class FolderPart:
    """A module's part of a composite model's folder.

    Attributes:
      config: the key of its part of ``config.json``; "" for the complete file. Older folders lack the part and have its
        settings at the top level.
      prefixes: the key prefixes in the composite model's folder, by the prefix in a folder of the module alone.
    """

    config: str
    prefixes: Prefixes


TABLES = ("embed", "head", "per_layer/embed")
"""Leaves of a language model with a row, or a column, for each token of the vocabulary."""
_TOWER = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
_LANGUAGE: Prefixes = {
    "model.": ("language_model.model.", "model.language_model."),
    "lm_head.": ("language_model.lm_head.", "lm_head."),
}
_PROJECTOR: Prefixes = {"multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector.")}
_LLAVA: Mapping[str, FolderPart] = {
    "llm": FolderPart("text_config", _LANGUAGE),
    "image": FolderPart("vision_config", {"vision_model.": _TOWER, "": _TOWER}),
}
_QWEN_VL: Mapping[str, FolderPart] = {
    "llm": FolderPart("text_config", {"model.": ("model.", "model.language_model."), "lm_head.": ("lm_head.",)}),
    "image": FolderPart("vision_config", {"": ("visual.", "model.visual.")}),
    "projector": FolderPart("", {"visual.merger.": ("visual.merger.", "model.visual.merger.")}),
}
_QWEN3_VL: Mapping[str, FolderPart] = {
    "llm": FolderPart("text_config", {"model.": ("model.language_model.",), "lm_head.": ("lm_head.",)}),
    "image": FolderPart("vision_config", {"": ("model.visual.",)}),
    "projector": FolderPart(
        "", {f"visual.{key}.": (f"model.visual.{key}.",) for key in ("merger", "deepstack_merger_list")}
    ),
}
_QWEN3_5: Mapping[str, FolderPart] = {
    **_QWEN3_VL,
    "projector": FolderPart("", {"visual.merger.": ("model.visual.merger.",)}),
}
_GEMMA: Mapping[str, FolderPart] = {**_LLAVA, "projector": FolderPart("", _PROJECTOR)}
_WITH_NEWLINES: Mapping[str, FolderPart] = {
    **_LLAVA,
    "projector": FolderPart("", {**_PROJECTOR, "image_newline": ("image_newline", "model.image_newline")}),
}
_GEMMA4: Mapping[str, FolderPart] = {
    "llm": FolderPart("text_config", {"model.": ("model.language_model.",), "lm_head.": ("lm_head.",)}),
    "image": FolderPart("vision_config", {"": ("model.vision_tower.",)}),
    "projector": FolderPart("", {"model.embed_vision.": ("model.embed_vision.",)}),
}
_CONDITIONED: Mapping[str, FolderPart] = {
    "image": FolderPart("", {"": ("",)}),
    "projector": FolderPart("", {PROJECTOR_PREFIX: (PROJECTOR_PREFIX,)}),
}
"""A generator of diffusers with the projector of its condition."""
COMPOSITES: Mapping[str, Mapping[str, FolderPart]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "paligemma": _GEMMA,
    "llava": {**_LLAVA, "projector": FolderPart("", _PROJECTOR)},
    "llava_next": _WITH_NEWLINES,
    "llava_onevision": _WITH_NEWLINES,
    CLASS_NAME: _CONDITIONED,
}
"""The parts of composite models by ``kind_of_model``: "llm", the name of an encoder's medium, and "projector"."""


@dataclass(frozen=True)
class Pretrained:
    """A module in a folder.

    Attributes:
      settings: its part of ``config.json``; for a composite model with the complete file as "whole".
      prefixes: see ``FolderPart``; empty for a folder of one module.
      weights: the Python module ``weights`` of its family.
      other_prefixes: key prefixes of the other modules of a composite model.
    """

    settings: Settings
    prefixes: Prefixes
    weights: FamilyWeights
    other_prefixes: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The fields of the family's configurable class that the folder determines, by name, such as {"layers": 32}.

        Raises:
          ConfigError: the family cannot compute the model.
        """
        return self.weights.settings(self.settings)

    @property
    def key_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the module's keys in the folder, such as "language_model.model."; ("",) for a folder of one
        module.
        """
        return _new_prefixes(self.prefixes) or ("",)

    def rows(self, config: Any) -> tuple[Row, ...]:
        """The weights table of a module with these settings, an instance of the family's configurable class, with the
        folder's keys.
        """
        rows = self.weights.rows(config, str(self.settings.get("model_type", "")))
        return renamed(rows, self.prefixes) if self.prefixes else rows


def kind_of_model(hf_config: Settings) -> str:
    """The kind of a model by its ``config.json``: its "model_type", or in folders of diffusers its "_class_name"."""
    return str(hf_config.get("model_type") or hf_config.get("_class_name", ""))


def _new_prefixes(prefixes: Prefixes) -> tuple[str, ...]:
    return tuple(prefix for alternatives in prefixes.values() for prefix in alternatives)


def find_pretrained(family: Family, hf_config: Settings, layer: int = 0) -> Pretrained:
    """The module of a family in a folder with this ``config.json``; nothing but the family's tables is read.

    Args:
      family: the family of the module, such as ``FAMILIES["llama"]``; ``PROJECTOR`` for a projector.
      hf_config: the contents of the ``config.json``.
      layer: the layer of an image tower whose hidden states are the features, as in LLaVA's ``vision_feature_layer``; 0
        for the tower's output. Only for a folder of the tower alone.

    Returns:
      The module's ``settings``, its part of the ``config.json``; ``fields()`` has the module's settings by name, and
      ``rows(config)`` its weights table.

    Raises:
      ConfigError: the folder has no such module or no choice of layers, or its model is unknown to the family. The
        message does not name the folder.
    """
    kind = kind_of_model(hf_config)
    name = gin_name(family.config)
    part_name = family.medium or family.roles[0]
    weights = family_weights(family)
    legal = part_name == "image" and kind not in COMPOSITES
    require(legal or not layer, "Weights.layer", layer, "is of an image tower in a folder of its own; leave it out")
    if kind in COMPOSITES:
        if part_name not in COMPOSITES[kind]:
            raise ConfigError(f"it is a {kind}, which has no {part_name} for {name}; name another folder")
        folder_part = COMPOSITES[kind][part_name]
        part = dict(hf_config.get(folder_part.config) or hf_config)
        settings = {"model_type": kind, **part, "whole": hf_config}
        prefixes = {name: _new_prefixes(each.prefixes) for name, each in COMPOSITES[kind].items()}
        other_prefixes = tuple(key for name, keys in prefixes.items() if name != part_name for key in keys)
        return Pretrained(settings, folder_part.prefixes, weights, other_prefixes)
    if "projector" in family.roles:
        known = ", ".join(model_type for model_type, parts in COMPOSITES.items() if part_name in parts)
        raise ConfigError(f"its model_type is {kind!r}, which has no projector; name a folder of {known}")
    return Pretrained({**hf_config, "feature_layer": layer} if layer else hf_config, {}, weights)


def require_whole(hf_config: Settings) -> None:
    """Raises `ConfigError` unless a ``config.json`` describes a composite model, by its "model_type".

    ``hf_config`` is its content, such as {"model_type": "llava", …}.

    Raises:
      ConfigError: mmjax reads no composite model of its type; the message does not name the folder.
    """
    kind, whole = hf_config.get("model_type", ""), [name for name, parts in COMPOSITES.items() if "llm" in parts]
    if kind not in whole:
        fix = "name the folder of a single module in its Weights.path, such as llm/Weights.path"
        raise ConfigError(f"its model_type is {kind!r}; mmjax reads whole models of {', '.join(sorted(whole))}; {fix}")


def stored_dtypes(folder: WeightsFolder, family: Family, settings: Any) -> set[str]:
    """NumPy's names of the dtypes of a module's tensors in a folder, such as {"bfloat16"}.

    Args:
      folder: the folder, as ``WeightsFolder.open("/models/llava")`` opens it.
      family: the module's family, such as ``FAMILIES["vit"]``.
      settings: the module's settings, an instance of the family's configurable class.

    Raises:
      ConfigError: the folder has no such module, or its model is unknown to the family.
    """
    entries = expand(find_pretrained(family, folder.config).rows(settings), getattr(settings, "layers", 0))
    return {folder.info(key).dtype for key, _ in match(entries, folder.tensors).places.values()}


def family_weights(family: Family) -> FamilyWeights:
    """The Python module ``weights`` of a family: ``mmjax.models.llama.weights`` for ``FAMILIES["llama"]``.

    It has the functions ``settings``, ``rows``, ``unused`` and ``to_hf_config``. Raises ConfigError for a family
    without one.
    """
    if not family.weights:
        names = ", ".join(sorted(gin_name(known.config) for known in FAMILIES.values() if known.weights))
        raise ConfigError(f"{gin_name(family.config)} has no table of weights; of {names} there is one")
    return cast(FamilyWeights, importlib.import_module(family.weights))
