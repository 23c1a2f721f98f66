"""The directory of a run's checkpoints: finds steps, and moves checkpoints so that a kill loses none. Knows no storage.

The checkpoint of a step is `<step, eight digits>`. After a kill there may be beside it

  <step>.orbax-checkpoint-tmp  an incomplete save;
  <step>.discarded             a checkpoint that an incomplete save would have replaced; it still counts as the step's;
  <step>.deleted               a checkpoint that was being deleted, perhaps half of it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

_TEMPORARY, _ASIDE, _DELETED = ".orbax-checkpoint-tmp", ".discarded", ".deleted"
_STEP = re.compile(rf"(\d{{8,}})(?:{re.escape(_ASIDE)})?")
_LEFTOVER = re.compile(rf"\d{{8,}}(?:{'|'.join(map(re.escape, (_TEMPORARY, _DELETED)))})")


class Folder:
    """The checkpoints in one directory. Methods that move any may run in one process only; reading moves nothing."""

    def __init__(self, directory: Path):
        self.directory = directory

    def place(self, step: int) -> Path:
        """The path to which the checkpoint of `step` is written: `<directory>/00000500` for step 500."""
        return self.directory / f"{step:08d}"

    def find(self, step: int) -> Path:
        """The path from which the checkpoint of `step` is read, whether or not there is one.

        It is its place, or after a kill during its replacement the discarded one.
        """
        place, aside = self.place(step), _aside(self.place(step))
        return aside if not place.exists() and aside.exists() else place

    def steps(self) -> list[int]:
        """The steps that have a directory, readable or not, in rising order; [] if there is no folder."""
        if not self.directory.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted({int(match[1]) for match in matches if match})

    def make_room(self, step: int) -> None:
        """Clears the place of `step` for a save: a checkpoint there becomes the discarded one; `put_back` undoes that.

        Raises:
          OSError: no directory can be made there; no other process has begun to wait for it yet.
        """
        place = self.place(step)
        if place.exists():
            if _aside(place).exists():
                _delete(_aside(place))
            place.rename(_aside(place))
        place.parent.mkdir(parents=True, exist_ok=True)
        _temporary(place).mkdir()
        _temporary(place).rmdir()

    def put_back(self, step: int) -> None:
        """Frees the disk space of a failed save of `step`, and moves a discarded checkpoint back to its place."""
        place = self.place(step)
        shutil.rmtree(_temporary(place), ignore_errors=True)
        if _aside(place).exists() and not place.exists():
            _aside(place).rename(place)

    def delete_replaced(self, step: int) -> None:
        """Deletes the discarded checkpoint of `step` that a complete save has replaced, if any. Raises OSError."""
        if _aside(self.place(step)).exists():
            _delete(_aside(self.place(step)))

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of `step`. Raises OSError, also if there is none."""
        _delete(self.place(step))

    def sweep(self) -> None:
        """Removes the remains of a killed run; a discarded checkpoint without a successor goes back to its place."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        for step in self.steps():
            with contextlib.suppress(OSError):  # `find` reads it where it is
                self.put_back(step)
                self.delete_replaced(step)


def _temporary(place: Path) -> Path:
    """The path at which Orbax writes a checkpoint until it is complete."""
    return place.with_suffix(_TEMPORARY)


def _aside(place: Path) -> Path:
    return place.with_suffix(_ASIDE)


def _delete(path: Path) -> None:
    """Renames a directory, then deletes it, so that a kill leaves no half of it under a name that is read."""
    renamed = path.with_suffix(_DELETED)
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)
