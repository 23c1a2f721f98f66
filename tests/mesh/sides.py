"""Stages as the tests of boundaries name them, and what their ranks have to hold.

Rows on a rank are written down from its layout alone, never read from a sharding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World

UNIT_ROWS, WIDTH = 5, 5
"""A unit has 25 elements: cut into 2, 3, 4, 6, 7 or 8 slices, the last is padded."""


@dataclass(frozen=True)
class Side:
    """A stage as tests name it: dp4tp2@0 is dp=4, tp=2 from rank 0 on. Each of its copies has all rows; optimizer
    instances make two mesh axes of dp."""

    dp: int
    tp: int = 1
    cp: int = 1
    at: int = 0
    copies: int = 1
    instances: int = 1

    @property
    def layout(self) -> Layout:
        split = Layout(dp=self.dp, tp=self.tp, cp=self.cp, copies=self.copies, rank_offset=self.at)
        return replace(split, optimizer_instances=self.instances)

    def __str__(self) -> str:
        degrees = {"copies": self.copies, "dp": self.dp, "tp": self.tp, "cp": self.cp, "instances": self.instances}
        return "".join(f"{n}{v}" for n, v in degrees.items() if v > 1) + f"@{self.at}"


@functools.cache
def the_world() -> World:
    return World(jax.devices())


def submesh_of(side: Side) -> Submesh:
    return the_world().submesh(side.layout, 0)


def rows_between(source: Side, target: Side) -> int:
    return math.lcm(source.dp, target.dp) * UNIT_ROWS


def distinct(rows: int, start: int = 1, dtype: str = "float32") -> np.ndarray:
    """Different everywhere, in bfloat16 too."""
    values = np.arange(start, start + rows * WIDTH).reshape(rows, WIDTH).astype(jnp.dtype(dtype))
    assert len(np.unique(values.astype(np.float32))) == values.size
    return values


def place(dense: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(dense, aval.sharding)


def assert_holds(x: jax.Array, side: Side, dense: np.ndarray, world: World | None = None) -> None:
    """Every rank of `side` holds its rows of `dense`, nothing else holds any."""
    devices, width, per = (world or the_world()).devices, side.tp * side.cp, len(dense) // side.dp
    intervals = [i // width % side.dp for i in range(side.copies * side.dp * width)]
    wanted = {devices[side.at + i]: dense[k * per : k * per + per] for i, k in enumerate(intervals)}
    found = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    assert x.dtype == dense.dtype
    assert found.keys() == wanted.keys()
    for device, rows in wanted.items():
        np.testing.assert_array_equal(found[device], rows, err_msg=str(device))
