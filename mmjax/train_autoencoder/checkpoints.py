"""Checkpoints of a training: a folder of diffusers for each, with the optimizer's moments beside it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax.configurable import ConfigError
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.models.parameters import Tree
from mmjax.train_autoencoder.settings import Training
from mmjax.train_autoencoder.step import State

LAST = "last"
"""A link to the youngest checkpoint."""
_MOMENTS, _SETTINGS, _PREFIX = "training.safetensors", "training.json", "step-"
_KEPT = 2
"""Checkpoints that stay."""


def save_checkpoint(out: Path, step: int, autoencoder: Autoencoder, training: Training, state: State) -> Path:
    """Writes the checkpoint of a step, links ``LAST`` to it and removes old ones; returns its folder.

    Args:
      out: the run's folder.
      step: the steps done.
      autoencoder: the autoencoder with the state's parameters.
      training: the run's settings.
      state: the state, of which the optimizer's part is written too.
    """
    from safetensors.numpy import save

    folder = out / f"{_PREFIX}{step:08d}"
    leaves = {f"{number:05d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    files = {_MOMENTS: save(leaves), _SETTINGS: training.text().encode()}
    try:
        autoencoder.write(folder, files)
        link = out / f"{LAST}.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, out / LAST)
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise ConfigError(f"--out={str(out)!r}: cannot be written ({cause}); name another directory") from None
    for old in _all(out)[:-_KEPT]:
        shutil.rmtree(old)
    return folder


def last_checkpoint(out: Path) -> tuple[Path, int] | None:
    """The folder of the youngest checkpoint and the steps that were done; ``None`` without one."""
    folders = _all(out)
    return (folders[-1], int(folders[-1].name.removeprefix(_PREFIX))) if folders else None


def restore(folder: Path, training: Training, new: State) -> State:
    """The state in a checkpoint's folder; ``new`` is a state of the same structure.

    Raises:
      ConfigError: the run was begun with other settings, or a file is damaged.
    """
    from safetensors.numpy import load_file

    training.require_same(folder / _SETTINGS)
    params: Tree = Autoencoder.read(str(folder)).params
    try:
        moments = load_file(folder / _MOMENTS)
    except Exception as error:  # the library has an error type of its own for a torn file
        raise ConfigError(f"{folder / _MOMENTS} cannot be read ({error}); remove {folder}") from None
    leaves: list[Any] = [moments[name] for name in sorted(moments)]
    return State(params, jax.tree.unflatten(jax.tree.structure(new.optimizer), leaves))


def with_statistics(autoencoder: Autoencoder, latents: np.ndarray) -> Autoencoder:
    """The autoencoder whose generators see latents of mean 0 and deviation 1, by these latents ``[..., Z]``.

    The settings are ``shift`` and ``scale``, or with causal kernels ``means`` and ``deviations`` of each channel.
    """
    c, numbers = autoencoder.config, np.asarray(latents, np.float64).reshape(-1, latents.shape[-1])
    if c.causal:
        means, deviations = (tuple(map(float, f(axis=0))) for f in (numbers.mean, numbers.std))
        return replace(autoencoder, config=replace(c, means=means, deviations=deviations))
    shift, scale = float(numbers.mean()), float(1 / numbers.std())
    return replace(autoencoder, config=replace(c, shift=shift, scale=scale))


def _all(out: Path) -> list[Path]:
    return sorted(folder for folder in out.glob(f"{_PREFIX}*") if folder.name.removeprefix(_PREFIX).isdigit())
