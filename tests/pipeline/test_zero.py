"""Masters and moments over dp: bytes per device, padding, and logical leaves that no layout shows in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mmjax import jax_compat
from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.models.parameters import Leaf
from mmjax.optimizer import moments
from mmjax.pipeline import zero
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.state_shapes import module_of_moment
from mmjax.pipeline.zero import ZeroLeaf

# By what they are good for: two stages with a padded vocabulary, many dp ranks, dp that divides next to nothing.
LAYOUTS = {
    "two stages": {"vision": Layout(dp=4, rank_offset=4), "llm": Layout(tp=2, pp=2)},
    "dp=4 tp=2": {"vision": Layout(dp=8), "llm": Layout(dp=4, tp=2)},
    "dp=3": {"vision": Layout(dp=3), "llm": Layout(dp=3, pp=2)},
}


def place(
    layouts: Mapping[str, Layout], frozen: tuple[str, ...] = (), decay: float = 0.1, model: str = "plain"
) -> PlacedModel:
    optimizers = parity.optimizers(parity.Case(frozen=frozen, weight_decay=decay, model=model))
    return PlacedModel(parity.MODELS[model], layouts, parity.world(), Settings(optimizers=optimizers, total_steps=1))


def matrix(shape: tuple[int, ...], axes: tuple[str, ...], layers: int = 0) -> Leaf:
    stacked = (layers, *shape) if layers else shape
    return Leaf("llm", "layers/w" if layers else "w", tuple(range(layers)) if layers else None, shape, stacked, axes)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_masters_and_moments_per_device_fall_with_dp() -> None:
    held: dict[int, dict[int, int]] = {}
    for dp in (1, 2, 4, 8):
        placed = place({"vision": Layout(dp=dp), "llm": Layout(dp=dp)})
        held[dp] = dict.fromkeys(range(dp), 0)
        for stage in placed.stages.values():
            for aval in jax.tree.leaves(stage.state.state_avals):
                array = jax.device_put(np.zeros(aval.shape, aval.dtype), aval.sharding)
                for shard in array.addressable_shards if array.ndim else ():
                    held[dp][parity.world().devices.index(shard.device)] += shard.data.nbytes
    elements = sum(leaf.size for leaf in parity.initial_parameters("plain").values())
    assert held[1] == {0: 3 * 4 * elements}  # master and two moments
    for dp in (2, 4, 8):
        assert len(set(held[dp].values())) == 1, "some device holds more than another"
        assert held[dp][0] <= held[1][0] // dp + 3 * 4 * 64  # what does not divide is small and repeated


def test_frozen_modules_hold_no_moments() -> None:
    placed = place(LAYOUTS["two stages"], frozen=("llm",))
    state = placed.stages["llm.0"].state
    assert state.state_avals["opt"] == {}
    tied = place(LAYOUTS["two stages"], frozen=("llm",), model="tied").stages["llm.0"].state
    assert tied.lent and tied.reduce_avals == ({}, {})
    assert not [name for name in state.logical_avals() if not name.startswith("params/")]


# ---- the plan of a leaf ----------------------------------------------------------------------------------------------


def test_the_first_dimension_whose_local_size_divides_is_sharded() -> None:
    submesh = parity.world().submesh(Layout(dp=2, tp=2), 0)
    cases = {
        matrix((6, 8), ("embed", "mlp")): 0,
        matrix((7, 8), ("embed", "mlp")): 1,
        matrix((7, 6), ("embed", "mlp")): None,  # 6 / tp is odd
        matrix((6, 6), ("mlp", "embed")): 1,
        matrix((6, 8), ("embed", "mlp"), layers=2): 1,  # not the stacking dimension while another one divides
        matrix((7, 6), ("embed", "mlp"), layers=2): 0,
        matrix((7,), ("",)): None,
    }
    for leaf, dimension in cases.items():
        plan = ZeroLeaf.plan(leaf, submesh)
        assert (plan.dimension, plan.shape) == (dimension, leaf.shape), leaf


def test_large_leaves_that_do_not_divide_are_padded_and_small_ones_repeated() -> None:
    submesh = parity.world().submesh(Layout(dp=4), 0)
    small, large = matrix((7, 9), ("", "")), matrix((7, 2341), ("", ""))
    assert math.prod(large.shape) >= zero.SMALL
    assert ZeroLeaf.plan(small, submesh) == ZeroLeaf(small, None, (7, 9))
    plan = ZeroLeaf.plan(large, submesh)
    assert (plan.dimension, plan.shape, plan.padding) == (1, (7, 2344), 3)
    for shape, dimension, padded in (
        ((2341, 7), 0, (2344, 7)),
        ((5, 7, 473), 2, (5, 7, 476)),
        ((5, 473, 7), 1, (5, 476, 7)),
        ((473, 5, 7), 0, (476, 5, 7)),
    ):
        plan = ZeroLeaf.plan(matrix(shape, ("",) * len(shape)), submesh)
        assert (plan.dimension, plan.shape, plan.padding) == (dimension, padded, 3)
    split = matrix((7, 2341), ("vocab", "embed"))  # the padded dimension is never one that tp splits
    assert ZeroLeaf.plan(split, parity.world().submesh(Layout(dp=4, tp=2), 0)).dimension == 1


def test_where_small_ends_and_what_is_never_split() -> None:
    by_five, alone = parity.world().submesh(Layout(dp=5), 0), parity.world().submesh(Layout(tp=2), 0)
    assert ZeroLeaf.plan(matrix((127, 129), ("", "")), by_five).dimension is None  # 16383 elements
    assert ZeroLeaf.plan(matrix((128, 128), ("", "")), by_five).shape == (130, 128)  # 16384
    assert ZeroLeaf.plan(matrix((), ()), by_five) == ZeroLeaf(matrix((), ()), None, ())
    assert ZeroLeaf.plan(matrix((8, 8), ("", "")), alone).dimension is None  # dp=1
    plan = ZeroLeaf.plan(matrix((128, 129), ("mlp", "vocab")), parity.world().submesh(Layout(dp=4, tp=2), 0))
    assert plan.dimension == 0  # 64 of 128 rows each
    odd = matrix((127 * 2, 129 * 2), ("mlp", "vocab"))  # both split over tp, neither local size divides by four
    assert ZeroLeaf.plan(odd, parity.world().submesh(Layout(dp=4, tp=2), 0)).dimension is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dimension = 1  # pyright: ignore[reportAttributeAccessIssue]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(rows=st.integers(4, 7), columns=st.integers(4, 7), dp=st.sampled_from([2, 3]), layers=st.sampled_from([0, 3]))
def test_padding_goes_on_and_off(rows: int, columns: int, dp: int, layers: int) -> None:
    leaf, submesh = matrix((rows, columns), ("", ""), layers), parity.world().submesh(Layout(dp=dp), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "SMALL", 1)
        plan = ZeroLeaf.plan(leaf, submesh)
    assert plan.dimension is not None and plan.shape[plan.dimension] % dp == 0
    assert sum(a != b for a, b in zip(plan.shape, leaf.shape, strict=True)) == bool(plan.padding)
    x = np.arange(1, math.prod(leaf.shape) + 1, dtype=np.float32).reshape(leaf.shape)
    padded = plan.pad(jnp.asarray(x))
    assert padded.shape == plan.shape and float(padded.sum()) == float(x.sum())
    np.testing.assert_array_equal(plan.unpad(padded), x)


@pytest.mark.parametrize("instances", [1, 3], ids=["", "instances"])
@pytest.mark.parametrize("shape", [(4, 6), (5, 6), (5, 7)], ids=["rows", "columns", "padded"])
def test_gathering_and_reducing_are_inverse_to_sharding(
    shape: tuple[int, int], instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "SMALL", 1)
    submesh = parity.world().submesh(Layout(dp=2 * instances, optimizer_instances=instances), 0)
    plan, axes = ZeroLeaf.plan(matrix(shape, ("", "")), submesh), submesh.axes
    assert (shape == (5, 7)) == bool(plan.padding)
    x = (
        np.random.default_rng(0).integers(-99, 99, size=(2 * instances, *shape)).astype(np.float32)
    )  # exact in any order

    def body(local: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        shard = plan.reduce(local[0], axes)
        return shard, plan.gather(shard, axes), jax.lax.psum(plan.squared_norm(shard, axes), axes.all)

    specs = (plan.spec(axes), P(), P())
    run = jax.jit(jax.shard_map(body, mesh=submesh.mesh, in_specs=P(axes.dp), out_specs=specs))
    shard, whole, norm = run(jnp.asarray(x))
    assert shard.shape == plan.shape
    assert shard.addressable_shards[0].data.size * 2 == math.prod(plan.shape)
    np.testing.assert_array_equal(whole, x.sum(0))
    assert float(norm) == np.square(x.sum(0)).sum()


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, tp=2), Layout(dp=4, tp=2, optimizer_instances=2), Layout(dp=2, tp=2, copies=2)],
    ids=["", "instances", "copies"],
)
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("", "")])
def test_each_element_counts_once_in_a_norm(axes: tuple[str, str], layout: Layout) -> None:
    """Leaves that tp, dp or copies repeat count on one of their ranks."""
    submesh = parity.world().submesh(layout, 0)
    plan = ZeroLeaf(matrix((3, 2), axes), None, (3, 2))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    body = jax.shard_map(
        lambda g: jax.lax.psum(plan.squared_norm(g, submesh.axes), submesh.axes.all),
        mesh=submesh.mesh,
        in_specs=plan.spec(submesh.axes),
        out_specs=P(),
    )
    assert float(jax.jit(body)(jnp.asarray(x))) == 55


def test_specs_put_dp_inside_tp() -> None:
    axes = Axes()
    split = matrix((8, 8), ("mlp", "embed"))
    assert ZeroLeaf(split, 0, (8, 8)).spec(axes) == P(("tp", "dp"), None)
    assert ZeroLeaf(split, 1, (8, 8)).spec(axes) == P(("tp",), ("dp",))
    stacked = matrix((8, 8), ("mlp", "embed"), layers=2)
    assert ZeroLeaf(stacked, 1, (2, 8, 8)).logical_spec(axes) == P(("tp", "dp"), None)
    assert ZeroLeaf(stacked, 1, (2, 9, 8)).logical_spec(axes) == P()  # padding is no part of a logical leaf
    assert ZeroLeaf(split, None, (8, 8)).logical_spec(axes) == P(("tp",), None)  # repeated over dp alone
    oblong = matrix((8, 4), ("mlp", "embed"), layers=3)
    assert ZeroLeaf(oblong, 2, (3, 8, 4)).logical_spec(axes) == P(("tp",), ("dp",))
    vocabulary = dataclasses.replace(split, logical_shape=(7, 8))  # one entry more than the vocabulary has
    assert ZeroLeaf(vocabulary, 1, (8, 8)).logical_spec(axes) == P()
    two = parity.world().submesh(Layout(dp=4, tp=2, optimizer_instances=2), 0).axes
    assert ZeroLeaf(split, 0, (8, 8)).spec(two) == P(("tp", "dp"), None)  # repeated over "instance"


# ---- logical leaves --------------------------------------------------------------------------------------------------


def random_leaves(placed: PlacedModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    avals: dict[str, Any] = {}
    for stage in placed.stages.values():
        avals |= stage.state.logical_avals()
    return {name: rng.normal(size=avals[name].shape).astype(np.float32) for name in sorted(avals)}


def restored(placed: PlacedModel, leaves: Mapping[str, np.ndarray], count: int) -> dict[str, Any]:
    return {
        name: stage.state.from_logical(
            {n: jax.device_put(leaves[n], aval.sharding) for n, aval in stage.state.logical_avals().items()}, count
        )
        for name, stage in placed.stages.items()
    }


PADDED = [
    pytest.param(own, True, id=f"{name}-padded", marks=() if name == "dp=3" else pytest.mark.slow)
    for name, own in LAYOUTS.items()
]


@pytest.mark.parametrize(
    ("layouts", "padded"), [*(pytest.param(own, False, id=name) for name, own in LAYOUTS.items()), *PADDED]
)
def test_states_and_logical_leaves_are_the_same_thing(
    layouts: Mapping[str, Layout], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padded:
        monkeypatch.setattr(zero, "SMALL", 1)
    placed = place(layouts)
    leaves = random_leaves(placed)
    states = restored(placed, leaves, 5)
    again = parity.logical_leaves(placed, states)
    assert again.keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(again[name], leaf, err_msg=name)
    for name, stage in placed.stages.items():
        assert jax.tree.structure(states[name]) == jax.tree.structure(stage.state.state_avals)
        for array, aval in zip(jax.tree.leaves(states[name]), jax.tree.leaves(stage.state.state_avals), strict=True):
            assert (array.shape, array.dtype, array.sharding) == (aval.shape, aval.dtype, aval.sharding)
        assert {int(x) for x in jax.tree.leaves(states[name]["opt"]) if x.dtype == jnp.int32} == {5}
        avals = stage.state.logical_avals()
        assert {n: x.sharding for n, x in stage.state.to_logical(states[name]).items()} == {
            n: NamedSharding(stage.submesh.mesh, aval.sharding.spec) for n, aval in avals.items()
        }
        alone = stage.state.parameters_from_logical(
            {n: jnp.asarray(leaves[n]) for n in avals if n.startswith("params/")}
        )
        assert alone.keys() == states[name].keys() and alone["opt"] == {}
        for array, master in zip(*(jax.tree.leaves(one["master"]) for one in (alone, states[name])), strict=True):
            np.testing.assert_array_equal(array, master)
            assert array.sharding == master.sharding
        with pytest.raises(KeyError, match=r"no parameters of .*, and no key"):
            stage.state.from_logical({}, 5)


@pytest.mark.long
def test_a_module_is_restored_beside_one_that_begins() -> None:
    """An encoder goes on, its moments younger than the run, where its projector, on the same stage, starts anew."""
    stage = place(LAYOUTS["dp=3"]).stages["vision.0"].state
    leaves = random_leaves(place(LAYOUTS["dp=3"]))
    own = {n: jnp.asarray(leaves[n]) for n in stage.logical_avals() if n.split("/")[1] == "vision"}
    state = stage.from_logical(own, 7, {"vision": 3}, jax.random.key(2))
    again, fresh = stage.to_logical(state), stage.to_logical(stage.initialise(jax.random.key(2)))
    for name, value in again.items():
        np.testing.assert_array_equal(value, own.get(name, fresh[name]), err_msg=name)
    held = {module: moments(opt) for module, opt in state["opt"].items()}
    assert {module: int(one.count) for module, one in held.items() if one} == {"vision": 4, "vision_projector": 0}
    for kind in ("params", "adam_m", "adam_v"):
        part = {name: value for name, value in own.items() if name != f"{kind}/vision/patch/kernel"}
        with pytest.raises(KeyError, match=f"{kind}/vision/patch/kernel"):
            stage.from_logical(part, 7, key=jax.random.key(2))


def test_programs_that_run_only_at_a_start_are_compiled_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = place(LAYOUTS["dp=3"]).stages["vision.0"].state
    named = {name: jnp.zeros(aval.shape) for name, aval in stage.logical_avals().items()}
    asked: list[tuple[str, bool]] = []

    def options(platform: str, *, once: bool = False) -> dict[str, Any]:
        asked.append((platform, once))
        return {}

    monkeypatch.setattr(jax_compat, "compiler_options", options)
    stage.parameters_from_logical(named)
    assert asked == [("cpu", True)]


def test_the_module_of_a_moment() -> None:
    names = {"adam_m/vision/patch/kernel": "vision", "adam_v/llm/embed": "llm", "params/llm/embed": ""}
    assert {name: module_of_moment(name) for name in names} == names


@pytest.mark.long
def test_fresh_leaves_do_not_depend_on_the_layout() -> None:
    """Nor do their names and shapes: no stage, stacking, vocabulary padding or ZeRO padding is in them."""
    placed, key = place({"vision": Layout(dp=2, rank_offset=6), "llm": Layout(tp=2, pp=3)}), jax.random.key(parity.SEED)
    leaves = parity.logical_leaves(placed, {n: s.state.initialise(key) for n, s in placed.stages.items()})
    want = parity.initial_parameters("plain")
    params = parity.of_kind(leaves, "params")
    assert params.keys() == want.keys() and len(leaves) == 3 * len(want)
    for name, leaf in want.items():
        np.testing.assert_array_equal(params[name], leaf, err_msg=name)
        assert not leaves[f"adam_m/{name}"].any() and not leaves[f"adam_v/{name}"].any()
        assert leaves[f"adam_m/{name}"].shape == leaf.shape
    assert params["llm/embed"].shape == (parity.VOCAB, 24)
    assert params["llm/head"].shape == (24, parity.VOCAB)


def test_a_tied_table_is_one_leaf_on_however_many_stages() -> None:
    one, two = (place(LAYOUTS[name], model="tied") for name in ("dp=4 tp=2", "two stages"))
    leaves = random_leaves(one)
    assert leaves.keys() == random_leaves(two).keys() and leaves["params/llm/embed"].shape == (parity.VOCAB, 24)
    again = parity.logical_leaves(two, restored(two, leaves, 5))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(again[name], leaf, err_msg=name)


def test_layers_of_a_module_start_from_different_numbers() -> None:
    leaves = parity.initial_parameters("plain")
    first, second = (leaves[f"llm/layers/{i:03d}/attn/q"] for i in (0, 1))
    assert (first != second).mean() > 0.9
    assert np.abs(leaves["llm/layers/000/attn/k"] - leaves["llm/layers/000/attn/v"]).max() > 0.1


# ---- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "norm", "scale"), [(0.0, 3.0, 1.0), (2.0, 1.5, 1.0), (2.0, 8.0, 0.25)])
def test_only_what_is_longer_than_the_limit_is_scaled(clip: float, norm: float, scale: float) -> None:
    """Seen in the first moment, which is proportional to the gradient; Adam's update does not show a scale."""
    alone = {name: Layout() for name in ("eye", "ear", "llm")}
    state = toy.placed(alone, toy.optimizers(), clip_norm=clip).stages["llm.0"].state
    before = state.initialise(jax.random.key(0))
    grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), before["master"])
    rows = jnp.zeros(state.rows_aval.shape).at[0, -1].set(norm**2)
    after = jax.jit(state.update)(before, grads, rows)
    held = moments(after["opt"]["llm"])
    b1 = toy.optimizers()["llm"].b1
    assert held is not None
    for m, g in zip(jax.tree.leaves(held.m), jax.tree.leaves(grads["llm"]), strict=True):
        np.testing.assert_allclose(m, (1 - b1) * scale * g, rtol=1e-5)


def test_what_is_repeated_over_dp_is_summed_and_never_gathered() -> None:
    submesh = parity.world().submesh(Layout(dp=3), 0)
    plan, axes = ZeroLeaf.plan(matrix((5, 7), ("", "")), submesh), submesh.axes
    assert plan.dimension is None
    x = np.random.default_rng(0).integers(-9, 9, size=(3, 5, 7)).astype(np.float32)

    def body(local: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = plan.reduce(local[0], axes)
        return whole, plan.gather(whole, axes)

    run = jax.jit(jax.shard_map(body, mesh=submesh.mesh, in_specs=P(axes.dp), out_specs=(P(), P())))
    for found in run(jnp.asarray(x)):
        np.testing.assert_array_equal(found, x.sum(0))
