"""The steps of a run whose length is given in epochs."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import replace
from fractions import Fraction

from mmjax.configurable import require
from mmjax.data.source import Source
from mmjax.recipe import Recipe, validate


def with_steps(recipe: Recipe, source: Source) -> Recipe:
    """The configuration with ``Train.steps`` computed from ``Train.epochs``; unchanged where ``Train.epochs`` is 0.

    An epoch is as many samples as ``source`` has training records. A step has ``Train.global_batch`` samples, however
    they are packed; the last step may go on into the next epoch.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      source: its training samples, as ``open_source(recipe, split="train")`` opens them.

    Raises:
      ConfigError: the source has no end, or a setting does not fit the number of steps.
    """
    train = recipe.train
    if not train.epochs:
        return recipe
    task = recipe.data.settings.task
    fix = f"the samples of Data.task={task!r} have no end; set this to 0 and Train.steps to a number"
    require(isinstance(source, Sized), "Train.epochs", train.epochs, fix)
    assert isinstance(source, Sized)
    steps = max(1, math.ceil(Fraction(repr(float(train.epochs))) * len(source) / train.global_batch))
    # Validated with epochs=0: settings in steps are compared only where the number of steps is known.
    validate(replace(recipe, train=replace(train, steps=steps, epochs=0.0)))
    return replace(recipe, train=replace(train, steps=steps))


def describe_epochs(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """One line about the steps of a configuration, as a tuple of one; () where ``Train.epochs`` is 0.

    Args:
      recipe: the result of ``with_steps``.
      source: its training samples, as ``open_source(recipe, split="train")`` opens them.
    """
    train = recipe.train
    if not train.epochs:
        return ()
    assert isinstance(source, Sized)
    epoch = f"{len(source)} records are {len(source) / train.global_batch:.4g} steps of {train.global_batch}"
    return (f"Train.epochs={train.epochs!r}: {train.steps} steps, as {epoch}",)
