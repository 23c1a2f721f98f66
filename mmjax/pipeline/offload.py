"""Offload: keeps arrays in pinned host memory while a stage's programs do not read them.

Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", appendix D: encoder parameters
leave the devices after a window's encoder forward and return before its backward; optimizer state may do the same.
Copies are dispatched at their op and return at once. Only one copy of an array exists: its owner drops the original.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mmjax.configurable import ConfigError
from mmjax.jax_compat import PlannedDevice

DEVICE, HOST = "device", "pinned_host"
"""JAX's names of the two kinds of memory."""


def moved(tree: Any, kind: str) -> Any:
    """The arrays of a tree in one kind of memory of their devices, `DEVICE` ("device") or `HOST` ("pinned_host").

    They are copies, or the arrays themselves if they are already there. Copies shard by shard: every process copies its
    own shards, and none waits for another.
    """
    return jax.tree.map(lambda x: x if x.sharding.memory_kind == kind else _copied(x, kind), tree)


def in_memory(avals: Any, kind: str) -> Any:
    """``ShapeDtypeStruct`` with shardings in one kind of memory, ``DEVICE`` or ``HOST``, from those of a tree."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(kind)), avals
    )


def _copied(x: jax.Array, kind: str) -> jax.Array:
    shards = x.addressable_shards
    targets = [SingleDeviceSharding(shard.device, memory_kind=kind) for shard in shards]
    copies = jax.device_put([shard.data for shard in shards], targets)
    sharding = x.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, copies, dtype=x.dtype)


def replaced(tree: Any, before: Any, after: Any) -> Any:
    """The tree with each array that is in ``before`` replaced by its counterpart in ``after``.

    Arrays are in ``before`` if they are the same objects; ``after`` has its structure.
    """
    new = {id(x): y for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)}
    return jax.tree.map(lambda x: new.get(id(x), x), tree)


def require_host_memory(field: str, devices: Iterable[Any]) -> None:
    """Checks that this process's devices have pinned host memory; planned devices are not checked.

    Args:
      field: the setting that needs it, such as "vision/Offload.parameters", for the message.
      devices: devices of any process.

    Raises:
      ConfigError: a device has no pinned host memory.
    """
    real_devices = [device for device in devices if not isinstance(device, PlannedDevice)]
    for device in (device for device in real_devices if device.process_index == jax.process_index()):
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            have = ", ".join(kinds) or "none"
            raise ConfigError(
                f"{field}=True: {device.platform} devices have no {HOST} memory ({have}); set it to False"
            )
