"""Fits settings that are in steps to the number of steps that a flag asks for.

A file's warm-up of 50 steps is meant for the file's 800 steps. `--gin.Train.steps=30` asks for a shorter run, not for
another warm-up: a setting of the file that does not fit is fitted, and a line says so. Settings that are given as flags
too have to fit as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmjax.config.gin_reader import Binding
from mmjax.configurable import ConfigError

STEPS = ("", "Train", "steps")
Fit = Callable[[object, int, int], tuple[object, str] | None]
"""A function of a value, the run's steps and the steps that the value was written for: a value that fits and words for
it, or None if the value fits already."""


def fit_to_steps(bindings: Sequence[Binding], usual: Callable[[], int]) -> tuple[list[Binding], tuple[str, ...]]:
    """The bindings, fitted where a flag's `Train.steps` leaves no room for them, and a line about each fitted one.

    `usual` returns the steps without the flag. Raises ConfigError where flags give both steps and epochs.
    """
    last = {(binding.scope, binding.cls, binding.field): binding for binding in bindings}
    steps = last.get(STEPS)
    if steps is None or not steps.given or type(steps.value) is not int or steps.value < 1:
        return list(bindings), ()
    epochs = last.get(("", "Train", "epochs"))
    if epochs and epochs.given and epochs.value:
        raise ConfigError(
            f"Train.epochs={epochs.value!r}: it sets the steps; leave Train.steps={steps.value} out, or this"
        )
    fitted, lines = dict[int, Binding](), list[str]()
    for binding in last.values():
        fit = _FITS.get((binding.cls, binding.field))
        if fit is None or binding.given or (found := fit(binding.value, steps.value, usual())) is None:
            continue
        value, what = found
        fitted[id(binding)] = replace(binding, value=value)
        lines.append(
            f"Train.steps={steps.value}: {binding.key} is {value!r} and not {binding.value!r}, {what} ({binding.where})"
        )
    return [fitted.get(id(binding), binding) for binding in bindings], tuple(lines)


def _warmup(value: object, steps: int, usual: int) -> tuple[object, str] | None:
    if type(value) is not int or value < steps:
        return None
    if value < usual:
        return value * steps // usual, f"the same share as of {usual}"
    return steps // 10, "a tenth"


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
