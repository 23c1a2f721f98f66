"""The checkpoints of a run directory: writes them, deletes old ones, and finds the one from which a run continues.

A checkpoint is one directory, `<directory>/<step, eight digits>`, which appears by an atomic rename when everything in
it has been written (`folder` lists what else may be there). It holds

  state   the leaves: one array per layer and parameter, unpadded, named without stage, dp or layout
          ("params/llm/layers/000/attn/q", "adam_m/...", "adam_v/..."), stored as a nested dict;
  mmjax   a JSON item: step, data seed, config text, versions, and the leaves' names, shapes, dtypes and checksums;
          for a leaf whose bytes are in another folder, that folder and the leaf's name in it.

Any layout restores any other's checkpoint, because leaves are stored without their placement. The writing thread
computes checksums, which are compared when leaves are restored: a checkpoint with a changed bit counts as torn.

`Checkpointer.save` returns when the bytes of every leaf are on the host, so the caller may donate, overwrite or delete
its buffers at once. On an accelerator they are copied. On CPU they are a view that pins the buffer: if the buffer is
donated meanwhile, XLA copies it instead of reusing its memory, so the values stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from mmjax.checkpoint.config import CheckpointConfig, CheckpointError, TornCheckpointError
from mmjax.checkpoint.folder import Folder
from mmjax.checkpoint.leaves import LeafInfo, as_stored, in_both, nest, require_match
from mmjax.checkpoint.metadata import HostLeaf, Metadata, Unsealed, versions
from mmjax.checkpoint.reading import in_all_processes, metadata_of, read_leaves
from mmjax.checkpoint.shards import cause
from mmjax.checkpoint.storage import Write, WriteError
from mmjax.mesh.process_group import give_up, has_peers
from mmjax.mesh.processes import broadcast_text, is_first

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint in memory.

    Attributes:
      step: optimizer steps done.
      leaves: the restored leaves by stored name, such as "params/llm/embed"; see `Checkpointer.restore`.
      metadata: the metadata, with all stored leaves.
    """

    step: int
    leaves: dict[str, jax.Array]
    metadata: Metadata


class Checkpointer:
    """Saves and restores the checkpoints of one run directory.

    Several processes each write and read the shards that they own, in a directory that all see. They must call `save`
    and `restore` in the same order. A save that fails in one process fails in all.

    In a `with` statement, saves are written in the background, and its end waits for them. Outside of one `save` itself
    waits: an ending program could not finish the write, since from Python 3.12 on it cannot start threads.

    Args:
      directory: the directory of the checkpoints; made by the first save.
      config: how often to save and how many checkpoints to keep; by default `CheckpointConfig()`.
      report: called with one-line messages about a failed save (from a background thread) or a skipped directory. By
        default they are logged as warnings.
      committed: called with each step whose checkpoint is complete, in the first process, from a background thread; may
        raise OSError.
      best: chooses one of the steps that have a checkpoint, which is kept beside the newest ones, or `None`; called
        from a background thread.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig | None = None,
        *,
        report: Callable[[str], None] = _logger.warning,
        committed: Callable[[int], None] = lambda step: None,
        best: Callable[[Collection[int]], int | None] = lambda steps: None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.config = config or CheckpointConfig()
        self._folder = Folder(self.directory)
        self._report, self._committed, self._best = report, committed, best
        self._writer: threading.Thread | None = None
        self._swept = False
        self._entered = self._closed = False
        self._saved: int | None = None
        self._failure: str | None = None

    def __enter__(self) -> Checkpointer:
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def failure(self) -> str | None:
        """The error of the last finished save, one line; `None` if it succeeded or there was none."""
        return self._failure

    def due(self, step: int) -> bool:
        """Whether the configuration has a checkpoint after `step` steps: they are a multiple of `every`, and not 0."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(
        self,
        step: int,
        leaves: Mapping[str, jax.Array],
        *,
        elsewhere: Mapping[str, LeafInfo] | None = None,
        seed: int = 0,
        config: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing a checkpoint and returns as soon as the leaves' values are on the host.

        Outside of a `with` statement it returns when the checkpoint is written.

        Waits first for an earlier save. A step that this object has just saved or restored is not saved again. An older
        checkpoint of the same step is replaced; it stays until the new one is complete. Errors of the disk are reported
        and kept in `failure`, and not raised.

        Args:
          step: optimizer steps done.
          leaves: logical leaves, whole and unpadded, by "/"-joined name such as "params/llm/layers/000/attn/q". They
            may be on different submeshes, and on devices of other processes; every process passes all.
          elsewhere: further leaves by name, with their `LeafInfo.folder`, which are not written, but read from there
            when they are restored.
          seed, config, extra: stored in the metadata; `extra` takes JSON values.

        Raises:
          CheckpointError: an impossible leaf name.
          RuntimeError: the checkpointer is closed.
        """
        if self._closed:
            raise RuntimeError(f"the checkpointer of {self.directory} is closed: save before close()")
        self.wait()
        if step == self._saved:
            return
        nest({**leaves, **(elsewhere or {})})  # raises here, before the processes start to write together
        body = {"step": step, "seed": seed, "config": config, "versions": versions(), "extra": dict(extra or {})}
        for leaf in leaves.values():
            for shard in leaf.addressable_shards:
                shard.data.copy_to_host_async()
        host_leaves = {name: HostLeaf(leaf) for name, leaf in leaves.items()}
        self._start(step, leaves, Unsealed(body=body, leaves=host_leaves, elsewhere=elsewhere or {}))
        if not self._entered:
            self.wait()

    def wait(self) -> None:
        """Waits for a running save. Ctrl-C interrupts the wait, not the save."""
        writer = self._writer
        if writer is not None:
            writer.join()
            self._writer = None

    def close(self) -> None:
        """Waits for a running save; afterwards `save` raises."""
        self.wait()
        self._closed = True

    def steps(self) -> list[int]:
        """The steps that have a checkpoint whose metadata can be read, in rising order."""
        return [step for step in self._folder.steps() if self._is_readable(step)]

    def is_empty(self) -> bool:
        """Whether the directory has no checkpoint, readable or not."""
        return not self._folder.steps()

    def latest_step(self) -> int | None:
        """The newest of `steps()`; `None` when there is none."""
        return next((step for step in reversed(self._folder.steps()) if self._is_readable(step)), None)

    def latest_metadata(self) -> Metadata | None:
        """The metadata of the checkpoint of `latest_step()`; `None` when there is none."""
        step = self.latest_step()
        return None if step is None else self.metadata(step)

    def metadata(self, step: int) -> Metadata:
        """Reads the metadata of the checkpoint of `step`; no leaf is read.

        Raises:
          TornCheckpointError: there is no such checkpoint, or it cannot be read.
          CheckpointError: a newer version of mmjax has written it.
        """
        return metadata_of(self._folder.find(step))

    def restore(
        self,
        step: int,
        targets: Mapping[str, jax.ShapeDtypeStruct],
        *,
        prefix: str = "",
        group: Callable[[str], str] = lambda name: "",
    ) -> dict[str, jax.Array]:
        """Reads the leaves of `step` for this process's devices, each straight into its sharding.

        All processes call it.

        Args:
          step: the step of the checkpoint.
          targets: stored name, such as "params/llm/embed", -> global shape, dtype and sharding of every leaf; shardings
            may be on different submeshes. A floating dtype may differ from the stored one.
          prefix: prefix of the stored leaves to read, such as "params/"; by default all are read.
          group: maps a leaf's name to its group. Groups that only the checkpoint or only `targets` has are left out; a
            leaf of the group "" must be in both.

        Returns:
          The leaves by stored name, in their stored dtypes, without leaves that have no device in this process.

        Raises:
          CheckpointError: leaves are missing, unexpected, or of another shape or dtype; the message names all.
          TornCheckpointError: the checkpoint cannot be read.
        """
        path = self._folder.find(step)
        stored = {name: leaf for name, leaf in self.metadata(step).leaves.items() if name.startswith(prefix)}
        stored, targets = in_both(stored, targets, group)
        require_match(path, stored, targets)
        return read_leaves(path, stored, as_stored(stored, targets))

    def restore_latest(
        self,
        targets: Mapping[str, jax.ShapeDtypeStruct],
        *,
        prefix: str = "",
        group: Callable[[str], str] = lambda name: "",
    ) -> Restored | None:
        """Restores the newest readable checkpoint, and reports newer ones that it skips.

        Arguments and leaves are those of `restore`; all processes call it. Returns `None` if there is no checkpoint: a
        fresh run.

        Raises:
          CheckpointError: the newest readable checkpoint does not fit `targets`; or none of the checkpoints can be read
            (a fresh run would overwrite them).
        """
        skipped: list[TornCheckpointError] = []
        steps: list[int] = json.loads(broadcast_text(json.dumps(self._folder.steps())))
        for step in reversed(steps):
            try:
                metadata = in_all_processes(functools.partial(self.metadata, step))
                leaves = self.restore(step, targets, prefix=prefix, group=group)
            except TornCheckpointError as error:
                skipped.append(error)
                continue
            for error in skipped:
                self._report(f"skipped: {error}; using {self._folder.find(step)}, the one before it")
            self._saved = step
            return Restored(step=step, leaves=leaves, metadata=metadata)
        if skipped:
            raise CheckpointError(f"no checkpoint can be read: {skipped[0]}; remove {self.directory} to start again")
        return None

    def _is_readable(self, step: int) -> bool:
        try:
            self.metadata(step)
        except CheckpointError:
            return False
        return True

    def _start(self, step: int, leaves: Mapping[str, jax.Array], metadata: Unsealed) -> None:
        """Starts the write, and a thread that finishes it."""
        path, problem = self._folder.place(step), ""
        try:
            if is_first():
                try:
                    self._sweep()
                    self._folder.make_room(step)
                except OSError as error:
                    problem = cause(error)
            if problem := broadcast_text(problem):  # the other processes wait for this
                self._abandon(step, problem)
                return
            write = Write(path, leaves, metadata)
        except Exception as error:
            if has_peers():  # the other processes wait for this one's part
                give_up(f"checkpoint {path} was not saved ({cause(error)}); {_free_space(self.directory)}")
            self._abandon(step, cause(error))
            return
        except BaseException:  # Ctrl-C: the discarded checkpoint is the step's again
            if is_first():
                self._folder.put_back(step)
            raise
        self._writer = threading.Thread(
            target=self._finish, args=(step, write), name=f"checkpoint-{step}", daemon=False
        )
        self._writer.start()

    def _finish(self, step: int, write: Write) -> None:
        try:
            write.finish()
        except WriteError as error:
            self._abandon(step, str(error))
            return
        self._saved, self._failure = step, None
        if not is_first():
            return
        try:
            self._committed(step)
        except OSError as error:
            self._report(f"the checkpoint of step {step} could not be noted ({cause(error)})")
        try:
            self._folder.delete_replaced(step)
            self._prune(step)
        except OSError as error:
            self._report(f"{self.directory}: an old checkpoint could not be deleted ({cause(error)})")

    def _abandon(self, step: int, reason: str) -> None:
        """Frees the disk space of a failed save, and reports the failure."""
        self._failure = reason
        if not is_first():
            return
        with contextlib.suppress(OSError):  # `Folder.find` reads it where it is
            self._folder.put_back(step)
        self._report(
            f"checkpoint {self._folder.place(step)} was not saved ({reason}); {_free_space(self.directory)}; "
            "training goes on and the next save tries again"
        )

    def _prune(self, newest: int) -> None:
        """Deletes all but the `keep` newest checkpoints and the best; the one just written always stays."""
        steps = self.steps()
        best, older = self._best(steps), [step for step in steps if step != newest]
        for step in older[: max(0, len(older) - (self.config.keep - 1))]:
            if step != best:
                self._folder.delete(step)

    def _sweep(self) -> None:
        """Removes half-written checkpoints of a killed run before the first save; readers must not touch a save."""
        if not self._swept:
            self._folder.sweep()
            self._swept = True


def _free_space(directory: Path) -> str:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB are free there"
    except OSError as error:
        return f"the disk cannot be asked for its free space ({error.strerror})"
