"""Faults injected into runs of several real processes: the line that names each, its delay, and lost steps.

Every run must end with the losses of a run without a fault, bit for bit.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmjax.bench.faults.kinds import KINDS, Fault
from mmjax.bench.faults.trial import EVERY, STEPS, FaultFailure, FaultResult, FaultTrial
from mmjax.bench.rows import Row, at_most
from mmjax.configurable import ConfigError, require, suggest


def bench_faults(rounds: int, *, processes: str, only: str, out: str) -> Iterator[Row]:
    """Yields for each fault and number of processes: seconds until it is named, steps lost, difference of losses.

    A fault that a run does not survive is one row, with the target missed.

    Args:
      rounds: not used; every fault happens once.
      processes: numbers of processes, "2", "4" or "2,4".
      only: faults by name, with commas between them; all where it is empty.
      out: folder for the files of runs; those of a run that survived are removed.
    """
    del rounds
    counts = [int(text) if text.isdecimal() else 0 for text in processes.split(",")]
    for count in counts:
        require(count in (2, 4), "--processes", processes, "must be 2, 4 or both with a comma between them")
    names = [name for name in only.split(",") if name] or list(KINDS)
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"--only={only!r}: there is no fault {name!r}; {suggest(name, KINDS)}")
    for count in counts:
        yield from _faults(count, names, Path(out).absolute() / str(count))


def _faults(count: int, names: Sequence[str], folder: Path) -> Iterator[Row]:
    shutil.rmtree(folder, ignore_errors=True)
    undisturbed: dict[tuple[str, ...], FaultTrial] = {}
    survived = 0
    for name in names:
        case, layout = f"{count} processes, {name}", KINDS[name].layout
        if layout not in undisturbed:
            undisturbed_folder = folder / f"undisturbed{len(undisturbed)}"
            undisturbed[layout] = FaultTrial(processes=count, folder=undisturbed_folder, settings=layout)
            undisturbed[layout].start()
            undisturbed[layout].finish()
        try:
            result = try_fault(KINDS[name], FaultTrial(processes=count, folder=folder / name), undisturbed[layout])
        except FaultFailure as failure:
            yield Row(bench="faults", case=f"{case}: {failure}", value=1, unit="failure", target=at_most(0))
            continue
        survived += 1
        shutil.rmtree(folder / name, ignore_errors=True)
        yield Row(bench="faults", case=f"{case}: named ({result.line})", value=result.seconds, unit="s")
        most_lost = at_most(2 * EVERY if KINDS[name].restarted else 0)
        text = f"{case}: {result.ending}, steps lost"
        yield Row(bench="faults", case=text, value=result.steps_lost, unit="steps", target=most_lost)
        gap = f"{case}: difference of losses"
        yield Row(bench="faults", case=gap, value=result.loss_gap, unit="", target=at_most(0))
    yield Row(bench="faults", case=f"{count} processes: faults survived of {len(names)}", value=survived, unit="")


def try_fault(fault: Fault, trial: FaultTrial, undisturbed: FaultTrial) -> FaultResult:
    """Trains a run in which the fault happens, to its end.

    Args:
      fault: the fault, one of ``KINDS``.
      trial: a trial that has not started; gets the fault's settings.
      undisturbed: a finished trial of the same configuration and number of processes, without a fault.

    Raises:
      FaultFailure: the fault is not named, or the run does not come to its end.
    """
    trial.inside = fault.inside
    trial.settings += (*fault.layout, *fault.settings)
    with fault.around(trial) if fault.around else contextlib.nullcontext(()) as settings:
        trial.settings += settings
        trial.start()
        fault_time = fault.inject(trial) if fault.inject else _wait_for_inside_fault(trial)
        step_before_fault = trial.last_step()
        line, seconds = trial.wait_for_line(fault.line, fault_time)
        ending = trial.finish()
        losses, undisturbed_losses = trial.losses(), undisturbed.losses()
        resumed = trial.resumed_after()
    steps_lost = 0 if resumed is None else max(0, step_before_fault - resumed)
    loss_gap = max(abs(losses[step] - undisturbed_losses[step]) for step in range(1, STEPS + 1))
    return FaultResult(ending=ending, line=line, seconds=seconds, steps_lost=steps_lost, loss_gap=loss_gap)


def _wait_for_inside_fault(trial: FaultTrial) -> float:
    """Waits for a fault from inside; returns its time."""
    trial.wait_for(trial.mark.exists, "the fault happened")
    time.sleep(0.1)  # the file is written after it is made
    return float(trial.mark.read_text())
