"""Exports of a run's parameters: for Orbax, or as folders for transformers and PEFT."""

from typing import TYPE_CHECKING

from mmjax.exports import exported

if TYPE_CHECKING:
    from mmjax.export.adapters import export_adapters as export_adapters
    from mmjax.export.folders import export_folders as export_folders
    from mmjax.export.parameters import export_run as export_run

__all__ = ["export_adapters", "export_folders", "export_run"]

__getattr__ = exported(
    __name__,
    {
        "mmjax.export.adapters": ("export_adapters",),
        "mmjax.export.folders": ("export_folders",),
        "mmjax.export.parameters": ("export_run",),
    },
)
