"""Writes leaves and metadata into one directory with Orbax, and reads them. Only this module and those that it uses
(`shards`, `quiet`) touch Orbax.

Several processes write a checkpoint together, or none does. In rounds each tells the others whether its part has
failed: when leaves are written, when process 0 has joined them, and when it has renamed the directory. At the first
round with a problem all stop alike, so none waits in a barrier for a process that does not come.
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
    """In each round all processes learn whether one of them has a problem. A process answers a round once."""

    def __init__(self) -> None:
        """Has to be called by all processes at the same place."""
        self._agreements = [Agreement() for _ in range(COMMITTED + 1)]
        self._lock = threading.Lock()
        self._results: dict[int, str] = {}

    def __call__(self, number: int, problem: str = "") -> str:
        """The problem of some process, "" if none has one; may be called from any thread."""
        with self._lock:
            if number not in self._results:
                self._results[number] = self._agreements[number](problem)
            return self._results[number]

    def settle(self, problem: str) -> str:
        """Answers the rounds up to `JOINED` that are still open, after this process's write ended with `problem`."""
        return self(WRITTEN, problem) or self(JOINED, problem)


class Write:
    """A checkpoint that is being written; made by all processes at the same place."""

    def __init__(self, path: Path, leaves: Mapping[str, jax.Array], about: Unsealed):
        """Starts the write; returns when the leaves' values are held on the host.

        Raises:
          Exception: one of a dozen types; the write has not begun.
        """
        self.path, self._rounds = path, WriteRounds()
        with _context(rounds=self._rounds):
            items = {_STATE: nest(local_shards(leaves)), _METADATA: about}
            self._response = ocp.save_checkpointables_async(str(path), items)

    def finish(self) -> None:
        """Waits until the directory is there.

        Raises:
          WriteError: it was not written, by any process.
        """
        problem = ""
        try:
            self._response.result()
        except BaseException as error:  # a cancelled save included: nobody above this thread would see it
            problem = cause(error)
        if jax_compat.process_count() > 1:
            problem = self._joint(problem)
        if problem:
            raise WriteError(problem)

    def _joint(self, problem: str) -> str:
        if joint := self._rounds.settle(problem):
            return joint
        if problem:  # the others wait for this one
            with contextlib.suppress(Exception):  # it may have failed there
                attend_commit(self._response)
        return self._rounds(COMMITTED, problem)


def read(path: Path, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Leaves of a checkpoint in the shardings of `leaves`, as nested dicts; no other process takes part.

    Raises:
      Exception: one of a dozen types, for a directory that is torn.
    """
    with _context(alone=True):
        return ocp.load_checkpointables(str(path), {_STATE: nest(leaves)})[_STATE] if leaves else {}


def read_metadata(path: Path) -> Any:
    """The JSON value of the metadata that is stored beside the leaves.

    Raises:
      OSError, ValueError: it cannot be read.
    """
    # Not by Orbax, which counts its operations: processes with different counts would never meet again.
    return parse((path / _METADATA / _FILE).read_bytes())


def export(leaves: Mapping[str, jax.Array], path: str | Path, *, about: Mapping[str, Any]) -> None:
    """Writes parameters alone as an Orbax checkpoint: `ocp.load` gives them as a nested dict of numpy arrays.

    The leaves are gathered on the host one after another, so the file fits any number of devices. The metadata beside
    them are those of a checkpoint, checksums included.

    Args:
      leaves: parameters by "/"-joined name, such as "llm/embed".
      path: the directory to make.
      about: see `Metadata`, without the leaves; also kept as the Orbax checkpoint's custom metadata.

    Raises:
      CheckpointError: the path exists, or a leaf's name or ownership is wrong.
    """
    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists: remove it or export to another path")
    require_addressable(leaves)
    tree = nest({name: np.asarray(leaf) for name, leaf in leaves.items()})
    held = Unsealed(body=about, leaves={name: HostLeaf(leaf) for name, leaf in leaves.items()})
    with _context():
        ocp.save_checkpointables(str(path), {_STATE: tree, _METADATA: held}, custom_metadata=dict(about))


class _MetadataHandler:
    """How Orbax writes and reads our JSON item: sealed in the background, while the leaves are being written.

    The file is the one that Orbax's own JSON handler would write.
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


def _context(alone: bool = False, rounds: WriteRounds | None = None) -> ocp.Context:
    """Orbax's options, with the reason for each that is not its default.

    Args:
      alone: whether this process acts without the others.
      rounds: the rounds of a write by several processes.
    """
    quieten()
    handlers = ocp.handlers.local_registry(include_global_registry=False)
    handlers.add(state_handler(rounds), checkpointable_name=_STATE)
    handlers.add(_MetadataHandler, checkpointable_name=_METADATA)
    context = ocp.Context()
    me, count = jax_compat.process_index(), jax_compat.process_count()
    if count > 1:
        # Named, they meet at the coordinator; otherwise in a collective, which another thread may be dispatching.
        context.multiprocessing.active_processes = {me} if alone else set(range(count))
        context.multiprocessing.primary_host = me if alone else 0
        context.multiprocessing.barrier_sync_key_prefix = f"process{me}" if alone else BARRIERS
    context.checkpointables.registry = handlers
    # Made later, a directory that cannot be made leaves threads that wait for it for five minutes.
    context.asynchronous.create_directories_asynchronously = False
    saving = context.array.saving
    saving.use_ocdbt = True  # hundreds of tiny leaves share a few files
    saving.use_replica_parallel = False  # it would compile a slicing program per shape, for one disk
    saving.use_compression = False  # weights do not compress, and training wants the cores
    saving.enable_write_sharding_file = False  # a leaf does not remember a layout
    context.pytree.loading.partial_load = True  # `require_match` has compared the names, with better words
    return context
