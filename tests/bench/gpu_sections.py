"""Sections of `bench gpu` that end in every way there is; they import no JAX."""

from __future__ import annotations

import os
import signal
import time

from mmjax.bench.gpu.job import Job


def machine(job: Job) -> None:
    job.note(platform="gpu", device="a card", memory_gib=80.0, packages={"jax": "0"})


def cpu(job: Job) -> None:
    job.note(platform="cpu", device="cpu")


def right(job: Job) -> None:
    job.note(seconds_of_a_step=0.123456789, nothing=float("nan"))
    job.check("values", True)


def wrong(job: Job) -> None:
    job.check("values", True)
    job.check("gradients", False)


def fails(job: Job) -> None:
    job.note(before=1)
    raise RuntimeError("out of memory\nand a long tail")


def dies(job: Job) -> None:
    job.note(before=2)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(job: Job) -> None:
    job.note(before=3)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
