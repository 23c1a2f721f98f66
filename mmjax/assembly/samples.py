"""The samples of a run, and whether all processes have the same."""

from __future__ import annotations

from pathlib import Path

from mmjax.assembly.model import encoder_specs
from mmjax.configurable import require
from mmjax.data.loader import make_source
from mmjax.data.source import Source
from mmjax.data.sources.mixture import Mixture
from mmjax.mesh.processes import gather_texts
from mmjax.progress import IndexProgress
from mmjax.recipe import Recipe


def open_source(recipe: Recipe, *, split: str, skipped: Path | None = None) -> Source:
    """The samples of a run, for ``split`` "train" or "test".

    Of the result ``meta(0)`` is the metadata of the first sample, and ``sample(0)`` the sample itself.

    Args:
      recipe: the run's configuration, as ``load_config(["run.gin"])`` gives it.
      split: "train" or "test".
      skipped: a JSONL file for the names of samples that cannot be read; ``None`` writes none.

    Raises:
      ConfigError: a setting does not fit the data, or the data cannot be read.
    """
    return make_source(
        recipe.data,
        encoder_specs(recipe),
        seed=recipe.train.seed,
        split=split,
        observer=IndexProgress(),
        skipped=skipped,
    )


def require_same_data(recipe: Recipe, source: Source) -> None:
    """Requires that all processes have found the same samples; all of them have to call it. Returns nothing.

    Args:
      recipe: the run's configuration.
      source: its samples, as ``open_source(recipe, split="train")`` opens them.

    Raises:
      ConfigError: some process has other files, or lacks some.
    """
    identities = gather_texts(source.identity) if isinstance(source, Mixture) else []
    differing = [str(process) for process, identity in enumerate(identities) if identity != identities[0]]
    fix = f"process {', '.join(differing)} finds other samples than process 0; give all of them the same files"
    require(not differing, "Data.sources", dict(recipe.data.settings.sources), fix)
