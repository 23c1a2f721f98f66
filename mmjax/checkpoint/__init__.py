"""Checkpoints of logical leaves: what any layout saves, any other restores."""

from mmjax.checkpoint.checkpointer import CheckpointConfig, Checkpointer, Restored
from mmjax.checkpoint.leaves import CheckpointError, LeafInfo, TornCheckpointError
from mmjax.checkpoint.metadata import Metadata
from mmjax.checkpoint.storage import export

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "LeafInfo",
    "Metadata",
    "Restored",
    "TornCheckpointError",
    "export",
]
