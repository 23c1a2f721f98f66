"""UNets as a module: pictures on canvases, rows of a condition and a picture, FLOPs, and layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, context, on_tp, slice_of

from mmjax.configurable import ConfigError, from_preset
from mmjax.mesh.layout import Layout
from mmjax.models.module import run_layers
from mmjax.models.parallel_convolution import convolution, kernel_gradient
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.taps import Tapped
from mmjax.models.unet.config import UNetConfig
from mmjax.models.unet.module import LatentUNet
from mmjax.reference.unet import unet_prediction
from studies.stable_diffusion import CONTEXT, SCALE, unet

TINY = UNetConfig(
    width=12, widths=(8, 16), heads_by_level=(2, 0), mid_heads=2, groups=4, queries=3, canvases=((6, 7), (8, 12))
)
SIZES = [(4, 4), (8, 12), (3, 7)]
"""Rows and columns of the pictures of a microbatch; two are smaller than the canvas, one has odd sides."""


@cache
def parameters(c: UNetConfig) -> Any:
    """Random parameters, biases and scales among them: by NumPy, since each shape would be compiled."""
    rng = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        inputs = leaf.shape[1:-1]  # behind the dimension of layers
        x = rng.normal(size=leaf.shape)
        return jnp.asarray(x / math.sqrt(math.prod(inputs)) if inputs else 0.5 + 0.2 * x, leaf.dtype)

    return jax.tree.map(drawn, jax.eval_shape(slice_of(LatentUNet(c)).initialise, jax.random.key(0)))


def pictures(c: UNetConfig, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [
        {
            "picture": rng.normal(size=(*size, c.channels)).astype(np.float32),
            "condition": rng.normal(size=(c.queries, c.width)).astype(np.float32),
            "time": np.float32(rng.uniform()),
        }
        for size in sizes
    ]


def rows_of(c: UNetConfig, given: list[dict[str, Any]], canvas: tuple[int, int]) -> dict[str, np.ndarray]:
    """Host inputs of rows of one picture, in the upper left corner of the canvas."""
    places = math.prod(canvas)
    inputs = {
        "segments": np.zeros((len(given), c.queries + places), np.int32),
        "patches": np.zeros((len(given), places, c.channels), np.float32),
        "times": np.zeros((len(given), places), np.float32),
    }
    for row, one in enumerate(given):
        rows, columns = one["picture"].shape[:2]
        inside = np.zeros(canvas, bool)
        inside[:rows, :columns] = True
        inputs["segments"][row] = np.concatenate([np.ones(c.queries), inside.ravel()])
        inputs["patches"][row, inside.ravel()] = one["picture"].reshape(-1, c.channels)
        inputs["times"][row, inside.ravel()] = one["time"]
    return inputs


def predicted(c: UNetConfig, given: list[dict[str, Any]], canvas: tuple[int, int], tp: int = 1) -> list[np.ndarray]:
    """The predictions of pictures on a canvas, each [H, W, C]."""
    module = LatentUNet(c)
    specs = jax.tree.map(lambda leaf: leaf.spec(AXES), slice_of(module).leaves())
    condition = np.stack([one["condition"] for one in given])

    def body(p: Any, inputs: Any, condition: jax.Array) -> jax.Array:
        here = context(module, **inputs)
        x = module.embed(p, here).at[:, : c.queries].add(condition)
        return module.predict(p, here, module.end(p, here, run_layers(module, p, here, x)[0]))

    run = partial(on_tp, tp, body, specs=(specs, P(), P()))
    y_RTE = np.asarray(jax.jit(run)(parameters(c), rows_of(c, given, canvas), condition))
    return [
        y.reshape(*canvas, c.channels)[: one["picture"].shape[0], : one["picture"].shape[1]]
        for y, one in zip(y_RTE, given, strict=True)
    ]


def reference(c: UNetConfig, one: dict[str, Any]) -> np.ndarray:
    """The dense reference's prediction, with a projector that changes nothing."""
    leaves = {f"painter/layers/000/{path}": x[0] for path, x in flat(parameters(c)["layers"]).items()}
    leaves |= {"painter_projector/kernel": jnp.eye(c.width), "painter_projector/bias": jnp.zeros(c.width)}
    rows, columns, _ = one["picture"].shape
    y_TX = unet_prediction(
        leaves,
        jnp.asarray(one["condition"]),
        jnp.asarray(one["picture"].reshape(rows * columns, -1)),
        jnp.float32(one["time"] * c.train_steps),
        name="painter",
        c=c,
        rows=rows,
        columns=columns,
        projector=ProjectorConfig(kind="linear"),
    )
    return np.asarray(y_TX).reshape(one["picture"].shape)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    result = {}
    for name, value in tree.items():
        result |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result


@pytest.mark.long
def test_a_picture_on_a_canvas_gets_what_it_gets_alone() -> None:
    given = pictures(TINY, SIZES)
    for one, on_canvas in zip(given, predicted(TINY, given, (8, 12)), strict=True):
        alone = reference(TINY, one)
        assert np.abs(on_canvas - alone).max() <= 1e-5 * np.abs(alone).max()


@pytest.mark.long
def test_another_canvas_changes_nothing() -> None:
    (one,) = pictures(TINY, SIZES[2:])
    (small,), (large,) = (predicted(TINY, [one], canvas) for canvas in TINY.canvases)
    assert np.abs(small - large).max() <= 1e-5 * np.abs(large).max()


@pytest.mark.long
def test_ranks_of_tp_compute_the_same() -> None:
    given = pictures(TINY, SIZES)
    for one, split in zip(given, predicted(TINY, given, (8, 12), tp=2), strict=True):
        alone = reference(TINY, one)
        assert np.abs(split - alone).max() <= 1e-5 * np.abs(alone).max()


def test_a_condition_that_is_not_in_use_is_not_read() -> None:
    c, (one,) = TINY, pictures(TINY, SIZES[:1])
    module = LatentUNet(c)
    inputs = rows_of(c, [one], (8, 12))
    inputs["segments"][:, 1] = 0

    def body(inputs: Any, condition: jax.Array) -> jax.Array:
        p, here = parameters(c), context(module, **inputs)
        x = module.embed(p, here).at[:, : c.queries].add(condition)
        return module.predict(p, here, run_layers(module, p, here, x)[0])

    condition = one["condition"][None]
    run = jax.jit(partial(on_tp, 1, body))
    y, changed = (np.asarray(run(inputs, x)) for x in (condition, condition + 5 * np.eye(3, 1, -1)[None]))
    inside = inputs["segments"][0, c.queries :] > 0
    assert np.array_equal(y[0, inside], changed[0, inside])
    assert not np.array_equal(y[0, inside], np.asarray(run(inputs, condition + 5 * np.eye(3, 1)[None]))[0, inside])


@pytest.mark.parametrize("stride", [1, 2])
def test_a_tapped_kernel_has_its_gradient_later(stride: int) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 6, 5, 3), (3, 3, 3, 4)))

    def body(x: jax.Array, kernel: jax.Array) -> Any:
        y, gradients = jax.vjp(lambda x, kernel: convolution(x, kernel, stride=stride), x, kernel)
        dy = jnp.sin(y)
        tapped = Tapped(weight=kernel, x=jnp.zeros_like(x), dy=jnp.zeros_like(y))
        same, deferred = jax.vjp(lambda x, tapped: convolution(x, tapped, stride=stride), x, tapped)
        dx, taps = deferred(dy)
        later = kernel_gradient(taps.x, taps.dy, kernel, stride=stride, stacked=False)
        stacked = kernel_gradient(taps.x[None], taps.dy[None], kernel[None], stride=stride, stacked=True)
        return gradients(dy), (dx, later), stacked[0], y, same

    (dx, of_kernel), (same_dx, later), stacked, y, same = jax.jit(partial(on_tp, 1, body))(x, kernel)
    assert np.array_equal(y, same) and np.array_equal(dx, same_dx)
    np.testing.assert_allclose(later, of_kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stacked, of_kernel, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("pixels", [512, 768, 1024])
def test_traced_flops_are_those_of_the_study(pixels: int) -> None:
    c = from_preset(UNetConfig, "sd-2.1")
    assert c.queries == CONTEXT
    places = (pixels // SCALE) ** 2
    assert LatentUNet(c).forward_flops([places]) == unet(pixels).flops


@pytest.mark.long
def test_flops_of_several_pictures_are_a_sum() -> None:
    module = LatentUNet(TINY)
    assert module.forward_flops([16, 96]) == module.forward_flops([16]) + module.forward_flops([96])
    assert module.forward_flops([]) == 0


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ({"pp": 2}, "painter/Layout.pp=2"),
        ({"cp": 2}, "painter/Layout.cp=2"),
        ({"tp": 2}, "painter/Layout.sp=True"),
    ],
)
def test_layouts_that_cut_a_picture_are_refused(layout: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}") as error:
        TINY.check("painter", Layout(**layout))
    assert "\n" not in str(error.value)


def test_tp_divides_groups_and_even_heads() -> None:
    by_tp = from_preset(UNetConfig, "sd-2.1").sizes("painter").by_tp
    assert by_tp == {
        "painter/UNet.groups": 32,
        "painter/UNet.heads_by_level[1]": 10,
        "painter/UNet.heads_by_level[2]": 20,
        "painter/UNet.mid_heads": 20,
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"widths": (8, 18)}, "UNet.widths"),
        ({"widths": ()}, "UNet.widths"),
        ({"heads_by_level": (2,)}, "UNet.heads_by_level"),
        ({"heads_by_level": (3, 0)}, "UNet.heads_by_level"),
        ({"mid_heads": 3}, "UNet.mid_heads"),
        ({"channels": 13}, "UNet.channels"),
        ({"canvases": ()}, "UNet.canvases"),
        ({"canvases": ((8, 8), (16, 4))}, "UNet.canvases"),
        ({"freq_shift": 4.0}, "UNet.freq_shift"),
        ({"remat": "some"}, "UNet.remat"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=") as error:
        replace(TINY, **changes)
    assert "\n" not in str(error.value)
