"""Makes a configuration from nothing but a folder of a whole model or a language model. Imports no JAX."""

from __future__ import annotations

import os
from dataclasses import replace

from mmjax.config.builder import ConfigBuilder, stored_dtype
from mmjax.config.gin_reader import read_bindings
from mmjax.configurable import ConfigError
from mmjax.models.config import projector_name
from mmjax.models.pretrained import COMPOSITES
from mmjax.recipe import ModelSpec, ModuleSpec
from mmjax.recipe.datasets import Processor
from mmjax.weights.folder import read_config

TOKENIZER = "tokenizer.json"
_MEDIA = ("vision_config", "audio_config")
"""Parts of the ``config.json`` of a whole model."""


def folder_bindings(path: str) -> list[str]:
    """Lines of gin for the model of a folder, with the dataset "messages"; `read_bindings([], lines)` reads them.

    They are ["Data.sources={'messages': 1.0}", "Model.weights='/models/llava'"] for a whole model; for a language model
    the second is "Model.encoders={}", and a third "llm/Weights.path='/models/llama'".

    Args:
      path: the folder of a whole model or of a language model, as ``save_pretrained`` writes it.

    Raises:
      ConfigError: the folder has no ``config.json`` that can be read; one line, which names --weights.
    """
    try:
        folder_config = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"--weights={path!r}: {error}") from None
    messages = "Data.sources={'messages': 1.0}"
    if folder_config.get("model_type") in COMPOSITES or any(part in folder_config for part in _MEDIA):
        return [messages, f"Model.weights={path!r}"]
    return [messages, "Model.encoders={}", f"llm/Weights.path={path!r}"]


def from_hf(path: str | os.PathLike[str]) -> ModelSpec:
    """The model of a folder as ``save_pretrained`` writes it, with its parameters, tokenizer and rules for images.

    Args:
      path: the folder of a whole model, such as LLaVA's or Qwen2-VL's, or of a language model.

    Raises:
      ConfigError: the folder holds no such model; one line.
    """
    recipe = ConfigBuilder(read_bindings([], folder_bindings(os.fspath(path)))).recipe()
    (source,) = recipe.data.sources.values()
    model = recipe.model.map(lambda node: _with_stored_dtypes(recipe.model, node))
    return replace(model, processor=Processor(tokenizer=recipe.data.settings.tokenizer, source=source))


def _with_stored_dtypes(model: ModelSpec, node: ModuleSpec) -> ModuleSpec:
    """The node, whose parts know the dtype that they are stored in."""
    node = replace(node, stored_dtype=stored_dtype(model.folder(node.name), node.family, node.settings))
    if part := node.projector:
        dtype = stored_dtype(model.folder(projector_name(node.name)), part.family, part.settings)
        node = replace(node, projector=replace(part, stored_dtype=dtype))
    return node
