"""Parameters of another run, a checkpoint or an export, from which modules start."""

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
from mmjax.checkpoint.reading import in_all_processes, metadata_of, read_leaves

PARAMETERS = "params/"
"""The prefix of parameters' names in a checkpoint; an export has none."""
MEANS = "ema/"
"""The prefix of running means of parameters in a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedParameters:
    """Parameters in a directory.

    Attributes:
      folder: the folder as it was named: of a run, a checkpoint or an export.
      path: the directory of the checkpoint or export in it.
      metadata: the metadata of that checkpoint or export.
      prefix: the prefix of its parameters' names: "params/" in a checkpoint, "" in an export.
      means: whether running means (``Optimizer.ema``) stand for parameters where the checkpoint has them.
    """

    folder: str
    path: Path
    metadata: Metadata
    prefix: str
    means: bool = False

    @classmethod
    def find(cls, folder: str, *, means: bool = False) -> SavedParameters:
        """Finds the parameters of a run's newest checkpoint, a checkpoint or an export; no leaf is read yet.

        ``means`` is as the attribute.

        Raises:
          CheckpointError: the directory is none of these, or cannot be read.
        """
        directory = Path(folder).absolute()
        run = Folder(directory / "checkpoints")
        steps = run.steps()
        path = run.find(steps[-1]) if steps else directory
        try:
            metadata = metadata_of(path)
        except CheckpointError as error:
            if steps[:-1]:
                raise CheckpointError(f"{error}; name an earlier one, such as {run.find(steps[-2])}") from None
            if steps or (path / "mmjax").is_dir():
                raise
            raise CheckpointError(_no_parameters(folder, directory)) from None
        is_checkpoint = any(name.startswith(PARAMETERS) for name in metadata.leaves)
        prefix = PARAMETERS if is_checkpoint else ""
        return cls(folder=folder, path=path, metadata=metadata, prefix=prefix, means=means and is_checkpoint)

    @functools.cached_property
    def leaves(self) -> dict[str, LeafInfo]:
        """The stored parameters by name, such as "llm/embed"."""
        stored = self.metadata.leaves
        names = [name.removeprefix(self.prefix) for name in stored if name.startswith(self.prefix)]
        return {name: stored[self._stored(name)] for name in names}

    def _stored(self, name: str) -> str:
        """The name in the checkpoint of a parameter, such as "llm/embed", or of its running mean."""
        mean = f"{MEANS}{name}"
        return mean if self.means and mean in self.metadata.leaves else f"{self.prefix}{name}"

    def elsewhere(self, name: str) -> LeafInfo:
        """An entry for another checkpoint that refers to the parameter `name`, such as "llm/embed", without copying it.

        Raises:
          KeyError: there is no such parameter.
        """
        leaf = self.leaves[name]
        folder, stored_name = leaf.folder or str(self.path), leaf.name or self._stored(name)
        return dataclasses.replace(leaf, folder=folder, name=stored_name)

    @property
    def dtypes(self) -> dict[str, str]:
        """The name of the stored dtype of each parameter, by the parameter's name: {"llm/embed": "float32"}."""
        return {name: leaf.dtype for name, leaf in self.leaves.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that have parameters in it, such as "llm", in the order of the leaves."""
        return tuple(dict.fromkeys(name.partition("/")[0] for name in self.leaves))

    def describe(self) -> str:
        """The folder, and the step at which its parameters were saved: "runs/a after step 500"."""
        return f"{self.folder} after step {self.metadata.step}"

    def read(
        self, targets: Mapping[str, jax.ShapeDtypeStruct], report: Callable[[int, int], None] | None = None
    ) -> dict[str, jax.Array]:
        """Reads leaves for the devices of this process, bit for bit as they were saved; all processes call it.

        Args:
          targets: the stored global shape, and a sharding, by name such as "llm/embed". Their dtype is ignored.
          report: called with the bytes read and the bytes to read; once, since Orbax reads all leaves together.

        Returns:
          The leaves by the same names, in their stored dtypes, without leaves that have no device in this process.

        Raises:
          KeyError: there is no such parameter.
          CheckpointError: another folder that has some of the leaves is missing or has changed.
          TornCheckpointError: leaves cannot be read, or their bytes have changed since they were saved.
        """
        named = {self._stored(name): name for name in targets}
        targets = {stored_name: targets[name] for stored_name, name in named.items()}
        stored = {name: self.metadata.leaves[name] for name in targets}
        leaves = read_leaves(self.path, stored, as_stored(stored, targets))
        size = sum(leaf.nbytes for leaf in leaves.values())
        if report:
            report(size, size)
        return {named[stored_name]: leaf for stored_name, leaf in leaves.items()}


def find_parameters(folders: Iterable[str]) -> dict[str, SavedParameters]:
    """Finds the parameters in each folder, by folder as it was named: of a run's newest checkpoint, a checkpoint or an
    export.

    No leaf is read yet.

    It fails in all processes or in none; all call it with the same folders.

    Raises:
      CheckpointError: a folder is none of these, or cannot be read.
      TornCheckpointError: it failed in another process.
    """
    return {folder: in_all_processes(functools.partial(SavedParameters.find, folder)) for folder in folders}


def _no_parameters(folder: str, path: Path) -> str:
    if not path.is_dir():
        return f"{folder} is no directory; name a run, one of its checkpoints, or what mmjax.export has written"
    if (path / "config.gin").is_file():
        return f"the run in {folder} has no checkpoint yet; name one that has"
    if (path / "_CHECKPOINT_METADATA").is_file():
        return f"{folder} was not written by this version of mmjax; name a run, or export it again"
    return f"{folder} is no run, checkpoint or export; name a run, such as runs/stage1"
