"""The stream of a run's batches, wherever they are prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from mmjax.data.batch_spec import BatchSpec
from mmjax.data.config import DataConfig
from mmjax.data.loader import StepLoader, StepMaker
from mmjax.data.service.addresses import read_addresses, read_token, read_trusted
from mmjax.data.types import StepBatch


class Batches(Protocol):
    """Iterator over the batches of consecutive steps. Close it, or use it in a `with` block.

    origin: who made the last one, the address of a server or "local".
    """

    origin: str

    def __next__(self) -> StepBatch: ...

    def __iter__(self) -> Iterator[StepBatch]: ...

    def interrupt(self) -> None:
        """Ends a `next` that waits in another thread for a server: it raises StopIteration.

        Harmless where batches are made locally: such a `next` ends with its batch.
        """
        ...

    def close(self) -> None:
        """Ends all processes and requests."""
        ...

    def __enter__(self) -> Batches: ...

    def __exit__(self, *_: object) -> None: ...


def require_access(data: DataConfig) -> None:
    """Raises ConfigError unless the files for access to `Data.servers` can be read: list, token, certificates.

    Checks nothing if `Data.servers` is empty.
    """
    if data.servers:
        read_addresses(data.servers)
        read_token("Data.token_file", data.token_file)
        read_trusted(data.tls_ca)


def open_batches(
    spec: BatchSpec, maker: StepMaker, *, steps: int, start_step: int, report: Callable[[str], None]
) -> Batches:
    """An iterator over the batches of steps start_step … steps-1, from `Data.servers` if there are any, else made here.

    Each item is a `StepBatch`, in order. Close it, or use it in a `with` block.

    Args:
      spec: all that batches depend on, as `planned_batch_spec(recipe)` gives it.
      maker: `spec.maker()` with the rows of this process; it also names the rows that are requested of servers.
      steps: the number of the last step, plus 1.
      start_step: the number of the first step, from 0.
      report: receives one-line messages, from any thread, such as `print`.

    Raises:
      ConfigError: a token, certificate or list cannot be read, or every server refuses this run.
    """
    if spec.data.settings.servers:
        # Arrow is loaded only where there are servers.
        from mmjax.data.service.loader import ServedLoader

        return ServedLoader(spec, maker, steps=steps, start_step=start_step, report=report)
    workers, prefetch = spec.data.settings.workers, spec.data.settings.prefetch
    return StepLoader(maker, steps=steps, start_step=start_step, workers=workers, prefetch=prefetch, report=report)
