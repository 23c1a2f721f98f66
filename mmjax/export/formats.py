"""Exports of a checkpoint by the name of their format."""

from __future__ import annotations

from pathlib import Path

from mmjax.configurable import one_of, require
from mmjax.export.adapters import export_adapters
from mmjax.export.folders import ExportedFolders, export_folders
from mmjax.export.parameters import Exported, export_run

FORMATS = ("orbax", "safetensors", "peft")
PEFT = FORMATS[-1]

Adapters = list[tuple[str, str]]
"""Each folder of adapters that was written, and its module."""


def export(
    run_dir: str | Path,
    out: str | Path,
    format: str,
    step: int = 0,
    *,
    allow_code: bool = False,
    merge_lora: bool | None = None,
) -> Exported | ExportedFolders | Adapters:
    """Writes the parameters of checkpoint `step` (0: the newest) of `run_dir` to `out`.

    Args:
      run_dir: the run's directory.
      out: the directory to make.
      format: "orbax", "safetensors" or "peft".
      step: the checkpoint's; 0 for the newest.
      allow_code: whether the run's settings may name code of one's own, which is run.
      merge_lora: whether low-rank adapters are added to the weights that they adapt; ``None`` merges where the format
        has no place for adapters, as a folder of safetensors.

    Returns:
      ``Exported`` for "orbax", ``ExportedFolders`` for "safetensors", and for "peft" each folder with its module.

    Raises:
      ConfigError: there is no such run, checkpoint or format, `out` exists, or the run has nothing in that format.
      CheckpointError: the checkpoint cannot be read.
    """
    one_of("--format", format, FORMATS)
    require(
        not (merge_lora and format == PEFT), "--merge_lora", merge_lora, "--format=peft writes adapters; leave one out"
    )
    if format == PEFT:
        return export_adapters(run_dir, out, step, allow_code=allow_code)
    if format == "orbax":
        return export_run(run_dir, out, step, merge_lora=bool(merge_lora))
    return export_folders(run_dir, out, step, allow_code=allow_code, merge_lora=merge_lora)
