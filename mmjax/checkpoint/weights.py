"""Parameters that modules start from: those of another run, of one of its checkpoints, or of an export."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax

from mmjax.checkpoint.config import CheckpointError
from mmjax.checkpoint.folder import Folder
from mmjax.checkpoint.leaves import LeafInfo, as_stored
from mmjax.checkpoint.metadata import Metadata
from mmjax.checkpoint.reading import alike, metadata_of, read_leaves

PARAMETERS = "params/"
"""The prefix of parameters' names in a checkpoint; an export has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedParameters:
    """Parameters in a directory.

    Attributes:
      folder: the folder as it was named.
      path: the checkpoint or export in it.
      metadata: the metadata of that.
      prefix: the prefix of its parameters' names.
    """

    folder: str
    path: Path
    metadata: Metadata
    prefix: str

    @classmethod
    def find(cls, folder: str) -> SavedParameters:
        """The parameters of a run's newest checkpoint, of a checkpoint or of an export; no leaf is read yet.

        Raises:
          CheckpointError: the directory is none of these, or cannot be read.
        """
        given = Path(folder).absolute()
        run = Folder(given / "checkpoints")
        steps = run.steps()
        path = run.find(steps[-1]) if steps else given
        try:
            metadata = metadata_of(path)
        except CheckpointError as error:
            if steps[:-1]:
                raise CheckpointError(f"{error}; name an earlier one, such as {run.find(steps[-2])}") from None
            if steps or (path / "mmjax").is_dir():
                raise
            raise CheckpointError(_no_parameters(folder, given)) from None
        inside = any(name.startswith(PARAMETERS) for name in metadata.leaves)
        return cls(folder=folder, path=path, metadata=metadata, prefix=PARAMETERS if inside else "")

    @functools.cached_property
    def leaves(self) -> dict[str, LeafInfo]:
        """The stored parameters by name, such as "llm/embed"."""
        own = self.metadata.leaves.items()
        return {name.removeprefix(self.prefix): leaf for name, leaf in own if name.startswith(self.prefix)}

    def elsewhere(self, name: str) -> LeafInfo:
        """The entry of a stored parameter in another checkpoint that does not copy it."""
        leaf = self.leaves[name]
        folder, there = leaf.folder or str(self.path), leaf.name or f"{self.prefix}{name}"
        return dataclasses.replace(leaf, folder=folder, name=there)

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each parameter as it is stored, by name."""
        return {name: leaf.dtype for name, leaf in self.leaves.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that have parameters in it."""
        return tuple(dict.fromkeys(name.partition("/")[0] for name in self.leaves))

    def describe(self) -> str:
        """The folder, and the step at which its parameters were saved."""
        return f"{self.folder} after step {self.metadata.step}"

    def read(
        self, targets: Mapping[str, jax.ShapeDtypeStruct], report: Callable[[int, int], None] = lambda done, of: None
    ) -> dict[str, jax.Array]:
        """Reads the leaves that this process has devices for, bit for bit as they were saved; all processes call it.

        Args:
          targets: shape and sharding by name, such as "llm/embed"; shapes as they are stored. The dtype is the stored
            one, whatever is given.
          report: is told the bytes read and those there are; once, since Orbax reads all leaves at the same time.

        Raises:
          TornCheckpointError: leaves cannot be read, or their bytes are not those that were saved.
        """
        wanted = {f"{self.prefix}{name}": target for name, target in targets.items()}
        stored = {name: self.metadata.leaves[name] for name in wanted}
        found = read_leaves(self.path, stored, as_stored(stored, wanted))
        size = sum(leaf.nbytes for leaf in found.values())
        report(size, size)
        return {name.removeprefix(self.prefix): leaf for name, leaf in found.items()}


def find_parameters(folders: Iterable[str]) -> dict[str, SavedParameters]:
    """The `SavedParameters.find` of each folder, in all processes or in none; all call it with the same folders.

    Raises:
      CheckpointError: see `SavedParameters.find`.
    """
    return {folder: alike(functools.partial(SavedParameters.find, folder)) for folder in folders}


def _no_parameters(folder: str, given: Path) -> str:
    if not given.is_dir():
        return f"{folder} is no directory; name a run, one of its checkpoints, or what mmjax.export has written"
    if (given / "config.gin").is_file():
        return f"the run in {folder} has no checkpoint yet; name one that has"
    if (given / "_CHECKPOINT_METADATA").is_file():
        return f"{folder} was not written by this version of mmjax; name a run, or export it again"
    return f"{folder} is no run, checkpoint or export; name a run, such as runs/stage1"
