"""Export of a multimodal model as one LLaVA folder. Imports no JAX.

The model has a CLIP or SigLIP tower, a projector of two layers, and a language model of a family of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.configurable import ConfigError, require, setting_name
from mmjax.models.choices import hf_activation
from mmjax.models.config import LLM, ModelConfig, projector_name
from mmjax.models.families import PROJECTOR, Family
from mmjax.models.pretrained import COMPOSITES, Prefixes, family_weights
from mmjax.models.projector.config import ProjectorConfig
from mmjax.weights.table import Entry, Row, expand, renamed

KIND, TOWERS = "llava", ("clip_vision_model", "siglip_vision_model")
ROUND = 64
"""An embedding table that lacks a row for the image token grows to a multiple of this, as tables on the Hub do."""
Read = Callable[[Collection[str]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Composed:
    """A folder of a complete model.

    Attributes:
      config: its ``config.json``.
      entries: its weights table; names of leaves begin with their module.
      modules: names of the modules in the folder.
      unread: values of the leaves that the table needs but no module has; LLaVA does not read them.
      rows: the number of rows of its embedding table.
    """

    config: Mapping[str, Any]
    entries: tuple[Entry, ...]
    modules: tuple[str, ...]
    unread: Mapping[str, np.ndarray]
    rows: int

    def reader(self, read: Read) -> Read:
        """A function that reads leaves in the folder's shapes: missing rows are the mean of the existing rows.

        It takes names of leaves, such as "llm/embed", and returns complete arrays by name. ``read`` does the same for
        the model's leaves; it is called for all names but those of ``unread``.
        """

        def read_and_grow(names: Collection[str]) -> dict[str, np.ndarray]:
            leaves = dict(read([name for name in names if name not in self.unread]))
            for name, axis in ((f"{LLM}/embed", 0), (f"{LLM}/head", 1)):
                if name in leaves:
                    table, missing = np.asarray(leaves[name]), self.rows - leaves[name].shape[axis]
                    mean = np.mean(table, axis, np.float32, keepdims=True).astype(table.dtype)
                    leaves[name] = np.concatenate([table, np.repeat(mean, missing, axis)], axis)
            return leaves | {name: self.unread[name] for name in names if name in self.unread}

        return read_and_grow


def compose(
    model: ModelConfig,
    modules: Mapping[str, Any],
    projectors: Mapping[str, ProjectorConfig],
    vocab: int,
    image_token: int,
) -> Composed:
    """The LLaVA folder of a model with these modules.

    Args:
      model: names and families of the modules.
      modules: settings of the modules by name, such as {"vision": ViTConfig(), "llm": DecoderConfig()}.
      projectors: settings of projectors by encoder, such as {"vision": ProjectorConfig()}.
      vocab: the number of rows of the language model's embedding table.
      image_token: the id of the placeholder token of images.

    Returns:
      The folder's ``config``, a dict; ``entries``, a row for each leaf, such as "llm/layers/000/attn/q"; the names of
      its ``modules``, such as ("vision", "vision_projector", "llm"); and ``rows`` of the embedding table, ``vocab`` or
      more.

    Raises:
      ConfigError: the model cannot be a LLaVA model; one line with the reason.
    """
    families = dict(model.families)
    encoder_names = [name for name in modules if name != LLM]
    one_encoder = len(encoder_names) == 1 and not model.generators
    is_supported = one_encoder and modules[encoder_names[0]].medium == "image"
    require(is_supported, "Model", encoder_names, "LLaVA has one encoder of images beside its language model")
    (name,) = encoder_names
    tower, llm = modules[name], modules[LLM]
    rows = vocab if image_token < vocab else -(-(image_token + 1) // ROUND) * ROUND
    tower_config = _tower(name, families[name], tower)
    projector = _projector(name, projectors[name], llm.width)
    text = family_weights(families[LLM]).to_hf_config(replace(llm, vocab=rows))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": KIND,
        "text_config": text,
        "vision_config": tower_config,
        "image_token_index": image_token,
        "image_seq_length": tower.grid**2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if tower.class_token else "full",
        **projector,
        "tie_word_embeddings": llm.tied,
    }
    with_norm = replace(tower, last_norm=True)  # transformers has one in every tower; LLaVA does not read it
    table = {
        name: (_weights_rows(families[name], with_norm, "image", tower_config["model_type"]), tower.layers),
        projector_name(name): (_weights_rows(PROJECTOR, projectors[name], "projector", KIND), 0),
        LLM: (_weights_rows(families[LLM], llm, LLM, text["model_type"]), llm.layers),
    }
    entries = (
        replace(entry, leaf=f"{module}/{entry.leaf}")
        for module, (table_rows, layers) in table.items()
        for entry in expand(table_rows, layers)
    )
    unread = {f"{name}/norm/scale": np.ones(tower.width, "f4"), f"{name}/norm/bias": np.zeros(tower.width, "f4")}
    return Composed(config, tuple(entries), tuple(table), unread, rows)


def _weights_rows(family: Family, config: Any, part: str, model_type: str) -> tuple[Row, ...]:
    """A family's weights table, with the key prefixes of a LLaVA folder's part."""
    prefixes: Prefixes = COMPOSITES[KIND][part].prefixes
    return renamed(family_weights(family).rows(config, model_type), prefixes)


def _tower(name: str, family: Family, tower: Any) -> dict[str, Any]:
    """The ``vision_config`` of a tower's settings."""
    if family.weights:
        fix = "LLaVA takes features before the norm behind the tower's last layer; name one with Weights.layer, such as"
        require(not tower.last_norm, setting_name(name, tower, "last_norm"), tower.last_norm, f"{fix} -2")
        require(tower.merge == 1, setting_name(name, tower, "merge"), tower.merge, "LLaVA makes a token of every patch")
        reasons = list[str]()
        for kind in TOWERS:
            try:
                return family_weights(family).to_hf_config(tower, model_type=kind)
            except ConfigError as error:
                reasons.append(str(error))
        closest = min(reasons, key=len)  # which lists the fewest differences
        raise ConfigError(f"{name}: it is no tower of CLIP or SigLIP, which LLaVA may have ({closest})")
    raise ConfigError(f"{name}: it is no tower of CLIP or SigLIP, which LLaVA may have")


def _projector(name: str, projector: ProjectorConfig, width: int) -> dict[str, Any]:
    """The entries of ``config.json`` that describe the projector."""
    prefix = f"{name}/Projector"
    require(projector.kind == "mlp", f"{prefix}.kind", projector.kind, "LLaVA's is 'mlp'")
    hidden = projector.hidden_of(width)
    require(hidden == width, f"{prefix}.hidden", hidden, f"LLaVA's has the language model's width ({width})")
    require(not projector.inject, f"{prefix}.inject", projector.inject, "LLaVA's tokens enter once")
    require(projector.bias, f"{prefix}.bias", projector.bias, "LLaVA's has biases")
    require(not projector.pool, f"{prefix}.pool", projector.pool, "LLaVA makes a token of every patch")
    return {"projector_hidden_act": hf_activation(projector.activation), "multimodal_projector_bias": True}
