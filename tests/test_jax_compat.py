"""One test for each thing that mmjax knows of JAX beyond its stable API; when JAX changes it, that test fails."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_mesh import ROWS, WHOLE, small_mesh, spmd

from mmjax import jax_compat
from mmjax.compile.hlo import replica_groups


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return small_mesh()


def test_backends_are_initialized():
    script = (
        "import jax; from mmjax import jax_compat; before = jax_compat.backends_are_initialized(); "
        "jax.config.update('jax_num_cpu_devices', 3); still = jax_compat.backends_are_initialized(); "
        "count = len(jax.devices()); print(before, still, count, jax_compat.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False", "3", "True"]


def test_arrays_are_pulled_whatever_comes_first():
    """The pull before the offer, and the offer before the array; several arrays on other devices and of other types."""
    script = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from mmjax import jax_compat
server = jax_compat.transfer_server("127.0.0.1")
connection = server.connect(server.address())
first, second = jax.local_devices()
def aval(x, device):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda _, y: jnp.cos(y), x))
x, y = jnp.arange(70000.0), jnp.arange(3, dtype=jnp.bfloat16)
early = connection.pull(2**62, [aval(x, second), aval(y, first)])
sent = [slow(x), y]
server.await_pull(2**62, sent)
assert all((a == b).all() for a, b in zip(map(jax.device_get, early), map(jax.device_get, sent), strict=True))
assert [a.sharding.device_set for a in early] == [{second}, {first}]
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)


def test_varying_axes(mesh):
    seen = {}

    @spmd(mesh, (ROWS, WHOLE), ROWS)
    def body(x, w):
        seen.update(x=x, w=w, both=x * lax.axis_index("tp"), reduced=lax.psum(x, "dp"), constant=jnp.ones(3))
        seen.update({name: jax_compat.varying_axes(value) for name, value in seen.items()})
        return x * w

    jax.eval_shape(body, jnp.ones((4, 3)), jnp.ones(3))
    assert seen == {"x": {"dp"}, "w": set(), "both": {"dp", "tp"}, "reduced": set(), "constant": set()}


def test_varying_axes_outside_of_shard_map():
    assert jax_compat.varying_axes(jnp.ones(3)) == frozenset()


def test_to_varying(mesh):
    """It types; it changes no value, adds no axis twice, and leaves gradients local instead of summed."""
    types = []

    @spmd(mesh, (WHOLE, ROWS), (ROWS, WHOLE, ROWS))
    def body(w, x):
        local = jax_compat.to_varying(w, ("dp",))
        assert jax_compat.to_varying(local, ("dp",)) is local
        types.extend(jax_compat.varying_axes(v) for v in (w, local, jax_compat.to_varying(local, ("dp", "tp"))))
        loss = lambda w: jnp.sum(w * x)  # noqa: E731
        return jax.grad(loss)(local)[None], jax.grad(lambda w: lax.psum(loss(w), "dp"))(w), local[None]

    x = np.arange(8.0).reshape(4, 2)
    local, summed, value = body(jnp.array([3.0, 5.0]), jnp.asarray(x))
    assert types == [set(), {"dp"}, {"dp", "tp"}]
    np.testing.assert_array_equal(local, [x[:2].sum(0), x[2:].sum(0)])
    np.testing.assert_array_equal(summed, x.sum(0))
    np.testing.assert_array_equal(value, [[3.0, 5.0]] * 2)


def test_tree_to_varying(mesh):
    types = []

    @spmd(mesh, ({"a": WHOLE, "b": [ROWS]},), ROWS)
    def body(tree):
        tree = jax_compat.tree_to_varying(tree, ("dp", "tp"))
        types.append(jax.tree.map(jax_compat.varying_axes, tree))
        return lax.pmean(tree["a"] + tree["b"][0], "tp")

    jax.eval_shape(body, {"a": jnp.ones(2), "b": [jnp.ones(4)]})
    assert types == [{"a": {"dp", "tp"}, "b": [{"dp", "tp"}]}]


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_all_gather_invariant(mesh, dimension):
    """Shards in rank order along the dimension, typed as equal everywhere: an unmapped output takes it."""
    every, types = PartitionSpec(*[None] * dimension, ("dp", "tp")), []

    @spmd(mesh, every, WHOLE)
    def body(x):
        out = jax_compat.all_gather_invariant(x, ("dp", "tp"), dimension)
        types.append(jax_compat.varying_axes(out))
        return out

    x = np.arange(256.0).reshape(4, 8, 8)
    np.testing.assert_array_equal(body(jnp.asarray(x)), x)
    assert types[-1] == set()
    weights = jnp.asarray(x**2)
    gradient = jax.grad(lambda x: jnp.sum(body(x) * weights))(jnp.asarray(x))
    np.testing.assert_array_equal(gradient, weights)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, use", [[0, 1], [2, 3]]),
        ("{{0}}", [[0]]),
        ("[2,4]<=[8], use", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}, use", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=1,'c'=2] {'c'}", [[0, 1], [2, 3]]),
    ],
)
def test_replica_groups(text, groups):
    line = f"  %x = f32[8]{{0}} all-gather(%p), channel_id=1, replica_groups={text}, dimensions={{0}}"
    assert replica_groups(line) == groups


@pytest.mark.parametrize("text", ["{}", "mesh['a'=4] {'a':(1)2}", "mesh['a'=4] {'c'}", "<@mesh>"])
def test_replica_groups_of_other_notations_are_no_guess(text):
    with pytest.raises(ValueError, match="no groups of devices in"):
        replica_groups(f"all-reduce(%p), replica_groups={text}, to_apply=%add")


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_replica_groups_of_this_jaxlib(mesh, axis):
    whole = spmd(mesh, PartitionSpec(axis), WHOLE)(lambda x: lax.psum(x, axis))
    hlo = jax.jit(whole).lower(jnp.zeros(2)).compile().as_text()
    (line,) = [line for line in (hlo or "").splitlines() if "replica_groups=" in line]
    assert replica_groups(line) == ([[0, 2], [1, 3]] if axis == "dp" else [[0, 1], [2, 3]])


def test_varying_axes_where_a_type_has_them_itself(monkeypatch):
    """As the types of other JAX versions have."""
    monkeypatch.setattr(jax, "typeof", lambda _: SimpleNamespace(vma=frozenset({"dp"})))
    assert jax_compat.varying_axes(jnp.ones(2)) == {"dp"}


LEVEL, PIECES = "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"


EMITTERS = "--xla_cpu_use_fusion_emitters=false"


@pytest.mark.parametrize(("jaxlib", "more"), [((0, 10, 2), [EMITTERS]), ((0, 11), []), ((0, 11, 0), [])])
def test_compile_cheaply_sets_flags_that_this_jaxlib_knows(monkeypatch, jaxlib, more):
    """XLA ends the process at one that it does not know, so that no process of these tests would start."""
    monkeypatch.setattr("jaxlib.version.__version_info__", jaxlib)
    for given, want in ((None, [LEVEL]), ("--mine=1", ["--mine=1", LEVEL]), (other := f"{LEVEL[:-1]}2", [other])):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        if given is not None:
            monkeypatch.setenv("XLA_FLAGS", given)
        for _ in range(2):
            jax_compat.compile_cheaply()
            assert os.environ["XLA_FLAGS"].split() == [*want, PIECES, *more]


@pytest.mark.parametrize(("once", "level"), [(True, 0), (False, 2)])
def test_this_jaxlib_compiles_with_our_options(monkeypatch, once, level):
    monkeypatch.delenv("XLA_FLAGS")
    assert jax_compat.compiler_options("gpu", once=once) == {}
    monkeypatch.setenv("XLA_FLAGS", f"{PIECES} {EMITTERS}")
    assert jax_compat.compiler_options("cpu", once=once) == {"xla_backend_optimization_level": level}
    monkeypatch.delenv("XLA_FLAGS")
    options = jax_compat.compiler_options("cpu", once=once)
    assert options == jax_compat.compiler_options("cpu") or once  # unless it is said, a program runs often
    assert options["xla_backend_optimization_level"] == level
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_mine"):  # options reach the compiler
        jax.jit(lambda x: x + 1, compiler_options={"xla_mine": 1})(1)


def test_who_this_process_is(monkeypatch):
    from jax._src import distributed

    state = SimpleNamespace(process_id=3, num_processes=5, client=object(), coordinator_address="here:1")
    monkeypatch.setattr(distributed, "global_state", state)
    assert (jax_compat.process_index(), jax_compat.process_count()) == (3, 5)
    assert jax_compat.coordination_client() is state.client
    assert jax_compat.coordinator_address() == "here:1"


def stage(w, x):
    return jnp.tanh((x * jnp.sin(x)) @ w["up"]) @ w["down"]


def test_argument_residuals_can_be_given_again():
    """Residuals that are weights or the input can be NaN if they are replaced: the gradient stays the same."""
    w = {"up": jnp.array([[1.0, 2.0], [3.0, -1.0]]), "down": jnp.array([[0.5, 2.0], [-1.0, 0.25]])}
    x, g = jnp.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), jnp.array([[1.0, -2.0]] * 3)
    shapes, structures = [], []

    @jax.jit
    def forward(w, x):
        _, vjp = jax.vjp(stage, w, x)
        leaves, structure = jax_compat.vjp_residuals(vjp)
        structures.append(structure)
        given = [any(leaf is one for one in (x, *w.values())) for leaf in leaves]
        shapes.append([leaf.shape for leaf, known in zip(leaves, given, strict=True) if known])
        return [leaf * jnp.nan if known else leaf for leaf, known in zip(leaves, given, strict=True)]

    @jax.jit
    def backward(w, x, leaves, g):
        vjp = jax.tree.unflatten(structures[0], leaves)
        jax_compat.replace_argument_residuals(vjp, 0, w)
        jax_compat.replace_argument_residuals(vjp, 1, x)
        return vjp(g)

    grads = backward(w, x, forward(w, x), g)
    assert sorted(shapes[0]) == [(2, 2), (2, 2), (3, 2)]
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.vjp(stage, w, x)[1](g)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_residuals_of_one_argument_are_replaced_alone():
    """Replacing the residuals of either argument leaves those of the other as they are."""
    first, second = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    for position in (0, 1):
        _, vjp = jax.vjp(lambda a, b: a * b, first, second)
        jax_compat.replace_argument_residuals(vjp, position, 10 * (first, second)[position])
        a, b = vjp(jnp.ones(2))
        np.testing.assert_array_equal(a, second * (10 if position == 1 else 1))
        np.testing.assert_array_equal(b, first * (10 if position == 0 else 1))


def test_vjp_residuals():
    """Flattening and rebuilding gives a working function, and the leaves are the arrays it needs."""
    w, x = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    _, vjp = jax.vjp(lambda w, x: w * x, w, x)
    leaves, structure = jax_compat.vjp_residuals(vjp)
    assert sorted(np.asarray(leaf).tolist() for leaf in leaves) == [[2.0, 3.0], [5.0, 7.0]]
    doubled = jax.tree.unflatten(structure, [2 * leaf for leaf in leaves])
    for got, expected in zip(doubled(jnp.ones(2)), (2 * x, 2 * w), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_planned_devices_serve_meshes_and_traces():
    mesh = Mesh(np.array([jax_compat.PlannedDevice(i) for i in range(4096)]).reshape(512, 8), ("a", "b"))
    aval = jax.ShapeDtypeStruct((1024, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a", "b")))
    assert aval.sharding.shard_shape(aval.shape) == (2, 2)
    total = jax.shard_map(
        lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=PartitionSpec("a", "b"), out_specs=PartitionSpec(None, "b")
    )
    assert jax.eval_shape(total, aval).shape == (2, 16)


def test_arrays_are_put_taken_apart_copied_and_joined(mesh):
    """What ``jax.device_put`` and ``jax.make_array_from_single_device_arrays`` do, on the same devices."""
    rows, devices = NamedSharding(mesh, ROWS), list(mesh.devices.flat)
    turned = NamedSharding(Mesh(np.array(devices[::-1]).reshape(mesh.devices.shape), mesh.axis_names), ROWS)
    host = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    put = jax_compat.host_array_on(host, rows)
    assert put.sharding == rows and put.tolist() == host.tolist()
    copy = jax_compat.copy_on(put, turned)
    assert copy.sharding == turned and copy.tolist() == host.tolist() and copy.committed
    apart = jax_compat.shards(put)
    assert [next(iter(shard.devices())) for shard in apart] == list(jax_compat.local_devices(rows)) == devices
    copies = jax_compat.copies_on(apart, devices[::-1])
    assert [next(iter(shard.devices())) for shard in copies] == devices[::-1]
    joined = jax_compat.array_of_shards(host.shape, host.dtype, turned, copies)
    assert joined.sharding == turned and joined.tolist() == host.tolist()
    assert (joined + copy).tolist() == (2 * host).tolist()


def test_manual_axes(mesh):
    seen = []
    names = mesh.axis_names
    jax.shard_map(lambda x: (seen.append(jax_compat.manual_axes()), x)[1], mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)(
        jnp.ones(2)
    )
    assert seen == [names] and jax_compat.manual_axes() == ()


def test_traced_devices(mesh):
    seen = []
    planned = Mesh(
        np.array([jax_compat.PlannedDevice(i, "gpu", "NVIDIA H100") for i in range(4)]).reshape(2, 2), ("dp", "tp")
    )
    for one in (mesh, planned):
        body = jax.shard_map(
            lambda x: (seen.append(jax_compat.traced_devices()), x)[1], mesh=one, in_specs=WHOLE, out_specs=WHOLE
        )
        jax.eval_shape(body, jnp.ones(3))
    own = jax.devices()[0]
    assert seen == [(own.platform, own.device_kind), ("gpu", "NVIDIA H100")]
    assert jax_compat.traced_devices() == seen[0]


@pytest.mark.parametrize(
    ("packed", "causal", "kind"),
    [(False, False, "NO_MASK"), (False, True, "CAUSAL"), (True, False, "PADDING"), (True, True, "PADDING_CAUSAL")],
)
def test_cudnn_programs(packed, causal, kind):
    """Lowered for a GPU, which takes none: the kernels, and what they are told."""
    B, T, H, G, K = 2, 64, 4, 2, 16
    q, k = (jax.ShapeDtypeStruct((B, T, heads, K), jnp.bfloat16) for heads in (H, G))
    runs = (jax.ShapeDtypeStruct((B * 8,), jnp.int32),) * 2 if packed else None

    def both(q, k, v, d_out, runs):
        out, stats = jax_compat.cudnn_forward(q, k, v, runs, causal=causal)
        return stats, jax_compat.cudnn_backward(q, k, v, out, stats, d_out, runs, causal=causal)

    traced = jax.jit(both).trace(q, k, k, q, runs)
    stats, gradients = traced.out_info
    assert stats.shape == (B * 8 if packed else B, H, T) and stats.dtype == jnp.float32
    assert [(one.shape, one.dtype) for one in gradients] == [(one.shape, one.dtype) for one in (q, k, k)]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    ahead, back = (line for line in text.splitlines() if "@__cudnn$fmha" in line)
    assert "fmhaSoftmax(" in ahead and "fmhaSoftmaxBackward(" in back
    for line in (ahead, back):
        assert (
            f"\\22mask_type\\22: \\22{kind}\\22" in line and f"\\22max_seg_per_batch\\22: {8 if packed else 1}," in line
        )
        assert f"\\22fmha_scale\\22: {K**-0.5}" in line and "\\22sliding_window_length\\22: 0" in line
        assert line.count("tensor<2x8xi32>") == (2 if packed else 0)  # lengths of queries and keys
        assert line.count("tensor<2x9xi32>") == (2 if packed else 0)  # offsets


def test_cudnn_offsets_are_in_numbers_of_each_array():
    runs = jnp.asarray([0, 5, 8, 16]), jnp.asarray([5, 3, 8, 0])
    q, k = jnp.ones((2, 8, 4, 16), jnp.bfloat16), jnp.ones((2, 8, 2, 16), jnp.bfloat16)
    operands, _ = jax_compat._cudnn_call(q, k, runs, causal=True, window=0)
    _, lengths, _, offsets, key_offsets, *_ = operands
    assert lengths.tolist() == [[5, 3], [8, 0]]
    assert offsets.reshape(-1).tolist() == [64 * at for at in (0, 5, 8, 16, 16, 16)]
    assert key_offsets.reshape(-1).tolist() == [32 * at for at in (0, 5, 8, 16, 16, 16)]


def test_cudnn_window():
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
    run = jax.jit(lambda q, k, v: jax_compat.cudnn_forward(q, k, v, causal=True, window=8))
    text = run.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "\\22sliding_window_length\\22: 8" in text


def test_cudnn_in_a_program_of_modules_with_different_meshes():
    automatic = (jax.sharding.AxisType.Auto,) * 2
    meshes = [jax.make_mesh(shape, ("dp", "tp"), axis_types=automatic) for shape in ((4, 1), (2, 2))]
    x = jax.ShapeDtypeStruct((4, 64, 2, 16), jnp.bfloat16)

    def attend(x):
        for mesh in meshes:
            run = jax.shard_map(
                lambda q: jax_compat.cudnn_forward(q, q, q, causal=True)[0],
                mesh=mesh,
                in_specs=PartitionSpec("dp", None, "tp"),
                out_specs=PartitionSpec("dp", None, "tp"),
            )
            x = jax.lax.with_sharding_constraint(run(x), NamedSharding(mesh, PartitionSpec("dp", None, "tp")))
        return x

    text = jax.jit(attend).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 2
