"""The directory of a run's checkpoints: finds steps, and moves checkpoints so that a kill loses none. Knows no storage.

The checkpoint of a step is `<step, eight digits>`. After a kill there may stand beside it

  <step>.orbax-checkpoint-tmp  a save that was not complete;
  <step>.discarded             a checkpoint that a save was to replace: it is the step's as long as there is no other;
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
    """The checkpoints in one directory. Whoever moves any must be its only writer; reading moves nothing."""

    def __init__(self, directory: Path):
        self.directory = directory

    def place(self, step: int) -> Path:
        """The path to which the checkpoint of `step` is written."""
        return self.directory / f"{step:08d}"

    def find(self, step: int) -> Path:
        """The path to read the checkpoint from: its place or, if a kill came while a save replaced it, the aside."""
        place, aside = self.place(step), _aside(self.place(step))
        return aside if not place.exists() and aside.exists() else place

    def steps(self) -> list[int]:
        """The steps that have a directory, in rising order."""
        if not self.directory.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted({int(match[1]) for match in found if match})

    def make_room(self, step: int) -> None:
        """Clears the place of `step` for a save; `put_back` undoes that.

        Raises:
          OSError: a directory cannot be made there: found here, no other process has begun to wait for it.
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
        """Gives a failed save's disk space back, and the step its earlier checkpoint."""
        place = self.place(step)
        shutil.rmtree(_temporary(place), ignore_errors=True)
        if _aside(place).exists() and not place.exists():
            _aside(place).rename(place)

    def delete_replaced(self, step: int) -> None:
        """Deletes the checkpoint that a complete save has replaced. Raises OSError."""
        if _aside(self.place(step)).exists():
            _delete(_aside(self.place(step)))

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of `step`. Raises OSError."""
        _delete(self.place(step))

    def sweep(self) -> None:
        """Removes the remains of a killed run; a checkpoint without a successor goes back to its place."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        for step in self.steps():
            with contextlib.suppress(OSError):  # it is read where it stands
                self.put_back(step)
                self.delete_replaced(step)


def _temporary(place: Path) -> Path:
    """The path at which Orbax writes a checkpoint until it is complete."""
    return place.with_suffix(_TEMPORARY)


def _aside(place: Path) -> Path:
    return place.with_suffix(_ASIDE)


def _delete(path: Path) -> None:
    """Renames a directory, then deletes it, so that a kill leaves no half of it under a name that is read."""
    gone = path.with_suffix(_DELETED)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)
