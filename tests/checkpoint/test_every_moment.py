"""A kill between any two operations on files: the newest whole checkpoint is there, with its values, and nothing else
is left after the next save."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpointer import assert_bitwise, put, targets, values

from mmjax.checkpoint import CheckpointConfig, Checkpointer

MOVES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "open")


class Recorder:
    """Copies a folder as it is before each operation of this process on files, in any thread: what a kill leaves."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._busy = threading.RLock()
        self._inside = False
        sys.addaudithook(self._hear)  # for the rest of the process: nothing can take it away

    @contextlib.contextmanager
    def watch(self, folder: Path, copies: Path) -> Iterator[dict[str, Path]]:
        """The copies by the names and sizes of what was in the folder, in order."""
        self._copies, self._into = dict[str, Path](), copies
        self._folder = folder
        try:
            yield self._copies
        finally:
            self._hear("os.rename", ())  # the last operation has been done
            self._folder = None

    def _hear(self, event: str, about: tuple[Any, ...]) -> None:
        if self._folder is None or event not in MOVES:
            return
        with self._busy:
            if self._inside:  # its own copying
                return
            self._inside = True
            try:
                self._copy(self._folder)
            finally:
                self._inside = False

    def _copy(self, folder: Path) -> None:
        files = {str(path.relative_to(folder)): _size(path) for path in sorted(folder.rglob("*"))}
        shown = repr(files)
        if shown not in self._copies:
            into = self._copies[shown] = self._into / str(len(self._copies))
            into.mkdir(parents=True)
            for name, size in files.items():
                with contextlib.suppress(FileNotFoundError):  # of a thread that is not Python's
                    (into / name).mkdir(exist_ok=True) if size is None else shutil.copy(folder / name, into / name)


def _size(path: Path) -> int | None:
    try:
        return None if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


def assert_whole(folder: Path, legal: Mapping[int, tuple[int, ...]]) -> int:
    """The newest checkpoint is of a step in `legal`, with the values of one of its seeds; nothing is skipped."""
    restored = Checkpointer(folder, report=pytest.fail).restore_latest(targets(values()))
    assert restored is not None, sorted(path.name for path in folder.iterdir())
    seeds = [s for s in legal[restored.step] if np.array_equal(values(s)["params/llm/embed"], _embed(restored.leaves))]
    assert seeds, f"step {restored.step} has other values"
    assert_bitwise(restored.leaves, values(seeds[0]))
    return restored.step


def _embed(leaves: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(leaves["params/llm/embed"])


@pytest.mark.long
def test_a_kill_at_any_moment_of_saves_and_of_clearing_up_after_it(tmp_path: Path, recorder: Recorder) -> None:
    folder, keep = tmp_path / "run", CheckpointConfig(keep=2)
    with Checkpointer(folder, keep) as first:
        for step in (2, 4):
            first.save(step, put(values(step)))
    with recorder.watch(folder, tmp_path / "killed") as killed, Checkpointer(folder, keep, report=pytest.fail) as again:
        again.save(4, put(values(5)))  # one of an abandoned future is replaced
        again.save(6, put(values(6)))  # the oldest makes room
        again.wait()
    assert len(killed) > 20
    names = [{path.name for path in copy.iterdir()} for copy in killed.values()]
    alone = [i for i, found in enumerate(names) if "00000004.discarded" in found and "00000004" not in found]
    newest = [assert_whole(copy, {4: (4, 5), 6: (6,)}) for copy in killed.values()]
    assert newest == sorted(newest) and set(newest) == {4, 6}
    assert alone and any("00000002.deleted" in found for found in names), "other moments than those that were meant"

    # The next run clears up, and may be killed at that too.
    different = {tuple(sorted(found)): index for index, found in enumerate(names)}
    for index in different.values():
        copy = list(killed.values())[index]
        watched = recorder.watch(copy, tmp_path / f"again{index}") if index == alone[-1] else contextlib.nullcontext({})
        with watched as twice, Checkpointer(copy, keep, report=pytest.fail) as last:
            last.save(8, put(values(8)))
        assert sorted(path.name for path in copy.iterdir()) == [f"{newest[index]:08d}", "00000008"]
        for later in twice.values():
            assert_whole(later, {4: (4, 5), 8: (8,)})
    assert len(list(tmp_path.glob("again*/*"))) > 10


def test_what_was_restored_is_not_saved_again(tmp_path: Path, recorder: Recorder) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(4, put(values(4)))
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore_latest(targets(values())) is not None
        with recorder.watch(tmp_path / "run", tmp_path / "copies") as copies:
            checkpointer.save(4, put(values(4)))
            checkpointer.wait()
    assert len(copies) == 1
