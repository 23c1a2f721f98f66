"""The state of a run: its parameters and moments, the steps that it has done, and both in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from mmjax.assembly.parts import Assembly
from mmjax.checkpoint import Checkpointer
from mmjax.config import operative_config
from mmjax.configurable import ConfigError
from mmjax.mesh.spmd import remote_array
from mmjax.pipeline.state_shapes import group_of_leaf
from mmjax.recipe import Recipe
from mmjax.train.soundness import Soundness
from mmjax.train.starts import Starts, frozen_elsewhere, moments_since, require_seed


class RunState:
    """The state of a run on its devices.

    Attributes:
      step: optimizer steps done.
      skipped: those of them whose update was skipped.
      resumed: whether the state is that of a checkpoint of this run.
      started: lines about the origin of the parameters; none if all have new values, or are the checkpoint's.
    """

    def __init__(
        self,
        recipe: Recipe,
        parts: Assembly,
        soundness: Soundness,
        *,
        checkpointer: Checkpointer | None,
        records: Mapping[str, Any],
    ):
        """The state has no values before ``start``.

        Args:
          recipe: the run's.
          parts: the model on its devices, and the executor that has its states.
          soundness: tells whether values are finite.
          checkpointer: the run's checkpoints; ``None`` without a run directory.
          records: metadata about the records of the data, for checkpoints.
        """
        self._recipe, self._parts, self._soundness = recipe, parts, soundness
        self._checkpointer, self._records = checkpointer, records
        self.step = self.skipped = 0
        self.resumed, self.started = False, tuple[str, ...]()
        self._since: dict[str, int] = {}  # updates of the run when a module's moments were zeros, where not 0
        self._elsewhere: dict[str, Any] = {}  # leaves whose bytes stay in the folders that they were read from

    def start(self, starts: Starts, say: Callable[[str], None]) -> None:
        """Sets the state: from the last checkpoint, from saved parameters, or to new values.

        Args:
          starts: the origins of the parameters of a run that begins.
          say: called with lines about the progress of reading.

        Raises:
          CheckpointError: the last checkpoint is of another model, or cannot be read.
          ConfigError: saved parameters do not fit or are not finite, or the checkpoint is of a run with another seed.
        """
        recipe, placed, executor = self._recipe, self._parts.placed, self._parts.executor
        self.started = starts.lines
        if not recipe.checkpoint.copy_frozen:
            self._elsewhere = starts.elsewhere(recipe.model.frozen, placed)
        self.resumed = bool(self._checkpointer) and self.restore(self._checkpointer)
        if not self.resumed and starts.loaded:
            self.take(starts.read(placed, say), jax.random.key(recipe.train.seed))
            if leaf := self._soundness.first_unsound():
                raise ConfigError(f"{'; '.join(self.started)}: {leaf}; name another folder")
        elif not self.resumed:
            executor.initialise(recipe.train.seed)

    def leaves(self) -> dict[str, jax.Array]:
        """The whole state as logical leaves by name, such as "params/llm/embed" and its moment "adam_m/llm/embed".

        Names and global shapes are the same whatever the stages and layouts are.

        Every process gets all names, but only those shards of the arrays that are on its own devices.
        """
        result: dict[str, jax.Array] = {}
        for name, stage in self._parts.placed.stages.items():
            if stage.submesh.local:
                result |= stage.state.to_logical(self._parts.executor.states[name])
            else:
                result |= {leaf: remote_array(aval) for leaf, aval in stage.state.logical_avals().items()}
        return result

    def save(self) -> None:
        """Writes a checkpoint of the state; nothing before the first step, or without a run directory.

        Raises:
          NonFiniteError: a parameter or a moment is not finite, and nothing is written.
        """
        if self._checkpointer and self.step:
            self._soundness.require_finite(self.step)
            self._checkpointer.save(
                self.step,
                {name: leaf for name, leaf in self.leaves().items() if name not in self._elsewhere},
                elsewhere=self._elsewhere,
                seed=self._recipe.train.seed,
                config=operative_config(self._recipe),
                extra={"skipped": self.skipped, "moments_since": self._since, **self._records},
            )

    def restore(self, checkpointer: Checkpointer) -> bool:
        """Restores the newest readable checkpoint, of any layout. Returns whether there is one.

        Modules that were frozen before and are trained now get moments of zeros; modules frozen now have none. A
        running mean that is new begins with the parameters.

        Raises:
          CheckpointError: it is of another model, or none can be read.
          ConfigError: it is of a run with another seed.
        """
        stages = self._parts.placed.stages
        targets = {name: aval for stage in stages.values() for name, aval in stage.state.logical_avals().items()}
        restored = checkpointer.restore_latest(targets, group=group_of_leaf)
        if restored is None:
            return False
        require_seed(self._recipe, restored.metadata, checkpointer.directory.parent)
        self.step, self.skipped = restored.step, int(restored.metadata.extra.get("skipped", 0))
        self._since, self.started = moments_since(self._recipe, restored.metadata, self.step - self.skipped)
        if not self._recipe.checkpoint.copy_frozen:
            self._elsewhere = frozen_elsewhere(self._recipe, restored.metadata)
        self.take(restored.leaves)
        return True

    def take(self, named: Mapping[str, jax.Array], key: jax.Array | None = None) -> None:
        """Sets the states of this process's stages from leaves; see ``StageState.from_logical``."""
        updates, stages = self.step - self.skipped, self._parts.placed.local_stages
        states = {n: stage.state.from_logical(named, updates, self._since, key) for n, stage in stages.items()}
        self._parts.executor.states = states
