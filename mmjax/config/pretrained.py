"""Where the modules of a configuration are in folders of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.config.schema import Config, folder_setting
from mmjax.configurable import ConfigError, require
from mmjax.models.config import LLM, projector_name
from mmjax.models.families import PROJECTOR
from mmjax.models.pretrained import WHOLES, find_pretrained
from mmjax.weights.folder import WeightsFolder, read_config
from mmjax.weights.parameters import FolderParameters, find_leaves
from mmjax.weights.table import Shape, View, expand

TOKENIZER = "tokenizer.json"


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
    projectors = {projector_name(name): own for name, own in config.projectors.items()}
    places: dict[str, tuple[str, View]] = {}
    try:
        folder = WeightsFolder.open(path)
        for module in modules:
            found = find_pretrained(families.get(module, PROJECTOR), folder.config)
            own = config.modules[module] if module in families else projectors[module]
            wanted = {n.removeprefix(f"{module}/"): shape for n, shape in shapes.items() if n.startswith(f"{module}/")}
            entries, unused = expand(found.rows(own), getattr(own, "layers", 0)), found.weights.unused(own)
            keys = {"prefixes": found.begins, "others": found.others, "unused": unused}
            places |= find_leaves(folder, module, entries, wanted, **keys)
    except ConfigError as error:
        setting = folder_setting(config.weights[modules[0]], modules[0])
        raise ConfigError(f"{setting}={path!r}: {error}") from None
    return FolderParameters(folder=folder, places=places)


def positions_of(config: Config) -> int:
    """The tokens for which the language model's folder says that it has positions; 0 where nothing says so."""
    try:
        theirs = read_config(config.pretrained(LLM)) if config.pretrained(LLM) else {}
        found = find_pretrained(dict(config.model.families)[LLM], theirs).settings if theirs else {}
    except ConfigError:  # a run that continues needs its folder no more
        return 0
    return int(found.get("max_position_embeddings") or 0)


def folder_bindings(path: str) -> list[str]:
    """Bindings that make a configuration of a folder alone: what its files say, and messages as data.

    Raises:
      ConfigError: it is no folder of a whole model; one line.
    """
    setting = f"--weights={path!r}"
    try:
        theirs = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None
    kind = str(theirs.get("model_type", ""))
    known = ", ".join(WHOLES)
    require(kind in WHOLES, "--weights", path, f"its model_type is {kind!r}; name a folder of {known}")
    file = Path(path) / TOKENIZER
    bindings = [f"Model.weights={path!r}", "Data.sources={'messages': 1.0}"]
    return bindings + [f"Data.tokenizer={str(file)!r}"] * file.is_file() + _preprocessing(kind, theirs)


def _preprocessing(kind: str, theirs: Mapping[str, Any]) -> list[str]:
    """How a whole model's images and dialogues are made ready."""
    side = theirs["vision_config"].get("image_size", 336)
    return {"llava": ["messages/Source.preset='llava15'", f"messages/Source.size=({side}, {side})"]}[kind]
