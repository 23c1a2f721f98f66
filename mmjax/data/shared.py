"""Batches from Grain's workers as dicts of arrays, which Grain passes on in shared memory instead of pickling them.

Grain copies the arrays of dicts and lists into shared memory, and opens them on the other side without a copy. To Grain
a dataclass is a leaf, which travels through a pipe as bytes.
"""

from __future__ import annotations

import json
import shutil
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.data import tree
from mmjax.data.types import StepBatch

_MOUNT = Path("/dev/shm")


def spread_out(batch: StepBatch) -> dict[str, Any]:
    """`batch` as {"batch": JSON text, "arrays": list of contiguous arrays}. Runs in the worker."""
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray) -> list[Any]:
        arrays.append(np.ascontiguousarray(array))
        return [len(arrays) - 1]

    return {"batch": json.dumps(tree.write(batch, place)), "arrays": arrays}


def put_together(parts: dict[str, Any]) -> StepBatch:
    """The batch that `spread_out` took apart. Its arrays are views of memory that is freed with their last view.

    parts: the result of `spread_out`, whose arrays Grain may have passed on in shared memory.
    """
    arrays = [_claim(array) for array in parts["arrays"]]
    return tree.read(json.loads(parts["batch"]), lambda place: arrays[place[0]])


def _claim(array: np.ndarray) -> np.ndarray:
    """Removes the name of the array's shared memory, and returns a view of the array.

    So no memory is left over, however this process ends. Grain would remove the name in a thread when the array is
    freed; the process may end before.
    """
    from grain.multiprocessing import SharedMemoryArray

    if isinstance(array, SharedMemoryArray) and isinstance(array.shm, SharedMemory):
        array.shm.unlink()
        array._unlink_on_del = False
    return array.view(np.ndarray)


def has_room(bytes_needed: int) -> bool:
    """Whether so many bytes of shared memory are free.

    In many containers they are not, and a worker that writes to them dies.
    """
    return _MOUNT.is_dir() and shutil.disk_usage(_MOUNT).free >= bytes_needed
