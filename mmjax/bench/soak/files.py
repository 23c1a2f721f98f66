"""Files of a drawn run: data that grow, and exports beside their checkpoint."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmjax.bench.soak.draws import GROWING

GROWTH = 7
"""Number of records that are added to data."""


def with_copied_data(bindings: Iterable[str], folder: Path) -> Iterator[str]:
    """Copies the data of the dataset ``GROWING`` into ``folder``; yields the bindings with the path of the copy.

    Bindings are text, such as "Train.steps=8"; without the dataset all are yielded as they are.
    """
    for binding in bindings:
        name, _, value = binding.partition("=")
        if name != f"{GROWING}/Source.path":
            yield binding
            continue
        path = Path(value.strip("'"))
        if not (folder / "data").exists():
            shutil.copytree(path.parent, folder / "data")
        yield f"{name}={str(folder / 'data' / path.name)!r}"


def grow(folder: Path) -> None:
    """Adds ``GROWTH`` records to the copy of the data in ``folder``: its first ones once more, under other names."""
    (path,) = (folder / "data").glob("*.json")
    records = json.loads(path.read_text())
    new = [{**record, "id": f"new{record['id']}"} for record in records[:GROWTH]]
    path.write_text(json.dumps([*records, *new]))


def held_out_records(checkpoint: Path) -> dict[str, str]:
    """Keys of the records that a checkpoint keeps held out, as one text by dataset; {} where no records are known.

    ``checkpoint`` is its directory.
    """
    from mmjax.assembly.data_state import DATA
    from mmjax.checkpoint.storage import read_metadata

    return {name: known["held_out"] for name, known in read_metadata(checkpoint)["extra"].get(DATA, {}).items()}


def compare_export(run_dir: Path, out: Path, folder: Path | None) -> int:
    """Compares an export with the newest checkpoint's parameters.

    Returns exit status 0 if they are equal bit for bit, else 1 after a line about the first leaf that differs.

    Args:
      run_dir: the run directory.
      out: the exported parameters, an Orbax checkpoint.
      folder: the run's LLM exported as a folder of safetensors, or None; some tensors of it are compared.
    """
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from mmjax.checkpoint import Checkpointer

    checkpointer = Checkpointer(run_dir / "checkpoints")
    step = checkpointer.steps()[-1]
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    stored = checkpointer.metadata(step).leaves
    targets = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in stored.items()}
    leaves = {name: np.asarray(leaf) for name, leaf in checkpointer.restore(step, targets).items()}
    tree: Any = ocp.load(str(out.absolute()))
    for name, leaf in leaves.items():
        kind, _, path = name.partition("/")
        if kind != "params":
            continue
        node: Any = tree
        for part in path.split("/"):
            node = node[part]
        if not np.array_equal(leaf, np.asarray(node)):
            print(f"error: {name} differs in the export")
            return 1
    return _compare_folder(leaves, folder) if folder else 0


def _compare_folder(leaves: dict[str, Any], folder: Path) -> int:
    """Compares tensors of the folder with their leaves, and the files' modes with one another.

    Weights into which adapters are merged are left out. Returns exit status 0 if all are equal, else 1 after a line.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import load_file

    from mmjax.bench.soak.weights import EMBED, HEAD, SAMPLES

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    if len(set(modes.values())) > 1:
        print(f"error: files of the folder have the modes { ({name: oct(mode) for name, mode in modes.items()}) }")
        return 1
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    for key, (name, transposed) in SAMPLES.items():
        if f"{name.replace('params/llm/', 'params/llm_lora/')}/a" in leaves:
            continue
        leaf = leaves[name].T if transposed else leaves[name]
        if not np.array_equal(tensors[key], leaf.astype(ml_dtypes.bfloat16)):
            print(f"error: {key} differs in the folder")
            return 1
    if "params/llm/head" not in leaves and not np.array_equal(tensors.get(HEAD, tensors[EMBED]), tensors[EMBED]):
        print(f"error: {HEAD}, a copy of {EMBED}, differs from it in the folder")
        return 1
    return 0
