"""Checkpoints of logical leaves: any layout restores a checkpoint of any other."""

from typing import TYPE_CHECKING

from mmjax.exports import exported

if TYPE_CHECKING:
    from mmjax.checkpoint.checkpointer import Checkpointer as Checkpointer
    from mmjax.checkpoint.checkpointer import Restored as Restored
    from mmjax.checkpoint.config import FRESH as FRESH
    from mmjax.checkpoint.config import CheckpointConfig as CheckpointConfig
    from mmjax.checkpoint.config import CheckpointError as CheckpointError
    from mmjax.checkpoint.config import TornCheckpointError as TornCheckpointError
    from mmjax.checkpoint.config import WeightsConfig as WeightsConfig
    from mmjax.checkpoint.leaves import LeafInfo as LeafInfo
    from mmjax.checkpoint.metadata import Metadata as Metadata
    from mmjax.checkpoint.storage import export as export
    from mmjax.checkpoint.weights import PARAMETERS as PARAMETERS
    from mmjax.checkpoint.weights import SavedParameters as SavedParameters
    from mmjax.checkpoint.weights import find_parameters as find_parameters

__all__ = [
    "FRESH",
    "PARAMETERS",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "LeafInfo",
    "Metadata",
    "Restored",
    "SavedParameters",
    "TornCheckpointError",
    "WeightsConfig",
    "export",
    "find_parameters",
]

# The imports above, made on first use: reading a configuration needs no JAX.
__getattr__ = exported(
    __name__,
    {
        "mmjax.checkpoint.checkpointer": ("Checkpointer", "Restored"),
        "mmjax.checkpoint.config": (
            "FRESH",
            "CheckpointConfig",
            "CheckpointError",
            "TornCheckpointError",
            "WeightsConfig",
        ),
        "mmjax.checkpoint.leaves": ("LeafInfo",),
        "mmjax.checkpoint.metadata": ("Metadata",),
        "mmjax.checkpoint.storage": ("export",),
        "mmjax.checkpoint.weights": ("PARAMETERS", "SavedParameters", "find_parameters"),
    },
)
