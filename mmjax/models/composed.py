"""A whole model's folder of modules that come from several: LLaVA's shape. Imports no JAX.

A tower of CLIP or SigLIP, a projector of two layers, and a language model of a family that ``transformers`` has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.configurable import ConfigError, require
from mmjax.models.choices import ACTIVATION_OF
from mmjax.models.config import LLM, ModelConfig, projector_name
from mmjax.models.families import PROJECTOR, Family
from mmjax.models.pretrained import WHOLES, Prefixes, family_weights
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit import weights as tower_weights
from mmjax.models.vit.config import ViTConfig
from mmjax.weights.table import Entry, Row, expand, renamed

KIND, TOWERS = "llava", ("clip_vision_model", "siglip_vision_model")
ROUND = 64
"""A table of embeddings without a row for the image's token grows to a multiple of this, as tables on the Hub are."""
Read = Callable[[Collection[str]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Composed:
    """A folder of a whole model.

    Attributes:
      config: its ``config.json``.
      entries: its table; names of leaves begin with their module.
      modules: the modules in it.
      unread: leaves of the table that none of these modules has, with their values: what nothing reads.
      rows: rows of its table of embeddings.
    """

    config: Mapping[str, Any]
    entries: tuple[Entry, ...]
    modules: tuple[str, ...]
    unread: Mapping[str, np.ndarray]
    rows: int

    def reader(self, read: Read) -> Read:
        """Reads leaves of the folder's shapes: rows that a table lacks are the mean of the others."""

        def grown(names: Collection[str]) -> dict[str, np.ndarray]:
            found = dict(read([name for name in names if name not in self.unread]))
            for name, axis in ((f"{LLM}/embed", 0), (f"{LLM}/head", 1)):
                if name in found:
                    table, more = np.asarray(found[name]), self.rows - found[name].shape[axis]
                    mean = np.mean(table, axis, np.float32, keepdims=True).astype(table.dtype)
                    found[name] = np.concatenate([table, np.repeat(mean, more, axis)], axis)
            return found | {name: self.unread[name] for name in names if name in self.unread}

        return grown


def compose(
    model: ModelConfig,
    modules: Mapping[str, Any],
    projectors: Mapping[str, ProjectorConfig],
    vocab: int,
    image_token: int,
) -> Composed:
    """The folder of a model of these modules.

    Args:
      model: names and families of the modules.
      modules: their settings.
      projectors: settings of projectors, by encoder and generator.
      vocab: rows of the language model's table of embeddings.
      image_token: id of the token that stands for an image's.

    Raises:
      ConfigError: LLaVA has no such model; one line that says why.
    """
    families = dict(model.families)
    others = [name for name in modules if name != LLM]
    alone = len(others) == 1 and getattr(type(modules[others[0]]), "medium", "") == "image" and not model.generators
    require(alone, "Model", others, "LLaVA has one encoder of images beside its language model")
    (name,) = others
    tower, llm = modules[name], modules[LLM]
    rows = vocab if image_token < vocab else -(-(image_token + 1) // ROUND) * ROUND
    their_tower = _tower(name, tower)
    projector = _projector(name, projectors[name], llm.width)
    text = family_weights(families[LLM]).their_config(replace(llm, vocab=rows))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": KIND,
        "text_config": text,
        "vision_config": their_tower,
        "image_token_index": image_token,
        "image_seq_length": tower.grid**2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if tower.class_token else "full",
        **projector,
        "tie_word_embeddings": llm.tied,
    }
    norm = replace(tower, last_norm=True)  # transformers has one in every tower; LLaVA does not read it
    table = {
        name: (_rows(families[name], norm, "image", their_tower["model_type"]), tower.layers),
        projector_name(name): (_rows(PROJECTOR, projectors[name], "projector", KIND), 0),
        LLM: (_rows(families[LLM], llm, LLM, text["model_type"]), llm.layers),
    }
    entries = (
        replace(entry, leaf=f"{module}/{entry.leaf}")
        for module, (own, layers) in table.items()
        for entry in expand(own, layers)
    )
    unread = {f"{name}/norm/scale": np.ones(tower.width, "f4"), f"{name}/norm/bias": np.zeros(tower.width, "f4")}
    return Composed(config, tuple(entries), tuple(table), unread, rows)


def _rows(family: Family, config: Any, what: str, model_type: str) -> tuple[Row, ...]:
    prefixes: Prefixes = WHOLES[KIND][what].prefixes
    return renamed(family_weights(family).rows(config, model_type), prefixes)


def _tower(name: str, tower: Any) -> dict[str, Any]:
    fix = "LLaVA takes features before the norm behind the tower's last layer; name one with Weights.layer, such as -2"
    require(not getattr(tower, "last_norm", False), f"{name}/ViT.last_norm", True, fix)
    merge = getattr(tower, "merge", 1)
    require(merge == 1, f"{name}/ViT.merge", merge, "LLaVA makes a token of every patch")
    for kind in TOWERS if isinstance(tower, ViTConfig) else ():
        try:
            return tower_weights.their_config(tower, kind)
        except ConfigError:
            continue
    raise ConfigError(f"{name}: it is no tower of CLIP or SigLIP, which LLaVA may have")


def _projector(name: str, projector: ProjectorConfig, width: int) -> dict[str, Any]:
    prefix = f"{name}/Projector"
    require(projector.kind == "mlp", f"{prefix}.kind", projector.kind, "LLaVA's is 'mlp'")
    hidden = projector.hidden_of(width)
    require(hidden == width, f"{prefix}.hidden", hidden, f"LLaVA's has the language model's width ({width})")
    require(not projector.inject, f"{prefix}.inject", projector.inject, "LLaVA's tokens enter once")
    act = next(theirs for theirs, ours in ACTIVATION_OF.items() if ours == projector.activation)
    return {"projector_hidden_act": act, "multimodal_projector_bias": True}
