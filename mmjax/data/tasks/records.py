"""The tasks whose samples are a user's records: those of a folder, and those of `Data.sources`."""

from __future__ import annotations

from mmjax.data.source import Source
from mmjax.data.tasks.task import Task, TaskContext


class Records(Task):
    """The task of records, which may have pictures and recordings to be made."""

    drawing_fix = "Source.draw to True for captions, or name pictures in records as targets"

    saying_fix = drawing_fix.replace("pictures", "recordings")

    @property
    def draws(self) -> bool | None:
        """None: it depends on the records."""
        return None


class Folder(Records):
    """Images and a data.jsonl in `Data.folder`."""

    drawing_fix = ""
    saying_fix = ""

    @property
    def media(self) -> tuple[str, ...]:
        """The media of its samples."""
        return ("image",)

    def open(self, context: TaskContext) -> Source:
        """See `Task.open`."""
        from mmjax.data.sources.datasets import open_folder  # imports libraries that read media

        return open_folder(context)


class Sources(Records):
    """The datasets of `Data.sources`, in place of a task."""

    def open(self, context: TaskContext) -> Source:
        """See `Task.open`."""
        from mmjax.data.sources.datasets import open_sources  # imports libraries that read media

        return open_sources(context)
