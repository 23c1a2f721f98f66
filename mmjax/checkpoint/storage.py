"""Writes leaves and metadata into a directory with Orbax, and reads them.

Only this module, `shards` and `quiet` use Orbax. Several processes write a checkpoint together, or none does. In rounds
they exchange problems: when leaves are written, when process 0 has merged them, and when it has renamed the directory.
At the first round with a problem all stop, so none waits in a barrier for a failed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mmjax import jax_compat
from mmjax.checkpoint.config import CheckpointError
from mmjax.checkpoint.leaves import nest, require_addressable
from mmjax.checkpoint.metadata import HostLeaf, Unsealed
from mmjax.checkpoint.quiet import quieten
from mmjax.checkpoint.shards import BARRIERS, attend_commit, cause, local_shards, state_handler
from mmjax.json_files import parse
from mmjax.mesh.processes import Agreement, Exchange

_STATE = "state"  # Orbax's own default name, so that a plain `ocp.load` finds it
_METADATA = "mmjax"
_FILE = "data.json"
WRITTEN, JOINED, COMMITTED = range(3)
"""The rounds of a write."""


class WriteError(Exception):
    """A checkpoint was not written, by any process; one line."""


class WriteRounds:
    """The rounds in which all processes learn of a problem of any. A process answers a round once."""

    def __init__(self) -> None:
        """All processes must call it at the same point."""
        self._agreements = [Agreement() for _ in range(COMMITTED + 1)]
        self._lock = threading.Lock()
        self._results: dict[int, str] = {}

    def __call__(self, number: int, problem: str = "") -> str:
        """Answers round `number`, and waits for the others; may be called from any thread.

        `number` is `WRITTEN`, `JOINED` or `COMMITTED`, and `problem` this process's problem, one line, or "".
        Returns the problem of the first process that has one, or "", the same in all processes. Another call for the
        same round returns the same.
        """
        with self._lock:
            if number not in self._results:
                self._results[number] = self._agreements[number](problem)
            return self._results[number]

    def settle(self, problem: str) -> str:
        """Answers the rounds up to `JOINED` that are still open, after this process's write ended with `problem`.

        Returns the problem of a process, or "" if none has one.
        """
        return self(WRITTEN, problem) or self(JOINED, problem)


class Write:
    """A checkpoint that is being written; all processes make it at the same point."""

    def __init__(self, path: Path, leaves: Mapping[str, jax.Array], metadata: Unsealed):
        """Starts the write; returns when the leaves' values are on the host.

        Args:
          path: the directory to make.
          leaves: whole leaves by name, such as "params/llm/embed", the same names in all processes.
          metadata: the metadata to store; `Unsealed.leaves` has the same names.

        Raises:
          Exception: an error of a dozen possible types; the write has not begun.
        """
        self.path, self._rounds = path, WriteRounds()
        with _context(rounds=self._rounds):
            items = {_STATE: nest(local_shards(leaves)), _METADATA: metadata}
            self._response = ocp.save_checkpointables_async(str(path), items)

    def finish(self) -> None:
        """Waits until the directory exists.

        Raises:
          WriteError: no process has written it.
        """
        problem = ""
        try:
            self._response.result()
        except BaseException as error:  # also of a cancelled save: nothing above this thread would catch it
            problem = cause(error)
        if jax_compat.process_count() > 1:
            problem = self._agree(problem)
        if problem:
            raise WriteError(problem)

    def _agree(self, problem: str) -> str:
        """The problem of a process, or "" if none has one."""
        if agreed := self._rounds.settle(problem):
            return agreed
        if problem:  # the other processes wait for this one
            with contextlib.suppress(Exception):  # the barrier itself may have failed
                attend_commit(self._response)
        return self._rounds(COMMITTED, problem)


def read(path: Path, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Reads leaves of the checkpoint `path` as nested dicts of arrays, one level per "/"; without other processes.

    `leaves` has the global shape, dtype and sharding of each, by its name in the checkpoint, such as
    "params/llm/embed"; {} gives {}.

    Raises:
      Exception: an error of a dozen possible types, for a torn directory.
    """
    with _context(single_process=True):
        return ocp.load_checkpointables(str(path), {_STATE: nest(leaves)})[_STATE] if leaves else {}


def read_metadata(path: Path) -> Any:
    """Reads the JSON value of the metadata beside the leaves of the checkpoint `path`, a dict for `metadata.unseal`.

    Raises:
      OSError, ValueError: it cannot be read.
    """
    # Not with Orbax, which numbers its operations: barriers of processes with different numbers would never match.
    return parse((path / _METADATA / _FILE).read_bytes())


def export(leaves: Mapping[str, jax.Array], path: str | Path, *, metadata: Mapping[str, Any]) -> None:
    """Writes parameters alone as an Orbax checkpoint: `ocp.load` returns them as a nested dict of numpy arrays.

    The leaves are gathered on the host one after another, so the file fits any number of devices. It has the metadata
    of a checkpoint, with checksums.

    Args:
      leaves: parameters by "/"-joined name, such as "llm/embed"; this process owns all their shards.
      path: the directory to make.
      metadata: JSON values by field of `Metadata`, without `leaves`: {"step": 500, "seed": 0, "config": "", "versions":
        versions(), "extra": {}}; also kept as the Orbax checkpoint's custom metadata.

    Raises:
      CheckpointError: the path exists, or a leaf's name or ownership is wrong.
    """
    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists: remove it or export to another path")
    require_addressable(leaves)
    tree = nest({name: np.asarray(leaf) for name, leaf in leaves.items()})
    unsealed = Unsealed(body=metadata, leaves={name: HostLeaf(leaf) for name, leaf in leaves.items()})
    with _context():
        ocp.save_checkpointables(str(path), {_STATE: tree, _METADATA: unsealed}, custom_metadata=dict(metadata))


class _MetadataHandler:
    """Orbax's handler of mmjax's JSON item, which is sealed in the background while leaves are being written.

    It writes the same file as Orbax's own JSON handler.
    """

    async def save(self, directory: Any, checkpointable: Unsealed) -> Awaitable[None]:
        return self._write(directory, checkpointable, Exchange())

    async def _write(self, directory: Any, unsealed: Unsealed, exchange: Exchange) -> None:
        text = await asyncio.to_thread(unsealed.seal, exchange)
        if text is None:
            return
        folder = await directory.await_creation()
        Path(folder, _FILE).write_text(text, encoding="utf-8")

    async def load(self, directory: Any, abstract_checkpointable: None = None) -> Awaitable[Any]:
        return self._read(Path(directory))

    async def _read(self, folder: Path) -> Any:
        return parse((folder / _FILE).read_bytes())

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Unsealed)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


def _context(*, single_process: bool = False, rounds: WriteRounds | None = None) -> ocp.Context:
    """Orbax's options, with the reason for each that is not the default.

    Args:
      single_process: whether this process acts without the others.
      rounds: the rounds of a write by several processes.
    """
    quieten()
    handlers = ocp.handlers.local_registry(include_global_registry=False)
    handlers.add(state_handler(rounds), checkpointable_name=_STATE)
    handlers.add(_MetadataHandler, checkpointable_name=_METADATA)
    context = ocp.Context()
    index, count = jax_compat.process_index(), jax_compat.process_count()
    if count > 1:
        # With names, barriers use the coordinator; else a collective, which another thread may be dispatching.
        context.multiprocessing.active_processes = {index} if single_process else set(range(count))
        context.multiprocessing.primary_host = index if single_process else 0
        context.multiprocessing.barrier_sync_key_prefix = f"process{index}" if single_process else BARRIERS
    context.checkpointables.registry = handlers
    # Created in the background, a directory that cannot be created would make threads wait five minutes for it.
    context.asynchronous.create_directories_asynchronously = False
    saving = context.array.saving
    saving.use_ocdbt = True  # hundreds of tiny leaves share a few files
    saving.use_replica_parallel = False  # would compile a slicing program per shape, for one disk
    saving.use_compression = False  # weights do not compress, and training needs the cores
    saving.enable_write_sharding_file = False  # leaves do not depend on a layout
    context.pytree.loading.partial_load = True  # `require_match` has compared the names, with a better message
    return context
