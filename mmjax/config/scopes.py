"""The scopes that settings take in gin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmjax.checkpoint.config import CheckpointConfig, WeightsConfig
from mmjax.data.config import DataConfig, LatentsConfig, PackingConfig, VocoderConfig
from mmjax.data.origin import task_class
from mmjax.data.sources.config import SourceConfig
from mmjax.data.tasks.registry import TASKS
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, CallbacksConfig, ModelConfig, lora_name, projector_name
from mmjax.models.edges import EdgeConfig
from mmjax.models.families import FAMILIES
from mmjax.models.lora.config import LoraConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.config import OffloadConfig
from mmjax.recipe.train_config import TrainConfig


def scopes_of(model: ModelConfig, data: DataConfig, adapted: Iterable[str] = ()) -> dict[type[Any], tuple[str, ...]]:
    """The scopes that each configurable class takes: ("vision", "llm") for ``Layout``; () for a class of the whole run.

    Args:
      model: the modules.
      data: the datasets.
      adapted: names of the modules with low-rank adapters, such as ["llm"], whose optimizer has the scope "llm_lora".
    """
    media, modules = model.media, tuple(name for name, _, _ in model.roles)
    tasks = [config for task in dict.fromkeys((*TASKS, data.task)) if (config := task_class(task).Config)]
    scopes: dict[type[Any], tuple[str, ...]] = dict.fromkeys(
        (TrainConfig, WorldConfig, DataConfig, *tasks, CheckpointConfig, ModelConfig), ()
    )
    for family in FAMILIES.values():
        scopes[family.config] = ()
    for name, family in model.families:
        scopes[family.config] = (*scopes.get(family.config, ()), name)
    scopes |= {
        ProjectorConfig: media,
        PackingConfig: (*media, *model.latent_encoders, LLM),
        Layout: modules,
        OffloadConfig: modules,
    }
    scopes[LatentsConfig] = scopes[VocoderConfig] = tuple(model.generators)
    scopes[EdgeConfig] = tuple(edge.name for edge in model.flows)
    scopes[CallbacksConfig] = scopes[LoraConfig] = modules
    scopes[SourceConfig] = tuple(data.sources)
    scopes[OptimizerConfig] = (*model.encoders, *map(projector_name, media), LLM, *model.generators)
    scopes[OptimizerConfig] += tuple(map(lora_name, adapted))
    scopes[WeightsConfig] = scopes[OptimizerConfig]
    return scopes
