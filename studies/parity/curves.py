"""Trains the runs of the study one after another in this process, and keeps their losses as JSON files.

A run whose file says that it had the same settings is not run again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

import mmjax
from mmjax.recipe import Recipe
from studies.parity.runs import GIN_FILE, Run
from studies.parity.stored import Stored, has, write

BASE = "base"
"""The folder of the run that teaches the tower and the LLM, which all others start with."""
BASE_STEPS = 500
BASE_SETTINGS = (
    *(f"Train.steps={BASE_STEPS}", "Train.seed=1", "Train.microbatches=1", "Train.clip_norm=1.0"),
    *("vision/Optimizer.frozen=False", "Optimizer.learning_rate=4e-3", "Optimizer.final_learning_rate=2e-4"),
    *("vision/Layout.dp=1", "llm/Layout.dp=1", "Checkpoint.every=50", "Checkpoint.keep=1"),
)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs to be trained.

    Attributes:
      runs: the runs.
      out: the folder of the results.
      steps: steps of every run; 0 for the paper's.
      check: steps of which parameters, gradients and moments are compared for every fp32 layout; 0 for none.
    """

    runs: Sequence[Run]
    out: Path
    steps: int = 0
    check: int = 0

    def execute(self) -> None:
        """Trains the runs that have not finished, then checks; prints a line for each.

        Raises:
          KeyboardInterrupt: a run was interrupted.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self._train_base()
        for number, run in enumerate(self.runs, start=1):
            steps = self.steps or run.steps
            self._once(f"{number} of {len(self.runs)}: {run.name}", run, steps, f"{run.name}.json", self._losses)
        checked = [run for run in self.runs if self.check and run.group == "layout" and run.dtype == "float32"]
        for number, run in enumerate(checked, start=1):
            title = f"check {number} of {len(checked)}: {run.name}"
            self._once(title, run, self.check, f"{run.name}.check.json", _differences)

    def _train_base(self) -> None:
        """Trains the model that all runs start with, unless it is there; goes on where it was interrupted."""
        done = self.out / f"{BASE}.json"
        if done.exists():
            return
        print(f"{BASE}: tower, projector and LLM on one device, {BASE_STEPS} steps", flush=True)
        recipe = mmjax.load_config([GIN_FILE], BASE_SETTINGS, allow_code=True)
        result = mmjax.build(recipe).train(run_dir=self.out / BASE, style="silent")
        if result.interrupted:
            raise KeyboardInterrupt
        write(done, {"settings": list(BASE_SETTINGS), "steps": result.step, "losses": result.losses})
        print(f"{BASE}: loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}", flush=True)

    def _losses(self, run: Run, steps: int) -> Stored:
        result = mmjax.build(self._recipe(run)).train(steps, style="silent")
        if result.interrupted:
            raise KeyboardInterrupt
        return {"losses": result.losses}

    def _recipe(self, run: Run) -> Recipe:
        starts = [f"{module}/Weights.init_from='{self.out / BASE}'" for module in ("vision", "llm")]
        return mmjax.load_config([GIN_FILE], [*run.bindings(), *starts], allow_code=True)

    def _once(self, title: str, run: Run, steps: int, file: str, make: Callable[[Run, int], Stored]) -> None:
        path, key = self.out / file, {"settings": list(run.bindings()), "steps": steps}
        if has(path, key):
            print(f"{title}: finished before", flush=True)
            return
        start = time.perf_counter()
        result = make(run, steps)
        seconds = time.perf_counter() - start
        write(path, {**key, "seconds": round(seconds, 1), **result})
        last = f"loss {result['losses'][-1]:.6f}" if "losses" in result else f"ok {result['ok']}"
        print(f"{title}: {last}, {seconds:.0f} s", flush=True)
        if "losses" in result:
            jax.clear_caches()  # The programs of a layout are of no use to the next, but those of the reference are.
        gc.collect()


def _differences(run: Run, steps: int) -> Stored:
    """The numbers of `mmjax.check` under the run's layout."""
    recipe = mmjax.load_config([GIN_FILE], run.bindings(), allow_code=True)
    report = mmjax.build(recipe).check(steps)
    assert report
    return report.numbers()
