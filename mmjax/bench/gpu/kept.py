"""The reference results of a CPU, kept in the package, which a GPU has to reproduce.

``python -m mmjax.bench gpu --keep`` computes them again. They hold their configurations as values, so that a machine
without gin-config can read them. For every parameter they hold a *digest*: its norm, and its products with a few
vectors of random signs. The expected mean square of a difference of such products is the difference's squared norm.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import changed_values
from mmjax.recipe import Recipe

KEPT = Path(__file__).with_name("kept.json")
PROJECTIONS = 8
Digest = list[float]
Digests = dict[str, Digest]
"""Digests by leaf, such as "llm/embed"."""


def kept() -> dict[str, Any]:
    """The content of the file: {"parity": ``parity.expected()``, "digits": ``digits.expected()``}."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def values_of(recipe: Recipe) -> dict[str, Any]:
    """``changed_values`` of a configuration without a platform, on one device, as the file has them."""
    return changed_values(replace(recipe, world=replace(recipe.world, platform="", devices=1)))


def digest(name: str, array: np.ndarray) -> Digest:
    """The digest of a leaf: its norm, then its ``PROJECTIONS`` products with vectors of random signs.

    The signs depend on name and size alone, and on no version of NumPy.
    """
    flat = array.astype(np.float64).ravel()
    signs = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 2, (PROJECTIONS, flat.size)) * 2 - 1
    return [float(np.linalg.norm(flat)), *map(float, signs @ flat)]


def digests(leaves: Mapping[str, np.ndarray]) -> Digests:
    """The digest of every leaf, by name."""
    return {name: digest(name, leaf) for name, leaf in leaves.items()}


def relative(got: Digests, want: Digests) -> float:
    """An estimate of ‖got − want‖ / ‖want‖ over all leaves; infinite where the names of leaves differ."""
    if got.keys() != want.keys():
        return math.inf
    gap = sum(float(np.mean(np.square(np.subtract(got[name][1:], want[name][1:])))) for name in want)
    norm = sum(leaf_digest[0] ** 2 for leaf_digest in want.values())
    if not norm:
        return 0.0 if not gap else math.inf
    ratio = math.sqrt(gap / norm)
    return ratio if math.isfinite(ratio) else math.inf


def of_module(leaf_digests: Digests, module: str) -> Digests:
    """The digests of one module's leaves: of those whose names begin with "<module>/"."""
    return {name: leaf_digest for name, leaf_digest in leaf_digests.items() if name.partition("/")[0] == module}
