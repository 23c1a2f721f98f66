"""Modules as pure functions with their sharding table, and the graph that makes them one model."""

from mmjax.models.decoder import DecoderConfig
from mmjax.models.multimodal import Encoder, ModelConfig, MultimodalModel
from mmjax.models.projector import ProjectorConfig
from mmjax.models.vit import ViTConfig

__all__ = ["DecoderConfig", "Encoder", "ModelConfig", "MultimodalModel", "ProjectorConfig", "ViTConfig"]
