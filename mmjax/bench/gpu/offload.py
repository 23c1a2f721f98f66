"""Pinned host memory: arrays there and back, and training with the optimizer offloaded; both bit for bit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.kept import kept
from mmjax.bench.gpu.parity import session
from mmjax.config import config_of_values
from mmjax.parity.compare import Run
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.offload import DEVICE, HOST, moved, require_host_memory
from mmjax.recipe import Recipe

DTYPES = ("float32", "bfloat16", "int32")


def run(job: Job) -> None:
    """Copies arrays, then trains with the optimizer offloaded and without.

    Notes rates of copies and losses, and checks that arrays and states are equal bit for bit.

    Raises:
      ConfigError: the device has no pinned host memory.
    """
    require_host_memory("Offload.optimizer", jax.devices()[:1])
    size = 1 << (16 if job.small else 28)
    rates: dict[str, Any] = {}
    for dtype in DTYPES:
        array = (jax.random.normal(jax.random.key(0), (size,)) * 1e3).astype(jnp.dtype(dtype))
        before = np.asarray(array)
        on_host, seconds_to_host = _timed(array, HOST)
        back, seconds_to_device = _timed(on_host, DEVICE)
        same = on_host.sharding.memory_kind == HOST and np.array_equal(
            before.view(np.uint8), np.asarray(back).view(np.uint8)
        )
        rates[dtype] = {
            "to_host_gb_per_s": array.nbytes / seconds_to_host / 1e9,
            "to_device_gb_per_s": array.nbytes / seconds_to_device / 1e9,
        }
        job.note(rates=rates)
        job.check(f"{dtype} there and back", same)
    recipe = config_of_values(next(iter(kept()["parity"].values()))["config"])
    model = recipe.model.map(lambda node: replace(node, offload=OffloadConfig(optimizer=True)))
    plain, offloaded = _trained(recipe), _trained(replace(recipe, model=model))
    job.note(losses=plain.losses, losses_offloaded=offloaded.losses)
    job.check("training with the optimizer offloaded", _same(plain, offloaded))


def _timed(array: jax.Array, kind: str) -> tuple[jax.Array, float]:
    """Copies an array to a kind of memory; returns the copy and its seconds.

    The second copy is timed: the first one also allocates the memory.
    """
    jax.block_until_ready(moved(array, kind))
    start = time.perf_counter()
    copy = jax.block_until_ready(moved(array, kind))
    return copy, time.perf_counter() - start


def _trained(recipe: Recipe) -> Run:
    """Trains with a program per op, so that runs differ only in their offloading."""
    return session(recipe, "float32", lowering="ops").start().run()


def _same(run: Run, reference: Run) -> bool:
    """Whether losses and the leaves of every step are equal, bit for bit."""
    equal_leaves = [
        np.array_equal(leaves[name], reference_leaves[name])
        for leaves, reference_leaves in zip(run.leaves, reference.leaves, strict=True)
        for name in leaves
    ]
    return run.losses == reference.losses and all(equal_leaves)
