"""Modules in folders of other projects: the settings that ``config.json`` gives them, and their tables of weights.

A folder holds one module, or a whole model of several, each with its own part of ``config.json`` and its own prefixes
of keys. A family's table lies beside the family, in ``<family>/weights.py``. Imports no JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mmjax.configurable import ConfigError, gin_name, require
from mmjax.models.families import FAMILIES, Family
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import Row, expand, match, renamed

Settings = Mapping[str, Any]
"""A ``config.json``, or a part of it."""


class FamilyWeights(Protocol):
    """The Python module ``weights`` of a family."""

    def settings(self, theirs: Settings) -> dict[str, Any]:
        """Fields of the family's configurable class. Raises ConfigError for what the family does not compute."""
        ...

    def rows(self, config: Any, model_type: str) -> tuple[Row, ...]:
        """The table of a module with these settings; keys as a folder of this module alone has them."""
        ...

    def unused(self, config: Any) -> tuple[str, ...]:
        """Regular expressions of the ends of keys that a folder may have and no leaf needs."""
        ...

    def their_config(self, config: Any) -> dict[str, Any]:
        """A ``config.json`` for a folder of this module alone. Raises ConfigError where there is none."""
        ...


Prefixes = Mapping[str, tuple[str, ...]]
"""See ``table.renamed``."""


@dataclass(frozen=True)
class Inside:
    """The place of a module in a whole model's folder.

    Attributes:
      config: the key of its part of ``config.json``; "" for the whole. Where that part is not there, as in older
        folders, its settings are among those of the whole.
      prefixes: by prefix of its keys in a folder of its own, those in the whole model's.
    """

    config: str
    prefixes: Prefixes


TABLES = ("embed", "head")
"""Leaves of a language model that have a row, or a column, for each token."""
_TOWER = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
_LANGUAGE: Prefixes = {
    "model.": ("language_model.model.", "model.language_model."),
    "lm_head.": ("language_model.lm_head.", "lm_head."),
}
_PROJECTOR: Prefixes = {"multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector.")}
_LLAVA: Mapping[str, Inside] = {
    "llm": Inside("text_config", _LANGUAGE),
    "image": Inside("vision_config", {"vision_model.": _TOWER, "": _TOWER}),
}
_QWEN_VL: Mapping[str, Inside] = {
    "llm": Inside("text_config", {"model.": ("model.", "model.language_model."), "lm_head.": ("lm_head.",)}),
    "image": Inside("vision_config", {"": ("visual.", "model.visual.")}),
    "projector": Inside("", {"visual.merger.": ("visual.merger.", "model.visual.merger.")}),
}
WHOLES: Mapping[str, Mapping[str, Inside]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "llava": {**_LLAVA, "projector": Inside("", _PROJECTOR)},
    "llava_onevision": {
        **_LLAVA,
        "projector": Inside("", {**_PROJECTOR, "image_newline": ("image_newline", "model.image_newline")}),
    },
}
"""By "model_type", where each module is: "llm", the encoder of a medium by the medium's name, and "projector"."""


@dataclass(frozen=True)
class Pretrained:
    """A module in a folder.

    Attributes:
      settings: its part of ``config.json``, with what the whole says of it.
      prefixes: the prefixes of its keys, where the folder is that of a whole model.
      weights: its family's.
      others: what keys of the whole model's other modules begin with.
    """

    settings: Settings
    prefixes: Prefixes
    weights: FamilyWeights
    others: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The fields of the family's configurable class that the folder decides."""
        return self.weights.settings(self.settings)

    @property
    def begins(self) -> tuple[str, ...]:
        """The prefixes of the module's keys in the folder."""
        return _begins(self.prefixes) or ("",)

    def rows(self, config: Any) -> tuple[Row, ...]:
        """The table of a module with these settings, with keys as the folder has them."""
        rows = self.weights.rows(config, str(self.settings.get("model_type", "")))
        return renamed(rows, self.prefixes) if self.prefixes else rows


def _begins(prefixes: Prefixes) -> tuple[str, ...]:
    return tuple(new for several in prefixes.values() for new in several)


def find_pretrained(family: Family, theirs: Settings, layer: int = 0) -> Pretrained:
    """A module in a folder with such a ``config.json``.

    Args:
      family: its family; that of a projector is ``PROJECTOR``.
      theirs: the ``config.json``.
      layer: which hidden states of a tower alone are its features, as LLaVA's ``vision_feature_layer`` says it; 0 for
        what it gives.

    Raises:
      ConfigError: the folder has no such module, or no choice of layers, or the family does not know it. The message
        does not name the folder.
    """
    kind = str(theirs.get("model_type", ""))
    name = gin_name(family.config)
    what = getattr(family.config, "medium", family.place)
    weights = family_weights(family)
    legal = what == "image" and kind not in WHOLES
    require(legal or not layer, "Weights.layer", layer, "is of an image tower in a folder of its own; leave it out")
    if kind in WHOLES:
        if what not in WHOLES[kind]:
            raise ConfigError(f"it is a {kind}, which has no {what} for {name}; name another folder")
        inside = WHOLES[kind][what]
        part = dict(theirs.get(inside.config) or theirs)
        others = tuple(new for own in WHOLES[kind].values() if own is not inside for new in _begins(own.prefixes))
        return Pretrained({"model_type": kind, **part, "whole": theirs}, inside.prefixes, weights, others)
    if family.place == "projector":
        known = ", ".join(own for own, parts in WHOLES.items() if what in parts)
        raise ConfigError(f"its model_type is {kind!r}, which has no projector; name a folder of {known}")
    return Pretrained({**theirs, "feature_layer": layer} if layer else theirs, {}, weights)


def require_whole(theirs: Settings) -> None:
    """Requires that a ``config.json`` describes a whole model.

    Raises:
      ConfigError: mmjax reads no whole model of its type; the message does not name the folder.
    """
    kind = theirs.get("model_type", "")
    if kind not in WHOLES:
        fix = "name the folder of a single module in its Weights.path, such as llm/Weights.path"
        raise ConfigError(f"its model_type is {kind!r}; mmjax reads whole models of {', '.join(sorted(WHOLES))}; {fix}")


def stored_dtypes(folder: WeightsFolder, family: Family, settings: Any) -> set[str]:
    """The dtypes of a module's tensors in a folder.

    Args:
      folder: the folder.
      family: the module's family.
      settings: the module's settings.

    Raises:
      ConfigError: the folder has no such module, or the family does not know it.
    """
    entries = expand(find_pretrained(family, folder.config).rows(settings), getattr(settings, "layers", 0))
    return {folder.tensors[key].dtype for key, _ in match(entries, folder.tensors).places.values()}


def family_weights(family: Family) -> FamilyWeights:
    """The tables of a family. Raises ConfigError where there are none."""
    if not family.weights:
        known = ", ".join(sorted(gin_name(own.config) for own in FAMILIES.values() if own.weights))
        raise ConfigError(f"{gin_name(family.config)} has no table of weights; of {known} there is one")
    return cast(FamilyWeights, importlib.import_module(family.weights))
