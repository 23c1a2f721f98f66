"""Ends a run whose values are no longer finite, before its checkpoints take the place of good ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmjax.pipeline.finite import NonFiniteError, first_nonfinite
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.stage_state import State


class Soundness:
    """Watches the updates and the state of a run. All processes make the same calls, in the same order.

    Attributes:
      skipped: how many updates were skipped in a row until now, because gradients were not finite.
    """

    def __init__(self, placed: PlacedModel, states: Callable[[], Mapping[str, State]], max_skipped: int):
        """Watches nothing yet.

        Args:
          placed: the model on its devices.
          states: returns the states of this process's stages, by name such as "llm.0".
          max_skipped: ``Train.max_skipped``.
        """
        self._placed, self._states, self._max_skipped = placed, states, max_skipped
        self.skipped = self._step = 0

    def add_update(self, step: int, *, skipped: bool) -> None:
        """Counts the update of a step; one that was not skipped sets ``skipped`` to 0."""
        self.skipped, self._step = self.skipped + 1 if skipped else 0, step

    def require_updates(self) -> None:
        """Raises ``NonFiniteError`` with the leaf at fault where ``max_skipped`` updates in a row were skipped.

        It raises nothing where ``max_skipped`` is 0. All processes have to call it.
        """
        if not self._max_skipped or self.skipped < self._max_skipped:
            return
        leaf = self.first_unsound()
        cause = leaf or "all parameters are finite, and --gin.Train.debug_nans=True names the first value that is not"
        why = f"gradients are not finite, {self.skipped} updates in a row are skipped"
        raise NonFiniteError(f"step {self._step}: {why} (Train.max_skipped={self._max_skipped}); {cause}")

    def require_finite(self, step: int) -> None:
        """Raises ``NonFiniteError`` where a parameter or a moment is not finite; ``step`` is for the message."""
        if leaf := self.first_unsound():
            raise NonFiniteError(f"step {step}: {leaf}; no checkpoint is saved")

    def first_unsound(self) -> str:
        """Name and index, in words, of the first parameter or moment that is not finite; "" where all are."""
        return first_nonfinite(self._placed, self._states())
