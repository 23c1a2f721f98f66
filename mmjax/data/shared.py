"""Batches from Grain's workers: a tree whose arrays Grain hands over in shared memory, instead of a pickled copy.

Grain copies the arrays of dicts and lists into shared memory and opens them on the other side without a copy; a
dataclass is a leaf to it, which travels through a pipe as bytes.
"""

from __future__ import annotations

import json
import shutil
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.data.service import tree
from mmjax.data.types import StepBatch

_MOUNT = Path("/dev/shm")


def spread_out(batch: StepBatch) -> dict[str, Any]:
    """`batch` as words and a list of arrays. Runs in the worker."""
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray) -> list[Any]:
        arrays.append(np.ascontiguousarray(array))
        return [len(arrays) - 1]

    return {"batch": json.dumps(tree.write(batch, place)), "arrays": arrays}


def put_together(found: dict[str, Any]) -> StepBatch:
    """The batch again. Its arrays are views; each frees its memory when the last view of it is gone."""
    arrays = [_claim(array) for array in found["arrays"]]
    return tree.read(json.loads(found["batch"]), lambda place: arrays[place[0]])


def _claim(array: np.ndarray) -> np.ndarray:
    """A view of the array, the name of its shared memory removed: so none is left over, however this process ends.

    Grain would remove the name when the array is freed, in a thread, which the process may end before.
    """
    from grain.multiprocessing import SharedMemoryArray

    if isinstance(array, SharedMemoryArray) and isinstance(array.shm, SharedMemory):
        array.shm.unlink()
        array._unlink_on_del = False
    return array.view(np.ndarray)


def has_room(bytes_needed: int) -> bool:
    """Whether so much shared memory is free. With less, as in many containers, a worker that writes to it dies."""
    return _MOUNT.is_dir() and shutil.disk_usage(_MOUNT).free >= bytes_needed
