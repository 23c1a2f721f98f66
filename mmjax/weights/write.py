"""Writes folders of safetensors: a folder that was read, with other parameters, or a new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mmjax.weights.folder import ADAPTER_CONFIG, ADAPTERS, CONFIG, DIFFUSERS_STEM, STEM, WeightsFolder
from mmjax.weights.table import Entry, View, assemble, is_list, keys_of

Read = Callable[[Collection[str]], Mapping[str, np.ndarray]]
"""Called with names of leaves, returns their whole arrays by name."""
SHARD_BYTES = 5 * 2**30
"""Largest file of a new folder, the same as of save_pretrained."""
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
      folder: the folder, as ``WeightsFolder.open(path)`` gives it; tensors of which no leaf is a view, and files other
        than weights, are copied unchanged.
      places: by leaf, such as "llm/embed", the key of its tensor and its view.
      read: a function from a list of leaves, names of ``places``, to their whole arrays by name; called for one leaf at
        a time.
      out: the directory to make, which appears when it is complete.
      copies: by key of a duplicate of a tensor, the leaf that is a view of it, and the view.
      files: contents of files that replace the folder's, by name, such as "config.json".

    Returns:
      The number of tensors made from leaves, duplicates counted.

    Raises:
      OSError: ``out`` is a directory with files, or cannot be written.
    """
    by_key: dict[str, list[_Part]] = {key: [_Part(*copy)] for key, copy in (copies or {}).items()}
    for leaf, (key, view) in places.items():
        for number, name in enumerate(keys_of(key, folder.tensors)):
            by_key.setdefault(name, []).append(_Part(leaf, view, number if is_list(key) else None))
    read = _with_last(read)
    shards = {tensor.file for tensor in folder.tensors.values()}
    stale = {f"{file}.index.json" for file in shards}
    with _new_directory(out) as directory:
        for file in sorted(shards):
            keys = [key for key, tensor in folder.tensors.items() if tensor.file == file]
            # Tensors of a list lie among others, and each leaf is to be read once.
            by_leaf = sorted(keys, key=lambda key: [part.leaf for part in by_key.get(key, ())])
            tensors = {key: _replaced(folder, key, by_key.get(key, ()), read) for key in by_leaf}
            _save({key: tensors[key] for key in keys}, directory / file)
        for source in sorted(Path(folder.path).iterdir()):
            if source.is_file() and source.suffix not in _NOT_COPIED and source.name not in stale:
                shutil.copyfile(source, directory / source.name)
        for name, content in (files or {}).items():
            (directory / name).write_bytes(content)
    return len(by_key)


class _Part(NamedTuple):
    """A leaf as a view of a tensor, or of the stack of a list in which the tensor has this number."""

    leaf: str
    view: View
    number: int | None = None


def _with_last(read: Read) -> Read:
    """A function that reads once if it is called for the same leaves again, as for the tensors of a list."""
    last: dict[tuple[str, ...], Mapping[str, np.ndarray]] = {}

    def read_or_last(leaves: Collection[str]) -> Mapping[str, np.ndarray]:
        key = tuple(leaves)
        if key not in last:
            last.clear()
            last[key] = read(leaves)
        return last[key]

    return read_or_last


def _replaced(folder: WeightsFolder, key: str, leaves: Sequence[_Part], read: Read) -> np.ndarray:
    """A tensor of the folder with the values of leaves; rows without a leaf keep the folder's values."""
    info = folder.tensors[key]
    axis = leaves[0].view.axis if leaves else 0
    rows = [part.view.rows for part in leaves]
    if leaves and (None in rows or sum(end - first for first, end in filter(None, rows)) == info.shape[axis]):
        tensor = np.empty(info.shape, info.dtype)
    else:
        tensor = np.array(folder.tensor(key)[tuple(slice(0, size) for size in info.shape)])
    for part, bounds in zip(leaves, rows, strict=True):
        values = part.view.undo(np.asarray(read([part.leaf])[part.leaf]))
        place = (*[slice(None)] * axis, slice(*bounds)) if bounds else ...
        tensor[place] = (values if part.number is None else values[part.number]).astype(tensor.dtype)
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
    stem: str = STEM,
) -> int:
    """Writes a new folder of a model: ``config.json``, safetensors (with an index if there are several) and ``files``.

    Args:
      config: the values of its ``config.json``, to which "dtype" is added, but not for ``DIFFUSERS_STEM``.
      entries: its table, as ``table.expand`` makes it.
      read: a function from a list of leaves, such as ["layers/000/attn/q"], to their whole arrays by name; called for
        the leaves of one tensor, or list of tensors, at a time.
      out: the directory to make, which appears when it is complete.
      dtype: numpy's name of the dtype of all tensors, or "bfloat16".
      shard_bytes: bytes of the largest file, unless a single tensor is larger.
      files: contents of further files by name, such as "tokenizer.json".
      stem: the beginning of the names of files with tensors, ``STEM`` or ``DIFFUSERS_STEM``.

    Returns:
      The number of tensors written.

    Raises:
      OSError: ``out`` is a directory with files, or cannot be written.
    """
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.keys[0], []).append(entry)

    written = 0

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal written
        for key_entries in by_key.values():
            for key, tensor in assemble(key_entries, read([entry.leaf for entry in key_entries])).items():
                written += 1
                yield key, tensor.astype(kind)

    with _new_directory(out) as directory:
        stated = {} if stem == DIFFUSERS_STEM else {"dtype": dtype}
        (directory / CONFIG).write_text(json.dumps({**config, **stated}, indent=2) + "\n")
        for name, content in (files or {}).items():
            (directory / name).write_bytes(content)
        _save_shards(tensors(), directory, shard_bytes, stem)
    return written


def write_adapters(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], out: Path) -> None:
    """Writes a folder of PEFT, ``out``: ``config`` as its ``adapter_config.json``, and ``tensors`` by key.

    Tensors keep their dtypes. The directory appears when it is complete.

    Raises:
      OSError: ``out`` is a directory with files, or cannot be written.
    """
    with _new_directory(out) as directory:
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _save(tensors, directory / ADAPTERS)


def _save_shards(tensors: Iterable[tuple[str, np.ndarray]], folder: Path, limit: int, stem: str) -> None:
    """Writes tensors in their order, in one file or in several with an index."""
    shards: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}

    def flush() -> None:
        _save(waiting, folder / f"{len(shards)}.part")
        shards.append(list(waiting))
        waiting.clear()

    total = 0
    for key, tensor in tensors:
        if waiting and sum(array.nbytes for array in waiting.values()) + tensor.nbytes > limit:
            flush()
        waiting[key] = tensor
        total += tensor.nbytes
    flush()
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [f"{stem}.safetensors"] if len(shards) == 1 else names
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    if len(names) > 1:
        places = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    path.touch()  # the library would make a file that only its owner can read
    mode = path.stat().st_mode
    contiguous = {key: np.ascontiguousarray(tensor).reshape(tensor.shape) for key, tensor in tensors.items()}  # scalars
    save_file(contiguous, path, metadata=_METADATA)
    path.chmod(mode)


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory that gets its name when it is complete."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(out)
