"""The one sum over the world, by value: what every rank contributes counts once, and every rank learns the total."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.pipeline.world_norm import WorldNorm
from mmjax.schedule.graph import WORLD

MODULES = 3
OVERLAPPING = {
    "a": Layout(dp=2, tp=2),
    "b": Layout(tp=3, rank_offset=2),  # shares ranks 2 and 3 with a, and 4 with d
    "c": Layout(dp=2, rank_offset=5),
    "d": Layout(cp=4, rank_offset=4),
    "e": Layout(rank_offset=7),
}
EQUAL = {"a": Layout(dp=2, tp=2), "b": Layout(dp=4), "c": Layout(tp=2, cp=2)}


def submeshes(layouts: Mapping[str, Layout]) -> dict[str, Submesh]:
    return {name: parity.world().submesh(layout, 0) for name, layout in layouts.items()}


def rows(of: Mapping[str, Submesh], start: int) -> dict[str, np.ndarray]:
    """A different power of two, or close to it, from every rank: no wrong choice of rows has the same sum."""
    count, result = start, {}
    for name, submesh in of.items():
        size = len(submesh.ranks) * MODULES
        result[name] = (1.5 ** np.arange(count, count + size)).astype(np.float32).reshape(-1, MODULES)
        count += size
    return result


def placed(values: Mapping[str, np.ndarray], of: Mapping[str, Submesh]) -> dict[str, jax.Array]:
    return {
        name: jax.device_put(values[name], submesh.sharding(PartitionSpec(submesh.axes.all)))
        for name, submesh in of.items()
    }


def assert_totals(got: Mapping[str, jax.Array], values: Mapping[str, np.ndarray], of: Mapping[str, Submesh]) -> None:
    total = np.concatenate(list(values.values())).astype(np.float64).sum(0, keepdims=True)
    assert got.keys() - {WORLD} == of.keys()
    for name, array in got.items():
        devices = parity.world().devices
        if name != WORLD:
            assert array.sharding.is_equivalent_to(of[name].sharding(PartitionSpec(of[name].axes.all)), 2)
            devices = [devices[rank] for rank in of[name].ranks]
        assert (array.shape, array.dtype) == ((len(devices), MODULES), jnp.float32)
        held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        assert list(held) == list(devices)
        for row in held.values():
            np.testing.assert_allclose(row, total, rtol=1e-6)


@pytest.mark.parametrize("layouts", [OVERLAPPING, EQUAL, {"e": OVERLAPPING["e"]}], ids=["overlap", "equal", "one rank"])
def test_every_rank_of_every_stage_gets_the_sum_of_all_rows(layouts: Mapping[str, Layout]) -> None:
    of = submeshes(layouts)
    norm = WorldNorm(parity.world(), of, MODULES)
    for start in (0, 3):  # twice: nothing of a step is left in the next
        values = rows(of, start)
        assert_totals(norm(placed(values, of)), values, of)


def test_stages_share_an_array_where_their_ranks_are_apart() -> None:
    """Five stages in three arrays: a, c and e; b; d. Empty rows are made once."""
    norm = WorldNorm(parity.world(), submeshes(OVERLAPPING), MODULES)
    assert [aval.shape for aval in norm.program.avals] == [(parity.DEVICES, MODULES)] * 3
    every = NamedSharding(parity.world().mesh, PartitionSpec("world"))
    assert [aval.sharding for aval in norm.program.avals] == [every] * 3
    of = submeshes(OVERLAPPING)
    norm(placed(rows(of, 0), of))
    empty = norm._zeros
    norm(placed(rows(of, 1), of))
    assert empty is norm._zeros and not any(np.asarray(row).any() for row in empty)


def test_inside_a_program_the_sum_is_the_same() -> None:
    of = submeshes(EQUAL)
    norm, values = WorldNorm(parity.world(), of, MODULES), rows(submeshes(EQUAL), 0)
    given = placed(values, of)
    assert_totals(jax.jit(norm.trace)(given), values, of)
    infinite = {**given, "b": given["b"].at[1, 2].set(jnp.inf)}
    assert all(np.isinf(np.asarray(total)[:, 2]).all() for total in jax.jit(norm.trace)(infinite).values())
