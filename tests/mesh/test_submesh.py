"""Submeshes: which device has which coordinates, and what model code sees of them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.layout import Layout
from mmjax.mesh.routes import RowSharding
from mmjax.mesh.spread import Axes
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World


@pytest.fixture(scope="module")
def world() -> World:
    return World(jax.devices())


def test_stages_lie_on_their_ranks_in_dp_cp_tp_order(world):
    layout = Layout(pp=2, cp=2, tp=2)
    for stage in range(2):
        submesh = world.submesh(layout, stage)
        assert submesh.ranks == tuple(range(4 * stage, 4 * stage + 4))
        assert submesh.layout is layout
        assert submesh.row_sharding == RowSharding(submesh.ranks, 1)
        assert dict(submesh.mesh.shape) == {"dp": 1, "cp": 2, "tp": 2}
        assert submesh.mesh.devices.flatten().tolist() == [world.devices[rank] for rank in submesh.ranks]


def test_axes_have_the_sizes_of_their_degrees(world):
    submesh = world.submesh(Layout(cp=4, tp=2), 0)
    assert list(submesh.mesh.shape.items()) == [("dp", 1), ("cp", 4), ("tp", 2)]


def test_tp_ranks_are_neighbours_and_hold_the_same_rows(world):
    submesh = world.submesh(Layout(dp=2, tp=2, rank_offset=3), 0)
    x = jax.device_put(np.arange(8.0), submesh.sharding(submesh.spread.whole_rows))
    local = {shard.device: np.asarray(shard.data).tolist() for shard in x.addressable_shards}
    lower, upper = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
    assert [local[world.devices[rank]] for rank in (3, 4, 5, 6)] == [lower, lower, upper, upper]


def test_a_stage_beyond_the_layout_has_no_submesh(world):
    with pytest.raises(IndexError, match="use a stage from 0 to 0"):
        world.submesh(Layout(dp=2), 1)


def test_axes_name_roles_and_a_role_may_be_several_axes():
    axes = Axes()
    assert axes.all == ("dp", "cp", "tp")
    assert (axes.shard, axes.instance) == (("dp",), ())


def test_optimizer_instances_split_dp_and_keep_the_ranks_in_order(world):
    layout = Layout(dp=4, tp=2, optimizer_instances=2)
    submesh = world.submesh(layout, 0)
    assert list(submesh.mesh.shape.items()) == [("instance", 2), ("dp", 2), ("cp", 1), ("tp", 2)]
    assert submesh.mesh.devices.ravel().tolist() == list(world.devices[:8]) == [world.devices[r] for r in submesh.ranks]
    axes = submesh.axes
    assert axes.all == ("instance", "dp", "cp", "tp")
    assert submesh.spread.whole_rows == PartitionSpec(("instance", "dp"))
    assert (axes.dp, axes.instance, axes.shard) == (("instance", "dp"), ("instance",), ("dp",))
    plain = world.submesh(dataclasses.replace(layout, optimizer_instances=1), 0)
    x = np.arange(8.0)
    there, here = (jax.device_put(x, one.sharding(one.spread.whole_rows)) for one in (plain, submesh))
    for one, other in zip(there.addressable_shards, here.addressable_shards, strict=True):
        assert one.device == other.device
        np.testing.assert_array_equal(one.data, other.data)


def test_copies_are_runs_of_ranks_that_hold_the_same(world):
    submesh = world.submesh(Layout(copies=2, dp=2, optimizer_instances=2, rank_offset=1), 0)
    assert list(submesh.mesh.shape.items()) == [("copy", 2), ("instance", 2), ("dp", 1), ("cp", 1), ("tp", 1)]
    assert submesh.mesh.devices.ravel().tolist() == list(world.devices[1:5])
    assert submesh.axes.copies == ("copy",)
    assert submesh.spread.same_tokens == ("copy", "cp", "tp")
    assert submesh.row_sharding == RowSharding((1, 2, 3, 4), 2, 2)
    x = jax.device_put(np.arange(2.0), submesh.sharding(submesh.spread.whole_rows))
    local = {shard.device: float(shard.data[0]) for shard in x.addressable_shards}
    assert [local[world.devices[rank]] for rank in submesh.ranks] == [0.0, 1.0, 0.0, 1.0]


def test_submeshes_cannot_be_changed(world):
    submesh = world.submesh(Layout(), 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        submesh.ranks = (1,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        submesh.axes.dp = ("tp",)


def test_a_sharding_is_on_the_stage_s_own_devices(world):
    submesh = world.submesh(Layout(dp=2, rank_offset=5), 0)
    sharding = submesh.sharding(PartitionSpec("dp", "tp"))
    assert sharding.spec == PartitionSpec("dp", "tp")
    assert sharding.device_set == {world.devices[5], world.devices[6]}


def test_the_processes_of_a_submesh_are_those_of_its_devices():
    planned = [PlannedDevice(i, process_index=i // 2) for i in range(6)]
    pairs = [Submesh.of(Layout(dp=2), (2 * i, 2 * i + 1), planned[2 * i : 2 * i + 2]) for i in range(3)]
    assert [one.processes for one in pairs] == [{0}, {1}, {2}]
    assert [one.local for one in pairs] == [True, False, False]  # this process is 0
    assert Submesh.of(Layout(dp=4), (1, 2, 3, 4), planned[1:5]).processes == {0, 1, 2}


def test_neighbours_make_an_optimizer_instance(world):
    submesh = world.submesh(Layout(dp=6, optimizer_instances=2), 0)
    assert [[device.id for device in group.ravel()] for group in submesh.mesh.devices] == [[0, 1, 2], [3, 4, 5]]
