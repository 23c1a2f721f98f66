"""The figures of an evaluation that ``Checkpoint.best`` may name."""

from __future__ import annotations

from mmjax.configurable import one_of, require
from mmjax.recipe.recipe import Recipe

_LOWER = ("loss", "perplexity")


def is_lower_better(metric: str) -> bool:
    """Whether lower is better: for "loss" and "perplexity". All other figures are shares of correct answers."""
    return metric in _LOWER


def check_best(recipe: Recipe) -> None:
    """Checks that the evaluations of a run have the figure ``Checkpoint.best``, and that ``Train.patience`` has one.

    Raises:
      ConfigError: they have not, or nothing is evaluated.
    """
    train, best, task = recipe.train, recipe.checkpoint.best, recipe.data.origin
    if best:
        unit = f"{task.unit}_accuracy"
        swapped = [f"swapped_{encoder}_{unit}" for encoder in recipe.model.encoders] if task.exchanges else []
        talkers = recipe.model.talkers
        drawn = ["drawing_accuracy"] if task.reads_drawings and len(recipe.model.generators) > len(talkers) else []
        spoken = ["code_accuracy"] * bool(talkers)
        one_of("Checkpoint.best", best, (*_LOWER, "exact_match", unit, *swapped, *drawn, *spoken, *task.scores))
        fix = "nothing is evaluated; set Train.eval_samples to 180, or this to ''"
        require(bool(train.eval_samples), "Checkpoint.best", best, fix)
    if train.patience:
        fix = "name the figure that has to get better in Checkpoint.best, such as 'loss'"
        require(bool(best), "Train.patience", train.patience, fix)
        fix = "counts evaluations on the way; set Train.eval_every to a number of steps, such as 100"
        require(bool(train.eval_every), "Train.patience", train.patience, fix)
