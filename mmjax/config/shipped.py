"""The configurations that come with mmjax, found by name from any directory: `digits_vlm`, `finetune/lora`.

They are the files of `configs/`: beside the package in a checkout, inside it where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmjax.configurable import near_misses

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(
    (folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE / "configs"
)
"""The folder of the configurations."""


def config_names() -> list[str]:
    """Names of all configurations, such as "digits_vlm" and "finetune/lora", and of their parts, sorted."""
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.gin"))


def find_config(name: str | os.PathLike[str]) -> Path:
    """The path of a gin file: the file itself if it is there, else the configuration of that name.

    `digits_vlm`, `digits_vlm.gin` and `configs/digits_vlm.gin`, as it stands in a checkout, name the same one. A name
    that leads nowhere is returned as it is.
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    relative = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    shipped = CONFIGS / (relative if relative.suffix == ".gin" else f"{relative}.gin")
    return shipped if shipped.is_file() else path


def nearest_file(path: Path, parents: Sequence[Path] = ()) -> str:
    """The fix for a missing gin file, for a message: "did you mean 'runs/mine.gin'?" or "use 'runs/mine.gin'".

    If the folder has no gin file: "there is no gin file in runs; use one of mmjax's, such as digits_vlm".

    Args:
      path: the missing file.
      parents: resolved paths of files that are never named, since they would include themselves.
    """
    folder = path.parent
    neighbours = folder.glob("*.gin") if folder.is_dir() else ()
    names = sorted(p.name for p in neighbours if p.resolve() not in parents)
    close = [str(folder / name) for name in near_misses(path.name, names)]
    if not close and not parents:
        close = near_misses(path.as_posix().removesuffix(".gin").removeprefix("configs/"), config_names())
    if close:
        return f"did you mean {close[0]!r}?"
    if names:
        return f"use {str(folder / names[0])!r}"
    return f"there is no {'other ' if parents else ''}gin file in {folder}; use one of mmjax's, such as digits_vlm"
