"""SPMD functions and programs compiled ahead of time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat
from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.spmd import (
    Program,
    Spmd,
    Stitcher,
    by_device,
    has_local_devices,
    local_shards,
    to_devices,
    with_sharding,
    zeros_of,
)

ROWS, WHOLE = PartitionSpec("dp"), PartitionSpec()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))


def on(mesh: Mesh, spec: PartitionSpec, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def avals(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]


def centre(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows less the mean of all rows, and that mean."""
    mean = lax.pmean(jnp.mean(x, 0), "dp")
    return x - mean, mean


def test_a_body_sees_local_rows_and_results_are_put_together(mesh):
    x = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2
    spmd = Spmd(centre, mesh, ROWS, (ROWS, WHOLE))
    for run in (spmd, jax.jit(spmd)):
        rest, mean = run(on(mesh, ROWS, x))
        np.testing.assert_allclose(np.asarray(mean), x.mean(0), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(rest), x - x.mean(0), rtol=1e-6)
        assert [shard.data.shape for shard in rest.addressable_shards] == [(2, 3)] * 4


def test_gradients_of_what_is_replicated_are_sums_over_ranks_once(mesh):
    """With `check_vma` a sum over ranks is transposed as a sum, not as a second sum."""
    x, w = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.array([1.0, -2.0], np.float32)
    loss = Spmd(lambda w, x: lax.psum(jnp.sum((x @ w) ** 2), "dp"), mesh, (WHOLE, ROWS), WHOLE)
    grad = jax.grad(loss)(on(mesh, WHOLE, w), on(mesh, ROWS, x))
    np.testing.assert_allclose(np.asarray(grad), 2 * x.T @ (x @ w), rtol=1e-6)


def test_untracked_bodies_may_return_what_cannot_be_typed(mesh):
    """A value that only happens to be equal everywhere is refused with tracking and passes without."""
    take = lambda x: lax.all_gather(x, "dp", tiled=True)  # noqa: E731
    x = on(mesh, ROWS, np.arange(4.0))
    with pytest.raises(ValueError, match="varying"):
        Spmd(take, mesh, ROWS, WHOLE)(x)
    out = Spmd(take, mesh, ROWS, WHOLE, check_vma=False)(x)
    assert [np.asarray(shard.data).tolist() for shard in out.addressable_shards] == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_abstract_tells_shapes_dtypes_and_shardings_without_running(mesh):
    spmd = Spmd(lambda x: {"a": centre(x), "b": x.astype(jnp.bfloat16)}, mesh, ROWS, {"a": (ROWS, WHOLE), "b": ROWS})
    aval = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    out = spmd.abstract(aval)
    rows, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, WHOLE)
    assert [(a.shape, a.dtype, a.sharding) for a in (*out["a"], out["b"])] == [
        ((4, 3), jnp.float32, rows),
        ((3,), jnp.float32, whole),
        ((4, 3), jnp.bfloat16, rows),
    ]


def test_specs_are_a_prefix_of_the_shapes(mesh):
    leaf = jax.ShapeDtypeStruct((2,), jnp.int32)
    tree = with_sharding({"a": [leaf, leaf], "b": leaf}, mesh, {"a": ROWS, "b": WHOLE})
    assert [a.sharding.spec for a in tree["a"]] == [ROWS, ROWS]
    assert tree["b"].sharding == NamedSharding(mesh, WHOLE)
    assert (tree["b"].shape, tree["b"].dtype) == ((2,), jnp.int32)


def test_an_spmd_function_is_itself_alone_and_cannot_be_changed(mesh):
    """It is compared and hashed by identity, as its body is."""
    body = lambda x: x  # noqa: E731
    one, other = Spmd(body, mesh, ROWS, ROWS), Spmd(body, mesh, ROWS, ROWS)
    assert one != other and len({one, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.mesh = other.mesh  # pyright: ignore[reportAttributeAccessIssue]


def test_a_program_promises_what_it_returns(mesh):
    x = on(mesh, ROWS, np.arange(12, dtype=np.float32).reshape(4, 3))
    program = Program.of("centre", Spmd(centre, mesh, ROWS, (ROWS, WHOLE)), avals(x))
    for promised, real in zip(program.outputs, program(x), strict=True):
        assert (real.shape, real.dtype) == (promised.shape, promised.dtype)
        assert real.sharding.is_equivalent_to(promised.sharding, real.ndim)


def test_a_program_is_traced_and_compiled_once(mesh):
    x, traces = on(mesh, ROWS, np.arange(4.0)), []

    def body(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x + 1

    program = Program("once", Spmd(body, mesh, ROWS, ROWS), avals(x), avals(x)[0])
    assert traces == []
    program.lower()
    lowered = program._lowered
    program.lower()
    assert traces == [(2,)] and program._lowered is lowered
    program.compile()
    compiled = program.compiled
    for _ in range(2):
        program.compile()
        program.lower()
        assert np.asarray(program(x)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert program.compiled is compiled and traces == [(2,)]
    assert program._lowered is None, "the trace is kept beside the executable"
    assert "stablehlo.add" in program.lowered_text() and program.compiled is compiled


def test_a_program_compiles_at_its_first_call(mesh):
    x = on(mesh, ROWS, np.arange(4.0))
    program = Program.of("late", Spmd(lambda x: 2 * x, mesh, ROWS, ROWS), avals(x))
    assert program.name == "late"
    assert program.temporary_bytes() == 0 and program.reads() == [True]
    assert np.asarray(program(x)).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_program_refuses_other_shapes_and_shardings(mesh):
    x = on(mesh, ROWS, np.arange(4.0))
    program = Program.of("fixed", Spmd(lambda x: x, mesh, ROWS, ROWS), avals(x))
    with pytest.raises(TypeError, match="float32\\[4\\]"):
        program(on(mesh, ROWS, np.arange(8.0)))
    with pytest.raises(ValueError, match="sharding"):
        program(on(mesh, WHOLE, np.arange(4.0)))


def test_donated_arguments_are_gone_and_others_stay(mesh):
    kept, given = on(mesh, ROWS, np.arange(4.0)), on(mesh, ROWS, np.ones(4))
    add = Spmd(lambda x, y: x + y, mesh, (ROWS, ROWS), ROWS)
    out = Program.of("add", add, avals(kept, given), donate=(1,))(kept, given)
    assert np.asarray(out).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert given.is_deleted() and not kept.is_deleted()


@pytest.mark.parametrize("put", [to_devices, local_shards])
def test_host_arrays_lie_as_their_shardings_say(mesh, put):
    """A sharding for each array, or one for all; whole or shard by shard."""
    rows, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, WHOLE)
    tree = {"a": np.arange(4.0, dtype=np.float32), "b": 3}
    for shardings in ({"a": rows, "b": whole}, whole):
        out = put(tree, shardings)
        wanted = shardings if isinstance(shardings, dict) else dict.fromkeys(tree, shardings)
        assert {name: x.sharding for name, x in out.items()} == wanted
        np.testing.assert_array_equal(np.asarray(out["a"]), tree["a"])
        assert (int(out["b"]), out["b"].shape) == (3, ())
    assert [shard.data.tolist() for shard in put(tree, {"a": rows, "b": whole})["a"].addressable_shards] == [
        [0.0, 1.0],
        [0.0, 1.0],
        [2.0, 3.0],
        [2.0, 3.0],
    ]


def test_what_others_have_devices_for_is_given_shard_by_shard():
    """`device_put` would ask every process for the whole array."""
    here, elsewhere = (SimpleNamespace(is_fully_addressable=whole) for whole in (True, False))
    with (
        mock.patch("mmjax.mesh.spmd.local_shards", lambda *arguments: arguments),
        mock.patch.object(jax, "device_put", lambda array, _: array),
    ):
        assert to_devices({"a": 1, "b": 2}, {"a": here, "b": elsewhere}) == {"a": 1, "b": (2, elsewhere)}


def test_what_lies_on_this_process_s_devices_alone_is_put_there_at_once(mesh):
    """One call for all; shard by shard is a call for each."""
    with mock.patch("mmjax.mesh.spmd.local_shards", side_effect=AssertionError("shard by shard")):
        out = to_devices({"a": np.arange(4.0), "b": 1}, NamedSharding(mesh, WHOLE))
    assert (out["a"].tolist(), int(out["b"])) == ([0.0, 1.0, 2.0, 3.0], 1)


def test_of_what_has_its_own_shards_alone_nothing_else_is_read(mesh):
    """A row of another process's is never made, so the whole is never asked for."""

    class Rows:
        shape = (4,)

        def __getitem__(self, index: tuple[slice]) -> np.ndarray:
            return np.arange(4.0, dtype=np.float32)[index]

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise AssertionError("the whole was asked for")

    out = local_shards(Rows(), NamedSharding(mesh, ROWS))
    assert np.asarray(out).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_pieces_are_stitched_and_zeros_fill_up(mesh):
    devices, sharding = list(mesh.devices.ravel()), NamedSharding(mesh, PartitionSpec(("dp", "tp")))
    stitch = Stitcher((1, 2), np.float32)
    piece = jax.device_put(np.full((1, 2), 7.0, np.float32), devices[2])
    whole = stitch({devices[2]: piece}, (4, 2), sharding)
    assert np.asarray(whole).tolist() == [[0.0, 0.0], [0.0, 0.0], [7.0, 7.0], [0.0, 0.0]]
    assert {device: x.tolist() for device, x in by_device(whole).items()} == {
        device: [[7.0, 7.0]] if device is devices[2] else [[0.0, 0.0]] for device in devices
    }


def test_a_program_is_local_where_one_device_of_one_argument_is():
    """Devices of processes 0, 0 and 1, 1: this one is 0."""
    planned = [PlannedDevice(i, process_index=i // 2) for i in range(4)]
    ours, shared, theirs = (
        NamedSharding(Mesh(np.array(planned[part]), ("dp",)), ROWS) for part in (slice(2), slice(4), slice(2, 4))
    )
    assert [has_local_devices(sharding) for sharding in (ours, shared, theirs)] == [True, True, False]

    def local(*shardings: NamedSharding) -> bool:
        args = [jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding) for sharding in shardings]
        return Program("any", lambda *x: x, args, args).local

    assert [local(ours, theirs), local(theirs, shared), local(theirs, theirs)] == [True, True, False]


def test_zeros_lie_as_an_aval_says(mesh):
    """Outside of programs and in one, where they are typed as an argument is that lies so."""
    aval = jax.ShapeDtypeStruct((4, 3), jnp.int8, sharding=NamedSharding(mesh, ROWS))
    total = Spmd(lambda x: lax.psum(x, "dp"), mesh, ROWS, WHOLE)
    for made in (zeros_of(aval), jax.jit(lambda: zeros_of(aval))()):
        assert (made.shape, made.dtype, made.sharding) == (aval.shape, aval.dtype, aval.sharding)
        assert not np.asarray(made).any()
    assert jax.jit(lambda: total(zeros_of(aval)))().shape == (2, 3)


def test_a_program_is_compiled_as_its_platform_wants_and_tells_what_it_needs(mesh, monkeypatch):
    asked = []
    monkeypatch.setattr(jax_compat, "compiler_options", lambda platform, **_: asked.append(platform))
    x = on(mesh, WHOLE, np.ones((8, 8), np.float32))
    program = Program("square", lambda x: jnp.sort(x @ x) @ x, avals(x), avals(x)[0])
    assert asked == ["cpu"]
    needed = program.compiled.memory_analysis().temp_size_in_bytes
    assert program.compiled_temporary_bytes() == needed > 0


def test_an_estimate_needs_no_compiler_and_so_no_options(mesh, monkeypatch):
    """Elsewhere than in tests, programs for CPUs have options, which nothing inside a trace may have."""
    monkeypatch.setattr(jax_compat, "compiler_options", lambda platform: {"xla_backend_optimization_level": 2})
    aval = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    program = Program.of("twice", Spmd(lambda x: jnp.sin(2 * x) @ x.T, mesh, (ROWS,), ROWS), [aval])
    assert program.temporary_bytes() > 0


def test_results_lie_where_a_program_is_told_to_put_them(mesh):
    x = on(mesh, WHOLE, np.arange(4.0, dtype=np.float32))
    rows = NamedSharding(mesh, ROWS)
    out = Program("spread", lambda x: x + 1, avals(x), avals(x)[0], out_shardings=rows)(x)
    assert out.sharding == rows
    np.testing.assert_array_equal(np.asarray(out), np.arange(4.0) + 1)
