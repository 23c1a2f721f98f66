"""The settings of a `Recipe` as text and as values, and the differences between two such texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mmjax.config.gin_reader import renamed
from mmjax.config.processor import DECIDED
from mmjax.configurable import gin_name, registry
from mmjax.fields import fields_of
from mmjax.models.choices import AUTO
from mmjax.recipe.device_defaults import DEVICE_DEFAULTS
from mmjax.recipe.recipe import Recipe


def operative_config(recipe: Recipe) -> str:
    """Returns gin text with every field of every module, a line "vision/Layout.tp = 2" each; loading it gives an equal
    `Recipe`.
    """
    blocks = ["# Every setting of the run. Loading this file gives the same configuration."]
    for prefix, settings in _settings_by_prefix(recipe):
        names = [field.name for field in dataclasses.fields(settings)]
        blocks.append("\n".join(f"{prefix}.{name} = {getattr(settings, name)!r}" for name in names))
    return "\n\n".join(blocks) + "\n"


def differences(before: str, after: str) -> dict[str, tuple[str, str]]:
    """Compares two texts of `operative_config`: the settings that differ, such as {"vision/Layout.tp": ("1", "2")}.

    The values are text, that of `before` first; "?" stands for one that a text lacks. {} if nothing differs.

    Names of earlier versions appear under today's names. They are left out if today's run has no such setting. Settings
    that are newer than a text have their defaults there. A
    setting that one of them leaves to the devices (`DEVICE_DEFAULTS`) does not differ.
    """
    old, new = (dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line) for text in (before, after))
    old = {renamed(name): value for name, value in old.items() if renamed(name) in (name, *new)}
    pairs = {name: (old.get(name, "?"), new.get(name, "?")) for name in {**old, **new}}
    return {
        name: values
        for name, values in pairs.items()
        if values[0] != values[1]
        and not (values[0] == "?" and values[1] == _default(name))
        and not (name.endswith(DEVICE_DEFAULTS) and repr(AUTO) in values)
    }


def _default(name: str) -> str:
    """The text of a setting's default, such as "()" for "Model.edges"; "" for a setting that no class has."""
    cls_name, _, field = name.rpartition("/")[2].partition(".")
    cls = registry().get(cls_name)
    info = fields_of(cls).get(field) if cls else None
    return repr(info.default) if info else ""


def changed_values(recipe: Recipe) -> dict[str, Any]:
    """Returns every value that is not its field's default, by key, such as "vision/Layout.tp" or "Train.steps".

    With folders, settings that a folder would decide are there too. `config_of_values` makes an equal `Recipe`.
    """
    values: dict[str, Any] = {}
    for prefix, settings in _settings_by_prefix(recipe):
        decided = DECIDED.get(type(settings), ())  # a folder would decide these if they were left out
        preset = getattr(settings, "presets", {}).get(getattr(settings, "preset", ""), {})  # and a preset these
        for name, info in fields_of(type(settings)).items():
            is_decided = name in preset or (name in decided and recipe.folders)
            if (value := getattr(settings, name)) != info.default or is_decided:
                values[f"{prefix}.{name}"] = value
    return values


def _settings_by_prefix(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yields every configured object with the beginning of its keys, such as "vision/Layout"."""
    for scope, settings in recipe.walk():
        name = gin_name(type(settings))
        yield (f"{scope}/{name}" if scope else name), settings
