"""Reads a directory's metadata and leaves by name; reading fails in all processes or in none."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from mmjax.checkpoint.config import CheckpointError, TornCheckpointError
from mmjax.checkpoint.leaves import LeafInfo, lookup, nest
from mmjax.checkpoint.metadata import Findings, Metadata, damaged, unseal
from mmjax.checkpoint.shards import cause
from mmjax.checkpoint.storage import read, read_metadata
from mmjax.configurable import ConfigError, shortened
from mmjax.mesh.processes import gather_texts
from mmjax.mesh.spmd import has_local_devices
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import FolderParameters, require_shape

T = TypeVar("T")


def metadata_of(path: Path) -> Metadata:
    """The metadata of a checkpoint or an export, from its directory `path`; no leaf is read.

    Raises:
      TornCheckpointError: there is no metadata, or it cannot be read.
      CheckpointError: a newer version has written it.
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
    """Reads leaves for the devices of this process, each straight into its sharding; all processes call it.

    Args:
      path: the directory of a checkpoint or an export.
      stored: its metadata's entries for exactly the leaves in `targets`, with the same shapes and dtypes.
      targets: name in the metadata, such as "params/llm/embed", -> global shape, dtype and sharding.

    Returns:
      The leaves by name, without leaves that have no device in this process.

    Raises:
      CheckpointError: another folder that has some of the leaves is missing or has changed.
      TornCheckpointError: leaves cannot be read, or their bytes have changed since they were saved.
    """
    if not targets:
        return {}
    if any(leaf.folder for leaf in stored.values()):
        in_all_processes(functools.partial(_require_folders, path, stored))
    local = {name: target for name, target in targets.items() if has_local_devices(target.sharding)}

    def read_local() -> tuple[Any, Findings]:
        tree = _read_all(path, stored, local)
        return tree, Findings.of(local, tree)

    try:
        tree, findings = in_all_processes(read_local)
    except Exception as error:
        raise TornCheckpointError(f"{path} cannot be read ({cause(error)})") from error
    answers = gather_texts(json.dumps(dataclasses.asdict(findings)))
    wrong = damaged(stored, [Findings(**json.loads(answer)) for answer in answers])
    if external := [name for name in wrong if stored[name].folder]:
        folder = stored[external[0]].folder
        raise CheckpointError(
            f"{folder} has changed since {path}, which needs {shortened(external)} of it; bring it back"
        )
    if wrong:
        raise TornCheckpointError(f"{path} is damaged: the bytes of {shortened(wrong)} are not those that were saved")
    return {name: lookup(tree, name) for name in local}


def _require_folders(path: Path, stored: Mapping[str, LeafInfo]) -> None:
    """Requires that other folders with some of the leaves exist, and that folders of safetensors have the tensors.

    Raises:
      CheckpointError: a folder is missing or has changed.
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
    leaves: dict[str, Any] = {}
    for folder, names in by_folder.items():
        views = {name: (key, view) for name, key in names.items() if (view := stored[name].view)}
        if views:
            parameters = FolderParameters(folder=WeightsFolder.open(folder), places=views)
            leaves |= parameters.read({name: targets[name] for name in views})
            continue
        tree = read(Path(folder) if folder else path, {key: targets[name] for name, key in names.items()})
        leaves |= {name: lookup(tree, key) for name, key in names.items()}
    return nest(leaves)


def in_all_processes(read: Callable[[], T]) -> T:
    """Returns the result of this process's `read()`, a function without arguments; if it fails in one process, this
    raises in all.

    All processes call it.

    Raises:
      TornCheckpointError: `read` failed in another process. An error of this process's `read` is raised unchanged.
    """
    try:
        result, problem = read(), None
    except Exception as error:
        result, problem = None, error
    answers = gather_texts(cause(problem) if problem else "")
    if problem:
        raise problem
    if remote_problem := next(filter(None, answers), ""):
        raise TornCheckpointError(f"another process finds: {remote_problem}")
    return cast(T, result)
