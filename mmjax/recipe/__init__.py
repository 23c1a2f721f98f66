"""Recipes: all settings of a run as one frozen value, each node with its own."""

from mmjax.recipe.advice import advise
from mmjax.recipe.model_spec import ModelSpec
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.specs import LoraSpec, ModuleSpec, ProjectorSpec
from mmjax.recipe.train_config import TrainConfig
from mmjax.recipe.validate import validate

__all__ = [
    "LoraSpec",
    "ModelSpec",
    "ModuleSpec",
    "ProjectorSpec",
    "Recipe",
    "TrainConfig",
    "advise",
    "validate",
]
