"""The tasks that come with mmjax: one entry each, by the name that `Data.task` gives them.

An entry is the place of a subclass of `Task`, "package.module:Class", as `Data.task` names a user's own. Nothing of it
is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

TASKS: Mapping[str, str] = {
    "digits": "mmjax.data.tasks.digits.task:Digits",
    "folder": "mmjax.data.tasks.records:Folder",
}
"""The first one is the default."""
SOURCES = "mmjax.data.tasks.records:Sources"
"""The entry in place of a task if `Data.sources` names datasets."""
MOVED: Mapping[str, str] = {
    f"Data.{name}": f"Digits.{name}"
    for name in (
        *("images", "calls", "digits", "scale", "aspect", "distortion", "tone", "gap", "level", "noise"),
        *("read", "count", "sum", "hear", "both", "same", "draw", "turns", "curriculum"),
    )
}
"""Names of tasks' settings by those that they had in `Data` in earlier versions."""
