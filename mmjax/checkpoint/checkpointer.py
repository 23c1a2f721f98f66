"""The checkpoints of a run directory: when they are written, which stay, and which one a run continues from.

A checkpoint is one directory, `<directory>/<step, eight digits>`, which appears by an atomic rename
when everything in it has been written. It holds

  state   the leaves: one array per layer and parameter, unpadded, named without stage, dp or layout
          ("params/llm/layers/000/attn/q", "adam_m/...", "adam_v/..."), stored as a nested dict;
  mmjax   a JSON item: step, data seed, config text, versions, and the leaves' names, shapes, dtypes and checksums.

Any layout restores any other, because a leaf says nothing about where it lived. Checksums are made by the thread that
writes and compared when leaves are restored: a checkpoint in which a bit has changed is as good as a torn one.

When the values are taken. `Checkpointer.save` returns when every leaf's bytes are held on the host, so
the caller may donate, overwrite or delete its buffers at once. On an accelerator that is a copy. On CPU
it is a view that pins the buffer: XLA then answers a donation of it with a copy instead of reusing the
memory, so the values stay, and the cost is paid only by buffers that really are donated meanwhile.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import logging
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import jax

from mmjax.checkpoint.leaves import (
    CheckpointError,
    TornCheckpointError,
    lookup,
    nest,
    require_match,
    some,
)
from mmjax.checkpoint.metadata import Findings, HostLeaf, Metadata, Unsealed, damaged, unseal, versions
from mmjax.checkpoint.parts import cause
from mmjax.checkpoint.storage import Write, WriteError, read, read_metadata
from mmjax.configurable import configurable, not_negative, positive
from mmjax.mesh.processes import everyone_says, first_says, give_up, in_company, is_first
from mmjax.mesh.spmd import has_local_devices

_STEP_NAME = re.compile(r"\d{8,}")
_LEFTOVER = re.compile(r"\d{8,}\.(orbax-checkpoint-tmp|discarded)")
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@configurable("Checkpoint")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and how much to keep.

    Attributes:
      every: steps between checkpoints; 0 saves at the end of the run only.
      keep: how many checkpoints stay on disk; older ones are deleted after a newer one is complete.
    """

    every: int = 500
    keep: int = 3

    def __post_init__(self) -> None:
        not_negative("Checkpoint.every", self.every)
        positive("Checkpoint.keep", self.keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint in memory: its step, its leaves by name, and its metadata."""

    step: int
    leaves: dict[str, jax.Array]
    metadata: Metadata


class Checkpointer:
    """Saves and restores the checkpoints of one run directory.

    Of several processes each writes and reads the shards that it owns, in a directory that all see; they have to call
    `save` and `restore` in the same order. A save that fails in one fails in all.

    Use it as a context manager, or call `close`: leaving waits for the save that is being written.

    Args:
      directory: where the checkpoints lie; made by the first save.
      config: how many to keep.
      report: receives one-line messages: a failed save (from a background thread), a skipped directory.
        By default they are logged as warnings.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig | None = None,
        *,
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.config = config or CheckpointConfig()
        self._report = report
        self._writer: threading.Thread | None = None
        self._swept = False
        self._closed = False
        self._saved: int | None = None
        self._failure: str | None = None
        _live.add(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def failure(self) -> str | None:
        """Why the last finished save failed; `None` when it succeeded."""
        return self._failure

    def due(self, step: int) -> bool:
        """Whether the config wants a checkpoint after `step` steps."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(
        self,
        step: int,
        leaves: Mapping[str, jax.Array],
        *,
        seed: int = 0,
        config: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing a checkpoint and returns as soon as the leaves' values are held on the host.

        Waits first for an earlier save that is still being written. A step that this object has just saved
        is not saved again; a checkpoint of the same step from before is replaced. What goes wrong with the
        disk is reported and kept in `failure`; it never raises.

        Args:
          step: optimizer steps done.
          leaves: logical leaves by "/"-joined name. They may live on different submeshes, and on devices of other
            processes; every process gives all.
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
        nest(leaves)  # raises here, and not in the middle of what processes do together
        about = {"step": step, "seed": seed, "config": config, "versions": versions(), "extra": dict(extra or {})}
        for leaf in leaves.values():
            for shard in leaf.addressable_shards:
                shard.data.copy_to_host_async()
        held = {name: HostLeaf(leaf) for name, leaf in leaves.items()}
        self._start(step, leaves, Unsealed(body=about, leaves=held))

    def wait(self) -> None:
        """Returns when no save is being written. A Ctrl-C interrupts the wait, not the save."""
        writer = self._writer
        if writer is not None:
            writer.join()
            self._writer = None

    def close(self) -> None:
        """Waits for the save that is being written; afterwards `save` is refused."""
        self.wait()
        self._closed = True

    def steps(self) -> list[int]:
        """The steps that have a checkpoint whose metadata can be read, in rising order."""
        return [step for step in self._step_directories() if self._is_readable(step)]

    def latest_step(self) -> int | None:
        """The newest of `steps()`; `None` when there is none."""
        return next((step for step in reversed(self._step_directories()) if self._is_readable(step)), None)

    def metadata(self, step: int) -> Metadata:
        """Reads what the checkpoint of `step` says about itself, without its leaves.

        Raises:
          TornCheckpointError: there is no such checkpoint, or it cannot be read.
        """
        path = self._path(step)
        try:
            return unseal(read_metadata(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # Orbax and the file system raise a dozen types for a torn directory
            raise TornCheckpointError(f"{path} is not a readable mmjax checkpoint ({cause(error)})") from error

    def restore(
        self, step: int, targets: Mapping[str, jax.ShapeDtypeStruct], *, prefix: str = ""
    ) -> dict[str, jax.Array]:
        """Reads the leaves of `step` that this process has devices of, each straight into the wanted sharding.

        Args:
          step: which checkpoint.
          targets: name -> shape, dtype and sharding of every leaf; shardings may be on different submeshes.
          prefix: the stored leaves that count, such as "params/"; others are left on disk. All by default.

        Raises:
          CheckpointError: leaves are missing, left over, or of another shape or dtype; all are named.
          TornCheckpointError: the checkpoint cannot be read.
        """
        path = self._path(step)
        stored = {name: leaf for name, leaf in self.metadata(step).leaves.items() if name.startswith(prefix)}
        require_match(path, stored, targets)
        if not targets:
            return {}
        own = {name: target for name, target in targets.items() if has_local_devices(target.sharding)}

        def read_own() -> tuple[Any, Findings]:
            tree = read(path, own)
            return tree, Findings.of(own, tree)

        try:
            tree, found = _alike(read_own)
        except Exception as error:
            raise TornCheckpointError(f"{path} cannot be read ({cause(error)})") from error
        answers = everyone_says(json.dumps(dataclasses.asdict(found)))
        wrong = damaged(stored, [Findings(**json.loads(answer)) for answer in answers])
        if wrong:
            raise TornCheckpointError(f"{path} is damaged: the bytes of {some(wrong)} are not those that were saved")
        return {name: lookup(tree, name) for name in own}

    def restore_latest(self, targets: Mapping[str, jax.ShapeDtypeStruct], *, prefix: str = "") -> Restored | None:
        """Restores the newest checkpoint that can be read, reporting each that had to be skipped.

        Returns `None` where there is no checkpoint: a fresh run.

        Raises:
          CheckpointError: the newest readable checkpoint does not fit `targets`; or there are checkpoints and
            none can be read (training from the start over them would not be what was meant).
        """
        skipped: list[TornCheckpointError] = []
        steps: list[int] = json.loads(first_says(json.dumps(self._step_directories())))
        for step in reversed(steps):
            try:
                metadata = _alike(functools.partial(self.metadata, step))
                leaves = self.restore(step, targets, prefix=prefix)
            except TornCheckpointError as error:
                skipped.append(error)
                continue
            for error in skipped:
                self._report(f"skipped: {error}; using {self._path(step)}, the one before it")
            return Restored(step=step, leaves=leaves, metadata=metadata)
        if skipped:
            raise CheckpointError(f"no checkpoint can be read: {skipped[0]}; remove {self.directory} to start again")
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def _step_directories(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if _STEP_NAME.fullmatch(path.name))

    def _is_readable(self, step: int) -> bool:
        try:
            self.metadata(step)
        except CheckpointError:
            return False
        return True

    def _start(self, step: int, leaves: Mapping[str, jax.Array], about: Unsealed) -> None:
        """Begins the write and hands its end to a thread."""
        discarded, problem = None, ""
        path = self._path(step)
        try:
            if is_first():
                try:
                    self._sweep()
                    discarded = _set_aside(path)
                    _require_room(path)
                except OSError as error:
                    problem = cause(error)
            if problem := first_says(problem):  # the others wait for that
                self._abandon(step, discarded, problem)
                return
            write = Write(path, leaves, about)
        except Exception as error:
            if in_company():  # the others wait for this one's part
                give_up(f"checkpoint {path} was not saved ({cause(error)}); {_free_space(self.directory)}")
            self._abandon(step, discarded, cause(error))
            return
        except BaseException:  # Ctrl-C: what was set aside is the checkpoint of this step
            _put_back(discarded, path)
            raise
        self._writer = threading.Thread(
            target=self._finish, args=(step, write, discarded), name=f"checkpoint-{step}", daemon=False
        )
        self._writer.start()

    def _finish(self, step: int, write: Write, discarded: Path | None) -> None:
        try:
            write.finish()
        except WriteError as error:
            self._abandon(step, discarded, str(error))
            return
        self._saved, self._failure = step, None
        if not is_first():
            return
        try:
            if discarded is not None:
                shutil.rmtree(discarded)
            self._prune(step)
        except OSError as error:
            self._report(f"{self.directory}: an old checkpoint could not be deleted ({cause(error)})")

    def _abandon(self, step: int, discarded: Path | None, why: str) -> None:
        """Gives a failed save's disk space back and reports it."""
        path, self._failure = self._path(step), why
        if not is_first():
            return
        shutil.rmtree(_temporary(path), ignore_errors=True)
        _put_back(discarded, path)
        self._report(
            f"checkpoint {path} was not saved ({why}); {_free_space(self.directory)}; "
            "training goes on and the next save tries again"
        )

    def _prune(self, newest: int) -> None:
        """Deletes all but the newest `keep` checkpoints; the one just written always stays."""
        older = [step for step in self.steps() if step != newest]
        for step in older[: max(0, len(older) - (self.config.keep - 1))]:
            discarded = _set_aside(self._path(step))  # by a rename, so that a kill leaves no half of it
            if discarded is not None:
                shutil.rmtree(discarded)

    def _sweep(self) -> None:
        """Removes what a killed run left half-written. Only a writer does: readers must not touch a live save."""
        if self._swept or not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        self._swept = True


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _wait_at_exit() -> None:
    for checkpointer in list(_live):
        checkpointer.wait()


# A program that ends without close() still commits. `atexit` runs too late for that: by then the executors that
# Orbax writes with are shut down. They are shut down by this same list of callbacks, last registered first.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)


def _alike(read: Callable[[], T]) -> T:
    """What `read` gives, in every process or in none.

    Raises:
      TornCheckpointError: another process cannot read it.
    """
    try:
        result, problem = read(), None
    except Exception as error:
        result, problem = None, error
    answers = everyone_says(cause(problem) if problem else "")
    if problem:
        raise problem
    if other := next(filter(None, answers), ""):
        raise TornCheckpointError(f"another process finds: {other}")
    return cast(T, result)


def _temporary(path: Path) -> Path:
    """Where Orbax writes a checkpoint until it is complete."""
    return path.with_name(f"{path.name}.orbax-checkpoint-tmp")


def _require_room(path: Path) -> None:
    """Raises OSError where a directory cannot be made: found here, no other process has begun to wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _temporary(path).mkdir()
    _temporary(path).rmdir()


def _set_aside(path: Path) -> Path | None:
    """Renames a checkpoint so that it is none any longer, in one step; `None` where there is nothing."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _put_back(aside: Path | None, path: Path) -> None:
    if aside is not None and aside.exists() and not path.exists():
        aside.rename(path)


def _free_space(directory: Path) -> str:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB are free there"
    except OSError as error:
        return f"the disk cannot be asked for its free space ({error.strerror})"
