"""Wraps leaves so that Orbax writes them from several processes.

Orbax refuses an array of which one process owns all shards, because it takes it for a copy that every process has. It
also reads the first shard of every array, which some processes do not have. `LocalShards` solve both. They are written
like the array: each process writes the shards that it owns, and the format does not depend on the processes.
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
"""The prefix of the names of the barriers of all processes."""


class LocalShards:
    """An array's shards on the devices of this process."""

    is_fully_addressable = False

    def __init__(self, array: jax.Array):
        self._array = array
        self.addressable_shards = array.addressable_shards or [_NoShard(array)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _NoShard:
    """A placeholder for shards of other processes: it has a shape, and is not written."""

    replica_id = -1

    def __init__(self, array: jax.Array):
        shape = array.sharding.shard_shape(array.shape)
        self.data = np.broadcast_to(np.zeros((), array.dtype), shape)
        self.index = tuple(slice(0, size) for size in shape)


def local_shards(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The leaves by name, such as "params/llm/embed", in a form that Orbax takes.

    In one process they are the arrays themselves, in several `LocalShards` of them.
    """
    if jax_compat.process_count() == 1:
        return dict(leaves)
    return {name: LocalShards(leaf) for name, leaf in leaves.items()}


def state_handler(rounds: Callable[[int, str], str] | None) -> type[Any]:
    """The class of Orbax's handler of trees; with several processes it takes `LocalShards` too.

    Args:
      rounds: exchanges problems among the processes of a write: takes a round's number and this process's problem or
        "", and returns the first problem of any or "", as a `storage.WriteRounds` does; `None` to read only.
    """
    plain = ocp.handlers.PyTreeHandler
    if jax_compat.process_count() == 1:
        return plain
    members: dict[str, Any] = {"rounds": staticmethod(rounds)} if rounds else {}
    # The checkpoint names its handler, and readers of it know only Orbax's own.
    members |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (_shards_handler(),), members)


@functools.cache
def _shards_handler() -> type[Any]:
    # Orbax documents handlers of leaves, but their modules are private: a run of one process does not import them.
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayLeafHandler
    from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry

    plain: Any = ocp.handlers.PyTreeHandler
    handler: Any = type(
        "_ShardsHandler", (ArrayLeafHandler,), {}
    )  # a class of its own, because it is registered for another type
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
            """Orbax's method, with rounds instead of barriers, in which others would wait for a failed process."""
            folder = await directory.await_creation()
            await self._together(0, *[asyncio.to_thread(future.result) for future in commit_futures])
            await self._together(1, self._finalize(folder))

        async def _together(self, number: int, *work: Awaitable[Any]) -> None:
            results = await asyncio.gather(*work, return_exceptions=True)
            error = next((result for result in results if isinstance(result, BaseException)), None)
            if problem := await asyncio.to_thread(self.rounds, number, cause(error) if error else ""):
                raise RuntimeError(problem) from error

    if "_background_save" not in vars(plain) or "_finalize" not in vars(plain):
        raise RuntimeError("this version of Orbax finishes a save in another way: install the one that mmjax asks for")
    return Handler


def attend_commit(response: Any) -> None:
    """Waits in Orbax's last barrier of a write, for a write that has failed before that barrier.

    `response` is the result of `ocp.save_checkpointables_async` for this write.
    """
    from orbax.checkpoint.experimental.v1._src.synchronization import multihost

    key = multihost.unique_barrier_key("save_checkpointables_async:finalize", prefix=BARRIERS)
    everybody = set(range(jax_compat.process_count()))
    asyncio.run(multihost.sync_global_processes(key, operation_id=response._operation_id, processes=everybody))


def cause(error: BaseException) -> str:
    """Type and first line of the original error, such as "OSError: No space left", or the type alone if it has no text.

    `error` may be wrapped several times, as Orbax does: `__cause__` and `__context__` are followed to the first.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
