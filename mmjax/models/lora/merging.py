"""Merging of adapters into saved parameters. Needs no model and no JAX."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mmjax.configurable import require
from mmjax.models.config import lora_name

_ALPHA = re.compile(r"^(\w+)/Lora\.alpha = (\S+)$", re.MULTILINE)


def require_adapters(adapters: Collection[str], *, merge: bool) -> None:
    """Raises `ConfigError` if ``merge`` is set and there are no ``adapters``, names of modules such as "llm_lora".

    Raises:
      ConfigError: there are none; the message is about the flag --merge_lora.
    """
    require(not merge or bool(adapters), "--merge_lora", merge, "the run has no adapters; leave the flag out")


def merged_adapters(leaves: Mapping[str, Any], config: str) -> dict[str, Any]:
    """Parameters without adapters, with adapted weights replaced by W + (alpha / rank) A B in the dtype of W.

    The leaves of other weights are the same arrays; ``leaves`` is not changed. Names stay:
    "llm/layers/000/attn/q" is merged, and there is no "llm_lora/…".

    Args:
      leaves: complete parameters by logical name, such as "llm/layers/000/attn/q" and "llm_lora/layers/000/attn/q/a".
      config: the text of the operative config of their run, which has each module's alpha as "llm/Lora.alpha = 16.0".
    """
    alphas = {lora_name(module): (module, float(alpha)) for module, alpha in _ALPHA.findall(config)}
    result = {name: leaf for name, leaf in leaves.items() if name.partition("/")[0] not in alphas}
    for name, a in leaves.items():
        adapters, _, path = name.partition("/")
        if adapters in alphas and path.endswith("/a"):
            (module, alpha), weight = alphas[adapters], path.removesuffix("/a")
            product = np.asarray(a) @ np.asarray(leaves[f"{adapters}/{weight}/b"])  # of each expert, if there are some
            merged = np.asarray(result[f"{module}/{weight}"]) + np.float32(alpha / a.shape[-1]) * product
            result[f"{module}/{weight}"] = merged.astype(result[f"{module}/{weight}"].dtype)
    return result
