"""Leaves in the form in which one of several processes gives them to Orbax.

Orbax refuses an array that one process owns whole, since it takes it for a copy that every process has; and it looks at
the first shard of every array, which some processes do not have. `LocalShards` solve both, and are written as the array
that they stand for: each process writes the shards that it owns, and the format does not depend on who writes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mmjax import jax_compat

BARRIERS = "all"
"""The prefix of the names of the barriers in which all processes meet."""


class LocalShards:
    """An array as one process has it: the shards here."""

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


def local_shards(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The leaves as Orbax takes them: their local shards where there are several processes."""
    if jax_compat.process_count() == 1:
        return dict(leaves)
    return {name: LocalShards(leaf) for name, leaf in leaves.items()}


def state_handler(rounds: Callable[[int, str], str] | None) -> type[Any]:
    """Orbax's handler of trees, which takes local shards too where there are several processes.

    Args:
      rounds: lets the processes of a write tell each other of problems (see `storage.WriteRounds`).
    """
    plain = ocp.handlers.PyTreeHandler
    if jax_compat.process_count() == 1:
        return plain
    members: dict[str, Any] = {"rounds": staticmethod(rounds)} if rounds else {}
    # The checkpoint names who wrote it, and whoever reads it knows Orbax's handler alone.
    members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (_handler_of_shards(),), members)


@functools.cache
def _handler_of_shards() -> type[Any]:
    # Orbax documents handlers of leaves, and keeps them in a private place: a run of one process does without.
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayLeafHandler
    from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry

    plain: Any = ocp.handlers.PyTreeHandler
    handler: Any = type("_ShardsHandler", (ArrayLeafHandler,), {})  # its own, for another type
    nothing = type("_AbstractShards", (), {})  # nothing is restored as local shards
    leaves = StandardLeafHandlerRegistry()
    leaves.add(LocalShards, nothing, handler, secondary_typestrs=["jax.Array"])

    class Handler(plain):
        rounds: Callable[[int, str], str]

        def __init__(self, **options: Any):
            super().__init__(leaf_handler_registry=leaves, **options)

        def is_handleable(self, checkpointable: Any) -> bool:
            return True

        async def _background_save(self, directory: Any, *, commit_futures: Sequence[Any], **_: Any) -> None:
            """Orbax's own, with rounds in place of its barriers, where others would wait for a process that failed."""
            folder = await directory.await_creation()
            await self._together(0, *[asyncio.to_thread(future.result) for future in commit_futures])
            await self._together(1, self._finalize(folder))

        async def _together(self, number: int, *work: Awaitable[Any]) -> None:
            found = await asyncio.gather(*work, return_exceptions=True)
            own = next((error for error in found if isinstance(error, BaseException)), None)
            if joint := await asyncio.to_thread(self.rounds, number, cause(own) if own else ""):
                raise RuntimeError(joint) from own

    if "_background_save" not in vars(plain) or "_finalize" not in vars(plain):
        raise RuntimeError("this version of Orbax finishes a save in another way: install the one that mmjax asks for")
    return Handler


def attend_commit(response: Any) -> None:
    """Waits in Orbax's last barrier of a write in place of the write itself, which failed before it got there."""
    from orbax.checkpoint.experimental.v1._src.synchronization import multihost

    key = multihost.unique_barrier_key("save_checkpointables_async:finalize", prefix=BARRIERS)
    everybody = set(range(jax_compat.process_count()))
    asyncio.run(multihost.sync_global_processes(key, operation_id=response._operation_id, processes=everybody))


def cause(error: BaseException) -> str:
    """Type and first line of the error at the bottom of the chain; Orbax wraps it several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
