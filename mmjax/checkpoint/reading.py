"""Reads one directory: its metadata, and leaves by name, in all processes or in none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from mmjax.checkpoint.config import CheckpointError, TornCheckpointError
from mmjax.checkpoint.leaves import LeafInfo, lookup, nest, some
from mmjax.checkpoint.metadata import Findings, Metadata, damaged, unseal
from mmjax.checkpoint.shards import cause
from mmjax.checkpoint.storage import read, read_metadata
from mmjax.configurable import ConfigError
from mmjax.mesh.processes import everyone_says
from mmjax.mesh.spmd import has_local_devices
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import FolderParameters, require_shape

T = TypeVar("T")


def metadata_of(path: Path) -> Metadata:
    """The metadata of a directory; no leaf is read.

    Raises:
      TornCheckpointError: there are none, or they cannot be read.
      CheckpointError: it is of a newer version.
    """
    try:
        return unseal(read_metadata(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # Orbax and the file system raise a dozen types for a torn directory
        raise TornCheckpointError(f"{path} is not a readable mmjax checkpoint ({cause(error)})") from error


def read_leaves(
    path: Path, stored: Mapping[str, LeafInfo], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads the leaves that this process has devices for, each straight into its sharding; all processes call it.

    Args:
      path: the directory.
      stored: its metadata's entries for the leaves in `targets` and no others, with the same shapes and dtypes.
      targets: name -> shape, dtype and sharding.

    Raises:
      CheckpointError: another folder that has some of them is gone or changed.
      TornCheckpointError: they cannot be read, or their bytes are not those that were saved.
    """
    if not targets:
        return {}
    if any(leaf.folder for leaf in stored.values()):
        alike(lambda: _require_folders(path, stored))
    own = {name: target for name, target in targets.items() if has_local_devices(target.sharding)}

    def read_own() -> tuple[Any, Findings]:
        tree = _read_all(path, stored, own)
        return tree, Findings.of(own, tree)

    try:
        tree, found = alike(read_own)
    except Exception as error:
        raise TornCheckpointError(f"{path} cannot be read ({cause(error)})") from error
    answers = everyone_says(json.dumps(dataclasses.asdict(found)))
    wrong = damaged(stored, [Findings(**json.loads(answer)) for answer in answers])
    if away := [name for name in wrong if stored[name].folder]:
        folder = stored[away[0]].folder
        raise CheckpointError(f"{folder} has changed since {path}, which needs {some(away)} of it; bring it back")
    if wrong:
        raise TornCheckpointError(f"{path} is damaged: the bytes of {some(wrong)} are not those that were saved")
    return {name: lookup(tree, name) for name in own}


def _require_folders(path: Path, stored: Mapping[str, LeafInfo]) -> None:
    """Requires the other folders, and in those of safetensors the tensors.

    Raises:
      CheckpointError: a folder is gone or changed.
    """
    by_folder: dict[str, list[LeafInfo]] = {}
    for leaf in stored.values():
        by_folder.setdefault(leaf.folder, []).append(leaf)
    for folder, leaves in by_folder.items():
        if folder and not Path(folder).is_dir():
            raise CheckpointError(f"{path} needs {folder}, which has its frozen modules and is gone; bring it back")
        viewed = [leaf for leaf in leaves if leaf.view]
        try:
            tensors = WeightsFolder.open(folder) if viewed else None
            for leaf in viewed:
                assert tensors and leaf.view
                if leaf.name not in tensors.tensors:
                    raise ConfigError(f"it lacks {leaf.name}")
                require_shape(tensors, leaf.name, leaf.shape, leaf.name, leaf.view)
        except ConfigError as error:
            fix = "bring back what it was"
            raise CheckpointError(f"{folder} has changed since {path}, which needs it: {error}; {fix}") from None


def _read_all(path: Path, stored: Mapping[str, LeafInfo], targets: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Leaves as nested dicts, each from the folder that has its bytes."""
    by_folder: dict[str, dict[str, str]] = {}
    for name in targets:
        by_folder.setdefault(stored[name].folder, {})[name] = stored[name].name or name
    found: dict[str, Any] = {}
    for folder, names in by_folder.items():
        views = {name: (there, view) for name, there in names.items() if (view := stored[name].view)}
        if views:
            parameters = FolderParameters(folder=WeightsFolder.open(folder), places=views)
            found |= parameters.read({name: targets[name] for name in views})
            continue
        tree = read(Path(folder) if folder else path, {there: targets[name] for name, there in names.items()})
        found |= {name: lookup(tree, there) for name, there in names.items()}
    return nest(found)


def alike(read: Callable[[], T]) -> T:
    """The result of `read`, in every process or in none; all processes call it.

    Raises:
      TornCheckpointError: `read` failed in another process; its own error is raised as it is.
    """
    try:
        result, problem = read(), None
    except Exception as error:
        result, problem = None, error
    answers = everyone_says(cause(problem) if problem else "")
    if problem:
        raise problem
    if other := next(filter(None, answers), ""):
        raise TornCheckpointError(f"another process finds: {other}")
    return cast(T, result)
