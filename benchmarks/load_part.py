"""One process of the benchmark ``load``: reads its part of a folder, and measures time and memory.

``mmjax.launch`` starts it with the folder, the path of the results, and the number of rounds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.load import leaf_shapes
from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.mesh.process_group import find_processes
from mmjax.mesh.processes import join
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.weights import rows, settings
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import FolderParameters, find_leaves
from mmjax.weights.table import Shape, expand


class PeakMemory:
    """A context that measures the peak memory of this process beyond its memory at entry; mapped files do not count."""

    def __enter__(self) -> PeakMemory:
        self._before, self.bytes, self._finished = _memory_bytes(), 0, threading.Event()
        self._watch = threading.Thread(target=self._poll_memory, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finished.set()
        self._watch.join()

    def _poll_memory(self) -> None:
        while not self._finished.wait(0.005):
            self.bytes = max(self.bytes, _memory_bytes() - self._before)


def _memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status says nothing of RssAnon; run this benchmark on Linux")


def main() -> int:
    path, out, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    join(find_processes({}))
    number, folder = jax_compat.process_index(), WeightsFolder.open(path)
    config = DecoderConfig(**settings(folder.config))
    leaves_of_folder = find_leaves(folder, "llm", expand(rows(config), config.layers), leaf_shapes(config))
    parameters = FolderParameters(folder=folder, places=leaves_of_folder)
    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    targets = {f"llm/{name}": _target(mesh, shape) for name, shape in leaf_shapes(config).items()}
    seconds, alone, peak, size = [], [], 0, 0
    for _ in range(rounds):
        with PeakMemory() as memory:
            start = time.perf_counter()
            leaves = jax.block_until_ready(parameters.read(targets))
            seconds.append(time.perf_counter() - start)
        peak = max(peak, memory.bytes)
        size = sum(shard.data.nbytes for leaf in leaves.values() for shard in leaf.addressable_shards)
        del leaves
        start = time.perf_counter()
        for key in list(folder.tensors)[number :: jax.process_count()]:
            info = folder.tensors[key]
            np.array(folder.tensor(key)[tuple(slice(0, length) for length in info.shape)])
        alone.append(time.perf_counter() - start)
    Path(f"{out}.{number}").write_text(
        json.dumps({"seconds": seconds, "alone": alone, "peak": peak, "bytes": size}) + "\n"
    )
    return 0


def _target(mesh: jax.sharding.Mesh, shape: Shape) -> jax.ShapeDtypeStruct:
    """A leaf whose last dimension is split, as a column-parallel weight's is."""
    spec = PartitionSpec(*[None] * (len(shape) - 1), "tp")
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))


if __name__ == "__main__":
    run_command(main)
