"""Settings in steps that give way when a flag says how many steps there are.

A file's warm-up of 50 steps is meant for the file's 800. `--gin.Train.steps=30` asks for a shorter run and not for
another warm-up: what does not fit into it is fitted, and a line says so. What flags give together has to fit as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmjax.config.gin_reader import Binding

STEPS = ("", "Train", "steps")
Fit = Callable[[object, int, int], tuple[object, str] | None]
"""Value, steps of the run, and steps that the value was written for: the value that fits, and what it is."""


def fit_to_steps(bindings: Sequence[Binding], usual: Callable[[], int]) -> tuple[list[Binding], tuple[str, ...]]:
    """The bindings, in which those that a flag's `Train.steps` leaves no room for fit; and a line about each of them.

    usual: the steps without the flag.
    """
    last = {(binding.scope, binding.cls, binding.field): binding for binding in bindings}
    steps = last.get(STEPS)
    if steps is None or not steps.given or type(steps.value) is not int or steps.value < 1:
        return list(bindings), ()
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
    """As many steps, the last ones."""
    if not isinstance(value, (tuple, list)) or [type(end) for end in value] != [int, int]:
        return None
    first, end = value
    if not 1 <= first <= end or end <= steps:
        return None
    return (max(1, steps - (end - first)), steps), "the last ones"


_FITS: dict[tuple[str, str], Fit] = {("Optimizer", "warmup"): _warmup, ("Train", "profile_steps"): _window}
