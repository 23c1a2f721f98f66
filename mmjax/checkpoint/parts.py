"""Leaves as one of several processes gives them to Orbax.

Orbax takes an array that one process owns whole for a copy that every process has, and refuses it; and it looks at the
first shard of every array, which a process without any does not have. A `Part` answers both, and is written as the
array that it stands for: each process writes the shards that it owns, in one format whoever writes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mmjax import jax_compat


class Part:
    """This process's part of an array."""

    is_fully_addressable = False

    def __init__(self, array: jax.Array):
        self._array = array
        self.addressable_shards = array.addressable_shards or [_Elsewhere(array)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _Elsewhere:
    """Stands for the shards that other processes have: a shape, and no replica that is written."""

    replica_id = -1

    def __init__(self, array: jax.Array):
        shape = array.sharding.shard_shape(array.shape)
        self.data = np.broadcast_to(np.zeros((), array.dtype), shape)
        self.index = tuple(slice(0, size) for size in shape)


def owned_parts(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The leaves as Orbax takes them: parts where there are several processes."""
    if jax_compat.process_count() == 1:
        return dict(leaves)
    return {name: Part(leaf) for name, leaf in leaves.items()}


def state_handler() -> type[Any]:
    """Orbax's handler of trees, which takes parts too where there are several processes."""
    return ocp.handlers.PyTreeHandler if jax_compat.process_count() == 1 else _handler_of_parts()


@functools.cache
def _handler_of_parts() -> type[Any]:
    # Orbax documents handlers of leaves, and keeps them in a private place: a run of one process does without.
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayLeafHandler
    from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry

    plain: Any = ocp.handlers.PyTreeHandler
    handler: Any = type("_PartHandler", (ArrayLeafHandler,), {})  # its own, for another type
    nothing = type("_AbstractPart", (), {})  # nothing is restored as a part
    leaves = StandardLeafHandlerRegistry()
    leaves.add(Part, nothing, handler, secondary_typestrs=["jax.Array"])

    class Handler(plain):
        def __init__(self, **options: Any):
            super().__init__(leaf_handler_registry=leaves, **options)

        def is_handleable(self, checkpointable: Any) -> bool:
            return True

    # The checkpoint names who wrote it, and whoever reads it knows Orbax's handler alone.
    Handler.__module__, Handler.__qualname__ = plain.__module__, plain.__qualname__
    return Handler
