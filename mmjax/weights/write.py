"""Writes folders of safetensors: a folder that was read, with other parameters, or a new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mmjax.weights.folder import ADAPTER_CONFIG, ADAPTERS, CONFIG, INDEX, SINGLE, WeightsFolder
from mmjax.weights.table import Entry, View, assemble

Read = Callable[[Collection[str]], Mapping[str, np.ndarray]]
"""Gives leaves by name."""
SHARD_BYTES = 5 * 2**30
"""Largest file of a new folder, as save_pretrained makes it."""
_METADATA = {"format": "pt"}
"""Without it ``transformers`` refuses a file."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def rewrite(
    folder: WeightsFolder,
    places: Mapping[str, tuple[str, View]],
    read: Read,
    out: Path,
    *,
    copies: Mapping[str, tuple[str, View]] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Copies a folder with other parameters, file by file; tensors keep their keys, dtypes and files.

    Args:
      folder: the folder; what no leaf is a view of, and files other than weights, are copied as they are.
      places: by leaf, the key of its tensor and its view.
      read: gives whole leaves.
      out: the directory to make.
      copies: by key of a tensor that the folder has once more, the leaf that it is a view of, and the view.
      files: by name, files that take the place of the folder's.

    Returns:
      How many tensors are made of leaves.
    """
    by_key: dict[str, list[tuple[str, View]]] = {key: [copy] for key, copy in (copies or {}).items()}
    for leaf, (key, view) in places.items():
        by_key.setdefault(key, []).append((leaf, view))
    shards = {tensor.file for tensor in folder.tensors.values()}
    stale = {INDEX} if shards == {SINGLE} else set()
    with _new(out) as made:
        for file in sorted(shards):
            keys = [key for key, tensor in folder.tensors.items() if tensor.file == file]
            _save({key: _replaced(folder, key, by_key.get(key, ()), read) for key in keys}, made / file)
        for other in sorted(Path(folder.path).iterdir()):
            if other.is_file() and other.suffix not in _NOT_COPIED and other.name not in stale:
                shutil.copyfile(other, made / other.name)
        for name, content in (files or {}).items():
            (made / name).write_bytes(content)
    return len(by_key)


def _replaced(folder: WeightsFolder, key: str, leaves: Sequence[tuple[str, View]], read: Read) -> np.ndarray:
    """A tensor of the folder with the values of leaves; its own are read where leaves leave any."""
    info = folder.tensors[key]
    rows = [view.rows or (0, info.shape[0]) for _, view in leaves]
    if leaves and sum(end - first for first, end in rows) == info.shape[0]:
        tensor = np.empty(info.shape, info.dtype)
    else:
        tensor = np.array(folder.tensor(key)[tuple(slice(0, size) for size in info.shape)])
    for (leaf, view), own in zip(leaves, rows, strict=True):
        tensor[slice(*own)] = view.undo(np.asarray(read([leaf])[leaf])).astype(tensor.dtype)
    return tensor


def write(
    config: Mapping[str, Any],
    entries: Iterable[Entry],
    read: Read,
    out: Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Writes a new folder of a model.

    Args:
      config: its ``config.json``.
      entries: its table.
      read: gives whole leaves.
      out: the directory to make.
      dtype: numpy's name of the dtype of all tensors, or "bfloat16".
      shard_bytes: the largest file, unless a single tensor is larger.
      files: other files by name.

    Returns:
      How many tensors are written.
    """
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.keys[0], []).append(entry)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for key, own in by_key.items():
            (tensor,) = assemble(own, read([entry.leaf for entry in own])).values()
            yield key, tensor.astype(kind)

    with _new(out) as made:
        (made / CONFIG).write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
        for name, content in (files or {}).items():
            (made / name).write_bytes(content)
        _save_shards(tensors(), made, shard_bytes)
    return len(by_key)


def write_adapters(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], out: Path) -> None:
    """Writes a folder of PEFT: its ``adapter_config.json`` and its tensors by key."""
    with _new(out) as made:
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _save(tensors, made / ADAPTERS)


def _save_shards(tensors: Iterable[tuple[str, np.ndarray]], folder: Path, limit: int) -> None:
    """Writes tensors as they come, in one file or in several with an index."""
    shards: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}

    def flush() -> None:
        _save(waiting, folder / f"{len(shards)}.part")
        shards.append(list(waiting))
        waiting.clear()

    total = 0
    for key, tensor in tensors:
        if waiting and sum(own.nbytes for own in waiting.values()) + tensor.nbytes > limit:
            flush()
        waiting[key] = tensor
        total += tensor.nbytes
    flush()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    if len(names) > 1:
        places = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    path.touch()  # the library makes its files for their owner alone
    mode = path.stat().st_mode
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, path, metadata=_METADATA)
    path.chmod(mode)


@contextmanager
def _new(out: Path) -> Iterator[Path]:
    """A directory that gets its name when all of it is written."""
    made = out.with_name(f"{out.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    made.rename(out)
