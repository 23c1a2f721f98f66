"""Fits settings that count steps to the number of steps that a flag sets.

A file's warm-up of 50 steps is meant for the file's 800 steps. `--gin.Train.steps=30` asks for a shorter run, not for
another warm-up: a setting of the file that does not fit is changed, and a line says so. Settings that are flags
themselves have to fit unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmjax.config.gin_reader import Binding
from mmjax.configurable import ConfigError
from mmjax.optimizer_config import fit_warmup

STEPS = ("", "Train", "steps")
Fit = Callable[[object, int, int], tuple[object, str] | None]
"""A function of a value, the run's steps and the file's steps, for which the value was written. It returns a value that
fits and a description of it, or None if the value fits already."""


def fit_to_steps(bindings: Sequence[Binding], file_steps: Callable[[], int]) -> tuple[list[Binding], tuple[str, ...]]:
    """Changes the settings that do not fit into the `Train.steps` of a flag.

    Args:
      bindings: all settings, as `read_bindings` gives them; later ones win.
      file_steps: returns `Train.steps` without the flag.

    Returns:
      The bindings in their order, and a line for people for each changed one; () if nothing has to be changed.

    Raises:
      ConfigError: flags set both steps and epochs.
    """
    last = {(binding.scope, binding.cls, binding.field): binding for binding in bindings}
    steps = last.get(STEPS)
    if steps is None or not steps.from_flag or type(steps.value) is not int or steps.value < 1:
        return list(bindings), ()
    epochs = last.get(("", "Train", "epochs"))
    if epochs and epochs.from_flag and epochs.value:
        raise ConfigError(
            f"Train.epochs={epochs.value!r}: it sets the steps; leave Train.steps={steps.value} out, or this"
        )
    fitted, lines = dict[int, Binding](), list[str]()
    for binding in last.values():
        fit = _FITS.get((binding.cls, binding.field))
        if fit is None or binding.from_flag or (fitting := fit(binding.value, steps.value, file_steps())) is None:
            continue
        value, description = fitting
        fitted[id(binding)] = replace(binding, value=value)
        change = f"{binding.key} is {value!r} and not {binding.value!r}, {description}"
        lines.append(f"Train.steps={steps.value}: {change} ({binding.where})")
    return [fitted.get(id(binding), binding) for binding in bindings], tuple(lines)


def _warmup(value: object, steps: int, file_steps: int) -> tuple[object, str] | None:
    if type(value) is not int or value < steps:
        return None
    description = f"the same share as of {file_steps}" if value < file_steps else "a tenth"
    return fit_warmup(value, steps, file_steps), description


def _window(value: object, steps: int, _: int) -> tuple[object, str] | None:
    """A window of the same length at the end of the run."""
    if not isinstance(value, (tuple, list)) or [type(end) for end in value] != [int, int]:
        return None
    first, end = value
    if not 1 <= first <= end or end <= steps:
        return None
    return (max(1, steps - (end - first)), steps), "the last ones"


def _epochs(value: object, steps: int, _: int) -> tuple[object, str] | None:
    del steps
    return (0.0, "so that the steps count") if value else None


_FITS: dict[tuple[str, str], Fit] = {("Optimizer", "warmup"): _warmup, ("Train", "profile_steps"): _window}
_FITS["Train", "epochs"] = _epochs
