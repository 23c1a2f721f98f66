"""Checks that generators have something to learn: media to draw, or to speak, and encoders of them. Imports no JAX."""

from __future__ import annotations

from collections.abc import Collection

from mmjax.configurable import require
from mmjax.recipe.recipe import Recipe


def require_targets(recipe: Recipe, media: Collection[str] | None = None) -> None:
    """Requires that samples have something to draw, or to speak, for every trained generator, and encoders parameters.

    Args:
      recipe: the configuration, such as ``load_config(["digits_vlm"])``.
      media: the modules of which samples have media, where samples have been read. Without it, generators pass whose
        pictures are those of records.

    Raises:
      ConfigError: they have nothing, or an encoder has no folder; one line that names a fix.
    """
    for name in recipe.model.latent_encoders if media is None else ():
        fix = f"{name!r} would encode by random numbers; name the folder of an autoencoder, such as 'sd-2.1/vae'"
        path = recipe.model[name].weights.path
        require(bool(path or recipe.init_from(name)), f"{name}/Weights.path", path, fix)
    origin, talkers = recipe.data.origin, recipe.model.talkers
    drawn = recipe.data.drawn if media is None else set(media) & set(recipe.model.generators)
    for name in recipe.model.generators:
        speaks = name in talkers
        if media is None and origin.draws is None and not speaks:
            continue
        sounds = recipe.model[name].settings.medium == "recording"
        targets, lacking = (recipe.data.spoken, "codes") if speaks else (drawn, "recording" if sounds else "picture")
        is_idle = name not in targets and not recipe.model.optimizers[name].frozen
        fixes = ["leave it out", f"set {name}/Optimizer.frozen to True"]
        origin_fix = origin.saying_fix if sounds else origin.drawing_fix
        fixes += [origin_fix] if origin_fix and not drawn and not speaks else []
        fixes += [f"Data.speaker to {name!r}"] if speaks and targets else []
        use = f"{lacking} for {name!r} to {'speak' if speaks else 'make' if sounds else 'draw'}"
        fix = f"the data have no {use}, so it would learn nothing; {', or '.join(fixes)}"
        require(not is_idle, "Model.generators", recipe.model.config.generators, fix)
