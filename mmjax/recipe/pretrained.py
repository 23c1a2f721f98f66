"""Finds the modules of a configuration in folders of safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.models.config import LLM, lora_name
from mmjax.models.lora.names import layer_rows
from mmjax.models.lora.peft import AdaptedModule, adapter_rows
from mmjax.models.pretrained import TABLES, Pretrained, find_pretrained
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.specs import ModuleSpec, ProjectorSpec
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import FolderParameters, find_copies, find_leaves
from mmjax.weights.table import Shape, View, expand, match


def pretrained_folders(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The parts that start from folders of safetensors, by folder: {"/models/llava": ("vision", "llm")}.

    {} if none does. ``recipe`` is such as ``load_config(["digits_vlm"])``.
    """
    folders: dict[str, list[str]] = {}
    for module in recipe.model.parts:
        if folder := recipe.model.folder(module):
            folders.setdefault(folder, []).append(module)
    return {folder: tuple(modules) for folder, modules in folders.items()}


def folder_parameters(recipe: Recipe, path: str, shapes: Mapping[str, Shape]) -> FolderParameters:
    """Finds the tensors for the leaves of all modules that start from a folder.

    Args:
      recipe: the run's.
      path: the folder; a key of ``pretrained_folders``.
      shapes: whole shapes of all leaves of the model by name, such as {"llm/embed": (32000, 4096)}.

    Returns:
      The opened folder, ``places``, by leaf the key of its tensor and the leaf as a ``View`` of it, and ``copies``, by
      key of a tensor's duplicate the leaf and the view.

    Raises:
      ConfigError: the folder cannot be used, or does not fit; one line.
    """
    modules = pretrained_folders(recipe)[path]
    if adapted := [name for name in recipe.model.adapted if lora_name(name) in modules]:
        return _adapters(recipe, path, adapted, shapes)
    places: dict[str, tuple[str, View]] = {}
    copies: dict[str, tuple[str, View]] = {}
    try:
        folder = WeightsFolder.open(path)
        for module in modules:
            part = recipe.model.parts[module]
            assert isinstance(part, ModuleSpec | ProjectorSpec)
            pretrained, settings = find_pretrained(part.family, folder.config), part.settings
            if module == LLM and recipe.data.settings.new_tokens:
                folder = _with_token_rows(folder, pretrained, settings)
            entries = expand(pretrained.rows(settings), getattr(settings, "layers", 0))
            prefix = f"{module}/"
            places |= find_leaves(
                folder,
                module,
                entries,
                {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)},
                prefixes=pretrained.key_prefixes,
                other_prefixes=pretrained.other_prefixes,
                unused=pretrained.weights.unused(settings),
            )
            copies |= find_copies(folder, module, entries, places)
    except ConfigError as error:
        setting = recipe.model.parts[modules[0]].weights.folder_setting(modules[0])
        raise ConfigError(f"{setting}={path!r}: {error}") from None
    return FolderParameters(folder=folder, places=places, copies=copies)


def adapted_module(recipe: Recipe, name: str) -> AdaptedModule:
    """The module ``name``, such as "llm", which has adapters, with the names that folders of PEFT give its weights.

    ``recipe`` is a configuration as ``load_config(["run.gin"])`` gives it. The result is an argument of
    ``adapter_rows`` and ``adapter_config``.
    """
    node = recipe.model[name]
    return AdaptedModule(
        name=name,
        layers=node.settings.layers,
        rows=layer_rows(node.family, node.settings, recipe.model.folder(name)),
        lora=node.lora.settings,
        medium=node.settings.medium or "",
    )


def _adapters(recipe: Recipe, path: str, names: Sequence[str], shapes: Mapping[str, Shape]) -> FolderParameters:
    """Finds the adapters of these modules in a folder of PEFT, which must have no others."""
    places: dict[str, tuple[str, View]] = {}
    try:
        folder = WeightsFolder.open(path)
        entries = [
            replace(entry, leaf=f"{lora_name(name)}/{entry.leaf}")
            for name in names
            for entry in expand(adapter_rows(adapted_module(recipe, name)), recipe.model[name].settings.layers)
        ]
        adapter_shapes = {entry.leaf: shapes[entry.leaf] for entry in entries}
        places = find_leaves(folder, "", entries, adapter_shapes)
    except ConfigError as error:
        raise ConfigError(f"{names[0]}/Lora.path={path!r}: {error}") from None
    return FolderParameters(folder=folder, places={leaf.removeprefix("/"): place for leaf, place in places.items()})


def _with_token_rows(folder: WeightsFolder, pretrained: Pretrained, settings: Any) -> WeightsFolder:
    """The folder, with a row in its embedding tables for each token of a language model with these settings."""
    for leaf, (key, _) in match(expand(pretrained.rows(settings), settings.layers), folder.tensors).places.items():
        if leaf in TABLES:
            folder = folder.grown(key, settings.vocab)
    return folder
