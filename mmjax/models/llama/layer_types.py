"""``layer_types`` of a ``config.json``: a layer of one kind behind equally many of another, again and again.

Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import require

Kinds = tuple[str, str]
"""The kind of most layers, and that of every so many, such as ("sliding_attention", "full_attention")."""
BY_WINDOW: Kinds = ("sliding_attention", "full_attention")


def layer_types(layers: int, every: int, kinds: Kinds) -> list[str]:
    """The kind of each of ``layers`` layers: the second for every ``every``-th; 0 is for none."""
    return [kinds[every > 0 and (layer + 1) % every == 0] for layer in range(layers)]


def period(t: Mapping[str, Any], kinds: Kinds, default: int) -> int:
    """Which layers have the second kind, every so many, or 0 for none; ``default`` if ``t`` has no ``layer_types``.

    Raises:
      ConfigError: they are at other places.
    """
    types = list(t["layer_types"] or ())
    if not types:
        return default
    every = types.index(kinds[1]) + 1 if kinds[1] in types else 0
    fix = f"mmjax has one layer of {kinds[1]} behind equally many of {kinds[0]}, again and again"
    require(types == layer_types(t["num_hidden_layers"], every, kinds), "config.json: layer_types", types, fix)
    return every
