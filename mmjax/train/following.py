"""Follows the ops of a training run: ends it where it hangs, and measures how busy ranks are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mmjax import jax_compat
from mmjax.mesh import stacks
from mmjax.mesh.processes import Board
from mmjax.pipeline.ends import Ends, numbers_of
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.recipe import Recipe
from mmjax.train.busy import BusyTimes
from mmjax.train.watchdog import Watchdog

LEAST_EVERY = 3
"""Steps from one whose ops are timed to the next, at least: every process is through with the one when the next begins,
so that all time the same steps."""


class Following:
    """A context in which the ops of an executor are followed.

    Attributes:
      enter, observe: see ``Watchdog``.
      columns: see ``BusyTimes``.
    """

    def __init__(
        self,
        executor: Executor | OneProgramExecutor,
        recipe: Recipe,
        report: Callable[[str], None],
        run_dir: Path | None,
        *,
        watched: bool,
    ):
        """Follows nothing yet.

        Args:
          executor: runs the steps.
          recipe: says when nothing has moved for too long, and the ops of which steps are timed.
          report: receives lines about slow ranks, in any thread.
          run_dir: where stacks are written if the run hangs; nowhere for `None`.
          watched: whether a run that hangs is ended, and this process with it.
        """
        world, process = executor.placed.world, jax_compat.process_index()
        self._executor, self._every = executor, max(recipe.train.log_every, LEAST_EVERY)
        self._ends = Ends({world.devices[rank]: rank for rank in world.local_ranks})
        side_by_side = world.platform != "cpu" or world.processes > 1
        self._busy = BusyTimes(executor.schedule, Board("busy"), world.processes, report, names_slow=side_by_side)
        self._watchdog = Watchdog(
            self._ends,
            numbers_of(executor.schedule.ops),
            Board("progress"),
            seconds=recipe.world.hang_seconds if watched else -1.0,
            data_seconds=2
            * recipe.data.settings.patience,  # data servers may be away for so long, and then it is reported
            process=process,
            processes=world.processes,
            measured=self._busy.add,
        )
        stacks.write_to(run_dir, process)
        self.enter, self.observe, self.columns = self._watchdog.enter, self._watchdog.observe, self._busy.columns

    def __enter__(self) -> Following:
        self._executor.follow(self._ends)
        self._watchdog.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watchdog.__exit__(kind, error, at)
        self._executor.follow(None)

    def step(self, step: int, run: Callable[[], Any]) -> Any:
        """Dispatches the ops of a step, a number from 1, by calling `run`, whose result it returns."""
        self._watchdog.enter("step", step)
        self._ends.begin_step(step, timed=step % self._every == 0)
        result = run()
        self._ends.end_step()
        return result
