"""Compiles programs ahead of the first step, several at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from mmjax.mesh.processes import gather_texts
from mmjax.mesh.spmd import Program


def compile_all(
    programs: Sequence[Program], report: Callable[[int, int, str], None] | None = None, workers: int = 0
) -> None:
    """Traces programs one after another and compiles them in parallel; returns when all processes are done.

    Each process waits for the others: a process that is still compiling would make them wait in a collective, which
    times out after half a minute.

    Args:
      programs: programs of this process to compile, which may repeat; compiled ones are skipped.
      report: called with (done, total, name of the program just finished), where done counts from 1.
      workers: number of threads; 0 means one per core, at most eight.
    """
    unique = list({id(program): program for program in programs}.values())
    workers = workers or min(8, os.cpu_count() or 1)
    numbers = itertools.count(1)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
    pending: dict[Future[None], Program] = {}

    def collect(seconds: float | None) -> None:
        """Reports finished programs; waits at most ``seconds`` for the first one."""
        finished, _ = wait(pending, seconds, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
            program = pending.pop(future)
            if report:
                report(next(numbers), len(unique), program.name)

    try:
        for program in unique:
            program.lower()
            pending[pool.submit(program.compile)] = program
            collect(0)
        while pending:
            collect(None)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    gather_texts("compiled")
