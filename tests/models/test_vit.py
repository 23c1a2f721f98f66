"""The vision transformer: packed images see themselves alone, at their own positions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd_runs import context, on_tp, slice_of

from mmjax.configurable import ConfigError
from mmjax.mesh.spread import Axes
from mmjax.models import layers
from mmjax.models.choices import ACTIVATIONS, REMATS
from mmjax.models.context import Context
from mmjax.models.module import run_layers
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.layers import embed_patches
from mmjax.models.vit.module import VisionTransformer
from mmjax.reference import arithmetic as reference_arithmetic

CONFIG = ViTConfig(layers=2, width=16, heads=2, mlp=24, patch=2, merge=1, grid=4)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0]])
POSITIONS = np.stack([[0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 0, 0]], -1)[None]
FIRST, SECOND, PADDING = (SEGMENTS[0] == i for i in (1, 2, 0))
CONFIGS = pytest.mark.parametrize("positions", ["rope2d", "learned2d"])


@cache
def parameters(c: ViTConfig) -> Any:
    fresh = slice_of(VisionTransformer(c)).initialise(jax.random.key(0))
    # Biases start at 0 and scales at 1: with those a missing one would not show.
    return jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"), fresh)


@cache
def compiled(c: ViTConfig) -> Any:
    def body(p: Any, patches: Any, segments: Any, positions: Any) -> jax.Array:
        module = VisionTransformer(c)
        given = context(module, patches=patches, segments=segments, positions=positions)
        return run_layers(module, p, given, module.embed(p, given))[0]

    return jax.jit(lambda *args: on_tp(1, body, *args))


def run(c: ViTConfig, patches: np.ndarray, segments: np.ndarray = SEGMENTS, positions: np.ndarray = POSITIONS) -> Any:
    return np.asarray(compiled(c)(parameters(c), patches, segments, positions))


def patches() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(1, 12, 4)).astype(np.float32)


@CONFIGS
def test_an_image_does_not_see_its_neighbour(positions: str) -> None:
    c, x = replace(CONFIG, positions=positions), patches()
    before = run(c, x)
    for changed, kept in ((SECOND, FIRST), (FIRST, SECOND), (PADDING, FIRST | SECOND)):
        y = x.copy()
        y[0, changed] += 5
        after = run(c, y)
        np.testing.assert_array_equal(after[0, kept], before[0, kept])
        assert (after[0, changed] != before[0, changed]).any(axis=-1).all()
    y = x.copy()
    y[0, 4] += 5  # every patch of the same image sees it, earlier or later
    assert (run(c, y)[0, SECOND] != before[0, SECOND]).any(axis=-1).all()


@CONFIGS
def test_a_packed_image_is_the_image_alone(positions: str) -> None:
    c, x = replace(CONFIG, positions=positions), patches()
    packed = run(c, x)
    alone = [np.zeros_like(a) for a in (x, SEGMENTS, POSITIONS)]
    for array, of in zip(alone, (x, SEGMENTS, POSITIONS), strict=True):
        array[:, :6] = of[:, SECOND]
    np.testing.assert_allclose(run(c, *alone)[0, :6], packed[0, SECOND], rtol=1e-4, atol=1e-5)


@CONFIGS
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_both_coordinates_matter(positions: str, axis: int) -> None:
    c, x, moved = replace(CONFIG, positions=positions), patches(), POSITIONS.copy()
    moved[0, 4, axis] += 1
    assert np.abs(run(c, x, positions=moved)[0, SECOND] - run(c, x)[0, SECOND]).max() > 1e-4
    swapped = POSITIONS[..., ::-1]
    assert np.abs(run(c, x, positions=swapped)[0, SECOND] - run(c, x)[0, SECOND]).max() > 1e-4


def test_rotary_positions_are_relative() -> None:
    x = patches()
    np.testing.assert_allclose(run(CONFIG, x, positions=POSITIONS + 7), run(CONFIG, x), rtol=1e-3, atol=1e-4)


def test_learned_positions_are_looked_up_by_row_and_column() -> None:
    c = replace(CONFIG, positions="learned2d")
    p, x = parameters(c), jnp.asarray(patches())
    given = {"patches": x, "positions": jnp.asarray(POSITIONS), "segments": jnp.asarray(SEGMENTS)}
    got = np.asarray(embed_patches(p, c, Context.of(Axes(), given, "full")))
    for t, (row, column) in enumerate(POSITIONS[0]):
        kernel, bias, position = (np.asarray(a) for a in (p["patch"]["kernel"], p["patch"]["bias"], p["position"]))
        np.testing.assert_allclose(
            got[0, t], np.asarray(x)[0, t] @ kernel + bias + position[row * 4 + column], atol=1e-5
        )


def test_activations() -> None:
    assert set(layers.ACTIVATIONS) == set(ACTIVATIONS) and set(layers.REMAT) == set(REMATS)
    x = np.linspace(-3, 3, 7, dtype=np.float32)
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    exact = [0.5 * y * (1 + math.erf(y / math.sqrt(2))) for y in x.tolist()]
    for name, wanted in (("gelu", gelu), ("gelu_exact", exact), ("quick_gelu", x / (1 + np.exp(-1.702 * x)))):
        for activate in (layers.ACTIVATIONS[name], reference_arithmetic.ACTIVATIONS[name]):
            np.testing.assert_allclose(activate(jnp.asarray(x)), wanted, atol=1e-6)


def test_heads_that_rotary_positions_cannot_split_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ViT\.heads"):
        ViTConfig(width=24, heads=4)
    assert ViTConfig(width=24, heads=4, positions="learned2d").head_width == 6
