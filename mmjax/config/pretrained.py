"""Where the modules of a configuration are in folders of safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmjax.config.schema import Config, folder_setting, pretrained_folder
from mmjax.configurable import ConfigError
from mmjax.models.config import LLM, lora_name, projector_name
from mmjax.models.families import PROJECTOR
from mmjax.models.lora.names import layer_rows
from mmjax.models.lora.peft import AdaptedModule, adapter_rows
from mmjax.models.pretrained import TABLES, Pretrained, find_pretrained
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import FolderParameters, find_copies, find_leaves
from mmjax.weights.table import Shape, View, expand, match


def pretrained_folders(config: Config) -> dict[str, tuple[str, ...]]:
    """The modules that start from each folder of safetensors."""
    folders: dict[str, list[str]] = {}
    for module in config.optimizers:
        if folder := config.pretrained(module):
            folders.setdefault(folder, []).append(module)
    return {folder: tuple(modules) for folder, modules in folders.items()}


def folder_parameters(config: Config, path: str, shapes: Mapping[str, Shape]) -> FolderParameters:
    """The places, in a folder, of the leaves of the modules that start from it.

    Args:
      config: names the folder; see ``pretrained_folders``.
      path: the folder.
      shapes: of all leaves, by name such as "llm/embed".

    Raises:
      ConfigError: the folder cannot be used, or does not fit; one line.
    """
    modules, families = pretrained_folders(config)[path], dict(config.model.families)
    if adapted := [name for name in config.loras if lora_name(name) in modules]:
        return _adapters(config, path, adapted, shapes)
    projectors = {projector_name(name): own for name, own in config.projectors.items()}
    places: dict[str, tuple[str, View]] = {}
    copies: dict[str, tuple[str, View]] = {}
    try:
        folder = WeightsFolder.open(path)
        for module in modules:
            found = find_pretrained(families.get(module, PROJECTOR), folder.config)
            own = config.modules[module] if module in families else projectors[module]
            wanted = {n.removeprefix(f"{module}/"): shape for n, shape in shapes.items() if n.startswith(f"{module}/")}
            if module == LLM and config.data.new_tokens:
                folder = _with_rows(folder, found, own)
            entries, unused = expand(found.rows(own), getattr(own, "layers", 0)), found.weights.unused(own)
            keys = {"prefixes": found.begins, "others": found.others, "unused": unused}
            places |= find_leaves(folder, module, entries, wanted, **keys)
            copies |= find_copies(folder, module, entries, places)
    except ConfigError as error:
        setting = folder_setting(config.weights[modules[0]], modules[0])
        raise ConfigError(f"{setting}={path!r}: {error}") from None
    return FolderParameters(folder=folder, places=places, copies=copies)


def adapted_module(config: Config, name: str) -> AdaptedModule:
    """A module with adapters, as folders of PEFT name its weights."""
    settings, family = config.modules[name], dict(config.model.families)[name]
    return AdaptedModule(
        name=name,
        layers=settings.layers,
        rows=layer_rows(family, settings, pretrained_folder(config.model, config.weights[name], name)),
        lora=config.lora(name),
        medium=getattr(family.config, "medium", ""),
    )


def _adapters(config: Config, path: str, names: Sequence[str], shapes: Mapping[str, Shape]) -> FolderParameters:
    """The places of the adapters of some modules in a folder of PEFT, which has no other ones."""
    places: dict[str, tuple[str, View]] = {}
    try:
        folder = WeightsFolder.open(path)
        entries = [
            replace(entry, leaf=f"{lora_name(name)}/{entry.leaf}")
            for name in names
            for entry in expand(adapter_rows(adapted_module(config, name)), config.modules[name].layers)
        ]
        wanted = {entry.leaf: shapes[entry.leaf] for entry in entries}
        places = find_leaves(folder, "", entries, wanted)
    except ConfigError as error:
        raise ConfigError(f"{names[0]}/Lora.path={path!r}: {error}") from None
    return FolderParameters(folder=folder, places={leaf.removeprefix("/"): place for leaf, place in places.items()})


def _with_rows(folder: WeightsFolder, found: Pretrained, settings: Any) -> WeightsFolder:
    """The folder with tables that have a row for each token of a language model with these settings."""
    for leaf, (key, _) in match(expand(found.rows(settings), settings.layers), folder.tensors).found.items():
        if leaf in TABLES:
            folder = folder.grown(key, settings.vocab)
    return folder
