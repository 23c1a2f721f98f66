"""With ``jaxprs`` the only file that relies on JAX beyond its public, stable API. Tested against jax 0.10 and 0.11.

Everything here has a test in ``tests/test_jax_compat.py`` that fails when JAX changes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.array import ArrayImpl
from jax._src.interpreters import pxla
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client


def backends_are_initialized() -> bool:
    """Whether JAX has started a backend, after which device counts and thread pools are fixed."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def compiler_options(platform: str, *, once: bool = False) -> dict[str, Any]:
    """``compiler_options`` for ``jax.jit``: CPU programs compile in a third to a half of the time and run as fast.

    Measured on the digits: LLVM's level 3 gains nothing over level 2, fusion emitters cost a tenth of a step, and a
    program that is compiled in pieces takes longer, since others are compiled beside it. Options that XLA_FLAGS sets
    are left out.

    Args:
      platform: platform of the devices that run the program, such as "cpu" or "gpu".
      once: whether the program runs only once, so that compiling it takes longer than running it.

    Returns:
      Values by the option's name, such as "xla_backend_optimization_level"; {} for other platforms than "cpu".
    """
    if platform != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 0 if once else 2, "xla_cpu_parallel_codegen_split_count": 1}
    if jaxlib.version.__version_info__ < (0, 11):  # newer XLA does not know the option, and refuses the program
        options["xla_cpu_use_fusion_emitters"] = False
    xla_flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in xla_flags}


def compile_cheaply() -> None:
    """Makes XLA compile every CPU program as if it ran only once. Must be called before a backend is started.

    Arithmetic stays IEEE fp32. Flags in XLA_FLAGS are kept. Only flags that this jaxlib knows are added, because XLA
    ends the process at an unknown one.
    """
    flags = [f"--{name}={str(value).lower()}" for name, value in compiler_options("cpu", once=True).items()]
    os.environ["XLA_FLAGS"] = " ".join((*os.environ.get("XLA_FLAGS", "").split(), *flags))


def process_index() -> int:
    """Index of this process in the run, from 0; starts no backend."""
    return _distributed().process_id


def process_count() -> int:
    """Number of processes in the run, 1 before ``jax.distributed.initialize``; starts no backend."""
    return _distributed().num_processes


def coordination_client() -> Any:
    """Client of JAX's coordination service: keys, values and barriers that all processes share.

    ``None`` before ``jax.distributed.initialize``.
    """
    return _distributed().client


def coordinator_address() -> str:
    """The coordinator's ``host:port``, after ``jax.distributed.initialize``.

    It is such as "localhost:9876".
    """
    return _distributed().coordinator_address


def transfer_server(host: str) -> Any:
    """A server from which other processes pull this process's arrays (``jax.experimental.transfer``).

    ``host`` is the IP address of this host that it listens at, on ports that are free.
    """
    from jax.experimental import transfer

    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    client = jax.local_devices()[0].client
    # Without an address for the bytes the server ends the process at the first large array (jaxlib 0.10).
    return transfer.start_transfer_server(client, address, [address])


def _distributed() -> Any:
    from jax._src import distributed

    return distributed.global_state


@dataclass(frozen=True)
class PlannedDevice:
    """A placeholder for a device that this process does not have, for meshes, shardings and traces but not programs.

    With a mesh of these, one process plans for more devices than it has. JAX reads the attributes to make a mesh and to
    trace; ``id`` is the rank.
    """

    id: int
    platform: str = "cpu"
    device_kind: str = "planned"
    process_index: int = 0
    client: Any = None


def host_array_on(array: np.ndarray, sharding: Any) -> jax.Array:
    """A host array with this sharding over devices of this process: ``jax.device_put`` in a quarter of its host time.

    The array is not copied where the device can read it, so it must not change; its dtype has at most 32 bits.
    """
    indices = sharding.addressable_devices_indices_map(array.shape)
    aval = _aval(array.shape, array.dtype)
    return pxla.batched_device_put(aval, sharding, [array[index] for index in indices.values()], list(indices))


def copies_on(arrays: Sequence[jax.Array], devices: Sequence[Any]) -> list[jax.Array]:
    """Copies of arrays that are each on one device, on these devices: ``jax.device_put`` in a fifth of its host time.

    An array that is on its device already is returned itself. All devices belong to this process.
    """
    shardings = [_on_device(device) for device in devices]
    lists = [sharding._internal_device_list for sharding in shardings]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)
    return xla_client.batched_copy_array_to_devices_with_sharding(list(arrays), lists, shardings, reuse)


def copy_on(array: jax.Array, sharding: Any) -> jax.Array:
    """A copy of an array, shard by shard on the devices of another sharding, whose shards have the same shape.

    It takes a third of the host's time that its shards one by one take. All devices belong to this process.
    """
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    return copy([array], [sharding._internal_device_list], [sharding], [xla_client.ArrayCopySemantics.REUSE_INPUT])[0]


def shards(array: jax.Array) -> Sequence[jax.Array]:
    """This process's shards of an array, as separate arrays, in the order of its ``local_devices``."""
    assert isinstance(array, ArrayImpl)
    return array._arrays


def shards_by_device(array: jax.Array) -> dict[Any, jax.Array]:
    """This process's shards of an array, as separate arrays, by device; {} if it has none."""
    return dict(zip(local_devices(array.sharding), shards(array), strict=True))


def local_devices(sharding: Any) -> tuple[Any, ...]:
    """This process's devices of a sharding, in the order of ranks."""
    return sharding._addressable_device_assignment


def array_of_shards(shape: tuple[int, ...], dtype: Any, sharding: Any, shards: Sequence[jax.Array]) -> jax.Array:
    """The array with these shards, without a copy and without checks.

    Like ``jax.make_array_from_single_device_arrays``, in a quarter of its host time.

    Args:
      shape, dtype, sharding: global shape, dtype and sharding of the array.
      shards: the shard of each of the ``local_devices`` of the sharding.
    """
    arrays: Any = shards
    return ArrayImpl(_aval(shape, dtype), sharding, arrays, committed=True, _skip_checks=True)


@lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: Any) -> Any:
    return ShapedArray(shape, dtype)


@cache
def _on_device(device: Any) -> Any:
    return SingleDeviceSharding(device)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which a value inside ``shard_map`` may differ from device to device."""
    aval = jax.typeof(x)
    manual = getattr(aval, "mat", None)
    return frozenset(manual.varying if manual is not None else aval.vma)


def manual_axes() -> tuple[str, ...]:
    """The axes of the mesh whose ``shard_map`` is being traced, such as ("dp", "tp"); () outside."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def device_kind(device: Any) -> tuple[str, str]:
    """Platform and kind of a device, or of a placeholder: ("gpu", "NVIDIA H100 80GB HBM3")."""
    return device.platform, device.device_kind


def traced_devices() -> tuple[str, str]:
    """Platform and kind of the devices of the ``shard_map`` that is being traced, or of the default ones outside.

    They are as ``jax.Device`` names them, such as ("gpu", "NVIDIA H100 80GB HBM3").
    """
    return device_kind(jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0])


def to_varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """A value ``x`` in ``shard_map``, typed as varying over ``axes``, such as ("dp",), too; its cotangent is not summed
    over them.
    """
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying")


def tree_to_varying(tree: Any, axes: Sequence[str]) -> Any:
    """The tree with ``to_varying`` applied to every leaf, an array."""
    return jax.tree.map(lambda x: to_varying(x, axes), tree)


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, typed as varying over all axes that any of them varies over: sums over axes are JAX's own then."""
    return tree_to_varying(arrays, sorted(frozenset[str]().union(*map(varying_axes, arrays))))


def varying_struct(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that may differ from device to device over mesh axes, such as {"dp"}."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def all_gather_invariant(x: jax.Array, axes: Sequence[str], dimension: int) -> jax.Array:
    """All-gathers the local shards ``x`` along ``dimension``; the result is typed as equal on all ranks of ``axes``.

    Must be called inside ``shard_map``. Each shard's size in this dimension is multiplied by the number of ranks.
    """
    return lax.all_gather(x, tuple(axes), axis=dimension, tiled=True, to="invarying")


def vjp_residuals(vjp: Callable[..., Any]) -> tuple[list[Any], Any]:
    """Flattens the function that ``jax.vjp`` returned inside a trace into its residual arrays and their structure.

    ``jax.tree.unflatten(structure, residuals)`` makes the function again.
    """
    return jax.tree.flatten(vjp)


def replace_argument_residuals(vjp: Any, position: int, value: Any) -> None:
    """Sets the residual that is positional argument ``position`` of the differentiated function to ``value``, in place.

    ``vjp`` is the function that ``jax.vjp`` returned; ``value`` has the structure of the argument.
    """
    vjp.args_res[position] = value


Runs = tuple[jax.Array, jax.Array]
"""First token and length of each run (contiguous tokens of one segment), integers ``[runs]``.

Tokens are numbered through all rows.
"""


def cudnn_forward(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, runs: Runs | None = None, *, causal: bool, window: int = 0
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's attention among the tokens of a row, or of a run, with the softmax statistics for its backward.

    The public function takes no runs, and returns neither the statistics nor names for checkpoint policies. This calls
    the kernel directly, because ``jax._src.cudnn``'s own code for runs read wrong keys if G < H (jax pull request
    39521).

    Args:
      q_BTHK, k_BTGK, v_BTGK: queries with H heads, and keys and values with G, in bf16 or fp16; G divides H.
      runs: (first token, length) of all runs of the rows, as ``kernels.segment_runs`` gives them, padded with runs of
        length 0 to a multiple of B; ``None`` if each row is one run.
      causal: whether a token sees no later ones.
      window: tokens that a token sees under a causal mask, itself included; 0 means all.

    Returns:
      The output ``[B, T, H, K]`` in the dtype of the queries, and the logarithm of each softmax's denominator in fp32:
      ``[B, H, T]``, or with N runs ``[N, H, T]``.
    """
    kernels = _cudnn()
    operands, settings = _cudnn_call(q_BTHK, k_BTGK, runs, causal=causal, window=window)
    arrays = (q_BTHK, k_BTGK, v_BTGK, *operands)
    out, stats = kernels._dot_product_attention_fwd_p.bind(*arrays, **settings, is_training=True)
    return out, stats


def cudnn_backward(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    out_BTHK: jax.Array,
    stats: jax.Array,
    d_out_BTHK: jax.Array,
    runs: Runs | None = None,
    *,
    causal: bool,
    window: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, in their shapes and dtypes.

    Args:
      q_BTHK, k_BTGK, v_BTGK: queries with H heads, and keys and values with G, in bf16 or fp16; G divides H.
      out_BTHK, stats: the results of ``cudnn_forward``, the output and the statistics of the softmax.
      d_out_BTHK: the gradient of the output.
      runs: (first token, length) of all runs of the rows, as ``cudnn_forward`` has taken; ``None`` if each row is one
        run.
      causal: whether a token sees no later ones.
      window: tokens that a token sees under a causal mask, itself included; 0 means all.
    """
    kernels = _cudnn()
    operands, settings = _cudnn_call(q_BTHK, k_BTGK, runs, causal=causal, window=window)
    arrays = (q_BTHK, k_BTGK, v_BTGK, *operands, stats, out_BTHK, d_out_BTHK)
    dq, dk, dv = kernels._dot_product_attention_bwd_p.bind(*arrays, **settings)
    return dq, dk, dv


@cache
def _cudnn() -> Any:
    """JAX's module of cuDNN's attention.

    JAX lowers it only in programs whose shardings are all over one mesh. Modules with different layouts that share one
    program have several, and inside ``shard_map`` the kernel needs none.
    """
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    demanding = dispatch.prim_requires_devices_during_lowering
    demanding -= {kernels._dot_product_attention_fwd_p, kernels._dot_product_attention_bwd_p}
    return kernels


def _cudnn_call(
    q_BTHK: jax.Array, k_BTGK: jax.Array, runs: Runs | None, *, causal: bool, window: int
) -> tuple[list[jax.Array], dict[str, Any]]:
    """A kernel's operands after queries, keys and values (bias, lengths, offsets, pages), and its parameters."""
    (B, T, H, K), G, masks = q_BTHK.shape, k_BTGK.shape[2], _cudnn().MaskType
    none = to_varying(jnp.zeros(0, q_BTHK.dtype), sorted(varying_axes(q_BTHK)))
    lengths, offsets, kind = [none, none], [none, none], masks.CAUSAL if causal else masks.NO_MASK
    if runs:
        first_N, length_N = runs
        kind = masks.PADDING_CAUSAL if causal else masks.PADDING
        end_B = jnp.full_like(first_N[:B], B * T)  # cuDNN wants an offset for each run, and at least one more
        lengths = [length_N.reshape(B, -1)] * 2
        # Offsets count numbers, not tokens: a token's queries have H heads of K numbers, its keys G heads.
        offsets = [(jnp.concatenate([first_N, end_B]) * heads * K).reshape(B, -1) for heads in (H, G)]
    settings = {"scale": K**-0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False)}
    settings |= {"mask_type": kind, "layout": _cudnn().AttentionLayout.BTNH.value}
    return [none, *lengths, *offsets, none, none], settings | {"sliding_window_length": window or None}
