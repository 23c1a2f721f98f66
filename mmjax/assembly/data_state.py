"""The records of a run's data: those that a checkpoint knows, those that are left out, and changes since then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmjax.checkpoint import Checkpointer, Metadata
from mmjax.configurable import ConfigError
from mmjax.data.source import Source
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.sources.mixture import Mixture
from mmjax.mesh.processes import broadcast_text
from mmjax.recipe import Recipe

DATA = "data"
"""The key of a checkpoint's extra metadata that has the records of each dataset."""


def with_known_records(recipe: Recipe, newest: Metadata | None) -> Recipe:
    """The configuration with the records in the metadata of a run's newest checkpoint; all processes have to call it.

    Those of process 0 count. Without a checkpoint, where ``newest`` is ``None``, no records are known. A checkpoint of
    an earlier version names no records: the run then has those that its data have now.

    Args:
      recipe: the run's configuration, whose field ``known`` the result has by dataset.
      newest: the metadata, as ``Checkpointer.latest_metadata()`` gives it.
    """
    stored = newest.extra.get(DATA, {}) if newest else {}
    records: dict[str, dict[str, Any]] = json.loads(broadcast_text(json.dumps(stored)))
    known = {name: KnownRecords(**values) for name, values in records.items()}
    return replace(recipe, data=replace(recipe.data, known=known))


def known_in(recipe: Recipe, run_dir: str | Path) -> Recipe:
    """The configuration with the records in the newest checkpoint of ``run_dir``; with none where it has none.

    So ``open_source`` of the result holds out the samples that the run does. All processes have to call it.
    """
    return with_known_records(recipe, Checkpointer(Path(run_dir) / "checkpoints").latest_metadata())


def stored_records(source: Source) -> dict[str, Any]:
    """The records of each dataset as JSON, for ``Metadata.extra``: {"data": {dataset: {field of ``KnownRecords``: …}}}.

    {} for a source that is no ``Mixture``, such as that of a task.

    source: the run's training samples, as ``open_source(recipe, split="train")`` opens them.
    """
    if not isinstance(source, Mixture):
        return {}
    return {DATA: {name: asdict(known) for name, known in source.known().items()}}


def describe_data(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Lines about records that are left out and about datasets that have changed since the run's last checkpoint.

    () where there are none, and for a source that is no ``Mixture``.

    Args:
      recipe: the run's configuration.
      source: its training samples, as ``open_source(recipe, split="train")`` opens them.

    Raises:
      ConfigError: too many records cannot be used, or the data have changed and `Data.require_same` is set.
    """
    if not isinstance(source, Mixture):
        return ()
    left_out = source.left_out()
    for records in left_out:
        records.require_few(recipe.data.settings.max_broken)
    broken = (f"{records.source}: {records.describe()}; they are left out" for records in left_out)
    return (*broken, *_changes(recipe, source))


def _changes(recipe: Recipe, source: Mixture) -> Iterator[str]:
    for name, change in source.changes().items():
        if recipe.data.settings.require_same:
            fix = "put the records back, or set it to False to go on with them"
            raise ConfigError(
                f"Data.require_same=True: the records of {name} have changed since the last checkpoint: {change}; {fix}"
            )
        now, before = source.count_held_out(name)
        held_out = f"{now} records are held out, of {before} when the run began; " if before else ""
        news = f"{name}: the data have changed since the last checkpoint: {change}"
        yield f"{news}; {held_out}from here on samples come in another order"
