"""Checks that the data have something to draw, or to speak, for a model's generators. Imports no JAX."""

from __future__ import annotations

from mmjax.configurable import require
from mmjax.recipe.recipe import Recipe


def require_targets(recipe: Recipe) -> None:
    """Requires that samples have something to draw, or to speak, for every trained generator.

    ``recipe`` is the configuration, such as ``load_config(["digits_vlm"])``.

    Raises:
      ConfigError: they have nothing; one line that names a fix.
    """
    drawn, spoken, drawing_fix = recipe.data.drawn, recipe.data.spoken, recipe.data.origin.drawing_fix
    for name in recipe.model.generators:
        speaks = name in recipe.model.talkers
        targets, lacking = (spoken, "codes") if speaks else (drawn, "picture")
        is_idle = name not in targets and not recipe.model.optimizers[name].frozen
        fixes = ["leave it out", f"set {name}/Optimizer.frozen to True"]
        fixes += [drawing_fix] if drawing_fix and not drawn and not speaks else []
        fixes += [f"Data.speaker to {name!r}"] if speaks and targets else []
        use = f"{lacking} for {name!r} to {'speak' if speaks else 'draw'}"
        fix = f"the data have no {use}, so it would learn nothing; {', or '.join(fixes)}"
        require(not is_idle, "Model.generators", recipe.model.config.generators, fix)
