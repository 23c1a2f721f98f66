"""A pool of processes that make batches of any steps on request, and hand them over without a copy.

A worker makes a memory file, writes a batch's arrays into it and passes it on; the serving process maps it. A worker
that dies is replaced once, and its step is given to the new one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mmjax.data import worker
from mmjax.data.batch_shape import place_arrays
from mmjax.data.loader import StepMaker, steps_of
from mmjax.data.process_rows import ProcessRows
from mmjax.data.service.encoding import fill
from mmjax.data.service.protocol import read_shard, write_shard


@dataclass(frozen=True, kw_only=True)
class MadeBatch:
    """A batch ready to be sent.

    Attributes:
      header: its header, see `encoding`.
      block: the bytes of its arrays.
      seconds: the time that it took to make, in seconds.
    """

    header: bytes
    block: np.ndarray
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of header and block together."""
        return len(self.header) + self.block.nbytes


class BatchError(RuntimeError):
    """A step's batch cannot be made; asking again will not help."""


_Task = tuple[int, ProcessRows | None, Future[MadeBatch]]


class Pool:
    """Makes batches of steps in processes that never import JAX. Close it, or use it in a `with` block.

    Args:
      maker: makes the batches; it is pickled.
      workers: number of processes.
    """

    def __init__(self, maker: StepMaker, workers: int):
        worker.become_main_of_workers()
        self._maker, self._tasks, self._closed = maker, queue.SimpleQueue[_Task | None](), False
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"pool-{number}", daemon=True)
            for number in range(workers)
        ]
        self._processes: dict[int, Any] = {}
        self._lock = threading.Lock()
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, step: int, process_rows: ProcessRows | None = None) -> Future[MadeBatch]:
        """Requests the batch of `step` in `process_rows` (all by default), and returns a future of it.

        The future raises BatchError if the batch cannot be made, and CancelledError if the pool is closed. If it is
        cancelled before a worker takes the step, the batch is not made.
        """
        future: Future[MadeBatch] = Future()
        if self._closed:
            future.cancel()
        else:
            self._tasks.put((step, process_rows, future))
        return future

    def close(self) -> None:
        """Kills the processes; batches that are not made are cancelled."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        with self._lock:
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()
        while not self._tasks.empty():
            if task := self._tasks.get():
                task[-1].cancel()

    def _run(self, number: int) -> None:
        process, connection = self._start(number)
        while not self._closed and (task := self._tasks.get()) is not None:
            step, process_rows, future = task
            if not future.set_running_or_notify_cancel():
                continue
            failure = None
            for _ in range(2):
                try:
                    future.set_result(_ask(connection, step, process_rows))
                except BatchError as error:
                    failure = error
                except (EOFError, OSError):  # the process is gone
                    connection.close()
                    process.join()
                    failure = BatchError(f"step {step}: the worker that made it has ended (status {process.exitcode})")
                    process, connection = self._start(number)
                    continue
                break
            if not future.done():
                future.set_exception(failure or BatchError(f"step {step}: not made"))
        connection.close()
        process.kill()
        process.join()

    def _start(self, number: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("spawn")
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=_work, args=(child_end, self._maker), name=f"{worker.POOL_PROCESS}-{number}", daemon=True
        )
        with self._lock:
            process.start()
            self._processes[number] = process
            if self._closed:
                process.kill()
        child_end.close()
        return process, parent_end


def _ask(connection: Connection, step: int, process_rows: ProcessRows | None) -> MadeBatch:
    connection.send_bytes(json.dumps([step, write_shard(process_rows)]).encode())
    answer = json.loads(connection.recv_bytes())
    if "error" in answer:
        raise BatchError(f"step {step}: {answer['error']}")
    header = connection.recv_bytes()
    file = reduction.recv_handle(connection)
    try:
        block = np.empty(0, np.uint8)
        if answer["size"]:
            block = np.frombuffer(mmap.mmap(file, answer["size"], access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(file)
    return MadeBatch(header=header, block=block, seconds=answer["seconds"])


def _work(connection: Connection, maker: StepMaker) -> None:
    """Runs a worker: receives steps and sends their batches, until the other end is closed."""
    worker.prepare(0, 1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(EOFError, OSError):
        while True:
            (step, shard), begin = json.loads(connection.recv_bytes()), time.perf_counter()
            try:
                file, header, size = _make(steps_of(replace(maker, process_rows=read_shard(shard, maker.packer)))[step])
            except Exception as error:  # an error of a source concerns only this step
                text = " ".join(str(error).split()) or "no message"
                connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {text}"[:2000]}).encode())
                continue
            try:
                answer = {"size": size, "seconds": time.perf_counter() - begin}
                connection.send_bytes(json.dumps(answer).encode())
                connection.send_bytes(header)
                reduction.send_handle(connection, file, parent.pid)
            finally:
                os.close(file)


def _make(batch: Any) -> tuple[int, bytes, int]:
    """A memory file that holds the batch's block, its header and its size."""
    offsets = place_arrays(batch)
    file = _memory_file()
    try:
        if not offsets.size:
            return file, fill(offsets, memoryview(b"")), 0
        os.posix_fallocate(file, 0, offsets.size)  # full memory is an error here, and not a signal later
        with mmap.mmap(file, offsets.size) as block:
            header = fill(offsets, block)
    except BaseException:
        os.close(file)
        raise
    return file, header, offsets.size


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmjax-batch")
    with tempfile.TemporaryFile() as file:  # gone with its last user, too
        return os.dup(file.fileno())
