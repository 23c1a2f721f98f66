"""The first step of a run: its loss, and its gradients by the names of leaves, beside those of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.data.types import Sample
from mmjax.models.pretrained import find_pretrained
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import expand

Arrays = dict[str, np.ndarray]


class FirstStep(NamedTuple):
    """The loss of a step, its gradients by leaf, and its only microbatch."""

    loss: float
    gradients: Arrays
    batch: Any


def first_step(config: Recipe, run_dir: Path, draw: Callable[[int], list[Sample]], rows: int = 3) -> FirstStep:
    """A run's first step, from whose first moments of Adam the gradients follow.

    Args:
      config: the run; its modules have one b1.
      run_dir: its directory.
      draw: the samples, with the given id in the places of images.
      rows: number of samples of the microbatch.
    """
    with Trainer(config, run_dir, style="silent") as trainer:
        batch = trainer.parts.packer.microbatch(draw(trainer.parts.tokenizer.media_token("vision")), rows)
        divisors = {"llm": float(np.sum(np.asarray(batch.inputs["llm"]["weights"]))), "llm_tokens": 1.0, "vision": 1.0}
        loss, _ = trainer.executor.step(trainer.parts.runs.signed([batch]), divisors).fetch()
        leaves = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    start, b1 = "adam_m/", config.model.optimizers["llm"].b1
    gradients = {name.removeprefix(start): leaf / (1 - b1) for name, leaf in leaves.items() if name.startswith(start)}
    return FirstStep(loss, gradients, batch)


def leaves_of_tensors(folder: Path, config: Recipe, tensors: Mapping[str, np.ndarray], like: Arrays) -> Arrays:
    """Tensors of a folder's keys by the names of leaves, through the tables, with the shapes of ``like``.

    A leaf whose key ``tensors`` does not have is left out.
    """
    theirs, found = WeightsFolder.open(str(folder)), {}
    for module in {name.partition("/")[0] for name in like}:
        part: Any = config.model.parts[module]
        pretrained = find_pretrained(part.family, theirs.config)
        table = expand(pretrained.rows(part.settings), getattr(part.settings, "layers", 0))
        shapes = {name.partition("/")[2]: leaf.shape for name, leaf in like.items() if name.startswith(f"{module}/")}
        prefixes: Any = {"prefixes": pretrained.key_prefixes, "other_prefixes": pretrained.other_prefixes}
        for leaf, (key, view) in find_leaves(theirs, module, table, shapes, **prefixes).items():
            if key in tensors:
                shape = like[leaf].shape
                found[leaf] = view.read(tensors[key], shape, tuple(slice(0, size) for size in shape))
    return found


def assert_gradients(got: Arrays, want: Arrays, *, bound: float, least: float = 1e-3) -> None:
    """Each of ``want`` is ``got`` within ``bound`` of its largest value, or of ``least``."""
    for name, leaf in want.items():
        limit = bound * max(np.abs(leaf).max(), least)
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=limit, err_msg=name)
